import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import jsonschema
import pytest

from bssearch import StudySpec, TargetNotReachedError
from bssearch.analysis.answer import NO_NEXT_STEP, Answer, Largest
from bssearch.analysis.build_answer import MOST_STEPS, build_answer, next_steps
from bssearch.analysis.certainty import Certainty
from bssearch.analysis.generalisation import over_seeds
from bssearch.analysis.headline import about_columns, further_metrics, headline, speedup_shares, trade_off_rows
from bssearch.analysis.objectives import TIME, Objective, make_objective
from bssearch.analysis.optimum import Candidate, Settles, Verdict, decide
from bssearch.analysis.rules.rule_book import BROKE, HELD, Judgement, judge
from bssearch.records import (
    Configuration,
    DeviceUse,
    MemoryBasis,
    Phase,
    StudyRecord,
    Target,
    TrialRecord,
    TrialState,
    student_t,
)
from bssearch.spec.model import IMPORTED
from bssearch.spec.space import UNKNOWN, MemoryBoundary
from tests.factories import EPOCH, make_environment, make_probe, make_spec, make_trial, not_none, with_outcome

SPEC = make_spec()
SIZES = (8, 16, 32, 64, 128)


def study(spec: StudySpec = SPEC) -> StudyRecord:
    return StudyRecord.created(spec.new_study("tester"), EPOCH, make_environment())


def answer(trials: list[TrialRecord], memory: MemoryBoundary = UNKNOWN, **probes: Any) -> Answer:
    return build_answer(
        study(), SPEC, trials, {size: make_probe(size) for size in SIZES} | probes.get("probes", {}), memory
    )


def confirmed(
    batch_size: int, *seconds: float, start: int = 100, rate: float = 0.1, first_seed: int = 0, **changes: Any
) -> list[TrialRecord]:
    return [
        make_trial(
            start + batch_size + n, batch_size=batch_size, seconds=value, phase=Phase.CONFIRM, seed=first_seed + n,
            learning_rate=rate, test_metric=0.88, **changes,
        )
        for n, value in enumerate(seconds)
    ]  # fmt: skip


def searched() -> list[TrialRecord]:
    times = {8: 4.0, 16: 2.0, 32: 0.5, 64: 1.02, 128: 3.0}
    return [make_trial(n, batch_size=size, seconds=value) for n, (size, value) in enumerate(times.items())]


def default_runs(*seconds: float) -> list[TrialRecord]:
    configuration = SPEC.default_configuration
    return [
        make_trial(300 + n, configuration=configuration, seconds=value, phase=Phase.CONFIRM, seed=n)
        for n, value in enumerate(seconds)
    ]


def test_the_verdict_uses_confirmation_runs_only() -> None:
    # In the search, batch 32 looked twice as fast as it is.
    trials = [
        *searched(),
        *confirmed(32, 1.5, 1.6, 1.4),
        *confirmed(64, 1.0, 1.05, 1.1),
        *confirmed(128, 3.0, 3.1, 2.9),
    ]
    found = answer([*trials, *default_runs(2.0, 2.1, 2.2)])
    assert (found.optimal.batch_size, found.optimal.test_metric) == (64, 0.88)
    time = not_none(found.optimal.time_to_target_s)
    assert (time.median, time.runs) == (1.05, 3)
    assert found.optimal.trial_numbers == [264 - 100, 265 - 100, 266 - 100]
    assert not_none(found.speedup.over_largest).value == pytest.approx(3.0 / 1.05)
    assert not_none(found.speedup.over_default).value == pytest.approx(2.0)
    assert {notice.code for notice in found.warnings}.isdisjoint({"unconfirmed", "optimum_at_edge"})


@pytest.mark.parametrize(
    ("mode", "said"),
    [("max-autotune", "Test CPU, 1 thread, compile max-autotune"), ("none", "Test CPU, 1 thread")],
)
def test_an_answer_has_the_mode_that_its_steps_were_computed_in(mode: str, said: str) -> None:
    environment = make_environment(compile_mode=mode, device_name="Test CPU")
    trials = [*searched(), *confirmed(32, 1.5, 1.6, 1.4), *default_runs(2.0, 2.1, 2.2)]
    found = build_answer(
        replace(study(), environment=environment), SPEC, trials, {size: make_probe(size) for size in SIZES}, UNKNOWN
    )
    assert found.device.compile_mode == mode and found.device.in_words == said


def test_unlike_the_flat_range_a_tie_must_be_shown() -> None:
    noisy = [*searched(), *confirmed(32, 1.0, 2.0, 0.6), *confirmed(64, 1.01, 2.1, 0.5)]
    steady = [*searched(), *confirmed(32, 1.0, 1.001, 0.999), *confirmed(64, 1.01, 1.011, 1.009)]
    assert (answer(noisy).flat_range, answer(noisy).tied) == ([32, 64], [32])
    assert (answer(steady).flat_range, answer(steady).tied) == ([32, 64], [32, 64])


def test_no_other_batch_size_is_said_to_be_worse_than_5_percent_unless_the_runs_show_it() -> None:
    said = "No other confirmed batch size is within 5 % of the best."
    steady = [*searched(), *confirmed(32, 1.0, 1.01, 0.99), *confirmed(64, 1.12, 1.13, 1.11)]
    assert (answer(steady).worse, said in headline(answer(steady))) == ([64], True)
    wide = [*searched(), *confirmed(32, 1.0, 1.3, 0.7), *confirmed(64, 2.0, 2.6, 1.4), *confirmed(128, 1.1, 1.4, 0.8)]
    (note,) = [notice.message for notice in answer(wide).warnings if notice.code == "not_separated"]
    assert answer(wide).worse == [64] and "128" in note and "64" not in note
    found = answer([*searched(), *confirmed(32, 1.0, 1.01, 0.99), *confirmed(64, 1.055, 1.06, 1.065)])
    assert found.optimal.time_to_target_s is not None and found.optimal.time_to_target_s.high is not None
    assert "not_separated" not in {notice.code for notice in found.warnings}, "their intervals do not overlap"
    assert (found.worse, said in headline(found)) == ([], False)


