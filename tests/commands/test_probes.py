"""The probes of step times, memory and the noise scale, by an executor that answers by a law, and of branches."""

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from bssearch import Launch, LaunchError, Store, StudySpec, UsageError, open_store
from bssearch.analysis.law.batch_model import fit_memory
from bssearch.analysis.law.branches import LocalCriticalBatch, plan_branches
from bssearch.commands.branch_probe import (
    BranchedCheckpoint,
    Branching,
    BranchPoint,
    branch_points,
    check_room,
    configuration_at,
    notices,
    rate_rule,
    samples_of,
    sentences,
)
from bssearch.commands.opening import OpenStudy
from bssearch.commands.probes import (
    BRACKET,
    FINE,
    SECONDS_LIMIT,
    MemoryProbe,
    next_size,
    noise_sentences,
    probe_memory,
    probe_noise,
    probe_step_times,
    step_time,
)
from bssearch.executors.base import Event
from bssearch.records import (
    Configuration,
    GradientNoise,
    LearningRateRule,
    Lease,
    MemoryRequest,
    MemoryUse,
    NoiseMeasurement,
    Observation,
    StepTimeError,
    TrialEnded,
    TrialObserved,
    TrialOutcome,
    TrialRequest,
    TrialState,
)
from bssearch.search import calibration
from bssearch.search.calibration import measure_step_times, missing_step_times
from tests.cli.task import INLINE, bssearch, printed, refused
from tests.commands.conftest import HERE, SPEC, SPEC as TOY, ProbedExecutor, open_study
from tests.factories import SPEC as RAW, make_plan, make_probe, make_spec, not_none
from tests.search.law import LawExecutor, step_seconds
from tests.waiting import Ear

SIZES = [8, 16, 32, 64, 128]
ERROR = StepTimeError(own=0.05, common=0.05, freedom=8.0, visits=3)


def test_every_batch_size_is_timed_for_longer_than_a_run_would_and_told(store: Store) -> None:
    executor = ProbedExecutor()
    listener = Ear()
    probes = probe_step_times(open_study(store, executor, listener))
    assert [probe.batch_size for probe in probes] == SIZES
    assert probes == list(store.probes.by_batch_size(SPEC.name).values())
    assert listener.notes == [f"batch {probe.batch_size}: timed {probe.steps_timed} steps" for probe in probes]
    assert executor.limits == [SECONDS_LIMIT] * 5
    assert all(probe.eval_every_steps for probe in probes)


def test_the_document_has_the_fit_and_is_whole_without_one(tmp_path: Path) -> None:
    launch = Launch(db=f"sqlite:///{tmp_path / 'study.db'}", make_executor=lambda *_: ProbedExecutor())
    fit = step_time(SPEC, launch).document["fit"]
    assert isinstance(fit, dict) and fit["beta_seconds"] == pytest.approx(0.0001, rel=1e-3)
    single = make_spec(name="single", space={**RAW["space"], "batch_size": 32})
    assert step_time(single, launch).document["fit"] is None


def test_the_host_bound_share_is_stored_and_shown_where_the_device_tells_one(tmp_path: Path) -> None:
    on_cuda = ProbedExecutor(timed=lambda found: replace(found, host_bound_share=4 / found.batch_size))
    report = step_time(SPEC, Launch(db=f"sqlite:///{tmp_path / 'study.db'}", make_executor=lambda *_: on_cuda))
    assert [row["host_bound_share"] for row in report.rows] == [4 / size for size in SIZES]
    assert [row["host-bound"] for row in report.table or ()] == ["50 %", "25 %", "12 %", "6 %", "3 %"]
    assert report.columns[-2:] == ["host-bound", "remark"]
    elsewhere = Launch(db=f"sqlite:///{tmp_path / 'cpu.db'}", make_executor=lambda *_: ProbedExecutor())
    assert "host-bound" not in step_time(SPEC, elsewhere).columns


def test_a_run_that_follows_makes_the_visits_that_are_left(store: Store) -> None:
    probe_step_times(open_study(store, ProbedExecutor()))
    executor = ProbedExecutor()
    measure_step_times(SPEC, store, executor, HERE, lambda: None, trials=[])
    assert executor.limits == [calibration.SECONDS_LIMIT] * 5 * (calibration.FIRST_VISITS - 1)
    assert missing_step_times(SPEC, store, HERE, trials=[]) == []
    assert calibration.SECONDS_LIMIT < SECONDS_LIMIT


