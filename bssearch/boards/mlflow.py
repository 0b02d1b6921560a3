"""MLflow: an experiment for each study, a run for each trial, and one for the answer.

Where it is stored is MLflow's own affair (``MLFLOW_TRACKING_URI``).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import starmap
from typing import Any

os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # A report is tried again as a whole.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")

from mlflow import MlflowClient
from mlflow.entities import Experiment, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException

from bssearch.boards.events import Answered, StudyOpened, TrialEnded, TrialObserved, TrialStarted
from bssearch.files import alone
from bssearch.settings import cache_folder

MOST_METRICS = 1000
MOST_PARAMS = 100
PARAM_CHARACTERS = 6000
TAG_CHARACTERS = 5000
"""What MLflow takes at once, by its REST API (log-batch), and of one value."""

MAKING_SECONDS = (2.0, 4.0, 8.0)
"""Seconds between tries to open a database: a choice; another driver's MLflow takes some to make its tables."""

STATUS = {
    "reached": "FINISHED",
    "exhausted": "FINISHED",
    "capped": "KILLED",
    "pruned": "KILLED",
    "cancelled": "KILLED",
    "lost": "KILLED",
    "diverged": "FAILED",
    "failed": "FAILED",
    "oom": "FAILED",
}
"""The end of a run by that of its trial."""


