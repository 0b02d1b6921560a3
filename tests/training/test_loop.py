import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from bssearch.records import GradientNoise, MemoryBasis, MetricInfo, TrialOutcome, TrialState, crossing
from bssearch.training import gradient_noise, loop
from bssearch.training.clock import LEDGER_GAP_SECONDS
from bssearch.training.contention import Contention, ContentionMeter
from bssearch.workloads.data import Part
from tests.training.toys import (
    CallClock,
    FakeTime,
    Run,
    Toy,
    configuration,
    core_of_pace,
    curve,
    metric_by_evaluation,
    on_cpu,
    request,
    ticking,
    toy_data,
)


def timeless(outcome: TrialOutcome) -> dict[str, Any]:
    """Return the fields that depend neither on the clock nor on the machine."""
    of_the_machine = {"contended", "warnings", "noise", "device_use", "peak_memory_bytes"}
    return {
        name: value
        for name, value in asdict(outcome).items()
        if not name.endswith(("seconds", "_s")) and name not in of_the_machine
    }


def test_the_target_ends_a_trial_at_the_first_evaluation_that_meets_it() -> None:
    run = Run(request(target=0.9, tested=True))
    outcome = run.outcome
    assert outcome.state is TrialState.REACHED
    assert [seen.step for seen in run.observations] == list(range(0, outcome.steps + 1, 5))
    assert all(seen.metric < 0.9 for seen in run.observations[:-1])
    assert run.observations[-1].metric == outcome.final_metric == outcome.best_metric
    assert (outcome.final_metric or 0) >= 0.9
    assert outcome.samples == 20 * outcome.steps
    assert outcome.test_metric is not None and 0.5 < outcome.test_metric <= 1
    assert outcome.peak_memory_bytes is not None and outcome.peak_memory_basis is MemoryBasis.RESIDENT


def test_the_test_part_has_the_metrics_that_the_workload_reports_and_no_others() -> None:
    toy = Toy(metrics={"accuracy": MetricInfo(reported=True), "loss": MetricInfo(low=0.0, reported=True)})
    tested, untested = (Run(request(tested=tests), toy).outcome for tests in (True, False))
    assert tested.further_test_metrics is not None
    assert sorted(tested.further_test_metrics) == ["loss", "training accuracy"]
    assert 0 < tested.further_test_metrics["loss"] < 0.6 and tested.test_metric is not None
    assert untested.further_test_metrics is None


def test_a_tested_trial_has_the_metric_of_as_many_training_samples_as_test_samples() -> None:
    class Seen(Toy):
        def evaluate(self, model: nn.Module, part: Part) -> Mapping[str, float]:
            self.last = part, super().evaluate(model, part)
            return self.last[1]

    toy, data = Seen(), toy_data(train_samples=120)
    outcome = Run(request(tested=True), toy, data).outcome
    part, found = toy.last
    torch.testing.assert_close(part.inputs, data.train.inputs[::3])
    assert outcome.further_test_metrics == {"training accuracy": found["accuracy"]}


def test_a_workload_that_cannot_evaluate_training_samples_is_tested_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Part, "thinned", lambda self, most: Part(self.inputs[:, :2], self.targets))
    outcome = Run(request(tested=True)).outcome
    assert outcome.test_metric is not None and outcome.further_test_metrics is None
    assert any("evaluate() failed on training samples: RuntimeError" in one for one in outcome.warnings)


def test_a_reported_metric_that_is_no_number_is_left_out() -> None:
    metrics = {"accuracy": MetricInfo(), "loss": MetricInfo(reported=True)}
    toy = Toy(on_evaluate=lambda found: {**found, "loss": math.nan}, metrics=metrics)
    outcome = Run(request(tested=True), toy).outcome
    assert outcome.test_metric is not None and set(outcome.further_test_metrics or {}) == {"training accuracy"}


def test_the_crossing_is_kept_as_an_interval_and_interpolated_inside_it() -> None:
    trial_request = request(target=0.9, train_seconds_limit=30.0)
    run = ticking(trial_request, [0.5, 0.6, 0.8, 0.95], step_seconds=0.5)
    expected = crossing(run.observations[-2], run.observations[-1], trial_request.target)
    outcome = run.outcome
    assert (outcome.last_miss_step, outcome.first_hit_step) == (10, 15)
    assert (outcome.last_miss_seconds, outcome.first_hit_seconds) == (5.0, 7.5)
    assert outcome.steps_to_target == expected.steps == 14
    assert outcome.time_to_target_s == expected.train_seconds == pytest.approx(5 + 2.5 * 2 / 3)