def test_visits_go_round_over_the_batch_sizes(store: Store) -> None:
    measure_step_times(SPEC, store, ProbedExecutor(), HERE, lambda: None, trials=[])
    assert [(one.visit, one.batch_size) for one in store.probes.visits(SPEC.name)] == [
        (visit, size) for visit in range(1, calibration.FIRST_VISITS + 1) for size in SIZES
    ]
    measure_step_times(SPEC, store, ProbedExecutor(), HERE, lambda: None, calibration.COMPARING_VISITS, trials=[])
    assert len(store.probes.visits(SPEC.name)) == calibration.COMPARING_VISITS * len(SIZES)


def test_a_probe_is_one_more_visit_and_what_it_returns_is_what_is_stored(store: Store) -> None:
    first = probe_step_times(open_study(store, ProbedExecutor()))
    slower = ProbedExecutor(timed=lambda found: replace(found, step_seconds=4.0 * not_none(found.step_seconds)))
    again = probe_step_times(open_study(store, slower))
    assert again == list(store.probes.by_batch_size(SPEC.name).values())
    assert [probe.step_seconds for probe in again] == pytest.approx([2 * step_seconds(size) for size in SIZES])
    assert [probe.eval_every_steps for probe in again] == [probe.eval_every_steps for probe in first]
    assert [probe.error and probe.error.visits for probe in again] == [2] * 5


def test_what_contradicts_the_other_step_times_is_visited_again(store: Store) -> None:
    for visit in range(1, calibration.COMPARING_VISITS + 1):
        for size in SIZES:
            seconds = step_seconds(size) * (6.0 if size == 32 else 1.0)
            store.probes.add_step_time(SPEC.name, HERE, make_probe(size, step_seconds=seconds), visit)
    assert missing_step_times(SPEC, store, HERE, trials=[]) == []
    assert missing_step_times(SPEC, store, HERE, calibration.COMPARING_VISITS, trials=[]) == [32, 64]
    measure_step_times(SPEC, store, ProbedExecutor(), HERE, lambda: None, calibration.COMPARING_VISITS, trials=[])
    assert Counter(one.batch_size for one in store.probes.visits(SPEC.name)) == {
        **dict.fromkeys(SIZES, calibration.COMPARING_VISITS),
        **dict.fromkeys([32, 64], calibration.MOST_VISITS),
    }, "and no more, though it is doubted still"


def test_what_does_not_fit_is_timed_in_smaller_micro_batches(store: Store) -> None:
    probes = probe_step_times(open_study(store, ProbedExecutor(fits_up_to=40)))
    assert [(probe.batch_size, probe.micro_batch_size) for probe in probes] == [
        (8, 8),
        (16, 16),
        (32, 32),
        (64, 32),
        (128, 32),
    ]
    assert store.probes.memory_boundary(SPEC.name, HERE).too_large == 64


def test_visits_that_others_disturbed_are_made_and_not_made_again_for_ever(store: Store) -> None:
    for visit in range(1, calibration.COMPARING_VISITS + 1):
        for size in SIZES:
            store.probes.add_step_time(SPEC.name, HERE, make_probe(size, contended=visit > 1), visit)
    assert missing_step_times(SPEC, store, HERE, calibration.COMPARING_VISITS, trials=[]) == []
    assert [probe.error and probe.error.visits for probe in store.probes.by_batch_size(SPEC.name).values()] == [3] * 5


def test_what_would_be_timed_in_smaller_micro_batches_than_those_in_force_is_left_alone(store: Store) -> None:
    store.probes.save_memory(SPEC.name, HERE, MemoryUse(micro_batch_size=100, fits=False, peak_memory_bytes=None))
    store.probes.save_memory(SPEC.name, HERE, MemoryUse(micro_batch_size=20, fits=True, peak_memory_bytes=None))
    for size in SIZES:
        store.probes.add_step_time(SPEC.name, HERE, make_probe(size, micro_batch_size=min(size, 64)), 1)
    executor = ProbedExecutor()
    measure_step_times(SPEC, store, executor, HERE, lambda: None, trials=[])
    assert len(executor.limits) <= len(SIZES) * calibration.MOST_VISITS
    assert missing_step_times(SPEC, store, HERE, trials=[]) == []


def test_where_nothing_fits_no_step_is_timed_and_no_noise_measured(store: Store, tmp_path: Path) -> None:
    assert probe_step_times(open_study(store, ProbedExecutor(fits_up_to=0))) == []
    launch = Launch(db=f"sqlite:///{tmp_path / 'study.db'}", make_executor=lambda *_: ProbedExecutor(fits_up_to=0))
    report = step_time(SPEC, launch)
    assert report.document["throughput_knee"] is None
    assert len(report.sentences) == 1 and "None" not in report.sentences[0]
    with pytest.raises(LaunchError, match="does not fit into memory"):
        probe_noise(open_study(store, ProbedExecutor(fits_up_to=0)))


