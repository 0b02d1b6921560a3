"""What all studies that match have found: which match, and whether they agree."""

from dataclasses import replace
from datetime import timedelta
from itertools import count
from typing import Any

import pytest

from bssearch.analysis.answer import Answer, Figure
from bssearch.commands.across.answers import (
    Finding,
    StudyFilter,
    agreement_of,
    in_words,
    nothing_matches,
    target_of,
    workload_names,
)
from bssearch.errors import UsageError
from bssearch.records import StudyRecord
from tests.documents import ROOT
from tests.factories import EPOCH, make_environment, make_spec, not_none

LATER = count(1)
"""Seconds after `EPOCH` at which studies are made: each is another one."""

BEST = Answer.model_validate_json((ROOT / "tests" / "data" / "digits.best.json").read_text())


def study(name: str = "toy", place: dict[str, Any] | None = None, **changes: Any) -> StudyRecord:
    return StudyRecord.created(
        make_spec(name=name, **changes).new_study("someone"),
        EPOCH + timedelta(seconds=next(LATER)),
        make_environment(**place or {}),
    )


# Which studies match -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("called", ["tasks/task.py:Task", "tasks/task.py", "task.py:Task", "task.py", "task", "Task"])
def test_a_workload_is_known_by_its_file_and_its_class(called: str) -> None:
    assert StudyFilter(workload=called).matches(study(workload="tasks/task.py:Task"))
    assert not StudyFilter(workload=called).matches(study(workload="tasks/other.py:Other"))


def test_a_shipped_workload_is_known_by_its_name_and_its_path() -> None:
    path = "bssearch.workloads.digits:Digits"
    for named in ("digits", path):
        assert {"digits", path} <= workload_names(study(workload=named))
    assert "char_lm" not in workload_names(study(workload="digits"))


def test_a_command_is_known_by_its_script() -> None:
    command = ["python", "my/train.py", "{batch_size}", "{learning_rate}", "{weight_decay}", "{dropout}"]
    changes = {key: value for key, value in make_spec().model_dump(mode="json").items() if key != "workload"}
    record = StudyRecord.created(make_spec().new_study("someone"), EPOCH)
    told = replace(record, spec={**changes, "workload": "command", "command": command})
    assert StudyFilter(workload="train.py").matches(told)
    assert not StudyFilter(workload="python").matches(told)


def test_a_device_matches_in_part_and_a_target_as_it_is_shown() -> None:
    here = study(place={"device_name": "NVIDIA A100-SXM4-80GB"}, target={"metric": "accuracy", "value": 0.1 + 0.2})
    for asked in (
        StudyFilter.of(device="a100"),
        StudyFilter.of(target=0.3),
        StudyFilter.of(target="0.3"),
        StudyFilter.of(target="accuracy=0.30", precision="fp32", objective="time_to_target"),
    ):
        assert asked.matches(here), asked
    for other in (
        StudyFilter.of(device="h100"),
        StudyFilter.of(target=0.3001),
        StudyFilter.of(target="loss=0.3"),
        StudyFilter.of(device="a100", precision="bf16"),
    ):
        assert not other.matches(here), other
    assert not StudyFilter.of(device="a100").matches(replace(here, environment=None))


@pytest.mark.parametrize("text", ["ninety", "accuracy=", "accuracy=nan", "inf", ""])
def test_a_target_that_is_no_number_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="--target"):
        target_of(text)


def test_where_nothing_matches_what_would_is_named() -> None:
    there = [study("one"), study("two", {"device_name": "H100"}), study("three", workload="char_lm")]
    error = nothing_matches(StudyFilter.of(workload="digitz", device="h100"), there)
    assert "--workload digitz --device h100" in error.message
    assert error.hint is not None
    # On the H100 there is digits alone; of digitz there is nothing on any device.
    assert "workloads digits;" in error.hint and "devices H100, Test CPU" in error.hint
    assert nothing_matches(StudyFilter.of(workload="digits"), []).hint is not None


# Whether they agree --------------------------------------------------------------------------------------------------


