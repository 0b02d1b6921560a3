"""Measures on one GPU what bssearch claims, and runs a study there, in nine minutes at most.

Run as ``python tests/gpu_evidence.py --out FOLDER`` where bssearch, its dependencies and pytest are installed; with
Fashion-MNIST not in its usual places also ``--data-dir``. Nothing is downloaded. Into the folder come ``evidence.json``
and the study's export: its answer (``NAME.best.json``, ``NAME.best.yaml``), its trials (``NAME.trials.json``) and their
curves (``NAME.csv.gz`` with ``NAME.json``). Each section runs in a process of its own and has its own limit of seconds;
one that fails, or takes longer, is recorded with its last words, and the rest goes on. ``evidence.json`` is written
anew after every section.

``--device cpu --quick`` runs small versions of all sections on a CPU, to try the script.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MINUTES = 9.0

Found = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What is measured, and where."""

    device: str
    quick: bool
    out: Path

    @property
    def workload(self) -> str:
        return "digits" if self.quick else "fashion_mnist"

    @property
    def study(self) -> str:
        return f"{self.workload}_{self.device.partition(':')[0]}"

    @property
    def database(self) -> str:
        return f"sqlite:///{(self.out / 'evidence.db').resolve()}"

    def spec(self, *overrides: str) -> Any:
        """Return the shipped spec of the workload, with the budget of this script."""
        from bssearch.spec import load_spec

        budget = (
            ["budget.trials=9", "budget.trial_train_seconds=2", "confirm.top=1", "confirm.runs=1"]
            if self.quick
            else [
                *("budget.trials=40", "budget.trial_train_seconds=12", "budget.wall_seconds=75"),
                *("confirm.top=2", "confirm.runs=2"),
            ]
        )
        named = [f"name={self.study}", f"executor.device={self.device}"]
        return load_spec(self.workload, [*named, *budget, *overrides])


def environment(task: Task) -> Found:
    """Where all this ran."""
    with opened(task.spec(), task) as study:
        return asdict(study.environment)


def repeatability(task: Task) -> Found:
    """The same request ten times: identical steps; on a GPU a CV of the train seconds of at most 1 %."""
    return benchmark("repeatability", task, "--runs", "3" if task.quick else "10")


def contention(task: Task) -> Found:
    """The same beside a busy process: every run is flagged."""
    return benchmark("repeatability", task, "--busy", "--runs", "2" if task.quick else "3")


def loop_overhead(task: Task) -> Found:
    """The product's loop over a bare one: at most 2 % on a GPU, 3 % on a CPU."""
    if task.quick:
        return benchmark("loop_overhead", task, "--batch-size", "256", "--pairs", "10")
    sizes = ("--batch-size", "256", "4096", "--steps", "20", "--pairs", "60")
    return benchmark("loop_overhead", task, "--precision", "bf16", *sizes)


def compilation(task: Task) -> Found:
    """The compiled product over the bare eager loop at small batch sizes."""
    modes = ["default"] if task.quick else ["default", "reduce-overhead"]
    sizes = ["64"] if task.quick else ["32", "128"]
    pairs = ("--steps", "4", "--pairs", "5") if task.quick else ("--steps", "50", "--pairs", "20")
    precision = () if task.quick else ("--precision", "bf16")
    return {
        mode: benchmark("loop_overhead", task, "--compile", mode, "--batch-size", *sizes, *pairs, *precision)
        for mode in modes
    }


def memory(task: Task) -> Found:
    """The probe's answer runs for 200 steps; a size above its upper bracket runs out."""
    from bssearch.commands.probe.memory import probe_memory
    from bssearch.records import TrialState
    from tests.benchmarks.memory_probe import ABOVE, run

    limit = 1.0
    spec = task.spec("name=memory", f"executor.memory_limit_gib={limit}", "space.batch_size.low=512")
    with opened(spec, task) as study:
        found = probe_memory(study)
        answer = run(spec, study.executor, found.largest_that_fits)
        above = None
        if found.smallest_that_does_not is not None:
            size = min(found.ceiling, int(found.smallest_that_does_not * ABOVE) + 1)
            above = run(spec, study.executor, size)
    return {
        "limit_gib": limit,
        "probe": asdict(found),
        "answer_for_200_steps": {"state": answer.state, "steps": answer.steps, "reason": answer.reason},
        "above_the_bracket": above and {"state": above.state, "steps": above.steps, "reason": above.reason},
        "passes": answer.state is not TrialState.OOM and (above is None or above.state is TrialState.OOM),
    }


def step_times(task: Task) -> Found:
    """The isolated step times of all batch sizes; the study reuses them."""
    from bssearch.search.calibration import measure_step_times

    spec = task.spec()
    with opened(spec, task) as study:
        measure_step_times(spec, study.store, study.executor, study.environment, lambda: None, trials=[])
        probes = study.store.probes(spec.name, study.environment)
    return {"batches": [asdict(probe) for _, probe in sorted(probes.items())]}