# Memory ---------------------------------------------------------------------------------------------------------------


def probe(store: Store, executor: LawExecutor, **environment: Any) -> MemoryProbe:
    return probe_memory(open_study(store, executor, **environment))


def test_sizes_are_doubled_then_bisected_and_only_those_are_returned(store: Store) -> None:
    executor = LawExecutor(fits_up_to=300)
    found = probe(store, executor)
    assert executor.sizes_run == [8, 16, 32, 64, 128, 256, 512, 384, 320, 288, 304, 296]
    assert [use.micro_batch_size for use in found.uses] == executor.sizes_run
    assert (found.largest_that_fits, found.smallest_that_does_not) == (296, 304)
    assert not found.whole_training_part_fits
    assert found.fit is not None
    assert found.fit.fixed_bytes == pytest.approx(10**6)
    assert found.fit.bytes_per_sample == pytest.approx(1000)
    assert found.fit.largest_residual == pytest.approx(0, abs=1e-9)


def test_whatever_is_marginal_the_ends_are_beside_it_and_are_no_marginal_sizes() -> None:
    for ceiling, reserve_ends in [(1, 2), (7, 2), (7, 9), *((300, one) for one in range(2, 302, 7))]:
        for memory_ends in range(reserve_ends, ceiling + 2, 5):
            uses: list[MemoryUse] = []
            marginal: list[int] = []
            while (size := next_size(uses, smallest=8, ceiling=ceiling, marginal=marginal)) is not None:
                assert 1 <= size <= ceiling and size not in {use.micro_batch_size for use in uses} | set(marginal)
                if reserve_ends <= size < memory_ends:
                    marginal.append(size)
                else:
                    uses.append(MemoryUse(micro_batch_size=size, fits=size < reserve_ends, peak_memory_bytes=None))
            fitting = max((use.micro_batch_size for use in uses if use.fits), default=0)
            failing = min((use.micro_batch_size for use in uses if not use.fits), default=ceiling + 1)
            assert fitting < reserve_ends and memory_ends <= failing
            assert failing <= max(fitting + 1, BRACKET * fitting) or (
                reserve_ends <= max(fitting + 1, FINE * fitting)
                and (failing > ceiling or failing <= max(memory_ends, FINE * (memory_ends - 1)))
            ), (reserve_ends, memory_ends, fitting, failing)
            assert len(uses) + len(marginal) <= 30


def test_a_size_that_leaves_no_reserve_neither_fits_nor_is_too_large(store: Store) -> None:
    found = probe(store, LawExecutor(fits_up_to=300, leaves_reserve_up_to=260))
    assert found.largest_that_fits <= 260 and found.smallest_that_does_not is not None
    assert found.smallest_that_does_not > 300
    assert {260 < use.micro_batch_size <= 300 for use in found.marginal} == {True}
    assert all("only if no memory stays in reserve" in (use.reason or "") for use in found.marginal)
    stored = {use.micro_batch_size for use in store.probes.memory(SPEC.name, HERE)}
    assert stored.isdisjoint(use.micro_batch_size for use in found.marginal)


def test_where_the_whole_training_part_fits_it_was_run_and_nothing_is_named_above(store: Store) -> None:
    executor = LawExecutor()
    found = probe(store, executor)
    assert executor.sizes_run[-1] == found.largest_that_fits == found.ceiling == 1000
    assert found.smallest_that_does_not is None
    assert found.whole_training_part_fits


def test_a_probe_that_broke_off_goes_on_where_it_stopped_and_a_limit_is_another_device(store: Store) -> None:
    class Breaks(LawExecutor):
        def measure_memory(self, request: MemoryRequest) -> MemoryUse:
            if len(self.sizes_run) == 4:
                raise KeyboardInterrupt
            return super().measure_memory(request)

    with pytest.raises(KeyboardInterrupt):
        probe(store, Breaks(fits_up_to=300))
    executor = LawExecutor(fits_up_to=300)
    found = probe(store, executor)
    assert executor.sizes_run[0] == 128
    assert found.largest_that_fits == 296
    assert probe(store, LawExecutor(fits_up_to=300)).uses == tuple(sorted(found.uses, key=lambda u: u.micro_batch_size))
    limited = LawExecutor(fits_up_to=20)
    assert probe(store, limited, device_memory_bytes=2**20).largest_that_fits <= 20
    assert limited.sizes_run[0] == 8


def test_below_the_smallest_batch_size_it_goes_down(store: Store) -> None:
    executor = LawExecutor(fits_up_to=3)
    found = probe(store, executor)
    assert executor.sizes_run == [8, 4, 2, 3]
    assert (found.largest_that_fits, found.smallest_that_does_not, found.fit) == (3, 4, None)