def test_a_flat_range_has_no_gap_and_no_unconfirmed_batch() -> None:
    trials = [
        *searched(),
        *confirmed(16, 1.0, 1.0, 1.0),
        *confirmed(64, 1.01, 1.01, 1.01),
        *confirmed(32, 2.0, 2.0, 2.0),
    ]
    assert answer(trials).flat_range == [16, 16]
    # Batch 32's single search trial took 0.5 s, too.
    assert answer([*searched(), *confirmed(16, 0.5, 0.5, 0.5)]).flat_range == [16, 16]


def test_slower_sides_that_never_finish_give_at_least() -> None:
    missing = confirmed(128, 10.0, 10.0, 10.0, state=TrialState.EXHAUSTED)
    found = answer([*searched(), *confirmed(32, 1.0, 1.1, 0.9), *missing])
    assert (found.largest_that_fits.time_to_target_s, found.largest_that_fits.lower_bound_s) == (None, 10.0)
    ratio = not_none(found.speedup.over_largest)
    assert (ratio.value, ratio.at_least) == (10.0, True)
    assert "at least 10× faster than 128, the largest tried (hardly tuned)" in headline(found)


def test_largest_that_fits_leaves_out_what_ran_out_of_memory() -> None:
    found = answer(searched(), memory=MemoryBoundary(fits=64, too_large=128))
    largest = found.largest_that_fits
    assert (largest.batch_size, largest.reason) == (64, "a micro-batch of 128 ran out of memory")
    assert "faster than 64, the largest that fits" in headline(found)
    beyond = answer(searched(), memory=MemoryBoundary(fits=128, too_large=500))
    assert beyond.largest_that_fits.reason == "the largest batch size of the study"
    assert "faster than 128, the largest tried" in headline(beyond)


def test_confirmation_in_micro_batches_that_ran_out_of_memory_since_does_not_count() -> None:
    trials = [*searched(), *confirmed(32, 1.0, 1.1, 0.9), *confirmed(64, 0.5, 0.5)]
    ran_out = make_trial(170, batch_size=64, state=TrialState.OOM, phase=Phase.CONFIRM, seed=9)
    found = answer([*trials, ran_out], memory=MemoryBoundary(fits=32, too_large=64))
    assert found.optimal.batch_size == 32 and "unconfirmed" not in codes(found)


def test_the_default_in_smaller_micro_batches_is_still_the_default() -> None:
    split = [
        replace(run, configuration=run.configuration.in_micro_batches(8), number=run.number + 50)
        for run in default_runs(2.0, 2.1, 2.2)
    ]
    found = answer([*searched(), *confirmed(32, 1.0, 1.1, 0.9), *split])
    assert found.speedup.over_default is not None and "default_outside_space" not in codes(found)


def test_largest_that_fits_runs_without_accumulation() -> None:
    split = searched()[-1]
    accumulated = replace(split, configuration=replace(split.configuration, micro_batch_size=64, accumulation_steps=2))
    found = answer([*searched()[:-1], accumulated], probes={128: make_probe(128, micro_batch_size=64)})
    assert found.largest_that_fits.batch_size == 64


def test_an_answer_that_is_not_sure_says_so_and_what_would_settle_it() -> None:
    found = answer([*searched(), *confirmed(32, 1.0, 1.4, 0.7), *confirmed(128, 1.05, 0.8, 1.45)])
    text, share = headline(found), not_none(found.within_5_percent)
    assert found.provisional and share < 0.9 and found.settle is not None
    assert text.startswith("Provisional: batch 32 reaches")
    assert f"probability of {math.floor(100 * share)} %" in text
    assert found.settling == found.next[0] and found.next[0].command in text
    assert "bssearch" not in headline(found.model_copy(update={**NO_NEXT_STEP}))
    assert "No other confirmed batch size is within 5 % of the best." not in text


def test_a_speed_up_that_the_seeds_do_not_show_is_not_claimed() -> None:
    found = answer(
        [*searched(), *confirmed(32, 1.0, 1.6, 0.7), *confirmed(128, 1.2, 0.6, 2.0), *default_runs(4.0, 4.1, 4.2)]
    )
    over = not_none(found.speedup.over_largest)
    assert not_none(over.low) < 1 < over.value < not_none(over.high)
    interval = f"[{over.low:.2g}, {over.high:.2g}]"
    assert f"not shown to be faster than 128, the largest tried (hardly tuned) (1.2× {interval})" in headline(found)
    assert "faster than your default" in headline(found)


def test_the_speed_up_of_one_batch_size_over_another_is_paired_by_seed() -> None:
    seeds = 0.7, 1.3, 0.8, 1.4, 1.0
    near = confirmed(64, *seeds)

    def width(*factors: float, first_seed: int = 0) -> float:
        slow = confirmed(128, *(one * more for one, more in zip(seeds, factors, strict=True)), first_seed=first_seed)
        over = not_none(answer([*searched(), *near, *slow]).speedup.over_largest)
        assert not_none(over.low) <= 2.0 <= not_none(over.high)
        return not_none(over.high) / not_none(over.low)

    paired, alone = width(2.0, 2.1, 1.9, 2.0, 2.05), width(2.0, 2.1, 1.9, 2.0, 2.05, first_seed=50)
    assert paired < 0.9 * alone


