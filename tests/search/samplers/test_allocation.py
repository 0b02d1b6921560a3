from collections import Counter
from typing import Any

import pytest

from bssearch.analysis.law.quick import QuickAnswer
from bssearch.errors import UsageError
from bssearch.records import ProbeRecord, TrialRecord, TrialState
from bssearch.search.history import History
from bssearch.search.samplers.allocation import (
    EVIDENCE_TRIALS,
    EVIDENCE_TRIES,
    RULED_OUT_TRIALS,
    default_is_due,
    evidence_sizes,
    propose,
    propose_evidence,
)
from bssearch.search.samplers.base import make_sampler
from tests.factories import make_probe, make_spec, make_trial, not_none, quick_at
from tests.search.samplers.made_up import MadeUpStudy, study_spec

SIZES = (8, 16, 32, 64, 128)


def history(*trials: TrialRecord, probes: dict[int, ProbeRecord] | None = None) -> History:
    return History(make_spec(), trials, probes or {size: make_probe(size) for size in SIZES})


def default_trial(**changes: object) -> TrialRecord:
    return make_trial(0, configuration=make_spec().default_configuration, **changes)  # type: ignore[arg-type]


def test_the_default_is_due_until_tried_a_lost_one_again_but_not_a_failed_one() -> None:
    assert default_is_due(history())
    assert default_is_due(history(default_trial(state=TrialState.LOST)))
    assert not default_is_due(history(default_trial(state=TrialState.FAILED)))


def test_every_batch_size_gets_its_trials_nearest_to_the_incumbent_first() -> None:
    trials = [default_trial(seconds=2.0)]
    order = []
    for number in range(1, 10):
        proposal = not_none(propose(history(*trials)))
        order.append(proposal.batch_size)
        trials.append(make_trial(number, batch_size=proposal.batch_size, seconds=3.0, state=TrialState.CAPPED))
    assert set(order[:2]) == {16, 64}
    assert set(order[:4]) == {8, 16, 64, 128}
    assert Counter([32, *order]) == dict.fromkeys(SIZES, 2)


def test_evidence_is_the_largest_and_a_rung_each_side_four_times_away() -> None:
    assert evidence_sizes(history(default_trial())) == [128, 8]
    wide = history(default_trial(), probes={size: make_probe(size) for size in (8, 16, 32, 64, 128, 256, 512)})
    assert evidence_sizes(wide) == [512, 8, 128]


def test_from_half_the_budget_evidence_runs_at_batch_sizes_without_a_hit() -> None:
    trials = [default_trial()]
    trials += [make_trial(n, batch_size=16, seconds=1.0) for n in range(1, 4)]
    for n, size in enumerate([8, 8, 32, 64, 64, 128, 128], start=4):
        trials.append(make_trial(n, batch_size=size, seconds=2.0, state=TrialState.CAPPED))
    proposal = propose(history(*trials))
    assert proposal is not None
    assert (proposal.batch_size, proposal.source, proposal.uncapped) == (128, "transfer", True)
    sources = []
    while proposal is not None and proposal.uncapped and proposal.batch_size == 128:
        sources.append(proposal.source)
        trials.append(make_trial(len(trials), batch_size=128, state=TrialState.EXHAUSTED, uncapped=True))
        proposal = propose(history(*trials))
    assert sources == ["transfer", "baseline", "sample"]


def test_evidence_that_fails_is_not_tried_for_ever() -> None:
    trials = [default_trial()]
    trials += [make_trial(n, batch_size=16, seconds=1.0) for n in range(1, 4)]
    for n, size in enumerate([8, 8, 32, 64, 64, 128, 128, 128], start=4):
        trials.append(make_trial(n, batch_size=size, seconds=2.0, state=TrialState.CAPPED))
    for _ in range(EVIDENCE_TRIES):
        assert (proposal := propose(history(*trials))) is not None and proposal.batch_size == 128
        trials.append(make_trial(len(trials), batch_size=128, state=TrialState.FAILED, uncapped=True))
    assert (proposal := propose(history(*trials))) is not None and proposal.batch_size != 128


def test_rivals_of_the_optimum_are_tuned_too() -> None:
    trials = [default_trial(seconds=8.0, uncapped=True)]  # batch 32
    trials += [make_trial(n, batch_size=size, seconds=1.0 if size == 8 else 4.0) for n, size in enumerate([8] * 6, 1)]
    trials += [make_trial(n, batch_size=size, seconds=4.0) for n, size in enumerate([16, 16, 32, 64, 64, 128, 128], 7)]
    asked = []
    while (proposal := propose(history(*trials))) is not None and proposal.uncapped:
        asked.append(proposal.batch_size)
        trials.append(make_trial(len(trials), batch_size=proposal.batch_size, seconds=4.0, uncapped=True))
    assert Counter(asked) == {128: EVIDENCE_TRIALS, 32: EVIDENCE_TRIALS - 1}  # the default itself was one


def test_remaining_trials_go_to_the_fastest_batch_sizes() -> None:
    trials = [default_trial(seconds=1.0)]
    for _ in range(60):
        number = len(trials)
        proposal = not_none(propose(history(*trials)))
        slowness = {8: 4.0, 16: 2.0, 32: 1.0, 64: 1.1, 128: 3.0}[proposal.batch_size]
        trials.append(make_trial(number, batch_size=proposal.batch_size, seconds=slowness, uncapped=proposal.uncapped))
    counts = Counter(trial.configuration.batch_size for trial in trials)
    assert counts[32] > counts[16] > counts[8] >= 2
    assert counts[64] > counts[16]
    assert min(counts.values()) >= 2


