"""Which batch sizes are timed again: missing, contradictory, or without memory."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from bssearch import Launch, LaunchError, Store, StudySpec, WorkloadError, enqueue, open_store, run_study
from bssearch.analysis.answer import Answer
from bssearch.executors.base import Event
from bssearch.records import (
    Configuration,
    Lease,
    MemoryUse,
    Phase,
    ProbeRecord,
    StepTime,
    StepTimeError,
    StepTimeRequest,
    TrialEnded,
    TrialOutcome,
    TrialRecord,
    TrialState,
)
from bssearch.search.calibration import (
    COMPARING_VISITS,
    FIRST_VISITS,
    MOST_VISITS,
    default_at,
    doubtful,
    measure_step_time_at,
    measure_step_times,
    missing_step_times,
    refuse_where_nothing_fits,
)
from bssearch.search.history import History
from bssearch.spec.space import UNKNOWN, MemoryBoundary
from tests.factories import (
    SPEC as RAW,
    make_environment,
    make_plan,
    make_probe,
    make_spec,
    make_trial,
    not_none,
    with_outcome,
)
from tests.search.law import LawExecutor, trials_in, url_in

SPACE = {**RAW["space"], "batch_size": [8, 16, 32]}
SPEC = make_spec(space=SPACE)
SIZES = [8, 16, 32]
HERE = make_environment()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(url_in(tmp_path)) as opened:
        opened.studies.create(SPEC.new_study("tester"))
        yield opened


def probe(size: int, seconds: float | None, own: float = 0.01, visits: int = 2, **changes: Any) -> ProbeRecord:
    error = StepTimeError(own=own, common=0.0, freedom=3.0, visits=visits)
    return make_probe(size, step_seconds=seconds, error=error, **changes)


def by_size(*probes: ProbeRecord) -> dict[int, ProbeRecord]:
    return {one.batch_size: one for one in probes}


def with_steps(number: int, step_seconds: float, size: int = 16, steps: int = 100, **changes: Any) -> TrialRecord:
    """A capped trial of the timed kind with this step time."""
    timed = default_at(SPEC, size, size).configuration
    seconds = step_seconds * (steps or 100)
    trial = make_trial(number, configuration=timed, state=TrialState.CAPPED, seconds=seconds, **changes)
    return with_outcome(trial, steps=steps)


@pytest.mark.parametrize(
    ("smaller", "larger", "own", "found"),
    [
        (1.0, 1.0, 0.01, set()),
        (1.0, 2.0, 0.01, set()),
        (1.02, 1.0, 0.01, set()),
        (1.05, 1.0, 0.01, {8, 16}),
        (1.05, 1.0, 0.05, set()),
    ],
)
def test_a_larger_batch_size_with_a_clearly_faster_step_is_doubted_with_the_smaller(
    smaller: float, larger: float, own: float, found: set[int]
) -> None:
    """Two standard errors of the difference are 2.8 times each probe's standard error."""
    assert doubtful(SPEC, by_size(probe(8, smaller, own), probe(16, larger, own)), []) == found


@pytest.mark.parametrize(
    ("others", "found"),
    [
        ([probe(32, 1.0)], {8, 32}),
        ([probe(16, 2.0), probe(32, 1.0)], {16, 32}),
        ([probe(32, 1.0, micro_batch_size=8)], set()),
        ([make_probe(32, step_seconds=1.0)], set()),
        ([probe(32, None)], set()),
    ],
)
def test_only_neighbours_in_whole_micro_batches_with_a_known_error_contradict_each_other(
    others: list[ProbeRecord], found: set[int]
) -> None:
    assert doubtful(SPEC, by_size(probe(8, 2.0), *others), []) == found


TRIAL = with_steps(1, 1.0)