def test_where_not_even_one_sample_fits_the_error_has_the_probes_numbers(store: Store) -> None:
    with pytest.raises(
        LaunchError, match=r"not even .* Test CPU \(8 GiB\); these sizes ran out of memory: 8, 4, 2, 1 \(no"
    ) as e:
        probe(store, LawExecutor(fits_up_to=0))
    assert e.value.exit_code == 6
    assert [use.fits for use in store.probes.memory(SPEC.name, HERE)] == [False] * 4


def test_the_fit_is_of_sizes_that_fit_and_says_how_far_off_it_is() -> None:
    peaks = [(10, 1100), (20, 1200), (30, 1330)]
    uses = [MemoryUse(micro_batch_size=size, fits=True, peak_memory_bytes=peak) for size, peak in peaks]
    uses.append(MemoryUse(micro_batch_size=40, fits=False, peak_memory_bytes=9999))
    fit = not_none(fit_memory(uses))
    assert fit.bytes_per_sample == pytest.approx(11.5)
    assert fit.fixed_bytes == pytest.approx(980)
    assert fit.largest_residual == pytest.approx(10 / 1200)
    assert fit_memory(uses[1:]) is None


# Noise ----------------------------------------------------------------------------------------------------------------


def add_trial(store: Store, configuration: Configuration, seconds: float | None) -> None:
    """Add a trial that reached the target after these seconds, or was capped."""
    plan = make_plan(configuration=configuration, eval_every_steps=17)
    trial = not_none(store.trials.start(SPEC.name, plan, environment=HERE, lease=Lease(owner="driver", seconds=60.0)))
    outcome = TrialOutcome(state=TrialState.CAPPED, reason="as the test has it", train_seconds=0.1, wall_seconds=0.1)
    if seconds is not None:
        outcome = replace(
            outcome, state=TrialState.REACHED, train_seconds=seconds, time_to_target_s=seconds, steps_to_target=10
        )
    store.trials.finish(SPEC.name, trial.number, outcome, steps_x_step_time_s=None)


def test_the_default_is_measured_where_no_trial_has_reached_the_target(store: Store) -> None:
    add_trial(store, replace(SPEC.default_configuration, learning_rate=0.3), None)
    executor = ProbedExecutor()
    found = probe_noise(open_study(store, executor))
    (request,) = executor.asked_noise
    assert request.configuration == SPEC.default_configuration
    assert executor.splits_timed and request.eval_every_steps >= 1
    assert (request.target, request.train_seconds_limit) == (SPEC.record_target, SPEC.budget.trial_train_seconds)
    assert store.probes.noise(SPEC.name) == [found]
    again = probe_noise(open_study(store, ProbedExecutor()))
    assert store.probes.noise(SPEC.name) == [again], "it takes the place of the first"


@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_the_noise_scale_has_the_unit_of_the_batch_size(unit: str) -> None:
    noise = GradientNoise(scale=40.0, low=30.0, high=50.0, passes=9)
    found = NoiseMeasurement(batch_size=8, micro_batch_size=8, step=3, metric=0.5, noise=noise, reason=None)
    said = next(noise_sentences(found, make_spec(training={"batch_unit": unit})))
    assert said.endswith(f"{unit} (9 passes)")


def test_a_step_time_that_is_stored_is_not_measured_again(store: Store) -> None:
    store.probes.add_step_time(SPEC.name, HERE, make_probe(SPEC.default.batch_size, eval_every_steps=9))
    executor = ProbedExecutor()
    probe_noise(open_study(store, executor))
    assert (executor.splits_timed, executor.asked_noise[0].eval_every_steps) == ([], 9)


def test_the_configuration_of_the_fastest_trial_is_measured_as_it_ran(store: Store) -> None:
    slow, fast = (replace(SPEC.default_configuration, learning_rate=rate) for rate in (0.2, 0.3))
    add_trial(store, slow, 3.0)
    add_trial(store, fast, 2.0)
    add_trial(store, slow, None)
    executor = ProbedExecutor()
    probe_noise(open_study(store, executor))
    assert executor.asked_noise[0].configuration == fast
    assert (executor.asked_noise[0].eval_every_steps, executor.splits_timed) == (17, [])


# Branches -------------------------------------------------------------------------------------------------------------


