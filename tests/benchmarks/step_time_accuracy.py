"""How well steps × probed step time tells the train seconds that a study's trials measured.

Run as ``python tests/benchmarks/step_time_accuracy.py``: runs the digits study in a temporary folder, about a minute.
``--db URL --study NAME`` reads a study that was run before. Counted are the trials that trained for 0.2 s or more,
where trial and step time both had the device to themselves. Exits 1 where the median of |steps × step time / train
seconds − 1| is above 3 %, or where no trial counts. The signed rows show where a difference comes from: the step time
is that of the default configuration at each batch size, while trials differ in what a step computes (dropout, label
smoothing).
"""

from __future__ import annotations

if not __package__:
    __import__("from_clone")

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from bssearch.commands.run import run_study
from bssearch.records import ProbeRecord, TrialRecord
from bssearch.spec import find_spec, load_spec
from bssearch.storage.repository import open_store
from tests.benchmarks.harness import script

BAR = 0.03
LEAST_SECONDS = 0.2


def difference(trial: TrialRecord, probes: dict[int, ProbeRecord]) -> float | None:
    """Return steps × step time / train seconds − 1; None for a trial that says nothing of it."""
    outcome, probe = trial.outcome, probes.get(trial.configuration.batch_size)
    if outcome is None or probe is None or probe.step_seconds is None or outcome.train_seconds < LEAST_SECONDS:
        return None
    return outcome.steps * probe.step_seconds / outcome.train_seconds - 1


def row(name: str, differences: Sequence[float]) -> None:
    """Print how many differences there are, and their signed quartiles."""
    low, middle, high = np.quantile(differences, [0.25, 0.5, 0.75])
    print(f"{name:<28} {len(differences):>4}   {low:+7.1%} {middle:+7.1%} {high:+7.1%}")


def report(trials: Sequence[TrialRecord], probes: dict[int, ProbeRecord]) -> bool:
    """Print the distribution; return whether the bar is met."""
    counted: list[tuple[TrialRecord, float]] = []
    contended = []
    for trial in trials:
        found = difference(trial, probes)
        if found is None:
            continue
        assert trial.outcome is not None
        if trial.outcome.contended or probes[trial.configuration.batch_size].contended:
            contended.append(found)
        else:
            counted.append((trial, found))
    unsettled = [size for size, probe in probes.items() if not probe.settled]
    shared = [size for size, probe in probes.items() if probe.contended]
    print(f"step times not within 2 %: {unsettled or 'none'}; contended: {shared or 'none'}")
    print(f"\nsteps × step time / train seconds − 1{'quartiles':>20}")
    if contended:
        row("contended, not counted", contended)
    if not counted:
        print(f"no trial trained for {LEAST_SECONDS} s uncontended")
        return False
    row("uncontended", [found for _, found in counted])
    for size in sorted(probes):
        of_size = [found for trial, found in counted if trial.configuration.batch_size == size]
        if of_size:
            row(f"  batch size {size}", of_size)
    for smoothed in (False, True):
        name = f"  {'with' if smoothed else 'without'} label smoothing"
        of_kind = [found for trial, found in counted if (trial.configuration.label_smoothing > 0) is smoothed]
        if of_kind:
            row(name, of_kind)
    low, median, high, worst = np.quantile(np.abs([found for _, found in counted]), [0.25, 0.5, 0.75, 1])
    print(f"\n|difference|: median {median:.1%}, quartiles {low:.1%} and {high:.1%}, worst {worst:.1%}")
    return bool(median <= BAR)


def main(
    db: Annotated[str | None, typer.Option(help="read this database and run nothing")] = None, study: str = "digits"
) -> bool:
    """Run or read the study, print, and judge."""
    with tempfile.TemporaryDirectory() as folder:
        url = db or f"sqlite:///{Path(folder) / 'study.db'}"
        if db is None:
            run_study(load_spec(find_spec("digits")), db=url)
        with open_store(url, write=False) as store:
            trials, probes = store.trials(study), store.probes(study)
    return report(trials, probes)


if __name__ == "__main__":
    script(main, __doc__)