@pytest.mark.parametrize(
    ("seconds", "trials", "is_doubted"),
    [
        (1.05, [TRIAL], False),
        (1.15, [TRIAL], True),
        (0.5, [TRIAL], False),  # without other work, steps may be faster
        (2.0, [with_steps(1, 1.0, contended=True)], False),
        (2.0, [with_steps(1, 1.0, size=32)], False),
        (2.0, [TRIAL, with_steps(2, 2.0), with_steps(3, 3.0)], False),  # the median counts
        (2.0, [with_steps(1, 1.0, steps=0)], False),
        (2.0, [replace(TRIAL, state=TrialState.RUNNING, outcome=None)], False),
        (2.0, [replace(TRIAL, configuration=replace(TRIAL.configuration, dropout=0.0))], False),
    ],
)
def test_a_step_time_far_above_the_pace_of_trials_is_doubted(
    seconds: float, trials: list[TrialRecord], is_doubted: bool
) -> None:
    assert doubtful(SPEC, by_size(probe(16, seconds)), trials) == ({16} if is_doubted else set())


def visit_all(store: Store, visits: int, sizes: list[int] = SIZES, step_seconds: float = 0.01) -> None:
    for visit in range(1, visits + 1):
        for size in sizes:
            store.probes.add_step_time("toy", HERE, make_probe(size, step_seconds=step_seconds * size), visit)


@pytest.mark.parametrize("visits", [FIRST_VISITS, COMPARING_VISITS])
def test_each_batch_size_is_visited_as_often_as_asked(store: Store, visits: int) -> None:
    assert missing_step_times(SPEC, store, HERE, visits, trials=()) == SIZES
    visit_all(store, visits - 1)
    assert missing_step_times(SPEC, store, HERE, visits, trials=()) == SIZES
    visit_all(store, visits, [8, 32])
    assert missing_step_times(SPEC, store, HERE, visits, trials=()) == [16]
    visit_all(store, visits)
    assert missing_step_times(SPEC, store, HERE, visits, trials=()) == []


def test_doubts_begin_after_the_search_and_end_after_six_visits(store: Store) -> None:
    def visited(times: int) -> list[int]:
        for visit in range(1, times + 1):
            for size, seconds in ((8, 1.0), (16, 0.1), (32, 2.0)):
                store.probes.add_step_time("toy", HERE, make_probe(size, step_seconds=seconds), visit)
        return missing_step_times(SPEC, store, HERE, COMPARING_VISITS, trials=())

    visited(FIRST_VISITS)
    assert missing_step_times(SPEC, store, HERE, FIRST_VISITS, trials=()) == []
    assert visited(COMPARING_VISITS) == [8, 16]
    assert visited(MOST_VISITS - 1) == [8, 16]
    assert visited(MOST_VISITS) == []


def too_large(size: int) -> MemoryUse:
    return MemoryUse(micro_batch_size=size, fits=False, peak_memory_bytes=None, reason="no memory left")


def test_a_batch_size_that_no_longer_fits_is_timed_again_in_smaller_micro_batches(store: Store) -> None:
    visit_all(store, FIRST_VISITS)
    store.probes.save_memory("toy", HERE, too_large(32))
    assert missing_step_times(SPEC, store, HERE, trials=()) == [32]


def test_measuring_ends_when_complete_and_each_round_is_one_visit(store: Store) -> None:
    executor, asked = LawExecutor(), []
    measure_step_times(SPEC, store, executor, HERE, lambda: asked.append(len(executor.splits_timed)), trials=[])
    assert [one.batch_size for one in executor.splits_timed] == FIRST_VISITS * SIZES
    visits = FIRST_VISITS * len(SIZES)
    assert asked == [made + written for made in range(visits) for written in (0, 1)], "before each one and its write"
    assert {visit.visit for visit in store.probes.visits("toy")} == set(range(1, FIRST_VISITS + 1))
    measure_step_times(SPEC, store, executor, HERE, lambda: asked.append(-1), trials=[])
    assert -1 not in asked


