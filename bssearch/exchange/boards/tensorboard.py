"""TensorBoard: a folder per study, a run per trial and a run for the answer."""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from bssearch.exchange.boards.base import Figures, Parameters, Point, Words
from bssearch.settings import tensorboard_folder

# The file with the study's mark, so that two studies of one name get separate folders.
MARK_FILE = ".bssearch-study"
# The figures of a trial in the table of hyperparameters.
RESULTS = tuple(f"result/{name}" for name in ("time_to_target_s", "final_metric", "best_metric", "train_seconds"))


class TensorBoard:
    """Writes event files in which TensorBoard's axis *Relative* shows train seconds."""

    def __init__(self) -> None:
        self._writers: dict[int, SummaryWriter] = {}

    def opened(self, name: str, mark: str, metric: str, about: Words) -> None:
        self._folder, self._metric = study_folder(tensorboard_folder(), name, mark), metric
        with SummaryWriter(str(self._folder / "summary")) as summary:
            summary.add_text("study", f"{about['target']}, {about['objective']}, on {about['device']}")
            summary.add_text("spec", "\n".join(f"    {line}" for line in about["spec"].splitlines()))

    def started(self, number: int, at: float, parameters: Parameters) -> None:
        writer = self._writer(number)
        _add_hparams(writer, [0, 1], {name: value for name, value in parameters.items() if value is not None})
        writer.flush()

    def observed(self, number: int, points: Sequence[Point]) -> None:
        writer, metric = self._writer(number), self._metric
        for step, at, figures in points:
            writer.add_scalar(
                f"{metric}/by_train_milliseconds", figures[metric], round(1000 * figures["train_seconds"]), at
            )
            for name, value in figures.items():
                writer.add_scalar(f"{metric}/by_step" if name == metric else name, value, step, at)
        writer.flush()

    def ended(self, number: int, state: str, reason: str, at: float, figures: Figures, is_elsewhere: bool) -> None:
        if is_elsewhere and not self._path(number).exists():
            return
        writer, step = self._writer(number), round(figures.get("steps", 0))
        writer.add_text("state", f"{state}: {reason}", step, at)
        if state != "paused":
            for name in RESULTS:
                if (value := figures.get(name.removeprefix("result/"))) is not None:
                    writer.add_scalar(name, value, step, at)
            _add_hparams(writer, [2], {})
        writer.close()
        del self._writers[number]

    def answered(self, trials: int, words: Words, parameters: Parameters, figures: Figures) -> None:
        lines = [words["headline"], "", f"The answer is {words['verdict']}.", "", "| parameter | value |", "|---|---|"]
        lines += [f"| {name} | {value} |" for name, value in parameters.items()]
        with SummaryWriter(str(self._folder / "summary")) as summary:
            summary.add_text("answer", "\n".join(lines), trials)
            for name, value in figures.items():
                summary.add_scalar(f"answer/{name}", value, trials)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _path(self, number: int) -> Path:
        return self._folder / f"trial-{number:04d}"

    def _writer(self, number: int) -> SummaryWriter:
        if number not in self._writers:
            # TensorBoard reads a run's files by their names, events.out.tfevents.SECOND.…: no two in one second.
            files = self._path(number).glob("events.out.tfevents.*")
            next_second = max((int(file.name.split(".")[3]) for file in files), default=0) + 1
            time.sleep(min(max(0.0, next_second - time.time()), 2.0))  # another machine's clock may be ahead
            self._writers[number] = SummaryWriter(str(self._path(number)))
        return self._writers[number]


def study_folder(root: Path, name: str, mark: str) -> Path:
    """Make and return the study's folder, named ``NAME-MARK`` if another study already has the name."""
    safe = re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip(".") or "study"
    for folder in (root / safe, root / f"{safe}-{mark}"):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with (folder / MARK_FILE).open("x", encoding="utf-8") as file:
                file.write(mark)
        except FileExistsError:
            if (folder / MARK_FILE).read_text(encoding="utf-8") != mark:
                continue
        return folder
    raise FileExistsError(f"{folder} belongs to a study other than {name!r}; move the folder")


def _add_hparams(writer: SummaryWriter, which: list[int], values: Parameters) -> None:
    summaries = hparams(dict(values), dict.fromkeys(RESULTS, 0.0))  # type: ignore[no-untyped-call]
    files: Any = writer._get_file_writer()  # type: ignore[no-untyped-call]
    for index in which:
        files.add_summary(summaries[index])  # `add_hparams` would start a separate run