def test_every_batch_has_its_time_or_why_not() -> None:
    trials = [*searched()[:4], make_trial(9, batch_size=128, state=TrialState.CAPPED, seconds=4.5, best_metric=0.7)]
    rows = {row.batch_size: row for row in answer(trials).batches}
    assert rows[128].time_to_target_s is None
    assert (rows[128].lower_bound_s, rows[128].ended, rows[128].final_metric) == (4.5, {"capped": 1}, 0.7)
    assert not_none(rows[64].best).trial == 3
    assert rows[8].lower_bound_s is None


def test_no_hit_says_how_near_it_came() -> None:
    trials = [make_trial(4, batch_size=16, state=TrialState.EXHAUSTED, seconds=9.0, best_metric=0.85)]
    with pytest.raises(TargetNotReachedError, match=r"nearest: trial 4 \(batch 16\) with 0.85 after 9 s") as missed:
        answer(trials)
    assert "from `bssearch check --suggest-target`" in str(missed.value.hint)
    with pytest.raises(TargetNotReachedError, match="no trial yet"):
        answer([])


def test_steps_that_rise_with_the_batch_are_marked_untuned() -> None:
    trials = [make_trial(0, batch_size=8, steps=100, seconds=2.0), make_trial(1, batch_size=16, steps=150, seconds=1.0)]
    trials += [make_trial(2 + n, batch_size=size, seconds=9.0, learning_rate=0.2) for n, size in enumerate((8, 16))]
    assert [row.batch_size for row in answer(trials).batches if row.untuned] == [16]


def test_the_answer_fits_its_schema_and_holds_no_nan() -> None:
    document = json.loads(
        json.dumps(answer([*searched(), *confirmed(32, 1.0, 1.1, 0.9)]).model_dump(mode="json"), allow_nan=False)
    )
    jsonschema.validate(document, Answer.model_json_schema(mode="serialization"))
    assert document["fit"]["verdict"] == "too_few_points"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**document, "tied": "none"}, Answer.model_json_schema(mode="serialization"))


def test_what_fresh_seeds_refuted_is_not_recommended() -> None:
    lucky = [*searched(), make_trial(50, batch_size=32, seconds=0.1, learning_rate=0.2)]
    found = answer([*lucky, *confirmed(32, 10.0, 10.0, 10.0, rate=0.2, state=TrialState.EXHAUSTED)])
    assert found.optimal.parameters["learning_rate"] == 0.1
    (warning,) = (notice.message for notice in found.warnings if notice.code == "confirmation_missed")
    assert "raise budget.trial_train_seconds" in warning


def test_imported_runs_that_miss_the_target_need_more_runs_or_an_easier_target() -> None:
    spec = make_spec(workload=IMPORTED)
    missed = confirmed(32, 10.0, 10.0, 10.0, rate=0.2, state=TrialState.EXHAUSTED)
    probes = {size: make_probe(size) for size in SIZES}
    found = build_answer(study(), spec, [*searched(), *missed], probes)
    (warning,) = (notice.message for notice in found.warnings if notice.code == "confirmation_missed")
    assert "--target" in warning and "budget" not in warning


def test_a_seed_that_ran_twice_counts_once() -> None:
    again = make_trial(500, batch_size=32, seconds=0.2, phase=Phase.CONFIRM, seed=0)
    time = not_none(answer([*CONFIRMED, again]).optimal.time_to_target_s)
    assert (time.runs, time.median) == (3, 1.0)


def test_a_bound_is_the_last_miss_that_was_seen_and_none_where_the_device_was_shared() -> None:
    base = searched()[:4]
    unseen = make_trial(9, batch_size=128, state=TrialState.CAPPED, seconds=9.0)
    changes: list[dict[str, Any]] = [{"last_miss_seconds": 0.5}, {"last_miss_seconds": None}, {"contended": True}]
    found = [answer([*base, with_outcome(unseen, **one)]).batches for one in changes]
    assert [row.lower_bound_s for rows in found for row in rows if row.batch_size == 128] == [0.5, None, None]


def test_a_loss_to_minimise_is_answered_the_right_way_round() -> None:
    spec = make_spec(target={"metric": "loss", "value": 0.5, "goal": "minimize"})
    trials = [
        make_trial(1, batch_size=16, state=TrialState.EXHAUSTED, best_metric=0.9, seconds=9.0),
        make_trial(2, batch_size=32, state=TrialState.EXHAUSTED, best_metric=0.6, seconds=9.0),
    ]
    with pytest.raises(TargetNotReachedError, match=r"nearest: trial 2 \(batch 32\) with 0.6"):
        build_answer(study(spec), spec, trials, {})
    found = build_answer(study(spec), spec, [*trials, make_trial(3, batch_size=64, best_metric=0.5)], {})
    assert headline(found).startswith("Provisional: batch 64 reaches loss ≤ 0.5 in 1 s (1 run)")


def test_trials_that_measured_nothing_are_counted() -> None:
    trials = [make_trial(n, state=TrialState.OOM, best_metric=None) for n in range(3)]
    with pytest.raises(TargetNotReachedError, match="has a result: 3 oom") as missed:
        answer([*trials, make_trial(3, state=TrialState.RUNNING, best_metric=None)])
    assert "trial show toy 2`" in str(missed.value.hint)
    with pytest.raises(TargetNotReachedError, match="has a result: 1 running") as missed:
        answer([make_trial(0, state=TrialState.RUNNING, best_metric=None)])
    assert "bssearch run" in str(missed.value.hint)


def codes(found: Answer) -> set[str]:
    return {notice.code for notice in found.warnings}


def default_trial(state: TrialState) -> TrialRecord:
    return make_trial(9, configuration=SPEC.default_configuration, state=state, seconds=9.0)


