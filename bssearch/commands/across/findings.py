"""What a study has found, which question that answers, and which findings are those of one study's copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from bssearch.analysis.answer import Answer
from bssearch.analysis.shape import Model
from bssearch.commands.across.matching import device_of, precision_of
from bssearch.records import Goal, StudyRecord
from bssearch.workloads.base import SHIPPED


class Question(Model):
    """What an answer is an answer to: two of them compare where these are the same.

    ``workload`` is without the folder of its file, ``device`` the kind of the device; an empty one is not known.
    """

    workload: str
    metric: str
    target: float
    goal: Goal
    objective: str
    device: str
    precision: str

    @property
    def in_words(self) -> dict[str, str]:
        """Return what people are told of it, by what it is about."""
        return {
            "workload": self.workload,
            "target": f"{self.metric} {self.goal.sign} {self.target:g}",
            "objective": self.objective,
            "device": self.device or "not known",
            "precision": self.precision or "not known",
        }


@dataclass(frozen=True, slots=True)
class Finding:
    """A study with its answer, and the database that it is in."""

    study: StudyRecord
    database: str
    answer: Answer

    @property
    def acceptable(self) -> set[int]:
        """Return the batch sizes that the answer has within 5 % of the least."""
        low, high = self.answer.flat_range
        flat = {row.batch_size for row in self.answer.batches if low <= row.batch_size <= high}
        return {self.answer.optimal.batch_size, *flat, *self.answer.tied}

    def accepts(self, batch_size: int) -> bool:
        """Return whether the answer has a batch size within 5 % of the least, be it one that it did not try."""
        low, high = self.answer.flat_range
        return low <= batch_size <= high or batch_size in self.acceptable

    @property
    def question(self) -> Question:
        """Return what the answer is an answer to."""
        target = self.answer.target
        return Question(
            workload=_without_folder(str(self.study.spec.get("workload", ""))),
            metric=target.metric,
            target=target.value,
            goal=target.goal,
            objective=self.answer.objective,
            device=device_of(self.study),
            precision=precision_of(self.study),
        )


def _without_folder(workload: str) -> str:
    """Return a workload's file and class, wherever the file lies; of a shipped one its module and class."""
    location, separator, attribute = SHIPPED.get(workload, workload).rpartition(":")
    return f"{PurePath(location).name}:{attribute}" if separator else workload


def without_copies(found: Sequence[Finding]) -> list[Finding]:
    """Return findings with one for each study: of copies in several databases that of the most trials, else the first.

    Copies are made by the same person, at the same moment, of the same question, whatever they are called.
    """
    kept: dict[str, Finding] = {}
    for one in found:
        other = kept.get(one.study.mark)
        if other is None or _trials(one) > _trials(other):
            kept[one.study.mark] = one
    return [one for one in found if kept[one.study.mark] is one]


def _trials(found: Finding) -> int:
    return sum(row.trials for row in found.answer.batches)