def test_other_library_versions_refuse_no_study_and_repeat_no_timing(store: Store) -> None:
    store.studies.bind("toy", HERE)
    store.probes.save_memory("toy", HERE, too_large(32))
    measure_step_times(SPEC, store, LawExecutor(), HERE, lambda: None, trials=[])
    before = store.probes.by_batch_size("toy", HERE)
    upgraded = make_environment(libraries=("numpy 3.0", "timm 2.0"), git_dirty=True, torch_version="3.0.0")
    store.studies.bind("toy", upgraded)
    assert missing_step_times(SPEC, store, upgraded, trials=()) == []
    assert store.probes.by_batch_size("toy", upgraded) == before
    assert store.probes.memory("toy", upgraded) == store.probes.memory("toy", HERE)


def test_a_batch_size_that_has_had_trials_keeps_their_cadence(store: Store) -> None:
    at_16 = Configuration(batch_size=16, micro_batch_size=16, learning_rate=0.1)
    plan = make_plan(configuration=at_16, eval_every_steps=77)
    assert store.trials.start("toy", plan, environment=HERE, lease=Lease(owner="driver", seconds=60.0)) is not None
    measure_step_times(SPEC, store, LawExecutor(), HERE, lambda: None, trials=store.trials.of("toy"))
    cadences = {size: one.eval_every_steps for size, one in store.probes.by_batch_size("toy").items()}
    assert cadences[16] == 77 and 77 not in (cadences[8], cadences[32])


@pytest.mark.parametrize("workload", ["train.py", "my_task.py:MyTask"])
def test_a_batch_size_refused_by_the_users_code_is_excluded_and_reported(workload: str, store: Store) -> None:
    spec = SPEC.model_copy(update={"workload": workload})
    told: list[str] = []
    executor = LawExecutor(refuses=frozenset({8}))
    measure_step_times(spec, store, executor, HERE, lambda: None, trials=[], tell=told.append)
    assert len(told) == 1 and "left out batch size 8" in told[0] and "no batch of 8" in told[0]
    probes = store.probes.by_batch_size("toy", HERE)
    assert History(spec, (), probes).feasible == (16, 32) and History(spec, (), probes).untimed == ()
    assert store.probes.memory_boundary("toy", HERE) == MemoryBoundary(fits=32), "this is no evidence about memory"
    assert missing_step_times(spec, store, HERE, MOST_VISITS, trials=()) == [16, 32]
    for size in (16, 32):
        executor.refuses = frozenset({size})
        with pytest.raises(WorkloadError, match=f"no batch of {size}"):
            measure_step_times(spec, store, executor, HERE, lambda: None, visits=MOST_VISITS, trials=[])


def test_failure_at_the_default_batch_size_excludes_no_batch_size(store: Store) -> None:
    told: list[str] = []
    executor = LawExecutor(refuses=frozenset({8, 16, 32}))
    with pytest.raises(WorkloadError, match="no batch of 32"):
        measure_step_times(SPEC, store, executor, HERE, lambda: None, trials=[], tell=told.append)
    assert told == [] and store.probes.by_batch_size("toy", HERE) == {}


def test_each_micro_batch_size_that_runs_out_is_reported_until_one_fits() -> None:
    told: list[MemoryUse] = []
    found = measure_step_time_at(SPEC, LawExecutor(fits_up_to=10), 32, UNKNOWN, told.append)
    assert found is not None and (found.batch_size, found.micro_batch_size) == (32, 8)
    assert [(one.micro_batch_size, one.fits) for one in told] == [(32, False), (16, False)]
    assert all(one.reason for one in told)
    assert measure_step_time_at(SPEC, LawExecutor(fits_up_to=0), 32, UNKNOWN) is None
    known = LawExecutor(fits_up_to=10)
    measure_step_time_at(SPEC, known, 32, MemoryBoundary(fits=8, too_large=16))
    assert [one.micro_batch_size for one in known.splits_timed] == [8]


