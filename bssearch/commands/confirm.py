"""``confirm``: more runs for a stored study, of its confirmation or of its finalists to their full budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bssearch.commands.answer import Answer
from bssearch.commands.opening import ExecutorFactory, Launch, OpenStudy, opened
from bssearch.errors import UsageError
from bssearch.history import History
from bssearch.records import Phase
from bssearch.search import confirmation as confirm
from bssearch.search import to_budget
from bssearch.search.finding import answer
from bssearch.search.listener import Listener
from bssearch.spec import StudySpec
from bssearch.spec.parts import ConfirmSpec


def with_confirmation(
    spec: StudySpec, *, runs: int | None = None, max_runs: int | None = None, train_seconds: float | None = None
) -> StudySpec:
    """Return a spec with other settings of its confirmation; None leaves one as it is.

    Raises `UsageError` for fewer runs than it has, and for settings that do not go together.
    """
    stored = spec.confirm
    if runs is not None and runs < stored.runs:
        raise UsageError(f"--runs {runs} must be >= confirm.runs = {stored.runs} of the stored study {spec.name!r}")
    if runs is not None and max_runs is None and stored.max_runs is not None and runs > stored.max_runs:
        max_runs = runs
    asked = {"runs": runs, "max_runs": max_runs, "train_seconds": train_seconds}
    changed: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    try:
        settings = ConfirmSpec.model_validate({**stored.model_dump(), **changed})
    except ValidationError as error:
        problem = error.errors()[0]
        given = "".join(f".{name} = {problem['input']}" for name in problem["loc"])
        raise UsageError(f"confirm{given}: {problem['msg'].removeprefix('Value error, ')}") from None
    if settings.runs == 0:
        raise UsageError(f"confirm.runs = 0 of the stored study {spec.name!r}: --runs must say how many to make")
    return spec.model_copy(update={"confirm": settings})


def confirm_study(
    spec: StudySpec,
    *,
    to_budget_runs: int | None = None,
    db: str | None = None,
    folder: Path | str = ".",
    data_dir: Path | str | None = None,
    allow_busy: bool = False,
    workload: Any = None,
    listener: Listener | None = None,
    progress: bool | None = None,
    make_executor: ExecutorFactory | None = None,
) -> Answer:
    """Run what is missing of a stored study's confirmation, store its settings with the study, and return the answer.

    With ``to_budget_runs`` the finalists are trained so often to their full train seconds instead, whenever they reach
    the target. ``workload`` is the code in the place of the spec's: a class, an object, or its name. The other
    arguments and the errors are those of `run_study`. Interrupted, the same call goes on.
    """
    launch = Launch(
        db=db,
        folder=folder,
        data_dir=data_dir,
        allow_busy=allow_busy,
        workload=workload,
        keeps_name=True,
        listener=listener,
        progress=progress,
        reports=True,
        make_executor=make_executor,
    )
    with opened(spec, launch) as study:
        driver = study.driver()
        if to_budget_runs is None:
            driver.run_planned(confirm.next_run, Phase.CONFIRM)
            _note(study, confirm.ending(study.history()))
        else:
            _note(study, _plan(study.history(), to_budget_runs))
            driver.run_planned(to_budget.next_run(to_budget_runs), Phase.TO_BUDGET)
        return Answer.of(answer(study.store, spec.name))


def _plan(history: History, runs: int) -> str:
    sizes = sorted({one.batch_size for one in to_budget.finalists(history)})
    seconds = history.spec.budget.trial_train_seconds
    return f"batch {', '.join(map(str, sizes))}: {runs} runs each, all to {seconds:g} train seconds"


def _note(study: OpenStudy, message: str | None) -> None:
    if message is not None:
        study.listener.note(message)
