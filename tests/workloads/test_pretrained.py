from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from bssearch import Data, Part, load_spec
from bssearch.records import TrialState
from bssearch.settings import cache_folder
from bssearch.workloads import finetune
from bssearch.workloads.finetune import (
    NEW_CLASSES,
    OLD_CLASSES,
    FineTune,
    TwoHeaded,
    Weights,
    pretrained,
    pretrained_weights,
)
from tests.training.toys import Run, request

MADE_OF = [b"code", b"data"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Training:
    """Makes weights at random, and counts how often."""

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.times = 0
        self.threads = 0
        self._meanwhile = meanwhile

    def __call__(self) -> Weights:
        self.times += 1
        self.threads = torch.get_num_threads()
        self._meanwhile()
        return {"layer.weight": torch.randn(3, 4), "layer.bias": torch.randn(3)}


def equal(left: Weights, right: Weights) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def kept() -> list[Path]:
    return sorted((cache_folder() / "pretrained").iterdir())


@pytest.fixture
def training() -> Training:
    return Training()


def test_weights_are_made_once_and_each_recipe_has_its_file(training: Training) -> None:
    assert equal(pretrained("toy", MADE_OF, training), pretrained("toy", MADE_OF, training)) and training.times == 1
    (path,) = kept()
    assert path.name.startswith("toy-")
    pretrained("toy", [b"code", b"other data"], training)
    pretrained("toy", [b"codedata"], training)
    assert training.times == len(kept()) == 3


def test_another_version_of_pytorch_or_kind_of_cpu_makes_its_own(
    monkeypatch: pytest.MonkeyPatch, training: Training
) -> None:
    pretrained("toy", MADE_OF, training)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "0.0")
        pretrained("toy", MADE_OF, training)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    pretrained("toy", MADE_OF, training)
    assert training.times == len(kept()) == 3


@pytest.mark.usefixtures("_one_thread")
def test_weights_and_the_process_do_not_share_random_numbers() -> None:
    torch.manual_seed(5)
    torch.set_num_threads(2)
    training = Training()
    first = pretrained("toy", MADE_OF, training)
    drawn = torch.rand(3)
    assert (training.threads, torch.get_num_threads()) == (1, 2)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn)
    kept()[0].unlink()
    assert equal(pretrained("toy", MADE_OF, Training()), first)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"something else"),
        lambda path: torch.save([1, 2], path),
        lambda path: torch.save(torch.nn.Linear(1, 1), path),
    ],
    ids=["cut off", "empty", "no file of PyTorch", "a list", "an object"],
)
def test_a_damaged_or_foreign_file_is_replaced(damage: Callable[[Path], object], training: Training) -> None:
    first = pretrained("toy", MADE_OF, training)
    (path,) = kept()
    damage(path)
    assert equal(pretrained("toy", MADE_OF, training), first) and training.times == 2
    pretrained("toy", MADE_OF, training)
    assert training.times == 2 and kept() == [path]


def test_two_processes_may_make_weights_at_once() -> None:
    other = Training()
    first = pretrained("toy", MADE_OF, Training(lambda: pretrained("toy", MADE_OF, other)))
    assert other.times == 1
    assert equal(pretrained("toy", MADE_OF, other), first) and other.times == 1
    assert len(kept()) == 1


@pytest.mark.parametrize("place", ["cache", "cache/bssearch/pretrained"])
def test_without_a_writable_cache_weights_are_made_in_memory_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    blocked = tmp_path / place
    blocked.parent.mkdir(parents=True, exist_ok=True)
    blocked.write_text("no folder")
    training = Training()
    first, second = (pretrained("toy", MADE_OF, training) for _ in range(2))
    assert equal(first, second) and training.times == 2
    said = capsys.readouterr().err
    assert str(blocked) in said and "each process trains the weights again" in said
    assert blocked.read_text() == "no folder"


def test_a_full_disk_is_reported_and_leaves_no_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "save", Mock(side_effect=RuntimeError("unexpected pos 64 vs 0")))
    pretrained("toy", MADE_OF, Training())
    assert "unexpected pos 64" in capsys.readouterr().err
    assert kept() == []


def test_weights_of_every_type_are_kept() -> None:
    made = {"half": torch.ones(2).bfloat16(), "count": torch.tensor(3), "flags": torch.tensor([True, False])}
    assert equal(pretrained("toy", MADE_OF, lambda: made), pretrained("toy", MADE_OF, Training()))


# Fine-tuning ----------------------------------------------------------------------------------------------------------


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


def test_an_untrained_network_still_knows_the_old_classes_and_not_the_new(
    loaded: tuple[FineTune, Data],
) -> None:
    workload, data = loaded
    model = workload.build_model(dropout=0.5).eval()
    for part in (data.validation, data.test):
        with torch.no_grad():
            found = workload.evaluate(model, part)
        assert found["forgetting"] == 0
        assert found["old_accuracy"] > 0.75 and found["accuracy"] < 0.5


def test_forgetting_is_the_lost_accuracy_on_old_classes(loaded: tuple[FineTune, Data]) -> None:
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


def test_every_parameter_but_the_old_head_learns(loaded: tuple[FineTune, Data]) -> None:
    workload, data = loaded
    model = workload.build_model(dropout=0.0)
    workload.loss(model, *data.train.gather(torch.arange(20)), label_smoothing=0.0).backward()  # type: ignore[no-untyped-call]
    without = {name for name, one in model.named_parameters() if one.grad is None or not one.grad.abs().sum()}
    assert without == {"old_head.weight", "old_head.bias"}
    assert {name for name, one in model.named_parameters() if not one.requires_grad} == without


def test_dropout_is_random_in_training_only() -> None:
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
def test_a_trial_of_the_shipped_study_learns_and_reports_forgetting(
    loaded: tuple[FineTune, Data],
) -> None:
    asked = request(replace(load_spec("finetune").default_configuration, learning_rate=1e-3), target=0.7, tested=True)
    outcome = Run(asked, *loaded).outcome
    assert outcome.state is TrialState.REACHED
    further = outcome.further_test_metrics or {}
    assert sorted(further) == ["forgetting", "old_accuracy"]
    with torch.no_grad():
        before = loaded[0].evaluate(loaded[0].build_model(dropout=0.0).eval(), loaded[1].test)
    assert further["forgetting"] == pytest.approx(before["old_accuracy"] - further["old_accuracy"])
    assert 0 < further["forgetting"] < 0.6
