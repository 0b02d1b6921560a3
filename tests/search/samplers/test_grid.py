"""The sampler `grid`: every combination of a space of lists, once."""

from __future__ import annotations

from typing import Any

import pytest

from bssearch.errors import UsageError
from bssearch.records import TrialState
from bssearch.search.samplers.base import make_sampler
from tests.factories import not_none
from tests.search.samplers.made_up import MadeUpStudy, study_spec

LISTS = {
    "batch_size": [8, 16, 64],
    "learning_rate": [0.03, 0.1, 0.3],
    "weight_decay": 0.0,
    "dropout": [0.0, 0.1],
}


def grid(**changes: Any) -> MadeUpStudy:
    default = {"batch_size": 16, "learning_rate": 0.1, "dropout": 0.0}
    return MadeUpStudy(study_spec("grid", **{"space": LISTS, "default": default, **changes}))


def ending(study: MadeUpStudy) -> str | None:
    return study.sampler.ending(study.history)


def test_a_grid_is_tried_whole_once_and_then_says_so() -> None:
    study = grid()
    tried = [study.step().configuration for _ in range(18)]
    assert tried[0] == study.spec.default_configuration
    assert len({configuration.key for configuration in tried}) == 18
    assert {one.batch_size for one in tried[:8]} == {8, 16, 64}, "in no order"
    assert study.choose() is None
    assert ending(study) == "all 18 combinations of the grid have been tried"
    assert study.restarted().choose() is None


def test_at_a_batch_size_it_has_an_end_too() -> None:
    study = grid()
    while (choice := study.choose(batch_size=64)) is not None:
        assert choice.configuration.batch_size == 64
        study.run(choice)
    assert len(study.trials) == 6
    assert ending(study) is None
    assert study.choose() is not None


def test_a_combination_that_was_lost_or_ran_out_of_memory_is_tried_again_one_that_failed_is_not() -> None:
    study = grid()
    study.step()
    again = study.step(TrialState.LOST).configuration
    assert study.step(TrialState.OOM).configuration == again
    assert study.step().configuration == again
    failed = study.step(TrialState.FAILED).configuration
    rest = [study.step().configuration for _ in range(15)]
    assert failed not in rest
    assert study.choose() is None


def test_combinations_that_do_not_fit_are_left_out_until_they_do() -> None:
    study = grid()
    probes = study.history.probes
    study.history.probes = {size: probe for size, probe in probes.items() if size != 64}
    for _ in range(12):
        assert study.step().configuration.batch_size != 64
    assert study.choose() is None
    assert ending(study) == "all 12 combinations of the grid at batch sizes that fit have been tried"
    study.history.probes = probes
    assert not_none(study.choose()).configuration.batch_size == 64
    assert ending(study) is None


def test_what_a_combination_does_not_use_makes_it_no_other() -> None:
    space = {
        "batch_size": [8, 16],
        "learning_rate": 0.1,
        "optimizer": [{"name": "sgd", "momentum": [0.8, 0.9]}, {"name": "adamw"}],
    }
    default = {"batch_size": 8, "learning_rate": 0.1, "optimizer": {"name": "adamw"}}
    study = grid(space=space, default=default)
    while (choice := study.choose()) is not None:
        study.run(choice)
    assert len(study.trials) == 6, "AdamW once, SGD with either momentum, at two batch sizes"
    assert ending(study) == "all 6 combinations of the grid have been tried"


def test_a_space_with_a_range_or_too_many_combinations_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="learning_rate, dropout is given as a range"):
        make_sampler(study_spec("grid"))
    monkeypatch.setattr("bssearch.search.samplers.base.MOST_CELLS", 5)
    with pytest.raises(UsageError, match="6 combinations at each batch size; it must be at most 5"):
        grid()
