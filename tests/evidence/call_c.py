"""Call C: repeatability of requests, processes, seconds and slots; the noise scale; the loop; the GPU tests."""

import math
import statistics
import subprocess
import sys
from dataclasses import asdict, replace

from tests.evidence.task import ENVIRONMENT, ROOT, Found, Section, Task, configuration_of, worker

PROCESSES = 5
SLOTS = 6
OCTAVES_LIKELY = 1.96
"""Standard deviations within which the noise scale predicts the critical batch size, as in a 95 % interval."""


def repeatability(task: Task) -> Found:
    """Run the same request ten times: equal steps, and on a GPU a CV of the train seconds of at most 1 %."""
    return task.benchmark("repeatability", "--workload", task.workload, "--runs", "3" if task.quick else "10")


def fresh_processes(task: Task) -> Found:
    """Time the steps of some batch sizes in five fresh processes, each of which chooses its kernels."""
    from tests.evidence.peers import step_times_at

    spec = task.spec()
    sizes = [64, 256] if task.quick else [64, 512, 4096]
    rows: list[Found] = []
    for process in range(2 if task.quick else PROCESSES):
        if task.seconds_left < task.seconds / (PROCESSES + 1):
            break
        with worker(spec) as (executor, _):
            for row in step_times_at(spec, executor, sizes, 0.2 if task.quick else 1.0, lambda: task.seconds_left > 2):
                rows.append({"process": process, **row})
                task.save({"compile": spec.training.compile, "rows": rows, "spread": spread(rows)})
    return {"compile": spec.training.compile, "rows": rows, "spread": spread(rows)}


def spread(rows: list[Found]) -> list[Found]:
    """Return the spread of the step times of several processes, for each batch size.

    Rows have the coefficient of variation, and the median half width of a single process's interval.
    """
    found = []
    for size in sorted({row["batch_size"] for row in rows}):
        here = [row for row in rows if row["batch_size"] == size and row.get("step_seconds")]
        times = [row["step_seconds"] for row in here]
        if not times:
            continue
        widths = [(row["step_seconds_high"] - row["step_seconds_low"]) / 2 / row["step_seconds"] for row in here]
        found.append(
            {
                "batch_size": size,
                "processes": len(times),
                "cv": statistics.stdev(times) / statistics.fmean(times) if len(times) > 1 else None,
                "slowest_over_fastest": max(times) / min(times),
                "half_width_in_one": statistics.median(widths),
            }
        )
    return found


def sustained(task: Task) -> Found:
    """Time steps for half a second, ten seconds, and half a second again, to show the pace of a warm chip."""
    from bssearch.search.calibration import default_at

    spec = task.spec()
    sizes = [256] if task.quick else [256, 1024, 8192]
    short, long = (0.1, 1.0) if task.quick else (0.5, 10.0)
    rows: list[Found] = []
    with worker(spec) as (executor, _):
        for size in sizes:
            if task.seconds_left < 1.5 * long:
                break
            seconds: list[float | None] = []
            for limit in (short, long, short):
                request = replace(default_at(spec, size, size, limit), precision=1e-9, trial_train_seconds=None)
                measured = executor.measure_step_time(request)
                seconds.append(measured.step_seconds)
            first, lasting, _ = seconds
            ratio = lasting / first if first and lasting else None
            rows.append({"batch_size": size, "step_seconds": seconds, "lasting_over_short": ratio})
            task.save({"limits": [short, long, short], "rows": rows})
    return {"compile": spec.training.compile, "limits": [short, long, short], "rows": rows}


def slots(task: Task) -> Found:
    """Compare the steps of six trials at once on one GPU with its isolated step time."""
    from bssearch.records import TrialEnded, TrialOutcome
    from bssearch.search.calibration import measure_step_time_at
    from bssearch.spec.space import UNKNOWN
    from tests.evidence.peers import for_seconds

    count, size, seconds = (2, 64, 1.0) if task.quick else (SLOTS, 512, 4.0)
    spec = task.spec(f"executor.slots={count}", "training.measure_noise=false")
    with worker(spec) as (executor, _):
        alone = measure_step_time_at(spec, executor, size, UNKNOWN)
        if alone is None or alone.step_seconds is None:
            raise RuntimeError(f"batch size {size} does not fit")
        task.save({"slots": count, "batch_size": size, "isolated_step_seconds": alone.step_seconds})
        configuration = replace(spec.default_configuration, batch_size=size).in_micro_batches(alone.micro_batch_size)
        for number in range(count):
            executor.submit(for_seconds(spec, configuration, seconds, alone.eval_every_steps or 1, number + 1))
        outcomes: list[TrialOutcome] = []
        while len(outcomes) < count:
            outcomes += [event.outcome for event in executor.events(timeout=1.0) if isinstance(event, TrialEnded)]
    shared = [one.train_seconds / one.steps for one in outcomes if one.steps]
    return {
        "slots": count,
        "batch_size": size,
        "isolated_step_seconds": alone.step_seconds,
        "shared_step_seconds": shared,
        "shared_over_isolated": [one / alone.step_seconds for one in shared],
        "throughput_over_one": sum(alone.step_seconds / one for one in shared),
        "states": [one.state for one in outcomes],
        "contended": [one.contended for one in outcomes],
        "passes": all(one.contended for one in outcomes),
    }


