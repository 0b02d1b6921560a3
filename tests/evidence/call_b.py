"""Call B: batch sizes of other tools, in the same loop; memory up to the device's limit; a compute-bound model."""

from __future__ import annotations

import json
import sysconfig
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tests.evidence.runner import section_of
from tests.evidence.task import EAGER, ENVIRONMENT, Found, Section, Task, configuration_of, worker

if TYPE_CHECKING:
    from bssearch.records import Configuration
    from bssearch.spec import StudySpec

SEEDS = 5
CAP_RATIO = 6.0
"""A run is stopped after this multiple of our expected seconds and counts as slower."""

SHORTEST_CAP = 1.0
STEPS = 50
"""Steps for which the largest micro-batch that fits must train."""

PRETENDED_SAMPLES = 600
"""Samples that fit in the quick version; a CPU has memory for all samples."""


def finders(task: Task) -> Found:
    """Let Lightning's finder in both modes, and accelerate's, choose a batch size on this device."""
    import torch

    from bssearch.training.batches import place
    from bssearch.training.computation import Computation
    from bssearch.workloads.digits import Digits
    from bssearch.workloads.fashion_mnist import FashionMnist
    from tests.evidence.finders import Memory, find_all

    spec = task.spec(*EAGER)
    torch.set_num_threads(1)
    device = torch.device(task.device)
    make: Any = Digits if task.quick else FashionMnist
    workload = make(**spec.workload_settings)
    computation = Computation(device, spec.training.model_copy(update={"measure_noise": False}))
    data, _ = place(workload.load(torch.device("cpu")), computation)
    limit = PRETENDED_SAMPLES if task.quick else None
    memory = Memory(workload, data, computation, spec.default_configuration, limit)
    about: Found = {"samples": memory.samples, "pretended_samples_that_fit": limit, "precision": computation.precision}
    return {**about, "found": find_all(memory, task.out, lambda found: task.save({**about, "found": found}))}


def recommended(task: Task) -> Found:
    """Return our configuration: the answer of call A's study, or of a short study if the export is missing."""
    answer = task.answer()
    if answer is not None:
        time_to_target = answer["optimal"]["time_to_target_s"]
        expected = time_to_target and time_to_target["median"]
        return {"from": "the export of call A", "optimal": answer["optimal"], "expected_seconds": expected}
    trials, seconds = ("9", "10") if task.quick else ("25", "35")
    budget = (f"budget.trials={trials}", f"budget.wall_seconds={seconds}", "confirm.runs=0")
    found = short_study(task.spec("name=recommended", *budget), task.new_database("call_b"))
    return {"from": "a short study, not confirmed", **found}


def short_study(spec: StudySpec, db: str) -> Found:
    """Run a study; return its optimum, seconds to the target and fit, or an error if no trial reached the target."""
    from bssearch.commands.launch import Launch
    from bssearch.commands.run import run_study
    from bssearch.errors import TargetNotReachedError

    started = time.monotonic()
    try:
        answer = run_study(spec, Launch(db=db, allow_busy=False)).model_dump(mode="json")
    except TargetNotReachedError as error:
        return {"wall_seconds": time.monotonic() - started, "error": str(error)}
    to_target = answer["optimal"]["time_to_target_s"]
    return {
        "wall_seconds": time.monotonic() - started,
        "optimal": answer["optimal"],
        "expected_seconds": to_target and to_target["median"],
        "fit": answer["fit"],
        "batches": {str(one["batch_size"]): one["time_to_target_s"] for one in answer["batches"]},
    }


def peers(task: Task) -> Found:
    """Train each tool's batch size, by each learning rate rule, and our configuration, with the same seeds."""
    from bssearch.commands.probes import step_time_of_default
    from bssearch.records import ProbeRecord, TrialState
    from tests.evidence.peers import TrialFailed, fresh_seeds, race_of, run_to_target

    known = section_of(task, "B", "recommended")
    if known.get("optimal") is None:
        raise RuntimeError(f"section recommended has no configuration to compare with: {known}")
    spec = task.spec()
    expected = known["expected_seconds"] or spec.budget.trial_train_seconds / CAP_RATIO
    cap = min(max(SHORTEST_CAP, CAP_RATIO * expected), spec.budget.trial_train_seconds)
    found = [row for row in section_of(task, "B", "finders").get("found", []) if "found" in row]
    with worker(spec) as (executor, description):
        default = spec.default_configuration
        samples = description.train_samples or spec.batch_sizes[-1]
        ours = configuration_of(known["optimal"])
        race = race_of(found, ours, default, spec.batch_sizes[-1], samples, cap)
        probes: dict[int, ProbeRecord] = {}
        ended: list[Found] = []

        def timed(configuration: Configuration, seed: int) -> float | None:
            size = configuration.batch_size
            if size not in probes:
                probes[size] = step_time_of_default(spec, executor, size)
            outcome = run_to_target(spec, executor, configuration, probes[size], seed, cap)
            row = {"batch_size": size, "learning_rate": configuration.learning_rate, "seed": seed}
            ended.append({**row, "state": outcome.state, "contended": outcome.contended, "steps": outcome.steps})
            if outcome.state not in {TrialState.REACHED, TrialState.EXHAUSTED, TrialState.DIVERGED}:
                raise TrialFailed(f"{outcome.state}: {outcome.reason}")
            return outcome.time_to_target_s

        about: Found = {"ours_from": known["from"], "cap": cap, "compile": spec.training.compile, "tools": len(found)}

        def save() -> None:
            task.save({**about, "rows": race.rows(), "runs": ended})

        rounds = race.run(fresh_seeds(SEEDS), timed, lambda: task.seconds_left, save)
    steps = {str(size): probe.step_seconds for size, probe in sorted(probes.items())}
    return {**about, "seeds": rounds, "rows": race.rows(), "step_seconds": steps, "runs": ended}