LINE = """
import torch

import bssearch


class Line:
    metrics = {"loss": bssearch.MetricInfo(low=0)}
    tokens_per_sample = 4

    def load(self, device):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(4096, 8, generator=generator)
        targets = inputs @ torch.ones(8, 1) + torch.randn(4096, 1, generator=generator)
        part = lambda a, b: bssearch.Part(inputs[a:b], targets[a:b])
        return bssearch.Data(train=part(0, 3072), validation=part(3072, 3584), test=part(3584, 4096))

    def build_model(self, *, dropout):
        return torch.nn.Linear(8, 1)

    def loss(self, model, inputs, targets, *, label_smoothing):
        return torch.nn.functional.mse_loss(model(inputs), targets)

    def evaluate(self, model, part):
        return {"loss": self.loss(model, part.inputs, part.targets, label_smoothing=0).item()}
"""
"""A line of eight slopes under noise: far from it large batches lose, near it the noise decides."""

LINE_SPEC: dict[str, Any] = {
    "schema_version": 1,
    "name": "line",
    "workload": "line.py:Line",
    "target": {"metric": "loss", "value": 1.01, "goal": "minimize"},
    "space": {
        "batch_size": {"low": 4, "high": 256},
        "learning_rate": 0.01,
        "optimizer": {"name": "sgd", "momentum": 0.0, "nesterov": False},
    },
    "default": {"batch_size": 4, "learning_rate": 0.01},
    "budget": {"trials": 8, "trial_train_seconds": 1},
    "executor": INLINE,
}


def weights(error: float) -> dict[str, torch.Tensor]:
    """Return a line whose slopes are all off by so much."""
    return {"weight": torch.full((1, 8), 1.0 - error), "bias": torch.zeros(1)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "line.py").write_text(LINE)
    (tmp_path / "line.yaml").write_text(yaml.safe_dump(LINE_SPEC))
    for name, error, step in (("early.pt", 1.0, 100), ("late.pt", 0.1, 4000)):
        torch.save({"model": weights(error), "step": step}, tmp_path / name)
    return tmp_path


def branch_probe(folder: Path, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed(folder, "probe", "branch", "line.yaml", "--format", "json", *words))
    return found


@pytest.mark.slow
def test_a_run_has_a_batch_size_at_each_checkpoint_in_the_order_of_training(folder: Path) -> None:
    found = branch_probe(
        folder, "--checkpoint", "late.pt", "--checkpoint", "early.pt", "--tokens", "4096", "--octaves", "5"
    )
    early, late = found["checkpoints"]
    assert (early["step"], early["samples"], late["samples"]) == (100, 400, 16000)
    assert (found["batch_size"], found["branch_samples"], found["branch_tokens"]) == (4, 1024, 4096)
    assert found["rules"] == {"learning_rate": "linear", "betas": "none", "weight_decay": "none"}
    rates = {row["batch_size"]: row["learning_rate"] for row in late["branches"]}
    assert rates[4] == pytest.approx(0.01) and rates[8] == pytest.approx(0.02)
    for one in found["checkpoints"]:
        assert one["verdict"] in {"found", "at_least", "below", "cannot_tell"}
        assert one["interval"][0] == max([row["batch_size"] for row in one["branches"] if row["holds"]], default=None)
        assert one["interval"][1] == next((row["batch_size"] for row in one["branches"] if row["holds"] is False), None)
    assert [row["samples"] for row in found["schedule"]] == [
        one["samples"] for one in found["checkpoints"] if one["batch_size"] is not None
    ]


@pytest.mark.slow
def test_what_is_stored_is_not_trained_again_and_a_changed_checkpoint_is(folder: Path) -> None:
    words = "--checkpoint", "early.pt", "--tokens", "512", "--octaves", "1"
    first = branch_probe(folder, *words)
    with open_store(f"sqlite:///{folder / 'bssearch.db'}", write=False) as store:
        stored = store.probes.branches("line")
    assert len(stored) == sum(len(row["ends"]) for row in first["checkpoints"][0]["branches"])
    (folder / "early.pt").rename(folder / "moved.pt")
    done = bssearch("probe", "branch", "line.yaml", "--checkpoint", "moved.pt", *words[2:], cwd=folder)
    assert "ends at" not in done.stderr and done.returncode == 0
    torch.save({"model": weights(0.9), "step": 100}, folder / "moved.pt")
    done = bssearch("probe", "branch", "line.yaml", "--checkpoint", "moved.pt", *words[2:], cwd=folder)
    assert "ends at" in done.stderr and done.returncode == 0


@pytest.mark.slow
def test_a_plain_state_dict_is_told_to_be_without_optimizer_state(folder: Path) -> None:
    torch.save(weights(1.0), folder / "plain.pt")
    found = branch_probe(folder, "--checkpoint", "plain.pt", "--tokens", "512", "--octaves", "1", "--warmup-steps", "2")
    assert any("has no optimizer state" in one["message"] for one in found["warnings"])
    assert (found["checkpoints"][0]["step"], found["checkpoints"][0]["samples"]) == (None, None)