def test_a_small_budget_still_buys_evidence_before_second_trials() -> None:
    spec = make_spec(budget={"trials": 9, "trial_train_seconds": 10.0})
    trials = [
        default_trial(),
        *(
            make_trial(n, batch_size=size, state=TrialState.CAPPED, seconds=2.0)
            for n, size in enumerate((8, 16, 64, 128), start=1)
        ),
    ]
    proposal = not_none(propose(History(spec, trials, {size: make_probe(size) for size in SIZES})))
    assert (proposal.batch_size, proposal.uncapped) == (128, True)


def ladder(quick: QuickAnswer | None, *, at_32: float) -> list[int]:
    """Batch sizes in trial order if the default takes ``at_32`` seconds and others 3."""
    trials, order = [default_trial(seconds=at_32)], []
    for number in range(1, 10):
        known = history(*trials)
        known.quick = quick
        proposal = not_none(propose(known))
        order.append(proposal.batch_size)
        trials.append(make_trial(number, batch_size=proposal.batch_size, seconds=3.0))
    return order


def test_the_ladder_begins_at_the_quick_answer_and_contains_every_batch_size() -> None:
    order = ladder(quick_at(128, 16, 128), at_32=2.0)
    assert order[:4] == [128, 64, 16, 8]
    assert Counter([32, *order]) == dict.fromkeys(SIZES, 2)


def test_a_quick_answer_reduces_the_evidence_for_unlikely_batch_sizes_unless_the_best_trial_contradicts() -> None:
    def evidence(quick: QuickAnswer | None) -> Counter[int]:
        trials = [default_trial(seconds=1.0, uncapped=True)]
        while True:
            known = history(*trials)
            known.quick = quick
            proposal = propose_evidence(known)
            if proposal is None:
                return Counter(trial.configuration.batch_size for trial in trials[1:])
            trials.append(make_trial(len(trials), batch_size=proposal.batch_size, seconds=3.0, uncapped=True))

    assert evidence(None) == {8: EVIDENCE_TRIALS, 128: EVIDENCE_TRIALS}
    assert evidence(quick_at(32, 16, 64)) == {8: RULED_OUT_TRIALS, 128: EVIDENCE_TRIALS}
    assert evidence(quick_at(128, 64, 128)) == evidence(None)


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


@pytest.fixture
def study() -> MadeUpStudy:
    return grid()


def test_a_grid_is_tried_whole_once_and_then_says_so(study: MadeUpStudy) -> None:
    tried = [study.step().configuration for _ in range(18)]
    assert tried[0] == study.spec.default_configuration
    assert len({configuration.key for configuration in tried}) == 18
    assert {one.batch_size for one in tried[:8]} == {8, 16, 64}, "in no order"
    assert study.choose() is None
    assert ending(study) == "trials ran all 18 combinations of the grid"
    assert study.restarted().choose() is None


def test_at_a_batch_size_it_has_an_end_too(study: MadeUpStudy) -> None:
    while (choice := study.choose(batch_size=64)) is not None:
        assert choice.configuration.batch_size == 64
        study.run(choice)
    assert len(study.trials) == 6
    assert ending(study) is None
    assert study.choose() is not None


def test_a_lost_or_out_of_memory_combination_is_tried_again_but_a_failed_one_is_not(
    study: MadeUpStudy,
) -> None:
    study.step()
    again = study.step(TrialState.LOST).configuration
    assert study.step(TrialState.OOM).configuration == again
    assert study.step().configuration == again
    assert study.step(TrialState.FAILED).configuration not in [study.step().configuration for _ in range(15)]
    assert study.choose() is None


def test_combinations_that_do_not_fit_are_excluded_until_they_do(study: MadeUpStudy) -> None:
    probes = study.history.probes
    study.history.probes = {size: probe for size, probe in probes.items() if size != 64}
    for _ in range(12):
        assert study.step().configuration.batch_size != 64
    assert study.choose() is None
    assert ending(study) == "trials ran all 12 combinations of the grid at batch sizes that fit"
    study.history.probes = probes
    assert not_none(study.choose()).configuration.batch_size == 64
    assert ending(study) is None


def test_unused_parameters_do_not_distinguish_combinations() -> None:
    space = {
        "batch_size": [8, 16],
        "learning_rate": 0.1,
        "optimizer": [{"name": "sgd", "momentum": [0.8, 0.9]}, {"name": "adamw"}],
    }
    study = grid(space=space, default={"batch_size": 8, "learning_rate": 0.1, "optimizer": {"name": "adamw"}})
    while (choice := study.choose()) is not None:
        study.run(choice)
    assert len(study.trials) == 6, "AdamW once, SGD with either momentum, at two batch sizes"
    assert ending(study) == "trials ran all 6 combinations of the grid"


def test_a_space_with_a_range_or_too_many_combinations_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="instead of ranges: learning_rate, dropout"):
        make_sampler(study_spec("grid"))
    monkeypatch.setattr("bssearch.search.samplers.base.MOST_CELLS", 5)
    with pytest.raises(UsageError, match="6 combinations at each batch size, more than 5"):
        grid()
