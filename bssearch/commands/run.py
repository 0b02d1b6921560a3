"""Run, resume and confirm a study."""

from __future__ import annotations

import time
from typing import Any

from pydantic import ValidationError

from bssearch.analysis.objectives import objective_of
from bssearch.commands.best import Answer
from bssearch.commands.launch import HERE, Launch
from bssearch.commands.opening import GivenSpec, OpenStudy, loaded, opened
from bssearch.errors import UsageError, problem_in_words
from bssearch.records import Phase
from bssearch.search import after_search
from bssearch.search import confirmation as confirm
from bssearch.search.finding import answer, quick_prior, stored_quick
from bssearch.search.history import History
from bssearch.search.stored_finding import stored_end
from bssearch.spec import StudySpec
from bssearch.spec.parts import ConfirmSpec


def run_study(spec: GivenSpec, launch: Launch = HERE, *, from_quick: bool = False) -> Answer:
    """Run or resume a study and return the answer.

    Several processes and machines may run one study. ``from_quick`` makes a quick answer to start from, if none is
    stored. Refused unless ``launch`` allows it: changed workload code, whose trials are not comparable, and a busy GPU.

    Raises any `BSSearchError`: `UsageError` for ``from_quick`` with an objective other than seconds, and
    `TargetNotReachedError` if no trial reached the target.

    ::

        answer = bssearch.run_study("digits")  # a shipped study, a file, a dict or a StudySpec
        print(answer.optimal.batch_size)
    """
    spec, launch = loaded(spec, launch)
    if from_quick and not objective_of(spec).trials_race:
        raise UsageError(
            f"objective = {spec.objective!r}: a quick answer gives seconds to a target, the search does not",
            hint="run the study without --from-quick",
        )
    with opened(spec, launch, reports=True) as study:
        known = stored_quick(study.store, spec.name) or stored_end(study.store, spec.name)
        if from_quick and known is None:
            from bssearch.commands.quick import SECONDS, QuickPlan, stored_quick_answer

            stored_quick_answer(study, QuickPlan(SECONDS, time.monotonic()), spec.preset)
        if (prior := quick_prior(study.store, study.spec)) is not None:
            low, high = prior.interval
            study.listener.note(
                f"the search begins at the quick answer: batch {prior.optimal.batch_size}, {low} to {high} with 90 %"
            )
        return run_opened(study)


def run_opened(study: OpenStudy) -> Answer:
    """Run an open study to its end."""
    study.driver().run()
    grow(study)
    return answer(study.store, study.spec.name)


def grow(study: OpenStudy) -> None:
    """Search batch schedules if asked, and confirm the best."""
    asked = any(trial.phase is Phase.GROWTH for trial in study.store.trials.of(study.spec.name))
    if study.spec.space.batch_schedule is None and not asked:
        return
    study.driver().run_planned(after_search.next_trial, Phase.GROWTH)
    study.driver().run_planned(after_search.next_repeat, Phase.AUDIT)
    if not any(trial.phase is Phase.GROWTH for trial in study.store.trials.of(study.spec.name)):
        study.listener.note(
            "no trial lets the batch grow: no schedule of space.batch_schedule changes the batch size within a trial's "
            "limit, or the best batch that stays has no steps to the target"
        )


def with_confirmation(
    spec: StudySpec, *, runs: int | None = None, max_runs: int | None = None, train_seconds: float | None = None
) -> StudySpec:
    """Change confirmation settings; None keeps one, but a study without confirmation gets the default ``runs``."""
    stored = spec.confirm
    if runs is None and not stored.runs:
        runs = ConfirmSpec().runs
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
        raise UsageError(f"confirm{given}: {problem_in_words(problem)}") from None
    return spec.model_copy(update={"confirm": settings})


def confirm_study(spec: GivenSpec, launch: Launch = HERE, *, to_budget_runs: int | None = None) -> Answer:
    """Run missing confirmation and return the answer; can be resumed.

    ``to_budget_runs``: runs of each finalist that train to the full limit instead. Raises as `run_study`.

    Example: ``answer = bssearch.confirm_study("study.yaml", to_budget_runs=3)``
    """
    spec, launch = loaded(spec, launch)
    with opened(spec, launch, keeps_name=True, reports=True) as study:
        driver = study.driver()
        if to_budget_runs is None:
            driver.run_planned(confirm.next_run, Phase.CONFIRM)
            if (told := confirm.ending(study.history())) is not None:
                study.listener.note(told)
        else:
            study.listener.note(_plan(study.history(), to_budget_runs))
            driver.run_planned(after_search.next_run(to_budget_runs), Phase.TO_BUDGET)
        return answer(study.store, spec.name)


def _plan(history: History, runs: int) -> str:
    sizes = sorted({one.batch_size for one in after_search.finalists(history)})
    seconds = history.spec.budget.trial_train_seconds
    return f"batch {', '.join(map(str, sizes))}: {runs} runs each, all to {seconds:g} train seconds"