def noise_scale(task: Task) -> Found:
    """Compare the gradient noise scale near the target with the critical batch size of call A's study."""
    from bssearch.commands.probes import step_time_of_default
    from bssearch.records import NoiseRequest

    spec = task.spec()
    answer = task.answer()
    configuration = spec.default_configuration if answer is None else configuration_of(answer["optimal"])
    seconds = 3.0 if task.quick else 15.0
    with worker(spec) as (executor, _):
        probe = step_time_of_default(spec, executor, configuration.batch_size)
        measured = executor.measure_noise(
            NoiseRequest(
                configuration=configuration.in_micro_batches(probe.micro_batch_size),
                seed=20,
                target=spec.record_target,
                train_seconds_limit=spec.budget.trial_train_seconds,
                noise_seconds_limit=seconds,
                eval_every_steps=probe.eval_every_steps or 1,
            )
        )
    fitted = None if answer is None or answer["fit"] is None else answer["fit"]["b_crit"]
    return {
        "measured": asdict(measured),
        "b_crit": fitted,
        "missing": None if fitted else "the folder has no export of call A with a fitted law",
        **compared(measured.noise.scale, fitted),
    }


def compared(scale: float | None, b_crit: Found | None) -> Found:
    """Return the distance of the noise scale from B_crit; pass if the distance is usual."""
    from bssearch.records.noise_scale import CRITICAL_BATCH_OCTAVES

    if scale is None or b_crit is None or not b_crit["estimate"]:
        return {"octaves_apart": None, "passes": None}
    octaves = math.log2(scale / b_crit["estimate"])
    return {"octaves_apart": octaves, "passes": abs(octaves) <= OCTAVES_LIKELY * CRITICAL_BATCH_OCTAVES}


def loop_overhead(task: Task) -> Found:
    """Compare the product's loop with the same steps in a bare loop: at most 2 % slower on a GPU, 3 % on a CPU."""
    workload = ("--workload", task.workload)
    if task.quick:
        return judged(task.benchmark("loop_overhead", *workload, "--batch-size", "256", "--pairs", "10")["rows"])
    sizes = ("--batch-size", "256", "--steps", "10", "--pairs", "100")
    return judged(task.benchmark("loop_overhead", *workload, "--precision", "bf16", *sizes)["rows"])


def bare_loop(task: Task) -> Found:
    """Compare the product's loop with a loop as in the fastest public speed runs: at most 2 % slower on a GPU."""
    rows: list[Found] = []
    for size in ("256",) if task.quick else ("64", "256", "1024"):
        pairs = ("--steps", "4", "--pairs", "10") if task.quick else ("--steps", "10", "--pairs", "100")
        options = ("--workload", task.workload, "--batch-size", size, *pairs)
        rows += task.benchmark("loop_overhead", "--reference", "fast", *options)["rows"]
        task.save(judged(rows))
    return judged(rows)


def judged(rows: list[Found]) -> Found:
    """Return a benchmark's rows; pass if all rows meet the benchmark's bar."""
    return {"rows": rows, "passes": all(row["passes"] for row in rows)}


def gpu_tests(task: Task) -> Found:
    """Run the tests marked gpu, with pytest and without its plugins."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:pytest_alembic", "-p", "no:cacheprovider"]
    selected = ["-m", "gpu", "-v", "-rs", "--color=no", "tests/gpu"]
    lines: list[str] = []
    with subprocess.Popen(
        [*command, *selected], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    return {"output": lines[-100:], **told(lines, run.returncode)}


def told(lines: list[str], code: int) -> Found:
    """Return the last line of pytest's output, and whether the tests pass; None if all were skipped."""
    summary = lines[-1] if lines else ""
    return {"summary": summary, "passes": code == 0 if code or " passed" in summary else None}


SECTIONS = (
    ENVIRONMENT,
    Section("repeatability", repeatability, 50),
    Section("fresh_processes", fresh_processes, 80),
    Section("sustained", sustained, 60),
    Section("slots", slots, 45),
    Section("noise_scale", noise_scale, 45),
    Section("loop_overhead", loop_overhead, 30),
    Section("bare_loop", bare_loop, 65),
    Section("gpu_tests", gpu_tests, 90),
)
