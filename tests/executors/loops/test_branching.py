"""A training of the user's own that branches off a checkpoint: what it is told, where it ends, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bssearch.errors import UsageError
from bssearch.records import Branch, TrialState
from tests.executors.loops.loops import FORMS, Started, Training, asked

BRANCH = Branch(checkpoint="run.pt", samples=140, start_samples=1000)


def branched(**changes: Any) -> Started:
    """Return a trial of seven steps of twenty samples, evaluated at 0, 3, 6 and at its end."""
    return Started(asked(branch=BRANCH, eval_every_steps=3, stop_at_target=False, **changes))


@pytest.mark.parametrize("form", FORMS)
def test_a_loop_ends_with_the_samples_of_its_branch_where_it_is_evaluated(form: str) -> None:
    started = branched()
    assert started.trial.checkpoint == "run.pt"
    Training(started.trial, started.time, keeps_state=False).go(form)
    started.run.finish()
    assert (started.line.outcome.state, started.line.outcome.steps) == (TrialState.EXHAUSTED, 7)
    assert [one.samples for one in started.line.observations] == [0, 60, 120, 140]


def test_a_training_from_its_start_has_no_checkpoint() -> None:
    assert Started(asked()).trial.checkpoint is None


def test_a_loop_that_does_not_ask_for_its_checkpoint_is_refused() -> None:
    started = branched()
    with pytest.raises(UsageError, match=r"run\.pt, but did not read trial\.checkpoint"):
        Training(started.trial, started.time, keeps_state=False).go("batches")


def saved_state(rate: float = 7.0) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the state of an optimizer that has taken a step at a rate, and its momentum."""
    layer = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=rate, momentum=0.9)
    layer(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer.state_dict(), optimizer.state[layer.weight]["momentum_buffer"]


def test_a_loaded_optimizer_keeps_its_own_learning_rate() -> None:
    state, momentum = saved_state()
    layer = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5, momentum=0.8)
    branched().trial.load_optimizer(optimizer, state)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.5, 0.8)
    assert torch.equal(optimizer.state[layer.weight]["momentum_buffer"], momentum)
    with pytest.raises(UsageError, match=r"not that of this optimizer: .* betas"):
        branched().trial.load_optimizer(torch.optim.AdamW(layer.parameters()), state)


@pytest.mark.filterwarnings("ignore")  # its own, of PyTorch
@pytest.mark.slow
class TestLightning:
    @pytest.fixture(autouse=True)
    def _lightning(self) -> None:
        pytest.importorskip("lightning")

    def test_a_fit_that_goes_on_by_itself_is_refused_with_the_way_that_is_a_branch(self, tmp_path: Path) -> None:
        from bssearch.executors.loops.lightning import TrialCallback
        from tests.executors.loops.test_lightning import Tiny, loader, trainer_of

        started = branched(configuration=None)
        trainer = trainer_of(max_steps=3)
        trainer.fit(Tiny(started.time), loader(started.trial), loader(started.trial))
        trainer.save_checkpoint(tmp_path / "run.ckpt")
        with pytest.raises(UsageError, match=r"begins at step 3: fit\(ckpt_path=\.\.\.\) restores the learning rate"):
            trainer_of(TrialCallback(started.trial)).fit(
                Tiny(started.time), loader(started.trial), loader(started.trial), ckpt_path=tmp_path / "run.ckpt"
            )

    def test_a_module_that_has_loaded_its_weights_and_its_optimizer_is_a_branch(self) -> None:
        from tests.executors.loops.test_lightning import GIVEN, Tiny, fit

        state, _ = saved_state()
        started = branched()
        started.trial.given = GIVEN
        assert started.trial.checkpoint == "run.pt"

        def optimizers(module: Any) -> Any:
            made = torch.optim.SGD(module.parameters(), lr=GIVEN["learning_rate"], momentum=0.9)  # type: ignore[arg-type]
            started.trial.load_optimizer(made, state)
            return made

        module = fit(started.trial, started.time, module=Tiny(started.time, optimizers))
        started.run.finish()
        assert started.line.outcome.steps == 7
        assert module.rates == pytest.approx([0.02] * 7)  # the trial's, by the callback
