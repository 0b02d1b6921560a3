"""The answer of a stored study: the stored one if up to date, otherwise computed."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bssearch import Launch, Store, StudySpec, TargetNotReachedError, open_store, run_study
from bssearch.analysis.answer import Answer
from bssearch.analysis.build_answer import build_answer
from bssearch.records import (
    BatchSchedule,
    Configuration,
    LearningRateRule,
    Lease,
    MemoryUse,
    Observation,
    Phase,
    Stage,
    StudyRecord,
    TrialOutcome,
    TrialRecord,
    TrialState,
    with_batch_schedule,
)
from bssearch.search.finding import ANSWERS, answer, compute_answer, save_finding
from tests.factories import make_environment, make_plan, make_probe, make_spec, not_none, store_study
from tests.records.test_batch_schedule import milestones
from tests.search.law import LawExecutor, url_in

HERE = make_environment()
SPEC = make_spec(confirm={"runs": 0})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(url_in(tmp_path)) as opened:
        store_study(opened, SPEC, HERE)
        yield opened


def add_trial(
    store: Store,
    batch_size: int,
    seconds: float,
    schedule: BatchSchedule | None = None,
    *,
    is_contended: bool = False,
) -> int:
    """Store a trial that is at 0.8 half-way, and at the target of 0.9 at its end.

    A trial with a schedule is contended.
    """
    configuration = Configuration(batch_size=batch_size, micro_batch_size=batch_size, learning_rate=0.1)
    phase = Phase.SEARCH
    if schedule is not None:
        configuration, phase = with_batch_schedule(configuration, schedule), Phase.GROWTH
    lease = Lease(owner="driver", seconds=60.0)
    plan = make_plan(configuration=configuration, phase=phase)
    trial = not_none(store.trials.start("toy", plan, environment=HERE, lease=lease))
    curve = [
        Observation(
            step=step, samples=step * batch_size, train_seconds=share * seconds, metric=metric, loss=None,
            learning_rate=0.1,
        )
        for step, share, metric in ((0, 0.0, 0.1), (50, 0.5, 0.8), (100, 1.0, 0.9))
    ]  # fmt: skip
    store.trials.append_observations("toy", [(trial.number, one) for one in curve])
    outcome = TrialOutcome(
        state=TrialState.REACHED, reason="by the test", steps=100, train_seconds=seconds, wall_seconds=seconds,
        time_to_target_s=seconds, steps_to_target=100, best_metric=0.9, final_metric=0.9,
        contended=is_contended or schedule is not None,
    )  # fmt: skip
    store.trials.finish("toy", trial.number, outcome, steps_x_step_time_s=None)
    return trial.number


@pytest.fixture
def found(store: Store) -> Answer:
    add_trial(store, 32, 2.0)
    add_trial(store, 64, 1.0)
    return compute_answer(store, "toy")


def test_before_the_first_hit_no_finding_is_kept(store: Store) -> None:
    save_finding(store, "toy")
    assert store.findings.current("toy") is None
    with pytest.raises(TargetNotReachedError):
        answer(store, "toy")


def test_a_kept_answer_is_read_until_the_study_changes(store: Store, found: Answer) -> None:
    other = found.model_copy(update={"tied": [8, 16]})
    kept = {"made_by": ANSWERS, "answer": other.model_dump(mode="json")}
    store.findings.save("toy", store.findings.stamp("toy"), kept)
    assert answer(store, "toy") == other
    add_trial(store, 128, 0.5)
    assert answer(store, "toy").optimal.batch_size == 128


def test_a_figure_that_changed_without_new_trials_is_named_until_its_batch_size_has_one(store: Store) -> None:
    for size in (32, 64):
        store.probes.add_step_time("toy", HERE, make_probe(size, step_seconds=0.02))
        add_trial(store, size, 9.0, is_contended=True)
    save_finding(store, "toy")
    assert moved_in(answer(store, "toy")) == []
    store.probes.add_step_time("toy", HERE, make_probe(64, step_seconds=0.03))
    for _ in range(2):  # a second save keeps the notice
        before, after = (times_in(one) for one in (kept_answer(store), compute_answer(store, "toy")))
        assert after[32] == before[32]
        (message,) = moved_in(compute_answer(store, "toy"))
        assert f"batch 64 by {after[64] / 2.0 - 1:+.1%}" in message and "32" not in message
        save_finding(store, "toy")
    add_trial(store, 64, 9.0, is_contended=True)
    assert moved_in(compute_answer(store, "toy")) == []


def kept_answer(store: Store) -> Answer:
    return Answer.model_validate(not_none(store.findings.last("toy"))["answer"])


def times_in(found: Answer) -> dict[int, float]:
    return {one.batch_size: not_none(one.time_to_target_s).median for one in found.batches}


def moved_in(found: Answer) -> list[str]:
    return [one.message for one in found.warnings if one.code == "step_times_changed"]


def test_for_another_target_no_kept_answer_is_read(store: Store, found: Answer) -> None:
    other = found.model_copy(update={"tied": [8, 16]}).model_dump(mode="json")
    store.findings.save("toy", store.findings.stamp("toy"), {"made_by": ANSWERS, "answer": other})
    assert answer(store, "toy", 0.9) == found, "its own target"
    easier = answer(store, "toy", 0.8)
    assert easier.target.value == 0.8
    assert not_none(easier.optimal.time_to_target_s).median == pytest.approx(0.5)
    assert easier.warnings[0].code not in {one.code for one in found.warnings}
    assert easier.next == []


def test_for_another_target_a_batch_that_grows_counts_each_step_at_the_size_it_had(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (32, 64, 128):
        store.probes.add_step_time("toy", HERE, make_probe(size, step_seconds=0.001 * size))
    add_trial(store, 64, 6.4)
    number = add_trial(store, 32, 9.0, milestones((0, 32), (640, 64), (1920, 128)))
    stages = (Stage(0, 32, 32), Stage(0, 64, 64))
    measured = BatchSchedule(name="noise_scale", stages=stages, rate_rule=LearningRateRule.SQRT, noise_share=1.0)
    by_noise = add_trial(store, 32, 20.0, measured)
    asked: list[TrialRecord] = []

    def listening(study: StudyRecord, spec: StudySpec, trials: Sequence[TrialRecord], *rest: Any) -> Answer:
        asked.extend(trials)
        return build_answer(study, spec, trials, *rest)

    monkeypatch.setattr("bssearch.search.finding.build_answer", listening)
    easier = compute_answer(store, "toy", 0.8).batch_schedule
    (trial,) = (one for one in asked if one.number == number)
    assert trial.outcome is not None and trial.outcome.steps_to_target == 50
    assert trial.steps_x_step_time_s == pytest.approx(20 * 0.032 + 20 * 0.064 + 10 * 0.128)
    assert {one.steps_x_step_time_s for one in asked if one.number == by_noise} == {None}, "its sizes are not known"
    assert easier is not None and easier.time_to_target == pytest.approx(trial.steps_x_step_time_s)


def test_the_memory_that_a_probe_measured_is_in_the_answer(store: Store) -> None:
    for size in (8, 16, 32, 64):
        use = MemoryUse(micro_batch_size=size, fits=True, peak_memory_bytes=10**6 + 1000 * size)
        store.probes.save_memory("toy", HERE, use)
    add_trial(store, 64, 1.0)
    memory = not_none(compute_answer(store, "toy").measured.memory)
    assert (memory.largest_that_fits, memory.smallest_that_does_not) == (64, None)
    assert not_none(memory.fixed_bytes) == pytest.approx(1e6)
    assert memory.bytes_per_sample == pytest.approx(1000)


def test_an_answer_says_that_its_trials_ran_with_several_versions_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url_in(tmp_path)
    spec = make_spec(budget={"trials": 8, "trial_train_seconds": 100.0}, confirm={"runs": 0})
    run_study(spec, Launch(db=url, make_executor=lambda *_: LawExecutor()))
    with open_store(url, write=False) as store:
        alone = compute_answer(store, spec.name)
        monkeypatch.setattr(store.trials, "torch_versions", lambda _: ["2.11", "2.13"])
        several = compute_answer(store, spec.name)
    assert (several.warnings[:-1], several.warnings[-1].code) == (alone.warnings, "torch_changed")
    assert "torch 2.11 and 2.13" in several.warnings[-1].message


def test_an_invalid_stored_answer_is_computed_again(tmp_path: Path) -> None:
    url = url_in(tmp_path)
    spec = make_spec(budget={"trials": 8, "trial_train_seconds": 100.0}, confirm={"runs": 0})
    made = run_study(spec, Launch(db=url, make_executor=lambda *_: LawExecutor()))
    with open_store(url) as store:
        for hostile in ({"made_by": ANSWERS, "answer": {"optimal": 5}}, {"made_by": ANSWERS, "answer": [1]}):
            store.findings.save(spec.name, store.findings.stamp(spec.name), hostile)
            assert answer(store, spec.name).model_dump() == made.model_dump()
