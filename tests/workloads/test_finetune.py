from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from bssearch.records import TrialState
from bssearch.spec import load_spec
from bssearch.workloads import finetune
from bssearch.workloads.data import Data, Part
from bssearch.workloads.finetune import NEW_CLASSES, OLD_CLASSES, FineTune, TwoHeaded, pretrained_weights
from tests.training.toys import Run, request

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def loaded(real_images: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FineTune, Data]]:
    """Return the workload and its data, after a pre-training on a tenth of the images."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(finetune, "pretrained_weights", lambda old: pretrained_weights(tenth(old)))
        workload = FineTune(train_samples=500, validation_samples=1000)
        yield workload, workload.load(CPU)


def tenth(part: Part) -> Part:
    return Part(part.inputs[::10], part.targets[::10])


def images(count: int) -> torch.Tensor:
    return torch.randn(count, 1, 28, 28, generator=torch.Generator().manual_seed(1))


def test_new_classes_train_and_both_kinds_are_evaluated(loaded: tuple[FineTune, Data]) -> None:
    data = loaded[1]
    assert data.train.targets[:, 0].bincount().tolist() == [0] * OLD_CLASSES + [100] * NEW_CLASSES
    for part, of_each in ((data.validation, 100), (data.test, 1000)):
        assert part.targets[:, 0].bincount().tolist() == [of_each] * (OLD_CLASSES + NEW_CLASSES)
        assert part.inputs.shape == (10 * of_each, 1, 28, 28)
    for part in (data.train, data.validation, data.test):
        assert (part.inputs.dtype, part.targets.dtype) == (torch.float32, torch.int64)
        assert not part.targets[part.targets[:, 0] >= OLD_CLASSES, 1].any()


def test_an_untouched_network_has_forgotten_nothing_and_knows_the_old_classes_alone(
    loaded: tuple[FineTune, Data],
) -> None:
    workload, data = loaded
    model = workload.build_model(dropout=0.5).eval()
    for part in (data.validation, data.test):
        with torch.no_grad():
            found = workload.evaluate(model, part)
        assert found["forgetting"] == 0
        assert found["old_accuracy"] > 0.75 and found["accuracy"] < 0.5


def test_forgetting_is_what_the_accuracy_on_the_old_classes_has_lost(loaded: tuple[FineTune, Data]) -> None:
    workload, data = loaded
    model = workload.build_model(dropout=0.0).eval()
    assert isinstance(model, TwoHeaded)
    with torch.no_grad():
        before = workload.evaluate(model, data.validation)
        for parameter in model.trunk.parameters():
            parameter.zero_()
        after = workload.evaluate(model, data.validation)
    assert after["old_accuracy"] == 1 / OLD_CLASSES
    assert after["forgetting"] == pytest.approx(before["old_accuracy"] - 1 / OLD_CLASSES)


def test_trials_begin_with_one_trunk_and_heads_of_their_own(loaded: tuple[FineTune, Data]) -> None:
    first, second = (loaded[0].build_model(dropout=0.0).state_dict() for _ in range(2))
    assert [name for name in first if not torch.equal(first[name], second[name])] == ["head.weight", "head.bias"]


def test_all_learns_but_the_old_head(loaded: tuple[FineTune, Data]) -> None:
    workload, data = loaded
    model = workload.build_model(dropout=0.0)
    workload.loss(model, *data.train.gather(torch.arange(20)), label_smoothing=0.0).backward()  # type: ignore[no-untyped-call]
    without = {name for name, one in model.named_parameters() if one.grad is None or not one.grad.abs().sum()}
    assert without == {"old_head.weight", "old_head.bias"}
    assert {name for name, one in model.named_parameters() if not one.requires_grad} == without


def test_dropout_is_random_where_it_trains() -> None:
    model = TwoHeaded(dropout=0.5)
    assert not torch.equal(model(images(4)), model(images(4)))
    assert torch.equal(model.eval()(images(4)), model(images(4)))


def test_the_pre_training_is_the_same_from_the_same_seed() -> None:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(pretrained_weights(Part(images(128), torch.arange(128) % OLD_CLASSES)))
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


@pytest.mark.slow
def test_a_trial_of_the_shipped_study_learns_and_its_outcome_tells_what_was_forgotten(
    loaded: tuple[FineTune, Data],
) -> None:
    spec = load_spec("finetune")
    asked = request(replace(spec.default_configuration, learning_rate=1e-3), target=0.7, tested=True)
    outcome = Run(asked, *loaded).outcome
    assert outcome.state is TrialState.REACHED
    further = outcome.further_test_metrics or {}
    assert sorted(further) == ["forgetting", "old_accuracy"]
    with torch.no_grad():
        before = loaded[0].evaluate(loaded[0].build_model(dropout=0.0).eval(), loaded[1].test)
    assert further["forgetting"] == pytest.approx(before["old_accuracy"] - further["old_accuracy"])
    assert 0 < further["forgetting"] < 0.6