def evenly(deviation: float) -> list[TrialRecord]:
    """Return confirmation runs whose logarithms deviate by as much."""
    return confirmed(32, 1.0, math.exp(deviation), math.exp(-deviation))


def interpolated(step: int) -> list[TrialRecord]:
    """Return the trials of a search that last missed the target at a step."""
    return [with_outcome(trial, last_miss_step=step) for trial in searched()]


def counted(batch_size: int, steps: int, samples: int) -> TrialRecord:
    """Return a trial that missed the target, with its own count of samples."""
    return with_outcome(make_trial(9, batch_size=batch_size, state=TrialState.EXHAUSTED), steps=steps, samples=samples)


def averaged(*decays: tuple[int, float]) -> list[TrialRecord]:
    """Return a trial at each batch size, with the decay of its own average of the weights."""
    return [
        make_trial(number, configuration=replace(one, parameters={"averaging.decay": decay}))
        for number, (one, (_, decay)) in enumerate(
            zip([make_trial(0, batch_size=size).configuration for size, _ in decays], decays, strict=True)
        )
    ]


CONFIRMED = [*searched(), *confirmed(32, 1.0, 1.1, 0.9)]
LARGER = [*searched(), *confirmed(64, 0.5, 0.51, 0.49)]  # twice the default's batch size
STEADY = [*searched()[:1], *confirmed(32, 1.0, 1.01, 0.99)]
TIE = [*searched(), *confirmed(32, 1.01, 1.011, 1.009), *confirmed(64, 1.0, 1.001, 0.999)]
LEAST = [*searched(), *confirmed(32, 1.0, 1.001, 0.999), *confirmed(64, 1.01, 1.011, 1.009)]
MISSED_IN_CONFIRMATION = make_trial(9, batch_size=32, state=TrialState.EXHAUSTED, phase=Phase.CONFIRM, seed=9)
HALF_CONFIRMED = [*searched(), *confirmed(128, 3.0, 3.1), *confirmed(32, 1.0, 1.1, 0.9)]
LOST = make_trial(500, batch_size=32, state=TrialState.FAILED, phase=Phase.CONFIRM, seed=9)
LIMITED: dict[str, Any] = {"contended": True, "dropped_samples_per_epoch": 7, "warnings": ("it snowed",)}
OPTIMUM_LIMITED = [*searched(), make_trial(9, batch_size=32, product=0.2, **LIMITED)]
OTHER_LIMITED = [*searched(), make_trial(9, batch_size=128, product=4.0, **LIMITED)]
SLOWER_CONTENDED = confirmed(64, 2.9, start=150, first_seed=2, contended=True, product=2.9)


@pytest.mark.parametrize(
    ("code", "told", "untold"),
    [
        ("unconfirmed", searched(), CONFIRMED),
        ("unconfirmed", HALF_CONFIRMED, CONFIRMED),
        ("confirmation_incomplete", HALF_CONFIRMED, CONFIRMED),
        ("missed_runs", [*confirmed(32, 1.0, 1.1), MISSED_IN_CONFIRMATION, *searched()], CONFIRMED),
        ("coarse_evaluation", interpolated(0), interpolated(50)),
        ("smallest_within_5_percent", TIE, LEAST),
        ("optimum_at_edge", [*searched(), make_trial(9, batch_size=8, seconds=0.1)], searched()),
        ("optimum_at_edge", [*searched(), make_trial(9, batch_size=128, seconds=0.1)], CONFIRMED),
        ("only_one_batch_size", [make_trial(0, batch_size=32)], searched()),
        ("learning_rate_at_edge", [make_trial(0, batch_size=32, learning_rate=1.0)], searched()),
        ("few_runs", [*searched(), *confirmed(32, 1.0, 1.1), LOST], CONFIRMED),
        ("few_runs", [*searched(), *confirmed(32, 1.0, 1.1), LOST], searched()),
        ("equal_runs", [*searched(), *confirmed(32, 1.0, 1.0, 1.0)], [*CONFIRMED, MISSED_IN_CONFIRMATION]),
        ("seed_noise", [*searched(), *evenly(0.105)], [*searched(), *evenly(0.095)]),
        ("not_separated", [*CONFIRMED, *confirmed(64, 1.1, 1.2, 1.0)], [*STEADY, *confirmed(64, 3.0, 3.01, 2.99)]),
        ("unconfirmed_rival", [*STEADY, make_trial(9, batch_size=16, seconds=0.5)], STEADY),
        ("running", [*searched(), make_trial(9, state=TrialState.RUNNING)], searched()),
        ("queued", [*searched(), make_trial(9, state=TrialState.QUEUED)], searched()),
        ("failed_trials", [*searched(), make_trial(9, state=TrialState.FAILED)], searched()),
        ("default_missed", [*searched(), default_trial(TrialState.EXHAUSTED)], searched()),
        ("default_missed", [default_trial(TrialState.EXHAUSTED), *searched()], [default_trial(TrialState.REACHED)]),
        ("ema_decay_fixed", averaged((16, 0.99), (128, 0.99)), averaged((16, 0.99), (128, 0.92))),
        ("ema_decay_fixed", averaged((16, 0.99), (128, 0.99)), averaged((16, 0.99), (64, 0.99))),
        (
            "steps_skipped",
            [make_trial(0, batch_size=32, skipped_steps=2)],
            [make_trial(0, batch_size=32, skipped_steps=0)],
        ),
        ("smaller_batches", [*searched(), counted(128, 10, 1_100)], [*searched(), counted(128, 10, 1_200)]),
        ("contended", OPTIMUM_LIMITED, OTHER_LIMITED),
        ("contended", [*CONFIRMED, *confirmed(64, 3.0, 3.1), *SLOWER_CONTENDED], [*CONFIRMED, OTHER_LIMITED[-1]]),
        ("incomplete_batch_dropped", OPTIMUM_LIMITED, OTHER_LIMITED),
        ("measurement", OPTIMUM_LIMITED, OTHER_LIMITED),
        ("accuracy_not_compared", LARGER, CONFIRMED),
        ("accuracy_not_compared", LARGER, [*LARGER, replace(LARGER[-1], number=99, phase=Phase.TO_BUDGET)]),
    ],
)
def test_a_notice_is_given_when_it_holds_and_not_otherwise(
    code: str, told: list[TrialRecord], untold: list[TrialRecord]
) -> None:
    assert code in codes(answer(told))
    assert code not in codes(answer(untold))