def noise(task: Task) -> Found:
    """The gradient noise scale near the target by the probe, and a trial's steps with and without measuring it."""
    from bssearch.records import NoiseRequest, TrialState
    from tests.benchmarks.repeatability import request_of, run_trial

    seconds, target = (4.0, 0.99) if task.quick else (10.0, 0.925)  # near it for long, and hardly ever there
    trial = request_of(task.workload)
    trial = replace(
        trial,
        target=replace(trial.target, value=target),
        stop_at_target=False,
        train_seconds_limit=seconds,
        limit_state=TrialState.CAPPED,
    )
    found: Found = {}
    curves: dict[bool, list[float]] = {}
    for measure in (False, True):
        spec = task.spec("training.deterministic=true", f"training.measure_noise={str(measure).lower()}")
        with executor_of(spec) as executor:
            outcome, curves[measure] = run_trial(executor, trial)
            found[f"trial_{'with' if measure else 'without'}_noise"] = {
                "noise": asdict(outcome.noise),
                "wall_seconds": outcome.wall_seconds,
                "train_seconds": outcome.train_seconds,
                "steps": outcome.steps,
            }
            if measure:
                request = NoiseRequest(
                    configuration=trial.configuration,
                    seed=trial.seed,
                    target=trial.target,
                    train_seconds_limit=seconds,
                    noise_seconds_limit=seconds,
                    eval_every_steps=trial.eval_every_steps,
                )
                found["probe"] = asdict(executor.measure_noise(request))
    shared = min(map(len, curves.values()))
    same = shared > 1 and curves[True][:shared] == curves[False][:shared]
    measured = found["trial_with_noise"]["noise"]["passes"] is not None  # else the same metrics show nothing
    return {**found, "evaluations_compared": shared, "same_metrics": same, "passes": same if measured else None}


def study(task: Task) -> Found:
    """A whole study, and its export, also of one that was cut short by its limit of seconds."""
    from bssearch.commands.run import run_study
    from bssearch.errors import TargetNotReachedError

    started = time.monotonic()
    try:
        answer = run_study(task.spec(), db=task.database, allow_busy=False)
    except TargetNotReachedError as error:
        return {"wall_seconds": time.monotonic() - started, "error": str(error)}
    return {"wall_seconds": time.monotonic() - started, "optimal": answer.optimal.model_dump(mode="json")}


def export(task: Task) -> Found:
    """What the study found, and its steps × step time against the measured seconds: a median within 3 %."""
    from bssearch.cli.recommended import Export, exported
    from bssearch.errors import TargetNotReachedError
    from bssearch.records import outcome_fields
    from bssearch.search.finding import answer
    from bssearch.storage.repository import open_store

    with open_store(task.database, write=False) as store:
        trials = store.trials(task.study)
        spec = store.study(task.study).spec
        curves = store.curves(task.study, [trial.number for trial in trials])
        try:
            best = answer(store, task.study)
        except TargetNotReachedError:
            best = None
    if best is not None:
        (task.out / f"{task.study}.best.json").write_text(json.dumps(best.model_dump(mode="json"), indent=1) + "\n")
        (task.out / f"{task.study}.best.yaml").write_text(exported(best, Export.YAML))
    rows = [asdict(replace(trial, outcome=None)) for trial in trials]
    for row, trial in zip(rows, trials, strict=True):
        del row["lease_owner"], row["lease_expires_at"]
        row["outcome"] = trial.outcome and outcome_fields(trial.outcome)
    (task.out / f"{task.study}.trials.json").write_text(json.dumps(rows, indent=1, default=str) + "\n")
    write_curves(task, spec, trials, curves)
    alone: list[float] = []
    contended: list[float] = []
    for trial in trials:
        if trial.outcome and trial.outcome.time_to_target_s and trial.steps_x_step_time_s:
            ratios = contended if trial.outcome.contended else alone
            ratios.append(trial.steps_x_step_time_s / trial.outcome.time_to_target_s)
    states = [trial.state for trial in trials]
    return {
        "trials": len(trials),
        "ended": {state: states.count(state) for state in sorted(set(states))},
        "steps_x_step_time_over_measured": {"alone": sorted(alone), "contended": sorted(contended)},
        "median_alone": statistics.median(alone) if alone else None,
        "passes": abs(statistics.median(alone) - 1) <= 0.03 if alone else None,
    }


