"""MLflow: an experiment per study, a run per trial and a run for the answer."""

import os
import re
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import cached_property

os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # a report is repeated as a whole
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag

from bssearch.exchange.boards.base import Figures, Parameters, Point, Words
from bssearch.files import alone
from bssearch.settings import cache_folder

# Limits of MLflow's REST API (log-batch).
MOST_METRICS, MOST_PARAMS, PARAM_CHARACTERS, TAG_CHARACTERS = 1000, 100, 6000, 5000
# Trial states whose runs do not end as ``FINISHED``.
STATUS = dict.fromkeys(("capped", "pruned", "cancelled", "lost"), "KILLED")
STATUS |= dict.fromkeys(("diverged", "failed", "oom"), "FAILED")


class MLflow:
    """Logs with MLflow's client. The tags ``bssearch.mark`` and ``bssearch.trial`` identify a trial's run."""

    def __init__(self) -> None:
        with ExitStack() as stack:
            # Two processes that create the tables of one SQLite file corrupt the file.
            with suppress(OSError):
                stack.enter_context(alone(cache_folder() / "mlflow.lock"))
            self._client = MlflowClient()
        self._runs: dict[int, str] = {}

    def opened(self, name: str, mark: str, metric: str, about: Words) -> None:
        self._name, self._mark = name, mark
        self._tag_experiment({"study": name, **about})

    def started(self, number: int, at: float, parameters: Parameters) -> None:
        run = self._run(number, at, parameters)
        self._client.update_run(run, status="RUNNING")
        self._client.set_tag(run, "bssearch.state", "running")

    def observed(self, number: int, points: Sequence[Point]) -> None:
        run = self._run(number)
        metrics = [metric for step, at, figures in points for metric in _metrics(figures, at, step)]
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(run, metrics=metrics[first : first + MOST_METRICS])

    def ended(self, number: int, state: str, reason: str, at: float, figures: Figures, is_elsewhere: bool) -> None:
        if is_elsewhere and self._found(trial=str(number)) is None:
            return
        run = self._run(number)
        results = {f"result/{name}": value for name, value in figures.items()}
        self._client.log_batch(
            run,
            metrics=_metrics(results, at, round(figures.get("steps", 0))),
            tags=_tags({"state": state, "reason": reason}),
        )
        if state != "paused":
            self._client.set_terminated(run, STATUS.get(state, "FINISHED"), round(1000 * at))
            self._runs.pop(number, None)

    def answered(self, trials: int, words: Words, parameters: Parameters, figures: Figures) -> None:
        """Log the answer. If the recommendation changed, tag the old answer's run as an earlier answer."""
        found, shown = self._found(kind="answer"), {"headline": words["headline"], "verdict": words["verdict"]}
        if found is not None and found.data.params != {one.key: one.value for one in _params(parameters)}:
            self._client.set_tag(found.info.run_id, "bssearch.kind", "earlier answer")
            found = None
        run = found.info.run_id if found else self._made("answer", {"kind": "answer"}, time.time(), parameters)
        self._client.log_batch(run, metrics=_metrics(figures, time.time(), trials), tags=_tags(shown))
        self._tag_experiment({**shown, "optimal_batch_size": str(parameters["batch_size"])})
        self._client.set_terminated(run, "FINISHED")
        try:
            self._client.log_text(run, words["document"], "best.json")
        except Exception as error:  # some stores take no files; the answer is complete without a file
            self._client.set_tag(run, "bssearch.best_json", f"cannot store best.json: {error}"[:TAG_CHARACTERS])

    def close(self) -> None:
        """MLflow has no buffer to flush."""

    @cached_property
    def _experiment(self) -> str:
        name = f"bssearch/{self._name}"
        found = self._client.get_experiment_by_name(name)
        if found is not None and found.lifecycle_stage == "deleted":  # its name stays taken
            name = f"{name} ({self._mark})"
            found = self._client.get_experiment_by_name(name)
        # If another driver is faster, MLflow refuses a second experiment; the repeated report finds the first.
        return str(self._client.create_experiment(name) if found is None else found.experiment_id)

    def _tag_experiment(self, values: Words) -> None:
        for tag in _tags(values):
            self._client.set_experiment_tag(self._experiment, tag.key, tag.value)

    def _run(self, number: int, at: float = 0.0, parameters: Parameters | None = None) -> str:
        if number not in self._runs:
            found, tags = self._found(trial=str(number)), {"kind": "trial", "trial": str(number)}
            made = found.info.run_id if found else self._made(f"trial {number}", tags, at, parameters or {})
            self._runs[number] = made
        return self._runs[number]

    def _made(self, name: str, tags: Words, at: float, parameters: Parameters) -> str:
        own = {tag.key: tag.value for tag in _tags({"study": self._name, "mark": self._mark, **tags})}
        run: Run = self._client.create_run(self._experiment, round(1000 * at), own, name)
        params = _params(parameters)
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(run.info.run_id, params=params[first : first + MOST_PARAMS])
        return str(run.info.run_id)

    def _found(self, **tags: str) -> Run | None:
        condition = " and ".join(
            f"tags.`bssearch.{name}` = '{value}'" for name, value in {"mark": self._mark, **tags}.items()
        )
        return next(iter(self._client.search_runs([self._experiment], condition, max_results=1)), None)


def _metrics(figures: Figures, at: float, step: int) -> list[Metric]:
    return [Metric(_key(name), value, round(1000 * at), step) for name, value in figures.items()]


def _params(values: Parameters) -> list[Param]:
    return [Param(_key(name), str(value)[:PARAM_CHARACTERS]) for name, value in values.items()]


def _tags(values: Words) -> list[RunTag]:
    return [RunTag(f"bssearch.{name}", value[:TAG_CHARACTERS]) for name, value in values.items()]


def _key(name: str) -> str:
    return re.sub(r"[^\w\-. /]", "_", name)  # MLflow refuses other characters