def test_as_many_runs_as_were_asked_for_are_few_below_three_and_the_remedy_is_named() -> None:
    spec = make_spec(confirm={"runs": 2})
    two = build_answer(study(spec), spec, [*searched(), *confirmed(32, 1.0, 1.1)], {})
    (note,) = (one.message for one in two.warnings if one.code == "few_runs")
    assert "--runs 3`" in note and "confirmation_incomplete" not in codes(two)


def test_step_times_that_were_not_measured_alone_are_told() -> None:
    assert "step_times_contended" in codes(answer(searched(), probes={32: make_probe(32, contended=True)}))
    assert "step_times_contended" not in codes(answer(searched()))


def test_what_a_single_configuration_reached_is_untuned() -> None:
    one = make_trial(0, batch_size=8, seconds=2.0)
    again = make_trial(1, batch_size=8, seconds=2.1, phase=Phase.CONFIRM, seed=1)
    assert answer([one, again]).batches[0].untuned
    assert not answer([one, again, make_trial(2, batch_size=8, seconds=2.2, learning_rate=0.2)]).batches[0].untuned


def test_the_gain_over_the_default_is_told_apart_into_retuning_and_batch_size() -> None:
    trials = [
        *searched(),
        *confirmed(64, 1.0, 1.05, 1.1),
        *confirmed(32, 1.5, 1.6, 1.4),
        *default_runs(3.0, 3.1, 3.2),
    ]
    found = answer(trials)
    speedup = found.speedup
    ratios = [not_none(one).value for one in (speedup.from_retuning, speedup.from_batch_size, speedup.over_default)]
    assert ratios == pytest.approx([3.1 / 1.5, 1.5 / 1.05, 3.1 / 1.05])
    assert speedup_shares(found) == "2.1× by retuning, 1.4× by batch size"
    same = answer([*searched(), *confirmed(32, 1.0, 1.1, 0.9), *default_runs(3.0, 3.1, 3.2)])
    assert speedup_shares(same) == "by retuning alone"
    assert speedup_shares(answer([*searched(), *confirmed(64, 1.0, 1.05, 1.1)])) == ""
    own = [*confirmed(64, 1.0, 1.05, 1.1), *confirmed(32, 3.0, 3.1, 3.2, rate=0.05)]
    same_runs = [replace(run, configuration=SPEC.default_configuration) for run in own[3:]]
    from_size = answer([*searched(), *own[:3], *same_runs])
    retuning = not_none(from_size.speedup.from_retuning)
    assert (retuning.value, retuning.low) == (1.0, 1.0)
    assert speedup_shares(from_size) == "by batch size alone"
    slight = answer([*searched(), *confirmed(32, 1.0, 1.1, 0.9), *default_runs(1.01, 1.11, 0.91)])
    assert speedup_shares(slight) == "by retuning alone"
    assert (
        speedup_shares(answer([*searched(), *confirmed(32, 1.0, 1.1, 0.9), *default_runs(1.004, 1.104, 0.904)])) == ""
    )


def test_sizes_that_were_timed_and_never_run_have_the_law_s_prediction() -> None:
    trials = [
        trial
        for size, steps in ((16, 700), (32, 400), (128, 175))
        for trial in confirmed(size, *(steps / 100 * one for one in (0.98, 1.0, 1.02)), steps=steps)
    ]
    probes = {size: make_probe(size, step_seconds=0.01) for size in (16, 32, 64, 128, 256)}
    rows = {row.batch_size: row for row in answer(trials, probes=probes).batches}
    untried = not_none(rows[64].predicted_s)
    assert (rows[64].time_to_target_s, untried.runs) == (None, 0)
    assert untried.median == pytest.approx(2.5, rel=0.05) and not_none(untried.low) < 2.5 < not_none(untried.high)
    assert rows[256].predicted_s is None, "the law predicts no time beyond the largest that ran"
    assert not_none(rows[32].predicted_s).median == pytest.approx(4.0, rel=0.05)


def test_the_law_decides_only_where_it_is_no_less_sure_than_the_runs() -> None:
    def noisy(size: int, seconds: float, steps: int) -> list[TrialRecord]:
        return confirmed(size, *(seconds * one for one in (0.8, 0.9, 1.0, 1.1, 1.25)), steps=steps)

    # By the law batch 64 is on a line with the others and slower than 32; its runs are below it.
    trials = [*noisy(16, 7.0, 700), *noisy(32, 4.0, 400), *noisy(64, 3.2, 250), *noisy(128, 7.0, 175)]
    steps = {16: 0.01, 32: 0.01, 64: 0.02, 128: 0.04}
    found = answer(trials, probes={size: make_probe(size, step_seconds=seconds) for size, seconds in steps.items()})
    assert found.fit is not None and found.fit.verdict == "fits"
    assert found.fit.predicted is not None and found.fit.predicted.batch_size < 64
    assert (found.optimal.batch_size, found.recommendation.rule) == (64, "least")