@pytest.mark.parametrize(("saved", "is_told"), [(0.01, False), (0.002, True), (0.05, True)])
def test_a_run_that_was_saved_at_another_learning_rate_is_told(folder: Path, saved: float, is_told: bool) -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(8, 1).parameters(), lr=saved)
    torch.save({"model": weights(1.0), "optimizer": optimizer.state_dict(), "step": 1}, folder / "c.pt")
    spec = StudySpec.model_validate(LINE_SPEC)
    told = list(notices(spec, True, branch_points(spec, [folder / "c.pt"], None), 4))
    assert [f"has learning rate {saved:g}" in one for one in told] == [True] * is_told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--checkpoint", "none.pt", "--tokens", "512"], "the file does not exist"),
        (["--checkpoint", "line.py", "--tokens", "512"], "cannot be read as tensors"),
        (
            ["--checkpoint", "early.pt", "--tokens", "28"],
            "--tokens 28 must be >= 32, which is one step at batch size 8 (twice the default) with 4 tokens a sample",
        ),
        (["--checkpoint", "other.pt", "--tokens", "512"], "weight is of shape (1, 3); expected shape (1, 8)"),
        (["--checkpoint", "early.pt", "--tokens", "512", "--at", "1", "--at", "2"], "--at has 2 values"),
        (["--checkpoint", "early.pt", "--tokens", "512", "--at", str(2**63)], f"samples must be <= {2**63 - 1}"),
        (
            ["--checkpoint", "plain.pt", "--checkpoint", "early.pt", "--tokens", "512"],
            "the samples before checkpoint plain.pt are unknown",
        ),
        (["--checkpoint", "early.pt", "--checkpoint", "early.pt", "--tokens", "512"], "are both after 400 samples"),
    ],
)
def test_what_cannot_be_branched_is_refused_in_words(folder: Path, words: list[str], message: str) -> None:
    torch.save(weights(1.0), folder / "plain.pt")
    torch.save({"model": {"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}}, folder / "other.pt")
    done = bssearch("probe", "branch", "line.yaml", *words, cwd=folder)
    assert done.returncode in {2, 3}
    assert message in " ".join(done.stderr.split())


def with_schedule(spec: StudySpec) -> StudySpec:
    fields = spec.model_dump(mode="json")
    fields["space"]["schedule"] = {"name": "linear", "horizon_samples": 1000}
    return StudySpec.model_validate(fields)


def test_a_branch_beyond_the_horizon_is_refused(tmp_path: Path) -> None:
    spec = with_schedule(TOY)
    torch.save({"model": {}, "samples": 900}, tmp_path / "c.pt")
    points = branch_points(spec, [tmp_path / "c.pt"], None)
    with pytest.raises(UsageError, match=r"900 samples \+ 200 of a branch must be <= schedule.horizon_samples = 1000"):
        check_room(spec, points, 200)
    check_room(spec, points, 100)
    torch.save({"model": {}}, tmp_path / "c.pt")
    with pytest.raises(UsageError, match="but necessary for the learning-rate schedule"):
        branch_points(spec, [tmp_path / "c.pt"], None)
    assert branch_points(spec, [tmp_path / "c.pt"], [300])[0].samples == 300


@pytest.mark.parametrize(
    ("optimizer", "written", "rule"),
    [("sgd", None, "linear"), ("sgd", "sqrt", "sqrt"), ("adamw", None, "sqrt"), ("adafactor", None, "sqrt")],
)
def test_the_learning_rate_follows_the_rule_that_is_written_or_else_the_optimizers(
    optimizer: str, written: str | None, rule: str
) -> None:
    space = {"batch_size": [8, 16], "learning_rate": {"reference_batch": 8, "low": 0.01, "high": 0.1}}
    rate = {**space["learning_rate"], **({} if written is None else {"rule": written})}  # type: ignore[dict-item]
    assert rate_rule(
        make_spec(
            space={**space, "learning_rate": rate, "optimizer": {"name": optimizer}},
            default={"batch_size": 8, "learning_rate": 0.02},
        )
    ) == (LearningRateRule(rule), optimizer != "adafactor")


def test_betas_and_weight_decay_follow_the_rules_of_the_space_from_the_default_on() -> None:
    found = configuration_at(
        make_spec(
            space={
                "batch_size": [8, 16, 64],
                "learning_rate": {"reference_batch": 16, "low": 0.01, "high": 0.1},
                "weight_decay": 0.1,
                "optimizer": {"name": "adamw", "beta2": 0.99},
                "batch_rules": {"betas": "half_life", "weight_decay": "timescale"},
            },
            default={
                "batch_size": 8,
                "learning_rate": 0.02,
                "weight_decay": 0.2,
                "optimizer": {"name": "adamw", "beta2": 0.95},
            },
        ),
        32,
        8,
        LearningRateRule.SQRT,
    )
    assert (found.batch_size, found.micro_batch_size, found.accumulation_steps) == (32, 8, 4)
    assert found.learning_rate == pytest.approx(0.04)
    assert found.parameters["beta2"] == pytest.approx(0.95**4)
    assert found.weight_decay == pytest.approx(0.2 * 4 / 2)  # λκ·η0/η


@dataclass
class BranchingExecutor(ProbedExecutor):
    """Ends the branches of a batch size as a test has it: at a loss, diverged, or out of memory."""

    ends: dict[int, float | TrialState] = field(default_factory=dict)
    at_once_up_to: float = float("inf")
    asked: list[TrialRequest] = field(default_factory=list)

    def submit(self, request: TrialRequest) -> None:
        self.asked.append(request)

    def events(self, timeout: float) -> list[Event]:
        request = self.asked[-1]
        end = self.ends[request.plan.configuration.batch_size]
        if request.plan.configuration.micro_batch_size > self.at_once_up_to:
            end = TrialState.OOM
        if isinstance(end, TrialState):
            return [
                TrialObserved(1, observation(0, 0.5)),
                TrialEnded(1, TrialOutcome(state=end, reason="as the test has it")),
            ]
        last = observation(not_none(request.branch).samples, end + (0.001 * (request.plan.seed % 7 - 3)))
        return [TrialObserved(1, observation(0, 0.5)), TrialObserved(1, last), TrialEnded(1, exhausted(last.samples))]


def observation(samples: int, metric: float) -> Observation:
    return Observation(step=samples, samples=samples, train_seconds=1.0, metric=metric, loss=None, learning_rate=0.1)


def exhausted(samples: int) -> TrialOutcome:
    return TrialOutcome(state=TrialState.EXHAUSTED, reason="its samples", samples=samples)


@pytest.fixture
def point(tmp_path: Path) -> BranchPoint:
    return BranchPoint(path=tmp_path / "c.pt", digest="abc", samples=1000, step=None)


def branching(study: OpenStudy, octaves: int = 4) -> Branching:
    size = TOY.default.batch_size
    return Branching(study, LearningRateRule.SQRT, plan_branches(size, 512 * size, octaves), 3, rise_samples=0)


B = TOY.default.batch_size


def test_a_batch_size_that_does_not_fit_at_once_runs_in_micro_batches_of_the_defaults(
    store: Store, point: BranchPoint
) -> None:
    executor = BranchingExecutor(ends={B: 0.9, 2 * B: 0.9}, at_once_up_to=B)
    found = branching(open_study(store, executor), octaves=1).at(point)
    assert found.found.verdict == "at_least" and found.notice is None
    tried = [(one.plan.configuration.batch_size, one.plan.configuration.micro_batch_size) for one in executor.asked]
    assert tried == [(B, B)] * 3 + [(2 * B, 2 * B)] + [(2 * B, B)] * 3


def test_a_batch_size_that_runs_out_of_memory_ends_the_range_with_a_notice(store: Store, point: BranchPoint) -> None:
    executor = BranchingExecutor(ends={B: 0.9, 2 * B: 0.9, 4 * B: TrialState.OOM})
    found = branching(open_study(store, executor)).at(point)
    assert (found.found.verdict, found.found.low, found.found.high) == ("at_least", 2 * B, None)
    assert found.notice is not None and f"batch size {4 * B} ran out of memory" in found.notice
    with pytest.raises(LaunchError, match=f"batch size {B} ran out of memory"):
        branching(open_study(store, BranchingExecutor(ends={B: TrialState.OOM}))).at(replace(point, digest="d"))


def test_a_batch_size_that_diverges_does_not_hold_and_larger_ones_are_not_tried(
    store: Store, point: BranchPoint
) -> None:
    executor = BranchingExecutor(ends={B: 0.9, 2 * B: TrialState.DIVERGED})
    found = branching(open_study(store, executor)).at(point)
    assert (found.found.verdict, found.found.low, found.found.high) == ("below", None, 2 * B)
    assert [one.plan.configuration.batch_size for one in executor.asked] == [B, B, B, 2 * B]
    assert len({one.plan.seed for one in executor.asked[:3]}) == 3


def test_a_branch_that_ends_before_its_samples_is_an_error(store: Store, point: BranchPoint) -> None:
    executor = BranchingExecutor(ends={B: TrialState.FAILED})
    with pytest.raises(UsageError, match=f"the branch at batch size {B} from .* ended: as the test has it"):
        branching(open_study(store, executor)).at(point)
    executor = BranchingExecutor(ends={B: TrialState.EXHAUSTED})
    with pytest.raises(UsageError, match="ended after 0 of"):
        branching(open_study(store, executor)).at(point)


SCRIPT = """
import sys

import torch

import bssearch

trial = bssearch.current_trial(batch_size=4, learning_rate=0.01)
generator = torch.Generator().manual_seed(0)
inputs = torch.randn(1024, 8, generator=generator)
targets = inputs @ torch.ones(8, 1) + torch.randn(1024, 1, generator=generator)
model = torch.nn.Linear(8, 1)
if trial.checkpoint is not None:
    model.load_state_dict(torch.load(trial.checkpoint, weights_only=True)["model"])
optimizer = torch.optim.SGD(model.parameters(), lr=trial.learning_rate)
data = torch.utils.data.TensorDataset(inputs[:768], targets[:768])
loader = torch.utils.data.DataLoader(data, batch_size=trial.micro_batch_size, sampler=trial.sampler(data))


def evaluate():
    with torch.no_grad():
        return {"loss": torch.nn.functional.mse_loss(model(inputs[768:]), targets[768:]).item()}


for x, y in trial.batches(loader, evaluate=evaluate):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("samples", "sizes", "said"),
    [
        ((400, 1600), (4, 4), "is equal at all"),
        ((400, 1600), (8, 4), "falls between"),
        ((400, 1600), (4, 8), "grows along"),
        ((400, 1600), (8, 16), "`bssearch trial add toy batch_size=4 batch_stages='400:8 1600:16'`"),
        ((400, 1600), (4, 16), "`bssearch trial add toy batch_size=4 batch_stages='1600:16'`"),
        ((0, 1600), (8, 16), "`bssearch trial add toy batch_size=8 batch_stages='1600:16'`"),
        ((400, 1600, 3200), (8, None, 16), "`bssearch trial add toy batch_size=4 batch_stages='400:8 3200:16'`"),
    ],
)
def test_the_schedule_that_is_proposed_has_each_batch_size_from_its_checkpoint_on_if_it_grows(
    point: BranchPoint, samples: tuple[int, ...], sizes: tuple[int | None, ...], said: str
) -> None:
    plan = plan_branches(4, 256, 2)
    found = [
        BranchedCheckpoint(
            point=replace(point, samples=at),
            plan=plan,
            start=1.0,
            sizes=(),
            found=LocalCriticalBatch(verdict="cannot_tell" if size is None else "found", batch_size=size),
        )
        for at, size in zip(samples, sizes, strict=True)
    ]
    assert said in " ".join(sentences(make_spec(), found, 3))


@pytest.mark.slow
def test_a_script_begins_with_the_checkpoint_that_it_reads(folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT)
    spec = {**LINE_SPEC, "workload": "train.py", "executor": {"device": "cpu"}}
    (folder / "line.yaml").write_text(yaml.safe_dump(spec))
    found = branch_probe(folder, "--checkpoint", "early.pt", *("--tokens", "256", "--octaves", "1", "--at", "400"))
    early = found["checkpoints"][0]
    assert early["samples"] == 400 and found["branch_samples"] == 256 and found["branch_tokens"] is None
    assert early["start_metric"] == pytest.approx(9, rel=0.2)  # all slopes are off by 1, under noise of 1
    assert len(early["branches"][0]["ends"]) == 3
    assert any("--tokens counts samples" in one["message"] for one in found["warnings"])


def test_a_command_cannot_be_told_of_a_checkpoint(folder: Path) -> None:
    spec = {name: value for name, value in LINE_SPEC.items() if name not in {"workload", "executor"}}
    command = ["python", "train.py", "{batch_size}", "{learning_rate}"]
    report = {"loss": "loss=([0-9.]+)", "step": "step=([0-9]+)"}
    (folder / "line.yaml").write_text(yaml.safe_dump({**spec, "command": command, "report": report}))
    told = refused(folder, "probe", "branch", "line.yaml", "--checkpoint", "early.pt", "--tokens", "512", code=2)
    assert "a command cannot receive a checkpoint" in told


def test_tokens_are_whole_samples_and_too_few_are_told_in_tokens() -> None:
    assert samples_of(1000, None, 2000) == 1000, "a workload without tokens counts samples"
    assert samples_of(1000, 32, 16) == 31
    with pytest.raises(UsageError, match=r"--tokens 500 must be >= 512, which is one step at batch size 16 "):
        samples_of(500, 32, 16)