def char_spec(task: Task, *overrides: str) -> StudySpec:
    """Return the spec of a transformer on the sources of Python's standard library: 6 layers of 384, context 256."""
    from bssearch.spec import load_spec

    model = (
        "context: 16, layers: 1, heads: 2, width: 32" if task.quick else "context: 256, layers: 6, heads: 6, width: 384"
    )
    text = f"text: {json.dumps(sysconfig.get_path('stdlib') + '/*.py')}"
    characters = 50_000 if task.quick else 5_000_000
    low, high = (8, 32) if task.quick else (8, 512)
    return load_spec(
        "char_lm_cpu",
        [
            *(
                "name=char_lm_evidence",
                f"workload_settings={{{text}, max_characters: {characters}, {model}}}",
                f"executor.device={task.device}",
            ),
            *(f"target.value={3.2 if task.quick else 2.0}", f"space.batch_size={{low: {low}, high: {high}}}"),
            "space.learning_rate={reference_batch: 64, low: 0.0003, high: 0.006, rule: sqrt}",
            *("default.batch_size=16" if task.quick else "default.batch_size=64", "confirm.runs=0"),
            *overrides,
        ],
    )


def char_lm(task: Task) -> Found:
    """Time the steps of a compute-bound model with their host-bound share; search its batch size for half a minute."""
    from tests.evidence.peers import step_times_at

    trials, wall, most = (4, 10, 2) if task.quick else (20, 30, 8)
    budget = (f"budget.trials={trials}", f"budget.wall_seconds={wall}", f"budget.trial_train_seconds={most}")
    spec = char_spec(task, *budget)
    rows: list[Found] = []
    with worker(spec) as (executor, _):
        for row in step_times_at(spec, executor, spec.batch_sizes, 0.5, lambda: task.seconds_left > wall):
            rows.append(row)
            task.save({"rows": rows})
    return {"rows": rows, "study": short_study(spec, task.new_database("char_lm"))}


def memory(task: Task) -> Found:
    """Probe the micro-batch of the compute-bound model up to the device's limit; train at the largest that fits."""
    from bssearch.commands.launch import Launch
    from bssearch.commands.opening import opened
    from bssearch.commands.probes import probe_memory
    from bssearch.records import TrialState
    from bssearch.search.driver import Listener
    from tests.benchmarks.memory_probe import run

    if task.quick:
        spec = task.spec("name=memory", "executor.memory_limit_gib=1.0", "space.batch_size.low=512")
    else:
        spec = char_spec(task, "name=memory", "space.batch_size={low: 256, high: 2048}", "default.batch_size=256")
    notes: list[str] = []

    class Notes(Listener):
        def note(self, message: str) -> None:
            notes.append(message)
            task.save({"notes": notes})

    with opened(spec, Launch(db=task.new_database("memory"), listener=Notes())) as study:
        found = probe_memory(study)
        total = study.environment.device_memory_bytes
        peaks = [use.peak_memory_bytes for use in found.uses if use.fits and use.peak_memory_bytes]
        result: Found = {
            "notes": notes,
            "probe": asdict(found),
            "device_memory_bytes": total,
            "largest_peak_over_device": max(peaks) / total if peaks and total else None,
        }
        task.save(result)
        answer = run(spec, study.executor, found.largest_that_fits, STEPS)
    held = {"state": answer.state, "steps": answer.steps, "peak_memory_bytes": answer.peak_memory_bytes}
    return {**result, "answer_for_50_steps": held, "passes": answer.state is not TrialState.OOM}


SECTIONS = (
    ENVIRONMENT,
    Section("finders", finders, 60),
    Section("recommended", recommended, 75),
    Section("peers", peers, 150, must=True),
    Section("memory", memory, 95),
    Section("char_lm", char_lm, 85),
)