def test_the_default_is_timed_at_another_batch_size_with_the_regularisation_that_may_be_on() -> None:
    request = default_at(make_spec(executor={"threads": 3}, default={**RAW["default"], "dropout": 0.0}), 64, 16, 0.5)
    one = request.configuration
    assert (one.batch_size, one.micro_batch_size, one.accumulation_steps, one.dropout) == (64, 16, 4, 0.5)
    assert (request.threads, request.seconds_limit, request.trial_train_seconds) == (3, 0.5, 10.0)


def test_a_workload_whose_single_sample_does_not_fit_is_refused(store: Store) -> None:
    refuse_where_nothing_fits(SPEC, store, HERE)
    store.probes.save_memory("toy", HERE, too_large(4))
    refuse_where_nothing_fits(SPEC, store, HERE)
    store.probes.save_memory("toy", HERE, too_large(1))
    with pytest.raises(LaunchError) as caught:
        refuse_where_nothing_fits(SPEC, store, HERE)
    assert "1, 4" in str(caught.value) and "no memory left" in str(caught.value)


# The memory boundary --------------------------------------------------------------------------------------------------


BUDGET = {"trials": 16, "trial_train_seconds": 100.0}
BOUNDED = make_spec(budget=BUDGET, confirm={"top": 2, "runs": 2})
BOUNDED_SIZES = [8, 16, 32, 64, 128]


def run(folder: Path, executor: LawExecutor, spec: StudySpec = BOUNDED) -> Answer:
    return run_study(spec, Launch(db=url_in(folder), make_executor=lambda *_: executor))


def splits(executor: LawExecutor) -> set[tuple[int, int]]:
    return {(one.plan.configuration.batch_size, one.plan.configuration.micro_batch_size) for one in executor.requests}


def test_batch_sizes_that_do_not_fit_at_once_are_timed_and_run_in_micro_batches(tmp_path: Path) -> None:
    executor = LawExecutor(fits_up_to=40)
    answer = run(tmp_path, executor)
    assert splits(executor) == {(8, 8), (16, 16), (32, 32), (64, 32), (128, 32)}
    timed = [(one.batch_size, one.micro_batch_size) for one in executor.splits_timed]
    first = [(8, 8), (16, 16), (32, 32), (64, 64), (64, 32), (128, 32)]  # 128 at once is known not to fit
    later = [(8, 8), (16, 16), (32, 32), (64, 32), (128, 32)]
    assert timed[: len(first)] == first
    confirmed = {one.configuration.batch_size for one in trials_in(tmp_path) if one.phase is Phase.CONFIRM}
    assert timed[len(first) :] == (COMPARING_VISITS - FIRST_VISITS) * [one for one in later if one[0] in confirmed]
    assert answer.largest_that_fits.batch_size == 32
    assert answer.largest_that_fits.reason == "a micro-batch of 64 ran out of memory"
    assert {row.batch_size for row in answer.batches} == set(BOUNDED_SIZES)
    assert all(trial.state is not TrialState.OOM for trial in trials_in(tmp_path))


@pytest.mark.parametrize("slots", [1, 3])
def test_a_trial_that_runs_out_is_tried_again_in_smaller_micro_batches(tmp_path: Path, slots: int) -> None:
    executor = LawExecutor(slots=slots, trains_up_to=20)
    answer = run(tmp_path, executor)
    trials = trials_in(tmp_path)
    ran_out = [trial for trial in trials if trial.state is TrialState.OOM]
    assert ran_out
    for trial in ran_out:
        (again,) = [other for other in trials if other.retry_of == trial.number]
        assert again.configuration.trains_like(trial.configuration)
        assert again.configuration.micro_batch_size < trial.configuration.micro_batch_size
        assert (again.seed, again.uncapped, again.sampled) == (trial.seed, trial.uncapped, trial.sampled)
        assert again.eval_every_steps == trial.eval_every_steps
    default = [one for one in trials if one.configuration.trains_like(BOUNDED.default_configuration)]
    assert [one.state for one in default if one.phase is Phase.SEARCH] == [TrialState.OOM, TrialState.REACHED]
    assert answer.speedup.over_default is not None
    assert "default_outside_space" not in {notice.code for notice in answer.warnings}
    assert answer.largest_that_fits.batch_size == 16
    assert sum(one.phase is Phase.SEARCH and not one.state.is_missing for one in trials) == BUDGET["trials"]
    assert {row.batch_size for row in answer.batches} == set(BOUNDED_SIZES)
    after = [one for one in executor.requests if one.number > max(trial.number for trial in ran_out) + slots]
    assert max(one.plan.configuration.micro_batch_size for one in after) == 16