def test_a_target_met_at_step_zero_takes_no_time() -> None:
    outcome = Run(request(target=0.0)).outcome
    assert (outcome.state, outcome.steps, outcome.steps_to_target) == (TrialState.REACHED, 0, 0)
    assert (outcome.time_to_target_s, outcome.train_seconds) == (0.0, 0.0)


def test_observations_have_the_steps_and_seconds_so_far() -> None:
    run = ticking(request(configuration(20, warmup_epochs=2.0, learning_rate=0.11), target=0.9), step_seconds=0.01)
    first, second, third = run.observations[:3]
    assert (first.step, first.samples, first.train_seconds, first.loss) == (0, 0, 0.0, None)
    assert [seen.samples for seen in (second, third)] == [100, 200]
    assert [seen.learning_rate for seen in (first, second, third)] == pytest.approx([0.01, 0.05, 0.1])
    assert all(seen.loss is not None for seen in (second, third))
    assert all(one.train_seconds < other.train_seconds for one, other in itertools.pairwise(run.observations))


def test_the_same_request_gives_the_same_trial_bit_for_bit() -> None:
    dropping = configuration(dropout=0.3)
    first, second = (Run(request(dropping, tested=True)) for _ in range(2))
    assert curve(first) == curve(second) != curve(Run(request(dropping, seed=4)))
    assert timeless(first.outcome) == timeless(second.outcome)
    assert first.outcome.steps_to_target == second.outcome.steps_to_target


def test_the_warm_up_leaves_no_trace_in_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    dropping = request(configuration(dropout=0.3, warmup_epochs=1.0))
    warmed = Run(dropping)
    warm_up = Mock()
    monkeypatch.setattr(loop, "warm_up", warm_up)
    cold = Run(dropping)
    warm_up.assert_called_once()
    assert curve(warmed) == curve(cold)
    assert timeless(warmed.outcome) == timeless(cold.outcome)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_noise_scale_is_measured_off_the_clock_and_leaves_the_steps_as_they_are(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_noise, "NOISE_SHARE", 100.0)  # the toy reaches its target in a hundred steps

    def trained(measure_noise: bool) -> Run:
        time = FakeTime()
        toy = Toy(on_loss=lambda: time.pass_by(10.0))
        computation = on_cpu(measure_noise=measure_noise)
        asked = request(configuration(dropout=0.3, optimizer=optimizer), target=0.9, train_seconds_limit=1e6)
        return Run(asked, toy, clock=time.clock(), computation=computation)

    measured, plain = trained(True), trained(False)
    noise = measured.outcome.noise
    assert noise.passes is not None and noise.low is not None and plain.outcome.noise == GradientNoise()
    assert (noise.adam_low is not None) == (optimizer == "adamw")
    assert curve(measured) == curve(plain)
    assert timeless(measured.outcome) == timeless(plain.outcome)
    assert measured.outcome.train_seconds == plain.outcome.train_seconds == 10.0 * plain.outcome.steps
    assert measured.outcome.other_seconds > plain.outcome.other_seconds == 0.0


def test_neither_the_clock_nor_the_limit_moves_an_evaluation() -> None:
    """A trial that a limit ends has the beginning of the same curve, without a further evaluation."""
    whole = Run(request(target=0.95))
    cut = ticking(request(target=0.95, train_seconds_limit=12.5, limit_state=TrialState.CAPPED))
    assert (cut.outcome.state, cut.outcome.steps) == (TrialState.CAPPED, 13)
    assert "12.5 train seconds" in cut.outcome.reason
    assert [seen.step for seen in cut.observations] == [0, 5, 10]
    assert curve(cut) == curve(whole)[:3]
    assert cut.outcome.train_seconds == 13.0
    assert cut.outcome.time_to_target_s is None and cut.outcome.steps_to_target is None


def test_an_evaluation_that_is_due_at_the_limit_still_counts() -> None:
    outcome = ticking(request(train_seconds_limit=4.5), [0.5, 0.95]).outcome
    assert (outcome.state, outcome.first_hit_seconds) == (TrialState.REACHED, 5.0)


