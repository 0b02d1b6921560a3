"""Whether equal requests take the same steps to the target and the same seconds.

Run as ``python tests/benchmarks/repeatability.py`` on an idle machine. One worker process runs the same request ten
times, with deterministic algorithms. Exits 1 if the steps or a metric differ, if the train seconds' coefficient of
variation (CV) is above 1 % on a GPU, or if a run is flagged as contended.
"""

if not __package__:
    __import__("from_clone")

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from bssearch.commands.probes import run_request
from bssearch.executors.base import ExecutorSettings
from bssearch.executors.slots import LocalExecutor
from bssearch.records import Configuration, Target, TrialRequest, TrialState
from bssearch.spec import TrainingSpec
from tests.benchmarks.harness import one_of, script
from tests.factories import make_request

GPU_BAR = 0.01

# Batch size, learning rate, target accuracy and steps between evaluations: a second or two, or three on a GPU.
TASKS = {"digits": (32, 0.01, 0.97, 10), "fashion_mnist": (512, 0.14, 0.88, 50)}


def request_of(workload: str) -> TrialRequest:
    batch_size, learning_rate, target, eval_every_steps = TASKS[workload]
    return make_request(
        number=0,
        configuration=Configuration(
            batch_size=batch_size, micro_batch_size=batch_size, learning_rate=learning_rate, warmup_epochs=0.2
        ),
        seed=1,
        target=Target(metric="accuracy", value=target),
        train_seconds_limit=120.0,
        limit_state=TrialState.EXHAUSTED,
        eval_every_steps=eval_every_steps,
    )


def measure(workload: str, device: str, precision: str, runs: int) -> dict[str, Any]:
    """Run the request ``runs`` times in one worker; return the differences."""
    settings = ExecutorSettings(
        workload=workload,
        folder=Path.cwd(),
        device=device,
        training=TrainingSpec.model_validate({"precision": precision, "deterministic": True}),
    )
    executor = LocalExecutor(settings)
    try:
        executor.describe()
        ended = []
        for number in range(runs):
            outcome, curve = run_request(executor, replace(request_of(workload), number=number))
            if outcome.state is not TrialState.REACHED:
                raise SystemExit(f"run {number} ended as {outcome.state}: {outcome.reason}")
            ended.append((outcome, [one.metric for one in curve]))
    finally:
        executor.close()
    outcomes = [outcome for outcome, _ in ended]
    seconds = [outcome.train_seconds for outcome in outcomes]
    contended = [outcome.contended for outcome in outcomes]
    identical = len({(outcome.steps_to_target, tuple(metrics)) for outcome, metrics in ended}) == 1
    variation = statistics.stdev(seconds) / statistics.fmean(seconds)
    return {
        "workload": workload,
        "device": device,
        "steps_to_target": [outcome.steps_to_target for outcome in outcomes],
        "identical": identical,
        "train_seconds": seconds,
        "train_seconds_cv": variation,
        "contended": contended,
        "warnings": sorted({warning for outcome in outcomes for warning in outcome.warnings}),
        "passes": identical and not any(contended),
    }


def main(
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N")] = "cpu",
    workload: Annotated[str, one_of(TASKS)] = "digits",
    precision: Annotated[str, one_of(("auto", "fp32", "tf32", "bf16", "fp16"))] = "auto",
    runs: int = 10,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of a table")] = False,
) -> bool:
    """Measure, print and judge."""
    found = measure(workload, device, precision, runs)
    if device != "cpu":
        found["passes"] = found["passes"] and found["train_seconds_cv"] <= GPU_BAR
    if as_json:
        print(json.dumps(found))
        return bool(found["passes"])
    print(f"{'run':>3} {'steps to target':>16} {'train seconds':>14} {'of the median':>14}  contended")
    median = statistics.median(found["train_seconds"])
    rows = zip(found["steps_to_target"], found["train_seconds"], found["contended"], strict=True)
    for number, (steps, seconds, contended) in enumerate(rows):
        print(f"{number:>3} {steps:>16} {seconds:>14.4f} {seconds / median:>14.3f}  {'yes' if contended else 'no'}")
    print(f"identical: {found['identical']}; CV of the train seconds: {found['train_seconds_cv']:.2%}")
    print(*found["warnings"], sep="\n", end="\n" if found["warnings"] else "")
    return bool(found["passes"])


if __name__ == "__main__":
    script(main, __doc__)
