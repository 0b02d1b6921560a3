"""Call A: the step times of the ladder in each way to run a step, one real study, and its export."""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from bssearch.commands.launch import Launch
from tests.evidence.task import EAGER, ENVIRONMENT, Found, Section, Task, worker

if TYPE_CHECKING:
    from bssearch.spec import StudySpec

MODES = {
    "eager": EAGER,
    "channels_last": ("training.compile=none", "training.channels_last=true"),
    "compiled": ("training.compile=default", "training.channels_last=false"),
}
"""The ways to run a step; compilation, which may take minutes, comes last."""

COMPILED_SIZES = (64, 1024, 256, 4096)
"""Batch sizes at which compiling is worth its time, the most informative first."""

SIZE_SECONDS = 1.0
"""Longest timing of the steps of one batch size."""

PRODUCT_BAR = 0.03
"""The median of steps × step time ÷ measured time to the target is within this share of 1."""


def step_times(task: Task, mode: str) -> Found:
    """Time the steps of the ladder in one mode, each with its host-bound share.

    A short trial of the default shows the mode in use; its warnings name the parts that ran eagerly.
    """
    from bssearch.commands.probes import run_request
    from tests.evidence.peers import for_seconds, step_times_at

    spec = task.spec(*MODES[mode])
    with worker(spec) as (executor, description):
        found: Found = {"compile": description.environment.compile_mode, "precision": description.environment.precision}
        sizes = ladder(spec, mode, quick=task.quick)
        rows: list[Found] = []
        seconds = 0.1 if task.quick else SIZE_SECONDS
        for row in step_times_at(spec, executor, sizes, seconds, lambda: task.seconds_left > 2 * seconds):
            rows.append(row)
            task.save({**found, "rows": rows})
        found |= {"rows": rows, "not_timed": sizes[len(rows) :]}
        task.save(found)
        if rows:
            default = spec.default_configuration
            request = for_seconds(spec, default.in_micro_batches(rows[0]["micro_batch_size"]), seconds, 10**6)
            if rows[0]["batch_size"] == default.batch_size:
                outcome, _ = run_request(executor, request)
                found["trial"] = {
                    "batch_size": default.batch_size,
                    "steps": outcome.steps,
                    "train_seconds": outcome.train_seconds,
                    "host_bound_share": getattr(outcome, "host_bound_share", None),
                    "peak_memory_bytes": outcome.peak_memory_bytes,
                    "warnings": outcome.warnings,
                }
    return found


def ladder(spec: StudySpec, mode: str, *, quick: bool) -> list[int]:
    """Return the batch sizes to time; the default, which also trains, comes first."""
    default = spec.default_configuration.batch_size
    if quick:
        others = [] if mode == "compiled" else [16, 64]
    else:
        others = [*COMPILED_SIZES] if mode == "compiled" else [*spec.batch_sizes]
    return [default, *(size for size in others if size != default)]


def study(task: Task) -> Found:
    """Run a whole study, with five fresh seeds each for the optimum, the default and the largest."""
    from bssearch.commands.run import run_study
    from bssearch.errors import TargetNotReachedError

    if task.quick:
        budget = ["budget.trials=9", "budget.wall_seconds=20", "confirm.top=1", "confirm.runs=1"]
    else:
        budget = ["budget.trials=40", "budget.wall_seconds=60", "confirm.top=1", "confirm.runs=5"]
    spec = task.spec(*budget)
    db = task.new_database("call_a")
    started = time.monotonic()
    try:
        answer = run_study(spec, Launch(db=db, allow_busy=False))
    except TargetNotReachedError as error:
        return {"wall_seconds": time.monotonic() - started, "error": str(error)}
    return {"wall_seconds": time.monotonic() - started, "optimal": answer.optimal.model_dump(mode="json")}


def export(task: Task) -> Found:
    """Write the study's answer, trials, curves and full export, also if the study was cut short.

    Add the ratio of steps × step time to the measured seconds, and a summary of the answer.
    """
    db = ["--db", task.database("call_a")]
    name, out = task.study, task.out
    commands = {
        f"{name}.best.json": ["best", name, "--format", "json", *db],
        f"{name}.trials.json": ["trial", "list", name, "--format", "json", *db],
        f"{name}.bssearch.jsonl.gz": ["export", name, "--to", "study", *db],
        f"{name}.csv.gz": ["export", name, "--to", "curves", *db],
        f"{name}.best.yaml": ["best", name, "--export", "yaml", *db],
    }
    found: Found = {"files": {}, "passes": False}
    for file, command in commands.items():
        path = out / file
        path.unlink(missing_ok=True)
        is_export = command[0] == "export"
        words = [*command, "--file", str(path)] if is_export else command
        done = subprocess.run([sys.executable, "-m", "bssearch", *words], capture_output=True, text=True)
        if done.returncode == 0 and not is_export:
            path.write_text(done.stdout)
        found["files"][file] = "written" if done.returncode == 0 else done.stderr.splitlines()[-5:]
        task.save(found)
    trials = out / f"{name}.trials.json"
    if trials.exists():
        found |= {"passes": None} | products(json.loads(trials.read_text()))
    else:
        found["refused"] = "there is no study to write"
    if (answer := task.answer()) is not None:
        found["answer"] = {
            name: answer[name] for name in ("optimal", "largest_that_fits", "speedup", "fit", "warnings")
        }
    return found


def products(trials: list[Found]) -> Found:
    """Return the states of the trials, and the ratios of steps × step time to the measured time to the target."""
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for trial in trials:
        if trial["time_to_target_s"] and trial["steps_x_step_time_s"]:
            ratios[trial["contended"]].append(trial["steps_x_step_time_s"] / trial["time_to_target_s"])
    states = [trial["state"] for trial in trials]
    median = statistics.median(ratios[False]) if ratios[False] else None
    return {
        "trials": len(trials),
        "ended": {state: states.count(state) for state in sorted(set(states))},
        "steps_x_step_time_over_measured": {"alone": sorted(ratios[False]), "contended": sorted(ratios[True])},
        "median_alone": median,
        "passes": None if median is None else abs(median - 1) <= PRODUCT_BAR,
    }


SECTIONS = (
    ENVIRONMENT,
    Section("step_times_eager", functools.partial(step_times, mode="eager"), 40),
    Section("study", study, 230),
    Section("export", export, 30, must=True),
    Section("step_times_channels_last", functools.partial(step_times, mode="channels_last"), 40),
    Section("step_times_compiled", functools.partial(step_times, mode="compiled"), 80),
)