def test_a_neighbour_on_the_processor_neither_ends_a_trial_nor_makes_it_look_slower() -> None:
    def run(slowed_by: float) -> Run:
        time = FakeTime()

        def step() -> None:
            time.pass_by(0.5)
            time.wait_for_a_cpu(slowed_by)

        toy = Toy(on_loss=step, on_evaluate=metric_by_evaluation([0.5, 0.6, 0.8, 0.95]))
        return Run(request(target=0.9, train_seconds_limit=8.0), toy, clock=time.clock())

    alone, beside = run(0.0), run(1.0)
    assert beside.outcome.time_to_target_s == pytest.approx(alone.outcome.time_to_target_s)
    assert [seen.train_seconds for seen in beside.observations] == pytest.approx([0.0, 2.5, 5.0, 7.5])
    assert beside.outcome.train_seconds == pytest.approx(22.5), "what it took is kept"
    assert beside.outcome.undelayed_train_seconds == pytest.approx(7.5)


def test_the_limit_counts_train_seconds_only() -> None:
    time = FakeTime()

    def slowly(metrics: Mapping[str, float]) -> Mapping[str, float]:
        time.pass_by(100.0)
        return {**metrics, "accuracy": 0.6}

    toy = Toy(on_loss=lambda: time.pass_by(1.0), on_evaluate=slowly)
    outcome = Run(
        request(train_seconds_limit=20.0), toy, clock=time.clock(), on_observation=lambda: time.pass_by(7.0)
    ).outcome
    assert (outcome.state, outcome.steps, outcome.train_seconds) == (TrialState.EXHAUSTED, 21, 21.0)
    assert (outcome.evaluation_seconds, outcome.warmup_seconds) == (500.0, 102.0)
    assert (outcome.other_seconds, outcome.wall_seconds) == (35.0, 21 + 500 + 102 + 35)


CALLS_BETWEEN_LEDGERS = 90
"""The most calls outside the ledgers for each evaluation of a trial: the bookkeeping itself makes 64.

An evaluation of the toy makes 300, a step 300, the model and its data 2,000.
"""


@pytest.mark.parametrize("every", [1, 5, 50])
def test_the_four_ledgers_of_a_real_run_add_up_to_its_wall_time(every: int) -> None:
    """The clock counts function calls, so work outside the ledgers is a number of calls and not of seconds."""
    with CallClock() as clock:
        outcome = Run(
            request(target=2.0, train_seconds_limit=30_000, tested=True, eval_every_steps=every),
            clock=clock,
            on_observation=lambda: [len("") for _ in range(200)],
        ).outcome
    ledgers = (outcome.train_seconds, outcome.evaluation_seconds, outcome.warmup_seconds, outcome.other_seconds)
    evaluations = 2 + outcome.steps // every
    assert outcome.steps > 50 and all(calls > 0 for calls in ledgers)
    assert 0 <= outcome.wall_seconds - sum(ledgers) <= CALLS_BETWEEN_LEDGERS * evaluations
    assert outcome.train_seconds >= 30_000 and outcome.other_seconds >= 200 * (evaluations - 1)
    assert outcome.evaluation_seconds >= 100 * evaluations


@pytest.mark.parametrize("lost", [0.004, 0.05])
def test_seconds_outside_all_ledgers_are_a_warning_in_the_record(lost: float) -> None:
    time, losses = FakeTime(), itertools.chain([lost], itertools.repeat(0.0))
    outcome = Run(request(), clock=time.clock(), on_progress=lambda: time.pass_by(next(losses))).outcome
    assert outcome.wall_seconds == lost
    assert any("not measured" in warning for warning in outcome.warnings) is (lost > LEDGER_GAP_SECONDS)


@pytest.mark.parametrize("contended", [False, True])
def test_a_trial_that_lost_the_processor_is_marked(monkeypatch: pytest.MonkeyPatch, contended: bool) -> None:
    monkeypatch.setattr(ContentionMeter, "stop", lambda meter: Contention(False))
    time = FakeTime()
    takes = time.wait_for_a_cpu if contended else time.pass_by
    toy = Toy(on_loss=lambda takes=takes: takes(1.0))  # type: ignore[misc]
    assert Run(request(), toy, clock=time.clock()).outcome.contended is contended


def test_a_trial_beside_other_work_is_marked_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ContentionMeter, "stop", lambda meter: Contention(True, "others used 1.0 of 2 CPUs"))
    outcome = Run(request(), clock=FakeTime().clock()).outcome
    assert outcome.contended
    assert outcome.warnings == ("contended: others used 1.0 of 2 CPUs",)


