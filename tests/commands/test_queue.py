"""A worker and what it is asked for, in this process: what it serves, refuses, and leaves to others."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bssearch import (
    DatabaseError,
    InterruptedRunError,
    Launch,
    LaunchError,
    OtherDeviceError,
    QuestionChangedError,
    SpecError,
    Store,
    TargetNotReachedError,
    UsageError,
    WorkloadError,
    load_spec,
    open_store,
)
from bssearch.commands.queue.submissions import (
    asked_in_file,
    cancel_study,
    pause_study,
    queued_studies,
    resume_study,
    settle_left_behind,
    submit_study,
)
from bssearch.commands.queue.worker import Meter, Serving, ended_by, run_worker
from bssearch.records import Lease, TrialOutcome, TrialState
from bssearch.spec.templates import NewSubmission, SubmissionState
from tests.cli.task import INLINE, UNCONFIRMED, bssearch, environment, refused, space_of
from tests.cli.worker_process import make_node
from tests.factories import make_environment, make_plan, make_trial, not_none, store_study
from tests.schema import execute
from tests.storage.test_queue import record

QUICK: dict[str, Any] = {
    "confirm": UNCONFIRMED,
    "budget": {"trials": 3, "trial_train_seconds": 2.0},
    "space": space_of(32, 64),
    "executor": INLINE,
}


WORKER, ITS_DRIVER, BY_HAND = "node-1/7/a/99/w", "node-1/7/a/99/d", "node-1/8/a/98/d"
"""Names of a worker, of its driver in the same process, and of a driver in another one."""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'queue.db'}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with open_store(url) as opened:
        yield opened


@pytest.fixture
def node(tmp_path: Path) -> Path:
    return make_node(tmp_path / "node", **QUICK)


def serve(node: Path, url: str, *, hears: Callable[[str], object] = lambda line: None, **options: Any) -> str:
    """Have a worker serve a node's templates until nothing is left; return what it said, which ``hears`` is told."""
    lines: list[str] = []

    def tell(line: str) -> None:
        lines.append(line)
        hears(line)

    run_worker(node / "templates.yaml", Launch(db=url), Serving(until_empty=True, **options), tell=tell)
    return "\n".join(lines)


def state(store: Store, name: str) -> tuple[str, str]:
    found = store.queue.submission(name)
    return found.state.value, found.reason


def put(store: Store, name: str, **changes: Any) -> None:
    """Store a submission past all that `submit` refuses, as who may write the table could."""
    values: dict[str, Any] = {"template": "task", "values": {}, "owner": "ann"}
    store.queue.submit(NewSubmission(name=name, **{**values, **changes}))


@pytest.mark.slow
def test_a_study_is_served_to_its_end_and_says_what_was_found(node: Path, url: str, store: Store) -> None:
    submit_study(store, "task", {"budget.trials": 4, "space.batch_size": [16, 64]}, name="mine", owner="ann")
    said = serve(node, url, tags=("a:b",))
    assert state(store, "mine")[0] == "done" and "reaches accuracy ≥ 0.93" in state(store, "mine")[1], said
    assert len(store.trials.of("mine")) == 4
    assert {trial.configuration.batch_size for trial in store.trials.of("mine")} <= {16, 32, 64}
    [row] = queued_studies(store, everything=True).submissions
    assert (row.trials, row.position) == (4, None) and row.served_seconds > 0
    [worker] = queued_studies(store, everything=True).workers
    assert (worker.is_here, worker.tags, worker.serving) == (False, ["a:b"], None) and worker.device is not None
    assert queued_studies(store).workers == [] == queued_studies(store).submissions


@pytest.mark.slow
def test_each_scale_of_a_spec_is_a_template(tmp_path: Path, url: str, store: Store) -> None:
    scales = [
        {"parameters": 10, "samples": one, "target": target, "workload_settings": {"step_seconds": one / 1e6}}
        for one, target in ((9, 0.93), (1, 0.91), (4, 0.92))
    ]
    node = make_node(tmp_path / "node", **QUICK, scales=scales)
    put(store, "mine.1", template="task.1")
    put(store, "mine.3", template="task.3")
    put(store, "whole")
    said = serve(node, url)
    assert [state(store, name)[0] for name in ("mine.1", "mine.3", "whole")] == ["done", "done", "waiting"], said
    assert [store.studies.get(name).target.value for name in ("mine.1", "mine.3")] == [0.91, 0.93]
    assert queued_studies(store, everything=True).workers[0].templates.keys() == {"task.1", "task.2", "task.3"}
    with pytest.raises(UsageError, match=r"no worker has a template 'task'; choose from task\.1, task\.2, task\.3"):
        submit_study(store, "task", {}, name="other")


