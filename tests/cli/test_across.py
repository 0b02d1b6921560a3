"""Query commands over several databases, and ``best`` without a study."""

from pathlib import Path
from typing import Any

import pytest

import bssearch as library
from bssearch import Launch, open_store, run_study
from tests.cli.task import bssearch, printed, read, refused
from tests.factories import make_spec
from tests.postgres import Postgres
from tests.search.law import LawExecutor

RATE = {"reference_batch": 32, "low": 0.01, "high": 1.0, "rule": "sqrt"}
A, B = "sqlite:///a.db", "sqlite:///b.db"
BOTH = ("--db", A, "--db", B)


def run(url: str, name: str, sizes: list[int], device: str = "NVIDIA A100", **changes: Any) -> None:
    spec = make_spec(
        name=name,
        space={"batch_size": sizes, "learning_rate": RATE},
        default={"batch_size": sizes[0], "learning_rate": 0.1},
        budget={"trials": 4, "trial_train_seconds": 10.0},
        confirm={"top": 1, "runs": 0},
    )
    executor = LawExecutor(place={"device_name": device}, **changes)
    run_study(spec, Launch(db=url, make_executor=lambda *_: executor))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two databases: a has near and far, b near and other, which ran on another device, and missed."""
    place = tmp_path_factory.mktemp("across")
    a, b = (f"sqlite:///{place / name}.db" for name in "ab")
    run(a, "near", [16, 32])
    run(a, "far", [128, 256])
    run(b, "near", [16, 32])
    run(b, "other", [16, 32], "NVIDIA H100")
    with pytest.raises(library.TargetNotReachedError):
        run(b, "missed", [16, 32], "TPU", reachable=False)
    return place


# Several databases ---------------------------------------------------------------------------------------------------


def test_a_study_is_looked_up_in_each_database(folder: Path) -> None:
    assert read(folder, "best", "far", *BOTH) == read(folder, "best", "far", "--db", A)
    assert read(folder, "trial", "list", "far", *BOTH) == read(folder, "trial", "list", "far", "--db", A)
    assert read(folder, "trial", "show", "other", "1", *BOTH)["number"] == 1
    assert read(folder, "study", "show", "other", *BOTH)["study"] == "other"
    rows = read(folder, "study", "compare", "far", "other", *BOTH)
    assert [(row["study"], row["database"]) for row in rows] == [("far", A), ("other", B)]


def test_a_study_in_several_databases_is_ambiguous_and_one_in_none_is_not_found(folder: Path) -> None:
    for command in (["best", "near"], ["trial", "list", "near"], ["study", "compare", "far", "near"]):
        told = refused(folder, *command, *BOTH, code=2)
        assert "'near'" in told and A in told and B in told
    told = refused(folder, "best", "faar", *BOTH, code=3)
    assert "'faar'" in told and A in told and B in told and "did you mean 'far'" in told


def test_a_database_that_is_named_twice_is_read_once(folder: Path) -> None:
    again = f"sqlite:///{folder / 'a.db'}"
    assert read(folder, "best", "near", "--db", A, "--db", again)["study"] == "near"
    assert len(read(folder, "study", "list", "--db", A, "--db", again)) == 2


def test_studies_of_several_databases_are_listed_with_where_they_are(folder: Path) -> None:
    assert [(row["name"], row["database"]) for row in read(folder, "study", "list", *BOTH)] == [
        ("near", A),
        ("far", A),
        ("near", B),
        ("other", B),
        ("missed", B),
    ]
    assert [row["name"] for row in read(folder, "study", "list", *BOTH, "--device", "h100")] == ["other"]
    assert read(folder, "study", "list", *BOTH, "--workload", "tea") == []
    assert "b.db" in bssearch("study", "list", *BOTH, cwd=folder).stdout
    assert "a.db" not in bssearch("study", "list", "--db", A, cwd=folder).stdout


def test_one_database_that_cannot_be_opened_is_named_and_no_other_answers_for_it(folder: Path) -> None:
    assert "nowhere.db" in refused(folder, "study", "list", "--db", A, "--db", "sqlite:///nowhere.db", code=4)
    secret = "postgresql://me:hunter2@127.0.0.1:1/nowhere?connect_timeout=2"
    told = refused(folder, "best", "--workload", "digits", "--db", A, "--db", secret, code=4)
    assert "127.0.0.1" in told and "hunter2" not in told
    (folder / "notes.db").write_text("no database " * 100)
    assert "notes.db" in refused(folder, "best", "far", "--db", A, "--db", "sqlite:///notes.db", code=4)


# Best without a study ------------------------------------------------------------------------------------------------


def test_best_without_a_study_answers_from_all_that_match(folder: Path) -> None:
    found = read(folder, "best", "--workload", "digits", "--device", "a100", "--target", "accuracy=0.9", *BOTH)
    assert found["schema_version"] == 1
    assert found["query"] == {
        "workload": "digits",
        "device": "a100",
        "target": 0.9,
        "metric": "accuracy",
        "objective": None,
        "precision": None,
        "databases": [A, B],
    }
    assert [(one["study"], one["database"]) for one in found["answers"]] == [("near", A), ("far", A), ("near", B)]
    for one in found["answers"]:
        alone = read(folder, "best", one["study"], "--db", one["database"])
        assert {key: one[key] for key in ("optimal", "flat_range", "tied", "provisional")} == {
            key: alone[key] for key in ("optimal", "flat_range", "tied", "provisional")
        }
        assert one["device"] == "NVIDIA A100"
    assert found["agreement"]["agree"] is False
    assert [one["between"] for one in found["agreement"]["disagreements"]] == [
        [f"near in {A}", "far"],
        ["far", f"near in {B}"],
    ]
    shown = printed(folder, "best", "--workload", "digits", "--device", "a100", *BOTH)
    assert "do not agree" in shown and "space.batch_size [16, 32] / [128, 256]" in shown


def test_answers_of_two_devices_are_to_two_questions_and_a_study_without_one_says_why(folder: Path) -> None:
    found = read(folder, "best", "--workload", "digits", "--target", "0.9", "--db", B)
    assert [one["study"] for one in found["answers"]] == ["near", "other", "missed"]
    missed = found["answers"][2]
    assert missed["optimal"] is None and "accuracy" in missed["note"]
    assert [one["question"]["device"] for one in found["agreement"]["questions"]] == ["NVIDIA A100", "NVIDIA H100"]
    told = printed(folder, "best", "--workload", "digits", "--db", B)
    assert "- device NVIDIA H100: One study answers: batch" in told


def test_a_copy_of_a_study_in_another_database_does_not_count_again(folder: Path) -> None:
    printed(folder, "import", "study", A, "--study", "near", "--db", "sqlite:///c.db")
    asked = ("best", "--workload", "digits", "--db", "sqlite:///c.db", "--db", A)
    found = read(folder, *asked)
    assert [one["copy_of"] for one in found["answers"]] == [None, "near in sqlite:///c.db", None]
    (question,) = found["agreement"]["questions"]
    assert question["studies"] == ["near", "far"]
    told = printed(folder, *asked)
    assert "The 2 answers do not agree" in told and "copy of near in sqlite:///c.db" in told


def test_archived_studies_do_not_answer(folder: Path) -> None:
    with open_store(f"sqlite:///{folder / 'b.db'}") as store:
        store.studies.archive("other")
    assert "choose from devices" in refused(folder, "best", "--device", "h100", "--db", B, code=3)


def test_what_does_not_match_or_has_no_answer_has_its_exit_code(folder: Path) -> None:
    told = refused(folder, "best", "--workload", "digitz", "--device", "a100", *BOTH, code=3)
    assert "--workload digitz" in told and "workloads digits" in told and "NVIDIA H100" in told
    assert "accuracy ≥ 0.9" in refused(folder, "best", "--target", "accuracy=0.91", *BOTH, code=3)
    assert "missed" in refused(folder, "best", "--device", "tpu", *BOTH, code=5)
    assert "far" in refused(folder, "best", "far", "--device", "a100", *BOTH, code=2)
    assert "--target" in refused(folder, "best", "--target", "tea", *BOTH, code=2)
    assert "loss" in refused(folder, "best", "far", "--target", "loss=0.5", *BOTH, code=2)
    assert "--export" in refused(folder, "best", "--device", "a100", "--export", "yaml", *BOTH, code=2)


def test_nothing_is_written_and_a_server_and_a_file_are_asked_together(folder: Path, postgres: Postgres) -> None:
    url = postgres.create_database()
    run(url, "third", [16, 32])
    before = {name: (folder / name).read_bytes() for name in ("a.db", "b.db")}
    found = read(folder, "best", "--workload", "digits", "--device", "a100", "--db", A, "--db", url)
    assert [one["study"] for one in found["answers"]] == ["near", "far", "third"]
    assert {name: (folder / name).read_bytes() for name in before} == before
    answer = library.best_across([A.replace("a.db", str(folder / "a.db")), url], device="a100", workload="digits")
    assert answer.agreement.model_dump() == {**found["agreement"]}
    with pytest.raises(library.UsageError, match="needs a condition"):
        library.best_across(url)