def test_the_pace_of_the_core_is_looked_at_with_each_evaluation() -> None:
    computation = on_cpu()
    computation.core = core_of_pace(1.0, 1.7)
    run = Run(request(), computation=computation)
    looks = len(run.observations)
    assert run.outcome.contended
    assert any(f"of {looks} timings" in warning for warning in run.outcome.warnings)


@pytest.mark.parametrize("asked_at", [1, 12])
def test_a_stop_is_honoured_within_one_step_and_not_evaluated(asked_at: int) -> None:
    step, warm_up_steps = Mock(), 2
    run = Run(
        request(target=2.0, tested=True),
        Toy(on_loss=step),
        stop=lambda: (TrialState.PRUNED, "worse than most") if step.call_count >= asked_at + warm_up_steps else None,
    )
    assert (run.outcome.state, run.outcome.reason) == (TrialState.PRUNED, "worse than most")
    assert run.outcome.steps == asked_at
    assert max(seen.step for seen in run.observations) == 5 * ((asked_at - 1) // 5)
    assert run.outcome.test_metric is None


def test_progress_is_reported_at_every_step_and_evaluation() -> None:
    on_progress = Mock()
    run = Run(request(), on_progress=on_progress)
    assert on_progress.call_count == 1 + run.outcome.steps + len(run.observations)


def test_the_horizon_ends_a_trial_with_an_evaluation() -> None:
    decaying = configuration(20, parameters={"schedule": "linear", "horizon_samples": 130})
    run = Run(request(decaying, target=2.0, tested=True))
    assert (run.outcome.state, run.outcome.steps) == (TrialState.EXHAUSTED, 7)
    assert "horizon ended at step 7" in run.outcome.reason
    assert [seen.step for seen in run.observations] == [0, 5, 7]
    assert run.outcome.test_metric is not None


def test_a_target_met_at_the_horizon_is_reached() -> None:
    decaying = configuration(20, parameters={"horizon_samples": 130})
    outcome = Run(request(decaying), Toy(on_evaluate=metric_by_evaluation([0.5, 0.6, 0.95]))).outcome
    assert (outcome.state, outcome.first_hit_step) == (TrialState.REACHED, 7)


def test_a_learning_rate_that_blows_up_is_divergence_and_names_it() -> None:
    run = Run(request(configuration(20, learning_rate=1e38), target=2.0))
    assert run.outcome.state is TrialState.DIVERGED
    assert "the training loss = nan is not finite: batch size 20, learning rate 1e+38, step 5" in run.outcome.reason
    assert all(math.isfinite(seen.metric) and math.isfinite(seen.loss or 0) for seen in run.observations)
    assert run.outcome.final_metric is not None and math.isfinite(run.outcome.final_metric)


CHANCE_CASES = [
    ([0.5], TrialState.EXHAUSTED, TrialState.DIVERGED, 20),
    ([0.51], TrialState.EXHAUSTED, TrialState.DIVERGED, 20),
    ([0.53], TrialState.EXHAUSTED, TrialState.EXHAUSTED, 31),
    ([0.5, 0.7, 0.5], TrialState.EXHAUSTED, TrialState.EXHAUSTED, 31),
    ([0.5], TrialState.CAPPED, TrialState.CAPPED, 31),
]


@pytest.mark.parametrize(("metrics", "limit_state", "state", "steps"), CHANCE_CASES)
def test_only_a_trial_that_never_left_chance_in_half_its_budget_diverged(
    metrics: list[float], limit_state: TrialState, state: TrialState, steps: int
) -> None:
    outcome = ticking(request(train_seconds_limit=30.0, limit_state=limit_state), metrics).outcome
    assert (outcome.state, outcome.steps) == (state, steps)
    assert ("no better than chance (0.5)" in outcome.reason) is (state is TrialState.DIVERGED)


def test_warmup_is_no_time_to_judge_chance() -> None:
    outcome = ticking(request(configuration(20, warmup_epochs=5.0), train_seconds_limit=40.0), [0.5]).outcome
    assert (outcome.state, outcome.steps) == (TrialState.DIVERGED, 30)


@pytest.mark.parametrize(
    ("error", "at_loss"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), 1),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), 9),
        (MemoryError(), 9),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried"), 9),
    ],
)
def test_running_out_of_memory_is_an_outcome(error: Exception, at_loss: int) -> None:
    outcome = Run(request(target=2.0), Toy(on_loss=Mock(side_effect=[*range(1, at_loss), error]))).outcome
    assert outcome.state is TrialState.OOM
    assert "micro-batch 20" in outcome.reason
    assert ("before the first step" if at_loss == 1 else "step 6") in outcome.reason
    assert outcome.wall_seconds > 0