@dataclass
class Unlucky(LawExecutor):
    """Trials in micro-batches of 32 and more run out of memory ``times`` times, as beside other processes."""

    times: int = 1

    def events(self, timeout: float) -> list[Event]:
        if self.running and self.times and self.running[0].plan.configuration.micro_batch_size >= 32:
            self.times -= 1
            return [
                TrialEnded(self.running.pop(0).number, TrialOutcome(state=TrialState.OOM, reason="CUDA out of memory"))
            ]
        return super().events(timeout)


def test_a_size_that_fits_into_a_new_process_is_used_again_after_one_trial_ran_out_of_memory(tmp_path: Path) -> None:
    executor = Unlucky()
    answer = run(tmp_path, executor)
    trials = trials_in(tmp_path)
    (ran_out,) = [trial for trial in trials if trial.state is TrialState.OOM]
    (again,) = [trial for trial in trials if trial.retry_of == ran_out.number]
    assert again.configuration == ran_out.configuration
    assert executor.sizes_run == [ran_out.configuration.micro_batch_size]
    assert all(one.plan.configuration.accumulation_steps == 1 for one in executor.requests)
    assert answer.largest_that_fits.batch_size == 128


def test_the_second_trial_that_runs_out_of_memory_at_a_size_lowers_the_boundary_for_good(tmp_path: Path) -> None:
    executor = Unlucky(times=2)
    answer = run(tmp_path, executor)
    ran_out = [trial.configuration for trial in trials_in(tmp_path) if trial.state is TrialState.OOM]
    assert len(ran_out) == 2 and len({one.micro_batch_size for one in ran_out}) == 1
    assert executor.sizes_run == [ran_out[0].micro_batch_size], "it is tried once"
    assert answer.largest_that_fits.batch_size < ran_out[0].micro_batch_size


def test_memory_that_ends_during_confirmation_repeats_the_runs_of_that_batch_size(tmp_path: Path) -> None:
    def shrinks(law: LawExecutor) -> None:
        if law.running and law.running[0].plan.is_tested and sum(one.plan.is_tested for one in law.requests) == 5:
            law.trains_up_to = min(law.trains_up_to, law.running[0].plan.configuration.micro_batch_size - 1)

    answer = run(tmp_path, LawExecutor(on_look=shrinks))
    confirming = [trial for trial in trials_in(tmp_path) if trial.phase is Phase.CONFIRM]
    (ran_out,) = [trial for trial in confirming if trial.state is TrialState.OOM]
    bound = ran_out.configuration.micro_batch_size
    whole = [trial for trial in confirming if trial.configuration.micro_batch_size < bound]
    assert set(Counter(trial.configuration.key for trial in whole).values()) == {2}
    assert any(trial.configuration.accumulation_steps > 1 for trial in whole)
    assert not {"unconfirmed", "confirmation_incomplete"} & {notice.code for notice in answer.warnings}
    assert answer.optimal.micro_batch_size < bound


def test_when_no_batch_size_fits_any_more_the_study_ends_with_the_reason(tmp_path: Path) -> None:
    executor = LawExecutor(trains_up_to=0)
    with pytest.raises(LaunchError, match="not even a micro-batch of one sample") as raised:
        run(tmp_path, executor)
    assert raised.value.exit_code == 6
    with (
        open_store(url_in(tmp_path)) as store,
        pytest.raises(LaunchError, match="not even a micro-batch of one sample"),
    ):
        enqueue(store, BOUNDED.name, {"dropout": 0.4})