def test_further_metrics_of_the_optimum_are_medians_with_the_interval_of_their_mean() -> None:
    missed = confirmed(64, 1.2, start=110, first_seed=9, state=TrialState.EXHAUSTED)
    trials = [*searched(), *confirmed(32, 1.5, 1.6, 1.4), *confirmed(64, 1.0, 1.05, 1.1), *missed]
    values = {164: 0.1, 165: 0.2, 166: 0.6}

    assert answer(trials).optimal.further_metrics == {}
    trained = answer([with_outcome(one, further_test_metrics={"training accuracy": 0.99}) for one in trials])
    assert "training accuracy 0.99" in further_metrics(trained, training=True) and not further_metrics(trained)
    reported = [with_outcome(one, further_test_metrics={"forgetting": values.get(one.number, 9.0)}) for one in trials]
    found = answer(reported).optimal.further_metrics["forgetting"]
    half = 4.302653 * 0.2645751 / 3**0.5  # Student's t of 2 degrees of freedom, standard deviation of the three
    assert (found.median, found.runs) == (0.2, 3)
    assert (found.low, found.high) == pytest.approx((0.3 - half, 0.3 + half))
    metrics = {"further_test_metrics": {"forgetting": 0.1}}
    two = [with_outcome(one, **metrics) if one.number < 166 else one for one in trials]
    assert answer(two).optimal.further_metrics["forgetting"].model_dump() == {
        "median": 0.1, "low": None, "high": None, "runs": 2
    }  # fmt: skip


def test_where_all_accumulate_the_largest_that_ran_is_named() -> None:
    trials = [
        replace(trial, configuration=replace(trial.configuration, micro_batch_size=4, accumulation_steps=2))
        for trial in searched()[:2]
    ]
    largest = answer(trials).largest_that_fits
    assert largest.batch_size == 16 and "accumulates" in largest.reason


@pytest.mark.parametrize(("sizes", "best"), [(32, 32), ([1, 2], 1)])
def test_the_only_batch_size_and_batch_1_are_no_edge(sizes: int | list[int], best: int) -> None:
    document = SPEC.model_dump(mode="json")
    changed = {name: {**document[name], "batch_size": size} for name, size in (("space", sizes), ("default", best))}
    spec = make_spec(**changed)
    assert "optimum_at_edge" not in codes(build_answer(study(spec), spec, [make_trial(0, batch_size=best)], {}))


LIMIT = 20.0
AT_64 = Configuration(batch_size=64, micro_batch_size=64, learning_rate=0.1)
MISSED, DIVERGED = TrialState.EXHAUSTED, TrialState.DIVERGED


def runs(*seconds: float, seeds: Sequence[int] = (), **changes: Any) -> tuple[TrialRecord, ...]:
    return tuple(
        make_trial(number, configuration=AT_64, seconds=one, seed=seed, phase=Phase.CONFIRM, **changes)
        for number, (one, seed) in enumerate(zip(seconds, seeds or range(len(seconds)), strict=True))
    )


def against(
    rule: tuple[TrialRecord, ...], tuned: tuple[TrialRecord, ...], *, wanted: int = 3, objective: Objective = TIME
) -> Judgement:
    mine, theirs = (Candidate(AT_64, one, objective) for one in (rule, tuned))
    return judge(mine, theirs, wanted=wanted, limit=LIMIT)


TUNED = runs(1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("seconds", "finding"),
    [(HELD - 1e-6, "held"), (HELD, "undecided"), (BROKE, "undecided"), (BROKE + 1e-6, "broke"), (0.5, "held")],
)
def test_a_rule_holds_below_5_percent_and_breaks_above_10(seconds: float, finding: str) -> None:
    judgement = against(runs(seconds, seconds, seconds), TUNED)
    regret = not_none(judgement.regret)
    assert (regret.low, regret.high) == pytest.approx((seconds, seconds)) and judgement.finding == finding


def test_paired_seeds_have_students_t_on_the_differences_of_their_logarithms() -> None:
    regret = not_none(against(runs(2.0, 4.4, 8.0), runs(1.0, 2.0, 4.0)).regret)
    differences = [math.log(ratio) for ratio in (2.0, 2.2, 2.0)]
    mean = math.fsum(differences) / 3
    half = student_t(2) * math.sqrt(math.fsum((one - mean) ** 2 for one in differences) / 2) / math.sqrt(3)
    expected = (math.exp(mean - half), math.exp(mean), math.exp(mean + half))
    assert (regret.low, regret.value, regret.high) == pytest.approx(expected) and not regret.at_least


def test_seeds_in_one_side_alone_make_no_pair() -> None:
    wide, other = runs(1.0, 2.0, 4.0), runs(1.0, 2.0, 4.0, seeds=(0, 1, 7))
    paired, welch = (not_none(against(one, wide).regret) for one in (wide, other))
    assert paired.high == pytest.approx(1.0) and not_none(welch.high) > 2.0
    assert (welch.value, welch.low) == pytest.approx((1.0, 1 / not_none(welch.high)))


def seeded(first: int, *seconds: float, **changes: Any) -> tuple[TrialRecord, ...]:
    """Return runs with numbers and seeds from ``first`` on."""
    return tuple(replace(one, seed=first + one.seed, number=first + one.seed) for one in runs(*seconds, **changes))


SLOW = runs(6.0, 6.0, 6.0)
ONE_MISSED = (*runs(2.0, 3.0), *seeded(2, 9.0, state=MISSED))
TWO_MISSED = (*runs(1.0), *seeded(5, 9, 9, state=MISSED))
SHARED = runs(1.0, 1.0, 1.0, contended=True, product=1.0)