def found(
    name: str,
    size: int,
    flat: tuple[int, int],
    *,
    tied: tuple[int, ...] = (),
    seconds: tuple[float, float] | None = None,
    database: str = "sqlite:///a.db",
    basis: str = "measured",
    place: dict[str, Any] | None = None,
    **changes: Any,
) -> Finding:
    """Return a finding whose figure has the interval ``seconds``."""
    low, high = seconds or (None, None)
    figure = Figure(median=1.0 if seconds is None else sum(seconds) / 2, low=low, high=high, runs=3)
    time = not_none(BEST.optimal.time_to_target_s)
    changed = {"objective_value": figure, "time_to_target_s": time.model_copy(update={"basis": basis})}
    optimal = BEST.optimal.model_copy(update={"batch_size": size, **changed})
    known = {"study": name, "optimal": optimal, "flat_range": list(flat), "tied": list(tied)}
    return Finding(study(name, place, **changes), database, BEST.model_copy(update=known))


@pytest.mark.parametrize(
    ("findings", "size", "flat_range"),
    [
        pytest.param(
            [found("a", 32, (16, 64)), found("b", 64, (32, 128)), found("c", 32, (32, 32))], 32, [32, 32], id="ranges"
        ),
        pytest.param(
            [found("a", 16, (16, 16), tied=(16, 128)), found("b", 128, (128, 128), tied=(128,))], 128, None, id="ties"
        ),
        pytest.param(
            [found("a", 32, (32, 64), seconds=(1.0, 1.2)), found("b", 32, (32, 64))], 32, [32, 64], id="too few runs"
        ),
        pytest.param(
            [found("a", 32, (32, 64), seconds=(1.0, 1.2)), found("b", 32, (32, 64), seconds=(1.1, 2.0))],
            32,
            [32, 64],
            id="overlapping figures",
        ),
        pytest.param(
            [
                found("a", 32, (32, 32), workload="tasks/task.py:Task"),
                found("b", 32, (32, 32), workload="task.py:Task"),
            ],
            32,
            [32, 32],
            id="one workload wherever its file lies",
        ),
    ],
)
def test_answers_agree(findings: list[Finding], size: int, flat_range: list[int] | None) -> None:
    agreement = agreement_of(findings)
    assert (agreement.agree, agreement.batch_size, agreement.flat_range) == (True, size, flat_range)
    assert in_words(agreement)[0].startswith(f"The {len(findings)} answers agree on batch {size}")


def test_a_target_is_the_same_as_it_is_shown() -> None:
    one, other = found("a", 32, (32, 32)), found("b", 32, (32, 32))
    target = replace(BEST.target, value=BEST.target.value + 1e-12)
    assert agreement_of([one, replace(other, answer=other.answer.model_copy(update={"target": target}))]).agree


def test_answers_that_share_no_size_disagree_and_what_differs_is_named() -> None:
    one = found("a", 16, (8, 32), training={"precision": "fp32"})
    other = found("b", 256, (128, 512), place={"torch_version": "2.11.0"}, training={"precision": "bf16"})
    agreement = agreement_of([one, other, found("c", 32, (32, 32))])
    assert (agreement.agree, agreement.batch_size, agreement.flat_range) == (False, None, None)
    assert [one.between for one in agreement.disagreements] == [["a", "b"], ["b", "c"]]
    first = agreement.disagreements[0]
    assert first.about == ["batch_size"]
    assert first.differences == ["training.precision fp32 / bf16", "torch_version 2.13.0 / 2.11.0"]
    assert [
        said
        for said in ("batch 16", "8 to 32", "batch 256", "128 to 512", "training.precision fp32 / bf16")
        if said not in first.message
    ] == []
    assert "do not agree" in in_words(agreement)[0]


def test_answers_of_which_each_two_share_a_size_and_all_of_them_none_do_not_agree() -> None:
    agreement = agreement_of(
        [
            found("a", 8, (8, 8), tied=(16,)),
            found("b", 16, (16, 16), tied=(32,)),
            found("c", 32, (32, 32), tied=(8,)),
        ]
    )
    assert (agreement.agree, agreement.batch_size, agreement.flat_range) == (False, None, None)
    assert "do not agree" in in_words(agreement)[0]


