"""Weights & Biases: a group for each study, a run for each trial, and one for the answer.

Where it goes is W&B's own affair (``WANDB_MODE``, ``WANDB_ENTITY``, ``WANDB_DIR``). The project is ``WANDB_PROJECT``,
else ``bssearch``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from bssearch.boards.events import Answered, StudyOpened, TrialEnded, TrialObserved, TrialStarted

BAD_ENDS = frozenset({"failed", "oom", "diverged", "lost", "cancelled"})
"""The ends of trials that W&B shows as failures."""

ID_CHARACTERS = 64
"""How long the id of a run may be (wandb.init)."""


class WeightsAndBiases:
    """Keeps a run open for each trial that runs. Its id follows from study and number: it is one run wherever it is.

    Nothing of the machine is sent but what `wandb` cannot leave out: no code, no console, no measurements of its own.
    """

    def __init__(self) -> None:
        self._study: StudyOpened | None = None
        self._started: dict[int, TrialStarted] = {}
        self._runs: dict[int, wandb.Run] = {}

    def opened(self, study: StudyOpened) -> None:
        """Take in which study it is."""
        self._study = study

    def started(self, trial: TrialStarted) -> None:
        """Begin the trial's run, or go on with it."""
        self._started[trial.number] = trial
        self._run(trial.number).summary["state"] = "running"

    def observed(self, number: int, points: Sequence[TrialObserved]) -> None:
        """Log the metric twice: as its own name over train seconds, and below ``by_step`` over steps."""
        run = self._run(number)
        metric = self._told.metric
        for point in points:
            values = {metric: point.value, f"by_step/{metric}": point.value, "train_seconds": point.train_seconds}
            run.log({**values, **point.figures}, step=point.step)

    def ended(self, trial: TrialEnded) -> None:
        """Write state, reason and results, and finish the run; one that goes on is resumed by its id."""
        if trial.is_elsewhere and trial.number not in self._runs:
            return  # W&B itself sees that the process of a run has gone.
        run = self._run(trial.number)
        results = {f"result/{name}": value for name, value in trial.figures.items()}
        run.summary.update({"state": trial.state, "reason": trial.reason, **results})
        run.finish(exit_code=int(trial.state in BAD_ENDS))
        self._runs.pop(trial.number, None)
        if trial.is_over:
            self._started.pop(trial.number, None)

    def answered(self, answer: Answered) -> None:
        """Write the answer as the summary of a run of its own."""
        run = self._new("answer", "answer", answer.parameters)
        run.summary.update({"headline": answer.headline, "verdict": answer.verdict, **answer.figures})
        run.finish()

    def close(self) -> None:
        """Finish what is open: the driver has left it, and another one may go on with it."""
        for run in self._runs.values():
            run.finish()

    @property
    def _told(self) -> StudyOpened:
        assert self._study is not None, "a study is opened before anything else is told"
        return self._study

    def _run(self, number: int) -> wandb.Run:
        """Return the run of a trial, begun or resumed where it is not open."""
        if number not in self._runs:
            trial = self._started.get(number)
            about: dict[str, Any] = {"trial": number}
            if trial is not None:
                about |= {"phase": trial.phase, "seed": trial.seed, "retry_of": trial.retry_of, **trial.parameters}
            self._runs[number] = self._new(str(number), "trial" if trial is None else trial.phase, about)
        return self._runs[number]

    def _new(self, suffix: str, job: str, configuration: Mapping[str, Any]) -> wandb.Run:
        study = self._told
        about = {"study": study.name, "target": study.target, "objective": study.objective, "device": study.device}
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "bssearch",
            group=study.name,
            id=f"{study.mark}-{suffix}"[:ID_CHARACTERS],
            name=f"{study.name} {suffix}",
            job_type=job,
            config={**about, **configuration},
            resume="allow",
            reinit="create_new",
            save_code=False,
            settings=_settings(),
        )
        run.define_metric("train_seconds")
        run.define_metric(study.metric, step_metric="train_seconds")
        return run


def _settings() -> wandb.Settings:
    return wandb.Settings(
        silent=True,
        console="off",
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        x_disable_stats=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
    )