@pytest.mark.parametrize(
    ("rule", "tuned", "finding", "ratio", "at_least"),
    [
        pytest.param(runs(5.0, 5.0, 5.0, state=MISSED), TUNED, "broke", 5.0, True, id="none reached"),
        pytest.param(runs(5.0, 5.0, state=MISSED), TUNED, "undecided", 5.0, True, id="none reached yet"),
        pytest.param(runs(5.0, 5.0, 5.0, state=DIVERGED), TUNED, "broke", LIMIT, True, id="all diverged"),
        pytest.param(runs(5.0, 5.0, state=DIVERGED), TUNED, "undecided", LIMIT, True, id="all diverged so far"),
        pytest.param(runs(0.0, 0.0, 0.0, state=MISSED), TUNED, "broke", None, False, id="missed at no time"),
        pytest.param(runs(-0.0, -0.0, -0.0, state=MISSED), TUNED, "broke", None, False, id="missed at minus no time"),
        pytest.param(
            (*runs(4.0, 5.0, state=MISSED), *seeded(9, 6.0, state=DIVERGED)), TUNED, "broke", 4.0, True, id="the least"
        ),
        pytest.param(ONE_MISSED, TUNED, "undecided", 3.0, False, id="the rule missed once"),
        pytest.param(SLOW, ONE_MISSED, "undecided", 2.0, False, id="the tuned runs missed once"),
        pytest.param(TWO_MISSED, TUNED, "undecided", 9.0, True, id="most runs missed"),
        pytest.param(SLOW, TWO_MISSED, "undecided", None, False, id="the tuned runs have no median"),
        pytest.param(runs(5.0, 5.0, 5.0, state=MISSED, contended=True), SHARED, "undecided", None, False, id="shared"),
        pytest.param(
            runs(5.0, 5.0, 5.0, state=DIVERGED, contended=True), SHARED, "broke", LIMIT, True, id="diverged on a shared"
        ),
    ],
)
def test_runs_that_missed_or_diverged_bound_the_regret_without_an_interval(
    rule: tuple[TrialRecord, ...], tuned: tuple[TrialRecord, ...], finding: str, ratio: float | None, at_least: bool
) -> None:
    judgement = against(rule, tuned)
    assert judgement.finding == finding
    if ratio is None:
        assert judgement.regret is None
    else:
        regret = not_none(judgement.regret)
        assert regret.value == pytest.approx(ratio) and regret.at_least is at_least
        assert regret.low is None and regret.high is None


def test_of_samples_a_run_that_diverged_bounds_nothing() -> None:
    samples = make_objective("samples_to_target", Target(metric="accuracy", value=0.9))
    judgement = against(runs(5.0, 5.0, 5.0, state=DIVERGED), TUNED, objective=samples)
    assert (judgement.finding, judgement.regret) == ("broke", None)


def trade_offs(found: Answer) -> list[str]:
    return [notice.message for notice in found.warnings if notice.code == "trade_off"]


def on_front(found: Answer) -> list[int]:
    return [point.batch_size for point in found.front if point.on_front]


def powered(batch_size: int, seconds: float, watts: float, steps: int) -> list[TrialRecord]:
    return confirmed(
        batch_size, seconds, 1.01 * seconds, 0.99 * seconds, steps=steps, device_use=DeviceUse(mean_power_watts=watts)
    )


def test_another_batch_size_with_fewer_samples_or_less_energy_is_told_in_one_sentence() -> None:
    found = answer([*powered(16, 2.0, 100.0, 120), *powered(32, 1.5, 60.0, 100), *powered(64, 1.0, 200.0, 90)])
    assert found.optimal.batch_size == 64
    (message,) = trade_offs(found)
    assert "batch 16 takes the fewest samples, 1,920 against 5,760, at 2 times the time" in message
    assert "batch 32 takes the least energy, 90 against 200 J, at 1.5 times the time" in message