# Several devices -----------------------------------------------------------------------------------------------------


WIDE, GPU = make_spec(), make_environment(device_type="cuda")
ALL_SIZES = [*WIDE.batch_sizes]


@dataclass
class Node(LawExecutor):
    """A node; its devices' step times are multiplied by ``paces``, and by ``together`` if all work at once."""

    slots: int = 3
    slots_apart: bool = True
    paces: tuple[float, ...] = (1.0, 1.0, 1.0)
    together: float = 1.0
    contended: bool = False
    waves: list[list[int]] = field(default_factory=list)

    def measure_step_times(self, requests: Sequence[StepTimeRequest]) -> list[StepTime]:
        self.waves.append([one.configuration.batch_size for one in requests])
        return [super(Node, self).measure_step_time(one) for one in requests]

    def step_times_by_device(self, request: StepTimeRequest) -> dict[str, StepTime]:
        found = super().measure_step_time(request)
        return {
            f"GPU-{index}": replace(
                found, step_seconds=not_none(found.step_seconds) * pace * self.together, contended=self.contended
            )
            for index, pace in enumerate(self.paces)
        }


class OneDeviceFails(Node):
    """A node with a broken device."""

    def step_times_by_device(self, request: StepTimeRequest) -> dict[str, StepTime]:
        raise LaunchError("the worker of slot 2 died")


def measured(store: Store, executor: LawExecutor) -> list[str]:
    """Time steps; return the messages."""
    told: list[str] = []
    measure_step_times(WIDE, store, executor, GPU, lambda: None, 3, trials=[], tell=told.append)
    visits = [(one.visit, one.batch_size) for one in store.probes.visits(WIDE.name)]
    assert sorted(visits) == [(visit, size) for visit in (1, 2, 3) for size in ALL_SIZES]
    return told


def test_devices_that_agree_share_the_visits_after_the_first(store: Store) -> None:
    executor = Node()
    assert measured(store, executor) == []
    assert executor.waves == [ALL_SIZES[:3], ALL_SIZES[3:]] * 2, "as many at once as there are devices"


@pytest.mark.parametrize(
    ("executor", "words"),
    [
        (Node(paces=(1.0, 1.0, 1.2)), ["a step on GPU-2 takes 1.2 times"]),
        (Node(paces=(1.0, 0.9, 1.0)), ["a step on GPU-1 takes 0.9 times"]),
        (Node(together=1.3), ["simultaneous steps take 1.3 times"]),
        (Node(contended=True), []),
        (Node(slots_apart=False), []),
        (LawExecutor(slots=3, slots_apart=True), []),
    ],
    ids=["slow", "fast", "in each other's way", "contended", "shared devices", "an executor that cannot"],
)
def test_if_devices_disagree_one_makes_all_visits(executor: LawExecutor, words: list[str], store: Store) -> None:
    told = measured(store, executor)
    assert len(told) == len(words) and all(word in sentence for word, sentence in zip(words, told, strict=True))
    assert not isinstance(executor, Node) or executor.waves == []


def test_a_size_that_runs_out_of_memory_on_another_device_is_timed_in_smaller_micro_batches(store: Store) -> None:
    @dataclass
    class Shrinks(Node):
        def measure_step_times(self, requests: Sequence[StepTimeRequest]) -> list[StepTime]:
            self.fits_up_to = ALL_SIZES[-1] - 1
            return super().measure_step_times(requests)

    measure_step_times(WIDE, store, Shrinks(), GPU, lambda: None, COMPARING_VISITS, trials=[])
    found = store.probes.by_batch_size(WIDE.name, GPU)
    assert found[ALL_SIZES[-1]].micro_batch_size < ALL_SIZES[-1]
    assert set(found) == set(ALL_SIZES)


def test_one_device_times_all_sizes_if_the_other_times_none(store: Store) -> None:
    node = OneDeviceFails()
    assert measured(store, node) == [
        "measuring step times on one device, because another device failed: the worker of slot 2 died"
    ]
    assert node.waves == []