@pytest.mark.parametrize(
    ("about", "other"),
    [
        *(("target", one) for one in [{"value": 0.99}, {"metric": "loss"}, {"goal": "minimize"}]),
        ("objective", {"objective": "samples_to_target"}),
        ("device", {"place": {"device_name": "H100"}}),
        ("precision", {"place": {"precision": "bf16"}}),
        ("workload", {"workload": "char_lm"}),
    ],
)
def test_answers_to_different_questions_are_not_compared_and_do_not_agree(about: str, other: dict[str, Any]) -> None:
    apart = found(
        "b", 32, (32, 32), seconds=(2.0, 2.5), **(other if about in {"device", "precision", "workload"} else {})
    )
    if about == "target":
        apart = replace(apart, answer=apart.answer.model_copy(update={"target": replace(BEST.target, **other)}))
    if about == "objective":
        apart = replace(apart, answer=apart.answer.model_copy(update=other))
    same = [found(name, 32, (32, 64), seconds=(1.0, 1.2)) for name in ("a", "c")]
    agreement = agreement_of([same[0], apart, same[1]])
    assert (agreement.agree, agreement.batch_size, agreement.disagreements) == (False, None, [])
    assert [(one.studies, one.agree, one.batch_size) for one in agreement.questions] == [
        (["a", "c"], True, 32),
        (["b"], True, 32),
    ]
    first, *lines = in_words(agreement)
    assert "3 answers concern 2 different questions" in first
    assert [line.startswith(f"- {about} ") and line.count(",") == 0 for line in lines] == [True, True]
    assert "The 2 answers agree on batch 32" in lines[0] and "One study answers" in lines[1]


def test_copies_of_a_study_count_once_and_the_one_with_the_most_trials_does() -> None:
    earlier = found("a", 16, (16, 16))
    rows = [row.model_copy(update={"trials": row.trials + 1}) for row in BEST.batches]
    later = found("renamed", 64, (64, 64), database="sqlite:///b.db")
    later = Finding(
        replace(earlier.study, name="renamed", spec={**earlier.study.spec, "name": "renamed"}),
        later.database,
        later.answer.model_copy(update={"batches": rows}),
    )
    for copies in ([earlier, later], [later, earlier, replace(earlier, database="sqlite:///c.db")]):
        agreement = agreement_of(copies)
        assert (agreement.agree, agreement.batch_size) == (True, 64)
        assert in_words(agreement) == ["One study answers: batch 64."]
    assert not agreement_of([later, found("a", 16, (16, 16))]).agree  # made at another moment


def test_figures_disagree_where_their_intervals_are_apart() -> None:
    one, other = found("a", 32, (32, 64), seconds=(1.0, 1.2)), found("b", 32, (32, 32), seconds=(2.0, 2.5))
    agreement = agreement_of([one, other])
    assert (agreement.agree, agreement.batch_size, agreement.flat_range) == (False, 32, [32, 32])
    (told,) = agreement.disagreements
    assert told.about == ["figure"]
    assert "[1, 1.2]" in told.message and "[2, 2.5]" in told.message
    assert "have equal" in told.message
    [told_of_all] = in_words(agreement)
    assert "agree on batch 32" in told_of_all and "not on its objective value" in told_of_all


@pytest.mark.parametrize(
    ("basis", "other_basis", "agree"),
    [
        ("measured", "wall", True),
        ("wall", "reported", True),
        ("wall", "wall", False),
        ("measured", "steps_x_step_time", False),
    ],
)
def test_seconds_of_two_kinds_of_clock_are_not_compared(basis: str, other_basis: str, agree: bool) -> None:
    one = found("a", 32, (32, 64), seconds=(1.0, 1.2), basis=basis)
    assert agreement_of([one, found("b", 32, (32, 64), seconds=(2.0, 2.5), basis=other_basis)]).agree is agree


def test_a_name_in_two_databases_is_told_with_them() -> None:
    agreement = agreement_of([found("a", 16, (16, 16)), found("a", 64, (64, 64), database="sqlite:///b.db")])
    assert agreement.disagreements[0].between == ["a in sqlite:///a.db", "a in sqlite:///b.db"]
