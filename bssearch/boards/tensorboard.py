"""TensorBoard: a folder for each study, and in it a run for each trial and one for the answer."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from bssearch.boards.events import Answered, StudyOpened, TrialEnded, TrialObserved, TrialStarted
from bssearch.settings import tensorboard_folder

MARK_FILE = ".bssearch-study"
"""Lies in a study's folder and says whose it is: two studies of one name have a folder each."""

RESULTS = ("time_to_target_s", "final_metric", "best_metric", "train_seconds")
"""The figures of a trial in the table of hyperparameters."""


class TensorBoard:
    """Writes event files. Steps are those of the trial; "relative" are its train seconds, whatever else took time."""

    def __init__(self) -> None:
        self._root = tensorboard_folder()
        self._folder = self._root
        self._metric = "metric"
        self._started: dict[int, TrialStarted] = {}
        self._writers: dict[int, SummaryWriter] = {}

    def opened(self, study: StudyOpened) -> None:
        """Find the study's folder."""
        self._folder, self._metric = study_folder(self._root, study), study.metric
        with SummaryWriter(str(self._folder / "summary")) as summary:
            about = f"{study.target}, {study.objective}, on {study.device}"
            summary.add_text("study", about)
            summary.add_text("spec", _block(study.spec))

    def started(self, trial: TrialStarted) -> None:
        """Begin or go on with the trial's run, and show its configuration."""
        self._started[trial.number] = trial
        writer = self._writer(trial.number)
        values = {name: _scalar(value) for name, value in trial.parameters.items() if value is not None}
        about, begins, _ = _hparams({**values, "phase": trial.phase, "seed": trial.seed}, self._results)
        for summary in (about, begins):
            _add_summary(writer, summary)
        writer.flush()

    def observed(self, number: int, points: Sequence[TrialObserved]) -> None:
        """Add the metric by step and by train milliseconds, and whatever else was measured by step."""
        writer = self._writer(number)
        start = self._started[number].started_at if number in self._started else 0.0
        for point in points:
            at = start + point.train_seconds
            milliseconds = round(1000 * point.train_seconds)
            _add(writer, f"{self._metric}/by_step", point.value, point.step, at)
            _add(writer, f"{self._metric}/by_train_milliseconds", point.value, milliseconds, at)
            for name, value in {"train_seconds": point.train_seconds, **point.figures}.items():
                _add(writer, name, value, point.step, at)
        writer.flush()

    def ended(self, trial: TrialEnded) -> None:
        """Write state, reason and results; the run of a trial that is paused stays open for what follows."""
        if trial.is_elsewhere and not self._path(trial.number).exists():
            return
        writer = self._writer(trial.number)
        step = round(trial.figures.get("steps", 0))
        writer.add_text("state", f"{trial.state}: {trial.reason}", step, trial.ended_at)
        if trial.is_over:
            for name in RESULTS:
                if name in trial.figures:
                    _add(writer, f"result/{name}", trial.figures[name], step, trial.ended_at)
            _add_summary(writer, _hparams({}, self._results)[2])
        writer.close()
        del self._writers[trial.number]

    def answered(self, answer: Answered) -> None:
        """Write the answer's words and figures, at the number of trials behind it."""
        with SummaryWriter(str(self._folder / "summary")) as summary:
            rows = [f"| {name} | {value} |" for name, value in answer.parameters.items()]
            table = "\n".join(["| parameter | value |", "|---|---|", *rows])
            words = f"{answer.headline}\n\nThis is {answer.verdict}.\n\n{table}"
            summary.add_text("answer", words, answer.trials)
            for name, value in answer.figures.items():
                _add(summary, f"answer/{name}", value, answer.trials, None)

    def close(self) -> None:
        """Close all runs."""
        for writer in self._writers.values():
            writer.close()

    @property
    def _results(self) -> dict[str, float]:
        return dict.fromkeys((f"result/{name}" for name in RESULTS), 0.0)

    def _path(self, number: int) -> Path:
        return self._folder / f"trial-{number:04d}"

    def _writer(self, number: int) -> SummaryWriter:
        if number not in self._writers:
            _wait_for_another_second(self._path(number))
            self._writers[number] = SummaryWriter(str(self._path(number)))
        return self._writers[number]


def study_folder(root: Path, study: StudyOpened) -> Path:
    """Return the folder of a study below ``root``, made and marked as its own.

    It is called after the study, with the study's mark where a folder of that name is another study's.
    """
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", study.name).lstrip(".") or "study"
    for folder in (root / name, root / f"{name}-{study.mark}"):
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / MARK_FILE
        try:
            with file.open("x", encoding="utf-8") as marked:
                marked.write(study.mark)
        except FileExistsError:
            if file.read_text(encoding="utf-8") != study.mark:
                continue
        return folder
    raise FileExistsError(f"{folder} holds what is not of study {study.name!r}")


def _wait_for_another_second(run: Path) -> None:
    """Wait until a new event file of a run is called after a later second than those there are.

    TensorBoard reads them in the order of their names, ``events.out.tfevents.SECOND.…``. A clock that is ahead
    elsewhere is not waited for.
    """
    seconds = [int(file.name.split(".")[3]) for file in run.glob("events.out.tfevents.*")]
    if seconds:
        time.sleep(min(max(0.0, max(seconds) + 1 - time.time()), 2.0))


def _add(writer: SummaryWriter, tag: str, value: float, step: int, at: float | None) -> None:
    writer.add_scalar(tag, value, step, at)


def _add_summary(writer: SummaryWriter, summary: Any) -> None:
    files: Any = writer._get_file_writer()  # type: ignore[no-untyped-call]
    files.add_summary(summary)  # where `add_hparams` would begin a run of its own


def _hparams(values: Mapping[str, Any], results: Mapping[str, float]) -> tuple[Any, Any, Any]:
    """Return the summaries of a run's hyperparameters: which there are, their values, and that the run has ended."""
    about, begins, ends = hparams(dict(values), dict(results))  # type: ignore[no-untyped-call]
    return about, begins, ends


def _scalar(value: object) -> bool | float | str:
    return value if isinstance(value, bool | int | float) else str(value)


def _block(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