def test_the_front_counts_the_hours_of_each_device() -> None:
    spec = make_spec(price_per_device_hour=3600.0, executor={"devices": 2})
    on_two = [
        replace(one, configuration=one.configuration.on_devices(2, one.configuration.batch_size // 2))
        for one in confirmed(64, 1.0, 1.1, 0.9)
    ]
    (point,) = build_answer(study(spec), spec, on_two, {}).front
    assert (point.time_to_target_s, point.cost) == (1.0, 2.0)


def test_a_batch_size_that_is_best_in_all_is_told_of_nothing_and_so_is_one_within_5_percent() -> None:
    best_in_all = [*powered(16, 1.0, 100.0, 100), *powered(64, 2.0, 100.0, 100)]
    assert trade_offs(answer(best_in_all)) == []
    assert on_front(answer(best_in_all)) == [16]
    assert (
        trade_offs(answer([*confirmed(32, 2.0, 2.1, 1.9, steps=100), *confirmed(64, 1.0, 1.05, 0.95, steps=52)])) == []
    )


def test_under_another_objective_the_sentence_is_on_time_and_says_what_that_takes_more_of() -> None:
    spec = make_spec(objective="samples_to_target")
    trials = [*confirmed(16, 2.0, 2.1, 1.9, steps=120), *confirmed(64, 1.0, 1.1, 0.9, steps=90)]
    found = build_answer(study(spec), spec, trials, {16: make_probe(16), 64: make_probe(64)})
    assert found.optimal.batch_size == 16
    (message,) = trade_offs(found)
    assert "batch 64 takes the least time, 1 against 2 s, at 3 times the samples" in message


def test_the_recommended_batch_size_is_on_the_front_although_a_single_search_trial_looks_better() -> None:
    lucky = make_trial(1, batch_size=16, seconds=0.5, steps=10)
    slow = make_trial(2, batch_size=128, seconds=9.0, steps=100)
    found = answer([lucky, slow, *confirmed(64, 1.0, 1.1, 0.9, steps=90), *confirmed(32, 2.0, 2.1, 1.9, steps=100)])
    assert found.optimal.batch_size == 64
    assert on_front(found) == [32, 64]
    assert {point.batch_size for point in found.front} == {16, 32, 64, 128}
    assert "batch 16" not in trade_offs(found)[0], "nor is it held against it in words"


def test_a_batch_size_generalises_as_its_tested_runs_do_with_their_spread() -> None:
    def run(number: int, **outcome: Any) -> TrialRecord:
        return make_trial(number, phase=Phase.CONFIRM, seed=number, **outcome)

    tested = not_none(over_seeds([run(1, test_metric=0.8), run(2, test_metric=0.9), run(3, test_metric=0.85), run(4)]))
    assert (tested.part, tested.median, tested.runs) == ("test", 0.85, 3)
    assert tested.standard_deviation == pytest.approx(0.05)
    validated = not_none(over_seeds([run(1, best_metric=0.91)]))
    assert (validated.part, validated.median, validated.standard_deviation) == ("validation", 0.91, None)
    assert over_seeds([run(1, best_metric=None)]) is None


def test_the_answer_has_each_batch_sizes_generalisation_and_peak_memory_with_what_it_is_of() -> None:
    small = confirmed(16, 2.0, 2.1, 1.9, peak_memory_bytes=5 * 2**20, peak_memory_basis=MemoryBasis.RESIDENT)
    large = confirmed(64, 1.0, 1.1, 0.9, peak_memory_bytes=2**31, peak_memory_basis=MemoryBasis.RESIDENT)
    found = answer([*small, *large])
    rows = {row.batch_size: row for row in found.batches}
    assert (rows[16].peak_memory_bytes, rows[16].peak_memory_basis) == (5 * 2**20, MemoryBasis.RESIDENT)
    assert (found.optimal.peak_memory_bytes, found.optimal.peak_memory_basis) == (2**31, MemoryBasis.RESIDENT)
    generalisation = not_none(rows[16].generalisation)
    assert (generalisation.part, generalisation.median) == ("test", 0.88)
    assert (rows[8].generalisation, rows[8].peak_memory_basis, rows[8].noise_scale) == (None, None, None)


def test_the_table_has_a_column_of_what_is_known_and_says_what_it_is() -> None:
    of_a_cpu: dict[str, Any] = {"peak_memory_bytes": 5 * 2**20, "peak_memory_basis": MemoryBasis.RESIDENT_SAMPLED}
    found = answer([*confirmed(16, 2.0, 2.1, 1.9, **of_a_cpu), *confirmed(64, 1.0, 1.1, 0.9)])
    headings, rows = trade_off_rows(found)
    assert headings == ["batch", "time", "samples", "peak memory", "test accuracy"]
    assert [row[0] for row in rows] == ["16", "64"]
    assert [row[3] for row in rows] == ["5 MiB", "–"]
    assert rows[0][4] == "0.88 ± 0"
    said = " ".join(about_columns(found))
    assert "sampled" in said and "Test metric" in said and "Validation" not in said and "Noise" not in said


def test_without_anything_beside_time_and_samples_there_is_no_table() -> None:
    assert trade_off_rows(answer([make_trial(1, batch_size=64, best_metric=None)])) == ([], [])


# What to do next ------------------------------------------------------------------------------------------------------


LARGEST = Largest(batch_size=128, time_to_target_s=None, lower_bound_s=None, reason="")


def verdict(batch_size: int = 64, *, confirmed: bool = True) -> Verdict:
    phase = Phase.CONFIRM if confirmed else Phase.SEARCH
    return not_none(
        decide([make_trial(n, batch_size=batch_size, seconds=1.0 + n / 10, phase=phase, seed=n) for n in range(3)], 3)
    )


def commands(spec: StudySpec, found: Verdict, sure: Certainty | None = None, largest: Largest = LARGEST) -> list[str]:
    return [step.command for step in islice(next_steps(spec, found, sure, largest, trials=60), MOST_STEPS)]


def test_an_answer_that_nothing_is_wrong_with_is_used_and_looked_at() -> None:
    expected = ["bssearch best mine --export yaml", "bssearch report mine --html mine.html"]
    assert commands(make_spec(name="mine"), verdict(), Certainty(0.95)) == expected


@pytest.mark.parametrize(
    ("settles", "runs", "command"),
    [
        ("runs", 12, "bssearch study confirm mine --max-runs 12"),
        ("step_times", None, "bssearch probe step-time mine"),
        ("idle_machine", 10, "bssearch study confirm mine --runs 10"),
        ("tuning", None, "bssearch run mine --set budget.trials=90"),
    ],
)
def test_a_provisional_answer_is_settled_first(settles: Settles, runs: int | None, command: str) -> None:
    told = commands(make_spec(name="mine"), verdict(), Certainty(0.6, settles, runs))
    assert told[0] == command and len(told) == MOST_STEPS
    assert commands(make_spec(name="mine"), verdict(confirmed=False))[0] == "bssearch study confirm mine"


def test_an_optimum_at_an_end_asks_for_more_batch_sizes_but_for_none_beyond_memory() -> None:
    spec = make_spec(name="digits")
    sizes = spec.batch_sizes
    largest, smallest = commands(spec, verdict(max(sizes)))[0], commands(spec, verdict(min(sizes)))[0]
    assert largest.startswith("bssearch run digits --set name=digits-wider") and str(2 * max(sizes)) in largest
    assert str([min(sizes) // 2, *sizes]) in smallest
    assert "wider" not in " ".join(
        commands(spec, verdict(max(sizes)), largest=LARGEST.model_copy(update={"bounded_by_memory": True}))
    )
