"""Whether progress tells early how long a study will take.

Run as ``python tests/benchmarks/progress.py [STUDY…]``: about 20 minutes on two idle cores. Each study runs as
``bssearch run`` does, until its answer. Prints the expected total at 25 % of the run over the real total, which is to
be within a factor of 1.5.
"""

if not __package__:
    __import__("from_clone")

import math
import shutil
import tempfile
import time
from bisect import bisect
from pathlib import Path
from typing import Annotated

import typer

from bssearch import Launch, run_study
from bssearch.commands.display import seconds_left
from bssearch.records import StudyRecord, TrialRecord
from bssearch.search.driver import Listener
from bssearch.search.history import History
from bssearch.settings import shipped_studies
from bssearch.spec import spec_of
from tests.benchmarks.harness import script, verdict
from tests.documents import ROOT

BAR = 1.5

OWN = "own"  # the script of a user, with its spec

SPEC = """\
name: own
workload: loop.py
target: {metric: accuracy, value: 0.95}
space:
  batch_size: {low: 8, high: 256}
  learning_rate: {reference_batch: 32, low: 1e-2, high: 1}
default: {batch_size: 32, learning_rate: 0.1}
budget: {trials: 40, trial_train_seconds: 3}
"""


class Expected(Listener):
    """Expected total seconds by elapsed seconds."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.times: list[float] = []
        self.totals: list[float] = []

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def opened(self, study: StudyRecord, database: str, continued: bool) -> None:
        self.note_of(History(spec_of(study)))

    def ended(self, trial: TrialRecord, history: History) -> None:
        self.note_of(history)

    def note_of(self, history: History) -> None:
        self.times.append(self.elapsed)
        self.totals.append(self.times[-1] + seconds_left(history))

    def at(self, elapsed: float) -> float | None:
        place = bisect(self.times, elapsed)
        return self.totals[place - 1] if place else None


def run(study: str, folder: Path, data_dir: str | None) -> Expected:
    spec = shipped_studies().get(study)
    if study == OWN:
        shutil.copy(ROOT / "tests" / "data" / "own_training" / "loop.py", folder)
        spec = folder / "own.yaml"
        spec.write_text(SPEC, encoding="utf-8")
    assert spec is not None, f"there is no study {study}"
    expected = Expected()
    run_study(spec, Launch(db=f"sqlite:///{folder / 'study.db'}", data_dir=data_dir, listener=expected))
    return expected


def main(
    studies: Annotated[list[str] | None, typer.Argument()] = None,
    data_dir: str | None = None,
) -> bool:
    """Run each study, print and judge."""
    is_met = True
    print(f"{'study':<20}{'seconds':>9}{'at 25 %':>9}", flush=True)
    for study in studies or ["digits", "fashion_mnist_cpu", "char_lm_cpu", "finetune", OWN]:
        with tempfile.TemporaryDirectory() as folder:
            expected = run(study, Path(folder), data_dir)
        total = expected.elapsed
        ratio = (expected.at(total / 4) or math.nan) / total
        print(f"{study:<20}{total:>9.0f}{ratio:>9.2f}", flush=True)
        is_met = is_met and 1 / BAR <= ratio <= BAR
    return verdict(is_met)


if __name__ == "__main__":
    script(main, __doc__)