def test_a_trial_out_of_memory_before_its_model_exists_has_no_steps_and_no_warnings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ContentionMeter, "stop", lambda meter: Contention(False))
    too_large = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    tiny = configuration(4, micro_batch_size=2, accumulation_steps=2)
    run = Run(request(tiny), Toy(network=too_large), clock=FakeTime().clock())
    outcome = run.outcome
    assert (outcome.state, outcome.steps, outcome.samples, run.observations) == (TrialState.OOM, 0, 0, [])
    assert (outcome.train_seconds, outcome.time_to_target_s, outcome.last_miss_step) == (0.0, None, None)
    assert outcome.warnings == (), "no model is known to have batch normalisation"
    assert "before the first step" in outcome.reason


@pytest.mark.parametrize("error", [RuntimeError("shapes cannot be multiplied"), KeyError("x"), KeyboardInterrupt()])
def test_other_exceptions_are_the_callers(error: BaseException) -> None:
    with pytest.raises(type(error)):
        Run(request(), Toy(on_loss=Mock(side_effect=error)))


def test_an_incomplete_batch_is_said_to_be_dropped() -> None:
    assert Run(request(configuration(30))).outcome.dropped_samples_per_epoch == 10


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize(
    ("state", "tested"),
    [(TrialState.CAPPED, True), (TrialState.EXHAUSTED, True), (TrialState.PRUNED, False)],
)
def test_the_test_part_is_seen_only_when_asked_and_only_at_the_end(
    state: TrialState, tested: bool, asked: bool
) -> None:
    time = FakeTime()
    toy = Toy(on_loss=lambda: time.pass_by(1.0), evaluate=Mock(side_effect=Toy().evaluate))
    asked_for = request(target=2.0, train_seconds_limit=8.5, limit_state=state, tested=asked)
    data = toy_data(train_samples=90)
    outcome = Run(asked_for, toy, data, clock=time.clock()).outcome
    sizes = [len(part) for (_, part), _ in toy.evaluate.call_args_list]  # type: ignore[attr-defined]
    test_samples, training_samples = len(data.test), 45
    *before, last = (one for one in sizes if one != training_samples)
    assert (training_samples in sizes) is (asked and tested)
    assert (last == test_samples) is (outcome.test_metric is not None) is (asked and tested)
    assert test_samples not in before


def test_tokens_are_counted_over_the_samples_seen() -> None:
    assert Run(request(target=2.0, train_seconds_limit=0.01)).outcome.tokens is None
    outcome = Run(request(), Toy(tokens_per_sample=32)).outcome
    assert outcome.samples > 0 and outcome.tokens == 32 * outcome.samples


def test_observations_reach_the_caller_before_the_next_step() -> None:
    """A decision of the observer, such as a prune, holds at the very next step."""
    seen = Mock()
    run = Run(
        request(target=2.0),
        stop=lambda: (TrialState.PRUNED, "enough") if seen.called else None,
        on_observation=seen,
    )
    assert (run.outcome.steps, len(run.observations)) == (0, 1)


def test_training_on_past_the_target_leaves_the_steps_and_the_crossing_as_they_were() -> None:
    dropping = configuration(dropout=0.1)
    stopping, going_on = (
        ticking(request(dropping, train_seconds_limit=20.04, **changes), step_seconds=0.1)
        for changes in ({"target": 0.9}, {"stop_at_target": False})
    )
    stopped, whole = stopping.outcome, going_on.outcome
    assert stopped.steps < 100 and whole.steps == 201
    assert curve(stopping) == curve(going_on)[: len(stopping.observations)]
    assert [seen.step for seen in going_on.observations] == list(range(0, 201, 5))
    crossings = [
        (
            outcome.state,
            outcome.time_to_target_s,
            outcome.steps_to_target,
            (outcome.last_miss_step, outcome.last_miss_seconds),
            (outcome.first_hit_step, outcome.first_hit_seconds),
        )
        for outcome in (stopped, whole)
    ]
    assert crossings[0] == crossings[1]
    metrics = [seen.metric for seen in going_on.observations]
    assert (whole.final_metric, whole.best_metric) == (metrics[-1], max(metrics))
    assert (whole.best_metric or 0) > (stopped.best_metric or 0)
    assert whole.reason == f"{stopped.reason}; further training ended: the limit of 20.04 train seconds passed"