def write_curves(task: Task, spec: Any, trials: list[Any], curves: dict[int, list[Any]]) -> None:
    """Write the table of recorded curves, and what it is a table of."""
    configurations = {
        trial.number: {
            name: value
            for name, value in {**asdict(trial.configuration), **trial.configuration.parameters}.items()
            if name != "parameters"
        }
        for trial in trials
    }
    names = sorted({name for values in configurations.values() for name in values})
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["trial", *(f"param.{name}" for name in names), "seed", "step", "train_seconds", "metric"])
    for trial in trials:
        values = [configurations[trial.number].get(name) for name in names]
        for seen in curves[trial.number]:
            writer.writerow([trial.number, *values, trial.seed, seen.step, seen.train_seconds, seen.metric])
    (task.out / f"{task.study}.csv.gz").write_bytes(gzip.compress(table.getvalue().encode(), mtime=0))
    about = {
        "name": task.study,
        "metric": spec["target"]["metric"],
        "goal": spec["target"]["goal"],
        "target": spec["target"]["value"],
        "max_train_seconds": spec["budget"]["trial_train_seconds"],
    }
    (task.out / f"{task.study}.json").write_text(json.dumps(about, indent=1) + "\n")


def gpu_tests(task: Task) -> Found:
    """The tests marked gpu."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "-q", "--color=no", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = done.stdout.splitlines()
    return {"summary": lines[-1], "output": lines[-100:], "passes": done.returncode == 0}


SECTIONS: dict[str, tuple[Callable[[Task], Found], float]] = {
    "environment": (environment, 30),
    "repeatability": (repeatability, 60),
    "contention": (contention, 40),
    "loop_overhead": (loop_overhead, 75),
    "compilation": (compilation, 90),
    "memory": (memory, 120),
    "noise": (noise, 75),
    "step_times": (step_times, 60),
    "study": (study, 210),
    "export": (export, 20),
    "gpu_tests": (gpu_tests, 150),
}
"""Each section with the seconds it may take."""

LAST = ("export",)
"""Sections for which time is kept, whatever the others take."""


def opened(spec: Any, task: Task) -> Any:
    from bssearch.commands.opening import Launch, opened

    return opened(spec, Launch(db=task.database))


def executor_of(spec: Any) -> Any:
    from contextlib import closing

    from bssearch.commands.opening import local

    return closing(local(None, allow_busy=False)(spec, Path.cwd()))


def benchmark(name: str, task: Task, *options: str) -> Found:
    """Return what a benchmark prints as JSON, whether or not it passes its bar."""
    script = ROOT / "tests" / "benchmarks" / f"{name}.py"
    command = [sys.executable, str(script), "--json", "--device", task.device, "--workload", task.workload, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if not done.stdout:
        raise RuntimeError(f"{name} printed nothing and exited with code {done.returncode}")
    found: Found = json.loads(done.stdout)
    return found


def run_section(name: str, task: Task, seconds: float) -> Found:
    """Run a section in a process of its own; return what it found, or its last words."""
    command = [sys.executable, __file__, "--section", name, "--device", task.device, "--out", str(task.out)]
    words = task.out / "words.txt"
    answer = task.out / "section.json"
    answer.unlink(missing_ok=True)
    started = time.monotonic()
    with words.open("w") as file:
        process = subprocess.Popen(
            [*command, *(["--quick"] if task.quick else [])], stdout=file, stderr=file, start_new_session=True
        )
        try:
            process.wait(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            file.write(f"\nstopped after {seconds:.0f} s\n")
    found: Found = {"seconds": round(time.monotonic() - started, 1)}
    if answer.exists():
        found |= json.loads(answer.read_text())
    else:
        found |= {"failed": words.read_text(errors="replace").splitlines()[-60:], "passes": False}
    return found


def main() -> int:
    """Run the sections one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder for what is found")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu with --quick")
    parser.add_argument("--quick", action="store_true", help="small versions, of the digits")
    parser.add_argument("--data-dir", help="the folder with Fashion-MNIST's four files")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for everything")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    task = Task(arguments.device, arguments.quick, arguments.out)
    if arguments.section:
        sys.path.insert(0, str(ROOT))
        found = SECTIONS[arguments.section][0](task)
        (task.out / "section.json").write_text(json.dumps(found, default=str))
        return 0
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    if arguments.data_dir:
        from bssearch.settings import DATA_DIR_VARIABLE

        os.environ[DATA_DIR_VARIABLE] = arguments.data_dir
    deadline = time.monotonic() + 60 * arguments.minutes
    evidence: Found = {"device": task.device, "quick": task.quick, "workload": task.workload, "sections": {}}
    for name in arguments.only:
        kept = sum(SECTIONS[last][1] for last in LAST if last in arguments.only and last not in evidence["sections"])
        left = deadline - time.monotonic() - (0 if name in LAST else kept)
        if left < 5:
            found = {"failed": ["no time was left"], "passes": False}
        else:
            found = run_section(name, task, min(SECTIONS[name][1], left))
        evidence["sections"][name] = found
        print(f"{name}: {'FAILED' if 'failed' in found else found.get('passes', 'done')}", flush=True)
        (task.out / "evidence.json").write_text(json.dumps(evidence, indent=1, allow_nan=False) + "\n")
    for temporary in ("words.txt", "section.json"):
        (task.out / temporary).unlink(missing_ok=True)
    return int(any("failed" in found for found in evidence["sections"].values()))


if __name__ == "__main__":
    sys.exit(main())
