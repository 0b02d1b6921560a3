"""Report a study's trials to its boards."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import yaml

from bssearch.analysis.headline import headline
from bssearch.analysis.shape import parameters_of
from bssearch.errors import BSSearchError, TargetNotReachedError
from bssearch.exchange.boards.base import BoardProcess, boards_of, check_boards, without_secrets
from bssearch.records import StudyRecord, TrialObserved, TrialRecord, TrialState
from bssearch.search.driver import Listener
from bssearch.search.finding import answer
from bssearch.search.history import History
from bssearch.spec import StudySpec
from bssearch.storage.repository import Store

# States of trials that another driver may end.
UNFINISHED = frozenset({TrialState.RUNNING, TrialState.PAUSED})


class Reporter(Listener):
    """Forwards events to ``watcher``, sends trials and answers to boards, and notes failed deliveries."""

    def __init__(self, boards: BoardProcess, watcher: Listener) -> None:
        self._boards, self._watcher = boards, watcher
        self._starts: dict[int, float] = {}
        self._unfinished: set[int] = set()

    @contextmanager
    def reporting(self, store: Store, spec: StudySpec, train_samples: int | None) -> Iterator[None]:
        self._store, self._name, self._metric = store, spec.name, spec.target.metric
        self._train_samples = train_samples
        study = store.studies.get(spec.name)
        target = study.target
        self._tell(
            "opened",
            name=study.name,
            mark=study.mark,
            metric=target.metric,
            about={
                "target": target.in_words,
                "objective": study.objective,
                "device": "unknown" if study.environment is None else study.environment.device_name,
                "spec": yaml.safe_dump(without_secrets(spec.model_dump(mode="json")), sort_keys=False),
            },
        )
        self._unfinished = {trial.number for trial in store.trials.of(spec.name) if trial.state in UNFINISHED}
        try:
            yield
        finally:
            with suppress(BSSearchError):  # a lost database must not raise a second error
                self._tell_the_rest()

    def opened(self, study: StudyRecord, database: str, continued: bool) -> None:
        self._watcher.opened(study, database, continued)

    def note(self, message: str) -> None:
        self._watcher.note(message)

    def started(self, trial: TrialRecord, history: History) -> None:
        self._watcher.started(trial, history)
        at = self._starts[trial.number] = trial.created_at.timestamp()
        self._unfinished.add(trial.number)
        parameters = {**_sizes(trial.configuration), **parameters_of(trial.configuration)}
        parameters |= {"phase": str(trial.phase), "seed": trial.seed}
        if trial.retry_of is not None:
            parameters["retry_of"] = trial.retry_of
        self._tell("started", number=trial.number, at=at, parameters=parameters)

    def observed(self, observed: TrialObserved) -> None:
        self._watcher.observed(observed)
        number, one = observed.number, observed.observation
        point = (
            one.step,
            self._starts.get(number, 0.0) + one.train_seconds,
            dict(
                _numbers(
                    {
                        "train_seconds": one.train_seconds,
                        "samples": one.samples,
                        "epoch": one.samples / self._train_samples if self._train_samples else None,
                        "learning_rate": one.learning_rate,
                        "loss": one.loss,
                        self._metric: one.metric,
                    }
                )
            ),
        )
        self._tell("observed", number=number, points=[point])

    def ended(self, trial: TrialRecord, history: History) -> None:
        self._watcher.ended(trial, history)
        if trial.state is not TrialState.PAUSED:
            self._unfinished.discard(trial.number)
        self._tell_end(trial)

    def search_ended(self, reason: str, history: History) -> None:
        self._watcher.search_ended(reason, history)
        with suppress(BSSearchError):
            self._tell_answer()

    def _tell_the_rest(self) -> None:
        for trial in self._store.trials.of(self._name) if self._unfinished else []:
            if trial.number in self._unfinished and trial.state not in UNFINISHED and trial.outcome is not None:
                self._tell_end(trial)
        if self._starts:
            self._tell_answer()

    def _tell_end(self, trial: TrialRecord) -> None:
        outcome = trial.outcome
        figures = {} if outcome is None else asdict(outcome)
        self._tell(
            "ended",
            number=trial.number,
            state=str(trial.state),
            reason="" if outcome is None else "; ".join([outcome.reason, *outcome.warnings]),
            at=time.time() if trial.ended_at is None else trial.ended_at.timestamp(),
            figures=dict(_numbers({**figures, "steps_x_step_time_s": trial.steps_x_step_time_s})),
            is_elsewhere=trial.number not in self._starts,
        )

    def _tell_answer(self) -> None:
        with suppress(TargetNotReachedError):
            found = answer(self._store, self._name)
            words = {
                "headline": headline(found),
                "verdict": "provisional" if found.provisional else "final",
                "document": found.model_dump_json(indent=2),
            }
            figures = found.model_dump(include={"optimal", "speedup", "within_5_percent"})
            figures["flat_range"] = dict(zip(("low", "high"), found.flat_range, strict=True))
            self._tell(
                "answered",
                trials=len(self._store.trials.of(self._name)),
                words=words,
                parameters={**_sizes(found.optimal), **found.optimal.parameters},
                figures=dict(_numbers(figures)),
            )

    def _tell(self, method: str, **arguments: Any) -> None:
        self._boards.report(method, **arguments)
        self._pass_on_notes()

    def close(self) -> None:
        self._boards.close()
        self._pass_on_notes()

    def _pass_on_notes(self) -> None:
        while self._boards.notes:
            self._watcher.note(self._boards.notes.popleft())


def _sizes(one: Any) -> dict[str, Any]:
    return {name: getattr(one, name) for name in ("batch_size", "micro_batch_size", "accumulation_steps")}


def _numbers(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{before}{name}_")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{before}{name}", float(value)


@contextmanager
def reported(spec: StudySpec, watcher: Listener, *, reports: bool) -> Iterator[tuple[Listener, Reporter | None]]:
    """Yield a run's listener, and its reporter or None; raise `UsageError` for an unusable board."""
    names = boards_of(spec) if reports else ()
    check_boards(names)
    if not names:
        yield watcher, None
        return
    try:
        reporter = Reporter(BoardProcess(names), watcher)
    except OSError as error:
        watcher.note(
            f"the boards in log = {', '.join(names)} receive no trial, because their process cannot start: {error}"
        )
        yield watcher, None
        return
    try:
        yield reporter, reporter
    finally:
        reporter.close()
