"""Whether a tuned schedule of growing batches saves time against the tuned batch that stays, each with as many trials.

Run as ``python tests/benchmarks/growing_batches.py``: the shipped char_lm_cpu and fashion_mnist_cpu, 30 search trials
and then 30 of schedules (geometric, linear, by the noise scale), ten seeds of the best of each; some 40 minutes of one
core. ``--quick`` is digits with 12, 8 and 5, in two minutes.

Both searches make all their trials. A schedule is searched with the other parameters of the best constant trials, its
learning rate tuned anew. The optimum and the two best schedules then run with the same fresh seeds; what is printed is
the time with the better schedule over the time without, paired by seed, with its 95 % interval. Of two schedules the
better one by these seeds is told: the ratio is too small by what that choice gains, at most. There is no bar: it is
published whichever way it falls.
"""

from __future__ import annotations

if not __package__:
    __import__("from_clone")

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from bssearch.analysis.headline import about_growing, headline
from bssearch.commands.run import run_study
from bssearch.spec import StudySpec, load_spec
from tests.benchmarks.harness import script

STUDIES = Path(__file__).parents[2] / "studies"
NAMES = ("geometric", "linear", "noise_scale")


def asked(study: str, trials: int, schedule_trials: int, seeds: int) -> StudySpec:
    """Return the spec of a study with as many trials of both kinds, and so many seeds of the best of each."""
    return load_spec(
        STUDIES / f"{study}.yaml",
        [
            f"budget.trials={trials}",
            f"budget.least_trials={trials}",
            f"budget.schedule_trials={schedule_trials}",
            f"confirm.runs={seeds}",
            "confirm.top=1",
            "confirm.max_runs=null",
            "confirm.train_seconds=null",
            f"space.batch_schedule.name=[{', '.join(NAMES)}]",
        ],
    )


def measure(spec: StudySpec, folder: Path) -> dict[str, Any]:
    """Run a study with its schedules; return what was found."""
    began = time.monotonic()
    found = run_study(spec, db=f"sqlite:///{folder / spec.name}.db", folder=STUDIES, progress=False)
    grown = found.batch_schedule
    return {
        "study": spec.name,
        "headline": headline(found),
        "growing": about_growing(found),
        "schedule": None if grown is None else grown.model_dump(mode="json"),
        "seconds": round(time.monotonic() - began),
    }


def main(
    studies: Annotated[list[str] | None, typer.Argument()] = None,
    trials: Annotated[int, typer.Option(help="of the search, and of that for a schedule")] = 30,
    seeds: int = 10,
    quick: Annotated[bool, typer.Option("--quick", help="digits, with few trials")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object a study")] = False,
) -> None:
    """Run the studies, and print what was found."""
    counts = (12, 8, 5) if quick else (trials, trials, seeds)
    with tempfile.TemporaryDirectory() as folder:
        for study in ["digits"] if quick else studies or ["char_lm_cpu", "fashion_mnist_cpu"]:
            found = measure(asked(study, *counts), Path(folder))
            told = f"{found['study']} ({found['seconds']} s)\n  {found['headline']}\n  {found['growing']}"
            print(json.dumps(found) if as_json else told, flush=True)


if __name__ == "__main__":
    script(main, __doc__)