class MLflow:
    """Logs to the store that MLflow's environment names. A run is found again by its study's mark and its number."""

    def __init__(self) -> None:
        self._client = _connected()
        self._study: StudyOpened | None = None
        self._experiment_id: str | None = None
        self._started: dict[int, TrialStarted] = {}
        self._runs: dict[int, str] = {}

    def opened(self, study: StudyOpened) -> None:
        """Find or make the study's experiment."""
        self._study = study
        about = {"study": study.name, "target": study.target, "objective": study.objective, "device": study.device}
        for name, value in {**about, "spec": study.spec}.items():
            self._tag_experiment(name, value)

    def started(self, trial: TrialStarted) -> None:
        """Make the trial's run, or go on with it."""
        self._started[trial.number] = trial
        run = self._run(trial.number)
        self._client.update_run(run, status="RUNNING")
        self._client.set_tag(run, "bssearch.state", "running")

    def observed(self, number: int, points: Sequence[TrialObserved]) -> None:
        """Add the metric and whatever else was measured by step; the time of each is the trial's start + train time."""
        run = self._run(number)
        start = self._started[number].started_at if number in self._started else 0.0
        metrics = [
            Metric(_key(name), value, _milliseconds(start + point.train_seconds), point.step)
            for point in points
            for name, value in self._figures(point).items()
        ]
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(run, metrics=metrics[first : first + MOST_METRICS])

    def ended(self, trial: TrialEnded) -> None:
        """Log state, reason and results, and end the run of a trial that does not go on."""
        if trial.is_elsewhere and self._find({"trial": str(trial.number)}) is None:
            return
        run, at = self._run(trial.number), _milliseconds(trial.ended_at)
        step = round(trial.figures.get("steps", 0))
        metrics = [Metric(f"result/{_key(name)}", value, at, step) for name, value in trial.figures.items()]
        self._client.log_batch(run, metrics=metrics, tags=_tags({"state": trial.state, "reason": trial.reason}))
        if trial.is_over:
            self._client.set_terminated(run, STATUS.get(trial.state, "FINISHED"), at)
            self._runs.pop(trial.number, None)
            self._started.pop(trial.number, None)

    def answered(self, answer: Answered) -> None:
        """Log the answer in a run of its own; one that recommends something else becomes an earlier answer."""
        params = _params(answer.parameters)
        found = self._find({"kind": "answer"})
        if found is not None and found.data.params != {one.key: one.value for one in params}:
            self._client.set_tag(found.info.run_id, "bssearch.kind", "earlier answer")
            found = None
        run = found.info.run_id if found is not None else self._new("answer", {"kind": "answer"}, params, None)
        at = _milliseconds(time.time())
        metrics = [Metric(_key(name), value, at, answer.trials) for name, value in answer.figures.items()]
        words = {"headline": answer.headline, "verdict": answer.verdict}
        self._client.log_batch(run, metrics=metrics, tags=_tags(words))
        for name, value in words.items():
            self._tag_experiment(name, value)
        self._tag_experiment("optimal_batch_size", str(answer.parameters["batch_size"]))
        self._client.set_terminated(run, "FINISHED")
        self._keep_document(run, answer.document)

    def close(self) -> None:
        """Do nothing: all is logged."""

    def _keep_document(self, run: str, document: str) -> None:
        """Add the answer as a file, where the store takes files; without it the answer is whole all the same."""
        try:
            self._client.log_text(run, document, "best.json")
        except Exception as error:
            self._client.set_tag(run, "bssearch.best_json", f"could not be stored: {error}"[:TAG_CHARACTERS])

    def _figures(self, point: TrialObserved) -> dict[str, float]:
        return {self._told.metric: point.value, "train_seconds": point.train_seconds, **point.figures}

    @property
    def _told(self) -> StudyOpened:
        assert self._study is not None, "a study is opened before anything else is told"
        return self._study

    @property
    def _experiment(self) -> str:
        """Return the id of the study's experiment, made where there is none."""
        if self._experiment_id is None:
            self._experiment_id = self._found_experiment()
        return self._experiment_id

    def _found_experiment(self) -> str:
        name = f"bssearch/{self._told.name}"
        found: Experiment | None = self._client.get_experiment_by_name(name)
        if found is not None and found.lifecycle_stage == "deleted":  # its name stays taken until it is gone for good
            name = f"{name} ({self._told.mark})"
            found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            return str(self._client.get_experiment_by_name(name).experiment_id)  # another driver was faster

    def _tag_experiment(self, name: str, value: str) -> None:
        self._client.set_experiment_tag(self._experiment, f"bssearch.{name}", value[:TAG_CHARACTERS])

    def _run(self, number: int) -> str:
        """Return the id of a trial's run, made where no driver has made it."""
        if number not in self._runs:
            found = self._find({"trial": str(number)})
            self._runs[number] = self._new_trial(number) if found is None else str(found.info.run_id)
        return self._runs[number]

    def _new_trial(self, number: int) -> str:
        trial = self._started.get(number)
        tags = {"kind": "trial", "trial": str(number)}
        if trial is None:
            return self._new(f"trial {number}", tags, [], None)
        tags |= {"phase": trial.phase} | ({} if trial.retry_of is None else {"retry_of": str(trial.retry_of)})
        params = _params({**trial.parameters, "seed": trial.seed})
        return self._new(f"trial {number}", tags, params, _milliseconds(trial.started_at))

    def _new(self, name: str, tags: Mapping[str, str], params: Sequence[Param], start: int | None) -> str:
        own = {"study": self._told.name, "mark": self._told.mark, **tags}
        made: Run = self._client.create_run(
            self._experiment, start, {f"bssearch.{key}": value for key, value in own.items()}, name
        )
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(made.info.run_id, params=params[first : first + MOST_PARAMS])
        return str(made.info.run_id)

    def _find(self, tags: Mapping[str, str]) -> Run | None:
        wanted = {"mark": self._told.mark, **tags}
        condition = " and ".join(starmap("tags.`bssearch.{}` = '{}'".format, wanted.items()))
        return next(iter(self._client.search_runs([self._experiment], condition, max_results=1)), None)


def _connected() -> MlflowClient:
    """Return a client; where another process makes the tables of a new database just now, after a while."""
    for wait in MAKING_SECONDS:
        try:
            return _opened()
        except Exception:
            time.sleep(wait)
    return _opened()


def _opened() -> MlflowClient:
    """Return a client, while no other board of this user's on this machine makes one.

    Of two that make the tables of a new SQLite file at once each breaks off, and the file stays half made for good.
    """
    with ExitStack() as stack:
        with suppress(OSError):  # then without
            stack.enter_context(alone(cache_folder() / "mlflow.lock"))
        return MlflowClient()


def _key(name: str) -> str:
    """Return a name with what MLflow takes in the names of metrics and parameters."""
    return re.sub(r"[^\w\-. /]", "_", name)


def _params(values: Mapping[str, Any]) -> list[Param]:
    return [Param(_key(name), str(value)[:PARAM_CHARACTERS]) for name, value in values.items()]


def _tags(values: Mapping[str, str]) -> list[RunTag]:
    return [RunTag(f"bssearch.{name}", value[:TAG_CHARACTERS]) for name, value in values.items()]


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds)