@pytest.mark.slow
def test_a_study_without_a_trial_at_its_target_is_done_and_says_so(tmp_path: Path, url: str, store: Store) -> None:
    rates, default = {"low": 1e-9, "high": 1e-8}, {"batch_size": 32, "learning_rate": 1e-9}
    slow = {"space": {"batch_size": [32, 64], "learning_rate": rates}, "default": default}
    node = make_node(tmp_path / "node", **QUICK | slow | {"budget": {"trials": 3, "trial_train_seconds": 0.1}})
    put(store, "vain", values={"budget.trials": 3})
    serve(node, url)
    assert state(store, "vain")[0] == "done" and "0 of 3 trials reached" in state(store, "vain")[1]


@pytest.mark.slow
def test_that_what_runs_is_stopped_is_said_once(
    tmp_path: Path, url: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it has stopped its file may be on its way to a store for a while."""
    monkeypatch.setattr("bssearch.commands.queue.worker.LOOK_SECONDS", 0.01)
    node = make_node(tmp_path / "node", **{**QUICK, "workload_settings": {"step_seconds": 0.2}})
    put(store, "mine")
    said = serve(node, url, hears=lambda line: "trial 1 runs" in line and pause_study(store, "mine"))
    assert said.count("pausing or stopping the running trials") == 1, said


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"budget.trials": 41}, "budget.trials = 41 must be a whole number from 1 to 40"),
        ({"workload": "evil.py:Evil"}, "workload is not a value of the template 'task'"),
        ({"command": "rm -rf ."}, "command is not a value of the template 'task'"),
    ],
)
def test_a_row_with_other_values_has_failed(
    node: Path, url: str, store: Store, values: dict[str, Any], said: str
) -> None:
    put(store, "wrong", values=values)
    assert "wrong: failed" in serve(node, url)
    assert state(store, "wrong")[0] == "failed" and said in state(store, "wrong")[1]
    assert store.studies.summaries() == []


def test_values_that_another_worker_takes_are_left_to_it(tmp_path: Path, url: str, store: Store) -> None:
    node = make_node(tmp_path / "node", values={"budget.trials": {"type": "integer", "low": 1, "high": 2}}, **QUICK)
    store.queue.keep_worker(
        record("other", templates={"task": {"budget.trials": {"type": "integer", "low": 1, "high": 9}}})
    )
    put(store, "large", values={"budget.trials": 5})
    assert "large: waiting: budget.trials = 5 must be" in serve(node, url)
    assert state(store, "large")[0] == "waiting"
    assert re.match(r"on \S+: budget.trials = 5 must be", state(store, "large")[1])


@pytest.mark.slow
def test_a_workload_that_is_broken_has_failed_and_resume_puts_it_back(node: Path, url: str, store: Store) -> None:
    whole = (node / "task.py").read_text()
    (node / "task.py").write_text("raise RuntimeError('out of order')")
    put(store, "mine")
    serve(node, url)
    assert state(store, "mine")[0] == "failed" and "out of order" in state(store, "mine")[1]
    (node / "task.py").write_text(whole)
    resume_study(store, "mine")
    serve(node, url)
    assert state(store, "mine")[0] == "done"


@pytest.mark.slow
def test_a_study_of_another_kind_of_device_stays_and_the_worker_serves_others(
    node: Path, url: str, store: Store
) -> None:
    for name in ("elsewhere", "mine"):
        put(store, name)
    store_study(store, load_spec(node / "task.yaml", ["name=elsewhere"]), make_environment(device_name="H200"))
    said = serve(node, url)
    assert "elsewhere: waiting: the study 'elsewhere' was measured on" in said
    assert "(this worker skips the study for 600 s)" in said
    assert (state(store, "elsewhere")[0], state(store, "mine")[0]) == ("waiting", "done")
    assert " was measured on H200" in queued_studies(store).submissions[0].reason
    assert store.trials.of("elsewhere") == []


@pytest.mark.slow
@pytest.mark.parametrize("broken", [None, "workload: [", "name: task\n"])
def test_a_template_whose_spec_breaks_while_the_worker_runs_keeps_its_submissions_and_holds_up_no_others(
    node: Path, url: str, store: Store, broken: str | None
) -> None:
    spec = node / "task.yaml"
    (node / "other.yaml").write_text(spec.read_text())
    (node / "templates.yaml").write_text("templates: {task: {spec: task.yaml}, other: {spec: other.yaml}}")
    put(store, "mine")
    put(store, "next", template="other")
    said = serve(node, url, hears=lambda _: spec.unlink(True) if broken is None else spec.write_text(broken))
    assert (state(store, "mine")[0], state(store, "next")[0]) == ("waiting", "done"), said
    assert "template 'task' is unusable: " in state(store, "mine")[1]
    assert "mine: waiting: template 'task' is unusable: " in said


def test_what_needs_other_tags_or_another_template_is_not_touched(node: Path, url: str, store: Store) -> None:
    put(store, "tagged", tags=("gpu:h200", "fast"))
    put(store, "other", template="other")
    assert "no study that this worker can serve soon" in serve(node, url, tags=("gpu:h200",))
    assert [one.served_seconds for one in store.queue.submissions()] == [0.0, 0.0]
    assert {one.state for one in store.queue.submissions()} == {SubmissionState.WAITING}


@pytest.mark.parametrize("options", [{"slots": 0}, {"turn_seconds": 0.0}, {"tags": ("no tag",)}, {"device": "abacus"}])
def test_a_worker_s_own_options_are_checked(node: Path, url: str, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        serve(node, url, **options)


# Reasons, and what is left behind -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"template": "other"}, "no present worker serves this study: no worker has a template 'other'"),
        (
            {"values": {"budget.trials": 9}},
            "this study: budget.trials = 9 must be a whole number from 1 to 4",
        ),
        (
            {"tags": ("gpu:h200", "a:b")},
            "no present worker with this template has all tags of the study (fewest missing: gpu:h200)",
        ),
        ({"tags": ("a:b",)}, ""),
        ({}, ""),
    ],
)
def test_the_queue_says_why_no_worker_serves_what_waits(
    tmp_path: Path, url: str, changes: dict[str, Any], said: str
) -> None:
    with open_store(url) as store:
        put(store, "mine", **changes)
        assert [one.reason for one in queued_studies(store).submissions] == [""]  # of no worker nothing is known
        offered = {"task": {"budget.trials": {"type": "integer", "low": 1, "high": 4}}}
        store.queue.keep_worker(record("untagged", templates=offered, tags=()))
        store.queue.keep_worker(record("tagged", templates=offered, tags=("a:b",)))
        [row] = queued_studies(store).submissions
        assert said in row.reason and bool(row.reason) == bool(said)
    shown = bssearch("queue", "list", "--db", url, cwd=tmp_path).stdout
    assert (said.split(":")[0] in " ".join(shown.split())) and ("no present worker" in " ".join(shown.split())) == bool(
        said
    )


def test_a_worker_with_the_tags_that_does_not_take_the_values_is_none_that_serves_it(store: Store) -> None:
    put(store, "mine", values={"budget.trials": 9}, tags=("a:b",))
    for name, most, tags in (("small", 4, ("a:b",)), ("large", 40, ())):
        offered = {"task": {"budget.trials": {"type": "integer", "low": 1, "high": most}}}
        store.queue.keep_worker(record(name, templates=offered, tags=tags))
    [row] = queued_studies(store).submissions
    lacking = "no present worker with this template has all tags of the study (fewest missing: a:b)"
    assert row.reason == f"{lacking}; start a worker with all tags"


def test_what_kept_one_worker_from_a_study_is_forgotten_once_another_serves_it(store: Store) -> None:
    for name in ("one", "two"):
        store.queue.keep_worker(record(name))
    put(store, "mine")
    store.queue.begin_shift("one", {"mine"})
    store.queue.end_shift("one", 1.0, SubmissionState.WAITING, "on one: no GPU")
    assert state(store, "mine") == ("waiting", "on one: no GPU")
    store.queue.begin_shift("two", {"mine"})
    assert state(store, "mine") == ("waiting", "")


@pytest.mark.slow
def test_a_study_that_is_done_goes_on_with_a_larger_budget(node: Path, url: str, store: Store) -> None:
    submit_study(store, "task", {"budget.trials": 3}, name="mine", owner="ann")
    serve(node, url)
    before = store.queue.submission("mine")
    assert (before.state, len(store.trials.of("mine"))) == (SubmissionState.DONE, 3)
    again = submit_study(store, "task", {"budget.trials": 5}, name="mine", owner="ann")
    assert (again.state, again.reason, again.values) == (SubmissionState.WAITING, "", {"budget.trials": 5})
    assert again.served_seconds == before.served_seconds
    serve(node, url)
    assert (state(store, "mine")[0], len(store.trials.of("mine"))) == ("done", 5)


def test_only_its_owner_submits_a_study_again_from_its_template_and_once_it_is_over(store: Store) -> None:
    put(store, "mine")
    for changes in ({}, {"owner": "bert"}):
        with pytest.raises(UsageError, match="'mine' was already submitted by ann from the template task"):
            put(store, "mine", **changes)
    store.queue.set_state("mine", SubmissionState.CANCELLED, "")
    for changes in ({"owner": "bert"}, {"template": "other"}):
        with pytest.raises(UsageError, match="and is cancelled"):
            put(store, "mine", **changes)
    put(store, "mine", priority=2.0)
    assert [(one.name, one.priority) for one in store.queue.submissions()] == [("mine", 2.0)]


def test_what_a_killed_worker_left_of_a_cancelled_study_is_settled_once_nobody_is_at_work_on_it(
    node: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver_runs = True
    monkeypatch.setattr("bssearch.commands.queue.submissions.is_alive", lambda owner: driver_runs)
    put(store, "mine")
    store_study(store, load_spec(node / "task.yaml", ["name=mine"]))
    store.queue.keep_worker(record(WORKER))
    lease = Lease(owner=ITS_DRIVER, seconds=60.0)
    for _ in range(2):
        store.trials.start("mine", make_plan(), environment=make_environment(), lease=lease)
    store.trials.finish("mine", 2, TrialOutcome(state=TrialState.PAUSED, reason="later"), steps_x_step_time_s=None)
    settle_left_behind(store)
    store.queue.set_state("mine", SubmissionState.CANCELLED, "by ann")
    settle_left_behind(store)
    assert [trial.state for trial in store.trials.of("mine")] == [TrialState.RUNNING, TrialState.PAUSED]
    driver_runs = False
    settle_left_behind(store)
    assert [trial.state for trial in store.trials.of("mine")] == [TrialState.LOST, TrialState.CANCELLED]
    assert store.queue.unsettled() == {}


@pytest.mark.slow
def test_what_cannot_be_settled_keeps_a_worker_neither_from_other_cancelled_studies_nor_from_serving(
    tmp_path: Path, node: Path, url: str
) -> None:
    with open_store(url) as store:
        for name in ("broken", "left"):
            put(store, name)
            store_study(store, load_spec(node / "task.yaml", [f"name={name}"]))
            store.trials.start(
                name, make_plan(), environment=make_environment(), lease=Lease(owner=ITS_DRIVER, seconds=60.0)
            )
            store.trials.finish(
                name, 1, TrialOutcome(state=TrialState.PAUSED, reason="later"), steps_x_step_time_s=None
            )
            store.queue.set_state(name, SubmissionState.CANCELLED, "by ann")
        store.queue.keep_worker(record(WORKER, left_at=datetime.now(UTC)))
        put(store, "mine")
    execute(tmp_path / "queue.db", "UPDATE bss_study SET spec = '{\"a\": 1e400}' WHERE name = 'broken'")
    said = serve(node, url)
    assert said.count("broken: cancelled, but ending the remaining trials failed: ") == 1, said
    with open_store(url) as store:
        assert state(store, "mine")[0] == "done"
        assert store.queue.unsettled() == {"broken": [1]}


def test_what_somebody_has_paused_who_ran_a_cancelled_study_by_hand_is_left_to_them(node: Path, store: Store) -> None:
    put(store, "mine")
    store.queue.set_state("mine", SubmissionState.CANCELLED, "by ann")
    store.queue.keep_worker(record(WORKER))
    store_study(store, load_spec(node / "task.yaml", ["name=mine"]))
    paused = TrialOutcome(state=TrialState.PAUSED, reason="stopped")
    for number, owner in enumerate((BY_HAND, ITS_DRIVER), start=1):
        store.trials.start("mine", make_plan(), environment=make_environment(), lease=Lease(owner=owner, seconds=60.0))
        store.trials.finish("mine", number, paused, steps_x_step_time_s=None)
    settle_left_behind(store)
    assert [trial.state for trial in store.trials.of("mine")] == [TrialState.PAUSED, TrialState.CANCELLED]


@pytest.mark.slow
def test_what_cannot_be_settled_keeps_no_worker_from_what_waits(
    node: Path, url: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Store] = []

    def fail(store: Store) -> None:
        tries.append(store)
        if len(tries) > 5:
            pytest.fail("nothing else is done")
        raise DatabaseError("no right to")

    monkeypatch.setattr("bssearch.commands.queue.worker.settle_left_behind", fail)
    monkeypatch.setattr("bssearch.commands.queue.worker.AWAY_FOR_S", 0.3)
    monkeypatch.setattr("bssearch.commands.queue.worker.SETTLE_SECONDS", 0.1)
    put(store, "mine")
    monkeypatch.setattr(
        "bssearch.commands.queue.worker.QueueWorker._may_come", lambda worker: bool(store.queue.waiting())
    )
    serve(node, url)
    assert state(store, "mine")[0] == "done"


@pytest.mark.slow
def test_a_study_that_is_submitted_again_while_it_runs_is_served_with_what_is_asked_now(
    node: Path, url: str, store: Store
) -> None:
    put(store, "mine", values={"budget.trials": 3})

    def hears(line: str) -> None:
        if "trial 1 runs" in line:
            cancel_study(store, "mine")
            put(store, "mine", values={"budget.trials": 5})

    said = serve(node, url, hears=hears)
    assert state(store, "mine")[0] == "done", said
    assert len([one for one in store.trials.of("mine") if one.state is TrialState.REACHED]) <= 5
    assert len(store.trials.of("mine")) >= 5, said


@pytest.mark.parametrize(
    ("error", "state", "alone"),
    [
        (InterruptedRunError("stopped"), SubmissionState.WAITING, 0.0),
        (TargetNotReachedError("none"), SubmissionState.DONE, 0.0),
        (LaunchError("no GPU"), SubmissionState.WAITING, 15.0),
        (OtherDeviceError("another"), SubmissionState.WAITING, 600.0),
        (DatabaseError("disk full"), SubmissionState.WAITING, 60.0),
        (OSError("no space left"), SubmissionState.WAITING, 600.0),
        (WorkloadError("broken"), SubmissionState.FAILED, 0.0),
        (SpecError("wrong"), SubmissionState.FAILED, 0.0),
        (QuestionChangedError("other", changes={}, hint=""), SubmissionState.FAILED, 0.0),
    ],
)
def test_whose_fault_an_error_is(error: Exception, state: SubmissionState, alone: float) -> None:
    end = ended_by(error)
    assert (end.state, end.alone_seconds) == (state, alone)
    assert end.alone_after(0) == alone


def test_the_end_of_a_shift_keeps_the_hint_of_its_error() -> None:
    assert ended_by(SpecError("the spec is wrong", hint="correct it")).reason == "the spec is wrong; correct it"


def test_what_fails_on_a_node_again_and_again_is_left_alone_for_longer_and_longer() -> None:
    end = ended_by(LaunchError("no GPU"))
    assert end.failed_here
    assert [end.alone_after(failures) for failures in (1, 2, 3, 4, 5)] == [15.0, 60.0, 240.0, 600.0, 600.0]


def test_slot_seconds_are_those_of_trials_and_of_one_slot_without_any() -> None:
    now = 0.0
    meter = Meter(lambda line: None, clock=lambda: now)
    history: Any = None
    now = 3.0  # loads
    meter.started(make_trial(1), history)
    now = 5.0
    meter.started(make_trial(2), history)
    now = 9.0
    meter.ended(make_trial(1), history)
    assert meter.take() == 3 + 2 + 2 * 4
    now = 10.0
    meter.ended(make_trial(2), history)
    now = 12.0
    assert meter.take() == 1 + 2


# Submitting -----------------------------------------------------------------------------------------------------------


def test_what_no_worker_offers_is_refused_at_once(store: Store) -> None:
    submit_study(store, "unknown", {}, name="before")  # no worker has been seen: nothing is known
    store.queue.keep_worker(record())
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("other", {}, "no worker has a template 'other'; choose from digits"),
        ("digits", {"budget.trials": 10}, r"budget.trials = 10 must be a whole number from 1 to 9"),
        ("digits", {"workload": "x.py:X"}, "is not a value of the template 'digits'"),
    ]
    for template, values, said in cases:
        with pytest.raises(UsageError, match=said):
            submit_study(store, template, values, name="a")
    store.queue.keep_worker(
        record("wider", templates={"digits": {"budget.trials": {"type": "integer", "low": 1, "high": 99}}})
    )
    assert submit_study(store, "digits", {"budget.trials": 10}, name="a").values == {"budget.trials": 10}


def test_a_file_gives_template_name_and_nested_values(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("template: digits\nname: mine\nbudget: {trials: 4}\nspace: {batch_size: [8, 16]}\nseed: 1\n")
    asked = asked_in_file(path)
    assert (asked.template, asked.name) == ("digits", "mine")
    assert asked.values == {"budget.trials": 4, "space.batch_size": [8, 16], "seed": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("workload: digits\ntarget: {value: 1}", "the queue stores no code"),
        ("template: digits\ncommand: [rm]", "command cannot be submitted"),
        ("template: digits\nexecutor: {slots: 4}", "executor.slots cannot be submitted"),
        ("name: mine", "template = null must name a worker's template"),
        ("template: digits\nspace: {optimizer: [{name: sgd}]}", "space.optimizer = .* must be a number"),
        ("template: digits\nseed: null", "seed = null must be a number"),
        ("template: digits\nbudget: {trials: 4}\nbudget.trials: 5", "budget.trials appears twice: 4 and 5"),
        ("- digits", "write a mapping of template, name and values"),
        ("template: [", "unreadable YAML"),
    ],
)
def test_a_file_that_carries_anything_else_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=said):
        asked_in_file(path)


def test_pause_resume_and_cancel_change_the_state(store: Store) -> None:
    put(store, "one")
    assert pause_study(store, "one").reason.startswith("paused by ")
    assert resume_study(store, "one").state is SubmissionState.WAITING
    assert cancel_study(store, "one").state is SubmissionState.CANCELLED
    with pytest.raises(UsageError, match="'one' is cancelled and cannot become paused"):
        pause_study(store, "one")


# Commands -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("submit digits", 2, "the study needs a name"),
        ("submit digits --name a b", 2, "must have the form KEY=VALUE"),
        ("submit digits --name a --not-before tomorrow", 2, "'tomorrow' is not a date and time"),
        ("submit digits --name a --not-before 2026-12-01T08:00", 2, "must have an offset from UTC"),
        ("submit digits --name a --priority 0", 2, "priority = 0 must be from 1e-06 to 1e+06"),
        ("submit digits --name a workload=x.py:X", 2, "workload cannot be submitted"),
        ("submit digits --name ../a", 2, "invalid study name"),
        ("submit missing.yaml --name a", 3, "no file of a submission 'missing.yaml'"),
        ("submit task budget.trials=3 budget.trials=4 --name a", 2, "budget.trials appears twice"),
        ("submit task --owner= --name a", 2, "owner = '' must be a name"),
        ("submit ./x.toml", 2, "'./x.toml' is not a name of a template"),
        ("submit digits --name a --not-before 0001-01-01T00:00+10:00", 2, "must be from 0001-01-02 to 9999-12-30"),
        *((f"{verb} none", 3, "no submission 'none'") for verb in ("cancel", "pause", "resume")),
    ],
)
def test_wrong_words_are_named(tmp_path: Path, url: str, words: str, code: int, said: str) -> None:
    open_store(url).close()
    assert said in refused(tmp_path, "queue", *words.split(), "--db", url, code=code)


# A worker that is told to stop ----------------------------------------------------------------------------------------


PROGRAM = """
import sys, threading, time
from bssearch.commands.queue.worker import Stop

obeyed = threading.Event()
stop = Stop(lambda: (print("obeys", flush=True), obeyed.set()), lambda: print("kills", flush=True), within=0.5)
with stop:
    print("ready", flush=True)
    {body}
print("stopped", flush=True)
"""


def said_after(number: int, body: str) -> tuple[int, list[str]]:
    """Send a signal to a program once it is ready; return its exit code, and what it said."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=body)], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert not_none(process.stdout).readline() == "ready\n"
    process.send_signal(number)
    rest, _ = process.communicate(timeout=120)
    return process.returncode, rest.splitlines()


@pytest.mark.parametrize(
    ("number", "body", "ends"),
    [
        (signal.SIGTERM, "obeyed.wait(); time.sleep(0)", (0, ["obeys", "stopped"])),
        pytest.param(signal.SIGINT, "obeyed.wait()", (0, ["obeys", "stopped"]), marks=pytest.mark.slow),
        (signal.SIGTERM, "stop.wait(1e6); obeyed.wait()", (0, ["obeys", "stopped"])),
        pytest.param(signal.SIGTERM, "time.sleep(1e6)", (1, ["obeys", "kills"]), marks=pytest.mark.slow),
    ],
    ids=["SIGTERM", "SIGINT", "a wait ends", "killed, then ended"],
)
def test_a_signal_is_obeyed(number: int, body: str, ends: tuple[int, list[str]]) -> None:
    assert said_after(number, body) == ends