@pytest.mark.parametrize(
    ("metrics", "changes", "steps", "hit", "best"),
    [
        ([0.5, 0.95, 0.7, 0.99, 0.8], {"train_seconds_limit": 22.5}, 23, 5, 0.99),
        ([0.5], {"train_seconds_limit": 7.5, "target": 0.0}, 8, 0, 0.5),
        ([0.2, 0.31], {"train_seconds_limit": 30.0, "target": 0.3}, 31, 5, 0.31),
    ],
    ids=["the first crossing counts", "before the first step", "worse than chance"],
)
def test_a_trial_that_has_met_its_target_trains_on_to_its_limit(
    metrics: list[float], changes: dict[str, Any], steps: int, hit: int, best: float
) -> None:
    outcome = ticking(request(stop_at_target=False, **changes), metrics).outcome
    assert (outcome.state, outcome.steps, outcome.first_hit_step) == (TrialState.REACHED, steps, hit)
    assert (outcome.first_hit_seconds, outcome.best_metric, outcome.final_metric) == (float(hit), best, metrics[-1])


@pytest.mark.parametrize("state", [TrialState.CAPPED, TrialState.EXHAUSTED])
def test_a_trial_that_would_train_on_but_never_meets_its_target_ends_as_any_other(state: TrialState) -> None:
    outcome = ticking(
        request(stop_at_target=False, train_seconds_limit=8.5, limit_state=state, tested=True), [0.5, 0.7]
    ).outcome
    assert (outcome.state, outcome.steps, outcome.time_to_target_s) == (state, 9, None)
    assert (outcome.last_miss_step, outcome.first_hit_step, outcome.test_metric) == (5, None, 0.7)


def test_the_horizon_ends_a_trial_that_trains_on_and_its_test_part_is_seen() -> None:
    decaying = configuration(20, parameters={"schedule": "linear", "horizon_samples": 260})
    toy = Toy(on_evaluate=metric_by_evaluation([0.5, 0.95, 0.96, 0.97, 0.98]))
    outcome = Run(request(decaying, stop_at_target=False, tested=True), toy).outcome
    assert (outcome.state, outcome.steps, outcome.first_hit_step) == (TrialState.REACHED, 13, 5)
    assert outcome.reason.endswith("further training ended: the schedule's horizon ended at step 13")
    assert (outcome.final_metric, outcome.test_metric) == (0.97, 0.98)


@pytest.mark.parametrize(
    ("metrics", "losses", "state", "steps", "reason"),
    [
        ([0.5, 0.95, math.nan], range(99), TrialState.REACHED, 10, "accuracy = nan is not finite"),
        ([0.5, 0.8, math.nan], range(99), TrialState.DIVERGED, 10, "accuracy = nan is not finite"),
        ([0.5, 0.95], [*range(8), MemoryError], TrialState.REACHED, 6, "out of memory"),
    ],
    ids=["diverges after its target", "diverges before its target", "out of memory after its target"],
)
def test_a_trial_that_fails_after_its_target_has_reached_the_target(
    metrics: list[float], losses: list[Any], state: TrialState, steps: int, reason: str
) -> None:
    toy = Toy(on_loss=Mock(side_effect=losses), on_evaluate=metric_by_evaluation(metrics))
    outcome = Run(request(stop_at_target=False), toy).outcome
    assert (outcome.state, outcome.steps, outcome.final_metric) == (state, steps, metrics[1])
    assert reason in outcome.reason


@pytest.mark.parametrize(
    ("asked", "state"),
    [
        (TrialState.PRUNED, TrialState.PRUNED),
        (TrialState.PAUSED, TrialState.PRUNED),  # its request names no checkpoint
        (TrialState.CANCELLED, TrialState.CANCELLED),
    ],
)
def test_a_trial_that_is_stopped_after_its_target_has_not_finished(asked: TrialState, state: TrialState) -> None:
    seen = Mock()
    outcome = Run(
        request(stop_at_target=False),
        Toy(on_evaluate=metric_by_evaluation([0.5, 0.95, 0.96])),
        on_observation=seen,
        stop=lambda: (asked, "enough") if seen.call_count == 3 else None,
    ).outcome
    assert (outcome.state, outcome.steps, outcome.reason) == (state, 10, "enough")
    assert (outcome.time_to_target_s, outcome.first_hit_step, outcome.last_miss_step) == (None, None, None)
    assert (outcome.final_metric, outcome.best_metric) == (0.96, 0.96)
