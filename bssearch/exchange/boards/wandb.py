"""Weights & Biases: a group per study, a run per trial and a run for the answer."""

import os
from collections.abc import Sequence

import wandb

from bssearch.exchange.boards.base import Figures, Parameters, Point, Words

BAD_ENDS = frozenset({"failed", "oom", "diverged", "lost", "cancelled"})
ID_CHARACTERS = 64  # wandb.init takes no longer id


class WeightsAndBiases:
    """Keeps one run open for each running trial, and sends no code or console output."""

    def __init__(self) -> None:
        self._runs: dict[int, wandb.Run] = {}
        self._settings = wandb.Settings(
            silent=True,
            console="off",
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )

    def opened(self, name: str, mark: str, metric: str, about: Words) -> None:
        self._name, self._mark, self._metric = name, mark, metric
        self._about = {"study": name, **{key: value for key, value in about.items() if key != "spec"}}

    def started(self, number: int, at: float, parameters: Parameters) -> None:
        self._run(number, parameters).summary["state"] = "running"

    def observed(self, number: int, points: Sequence[Point]) -> None:
        for step, _, figures in points:
            self._run(number).log({**figures, f"by_step/{self._metric}": figures[self._metric]}, step=step)

    def ended(self, number: int, state: str, reason: str, at: float, figures: Figures, is_elsewhere: bool) -> None:
        """Finish the run. A paused trial later resumes the run by id."""
        if is_elsewhere and number not in self._runs:
            return  # W&B itself notices that a run's process died
        run = self._run(number)
        results = {f"result/{name}": value for name, value in figures.items()}
        run.summary.update({"state": state, "reason": reason, **results})
        run.finish(exit_code=int(state in BAD_ENDS))
        del self._runs[number]

    def answered(self, trials: int, words: Words, parameters: Parameters, figures: Figures) -> None:
        run = self._new("answer", "answer", parameters)
        run.summary.update({"headline": words["headline"], "verdict": words["verdict"], **figures})
        run.finish()

    def close(self) -> None:
        for run in self._runs.values():
            run.finish()

    def _run(self, number: int, parameters: Parameters | None = None) -> wandb.Run:
        if number not in self._runs:
            configuration = {"trial": number, **(parameters or {})}
            self._runs[number] = self._new(str(number), str(configuration.get("phase", "trial")), configuration)
        return self._runs[number]

    def _new(self, suffix: str, job: str, configuration: Parameters) -> wandb.Run:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "bssearch",
            group=self._name,
            id=f"{self._mark}-{suffix}"[:ID_CHARACTERS],
            name=f"{self._name} {suffix}",
            job_type=job,
            config={**self._about, **configuration},
            resume="allow",
            reinit="create_new",
            save_code=False,
            settings=self._settings,
        )
        run.define_metric("train_seconds")
        run.define_metric(self._metric, step_metric="train_seconds")
        return run
