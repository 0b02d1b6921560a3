"""What ``bssearch init`` writes runs as it is, and nothing that exists is touched."""

import ast
import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from bssearch.cli.run import TEMPLATES, Kind, check_free, class_name_of, write_new
from bssearch.errors import UsageError
from bssearch.spec import PrunerSpec, load_spec
from bssearch.workloads.base import resolve
from bssearch.workloads.data import check_data
from tests.cli.task import bssearch, printed, refused
from tests.documents import DOCUMENTS, blocks

SMALL = {
    "image": ("space.batch_size=[128, 256]", "target.value=0.8"),
    "text": ("space.batch_size=[16, 32]", "target.value=5.5"),
}
FEW = ("budget.trials=2", "confirm={runs: 0}", "executor.name=inline")


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", get_args(Kind))
def test_both_files_appear_under_the_name_and_the_next_steps_are_said(tmp_path: Path, kind: Kind) -> None:
    shown = printed(tmp_path, "init", "my-first_task", "--kind", kind)
    assert sorted(files_in(tmp_path)) == ["my-first_task.py", "my-first_task.yaml"]
    assert "bssearch check my-first_task.yaml" in shown
    assert "bssearch run my-first_task.yaml" in shown
    spec = load_spec(tmp_path / "my-first_task.yaml")
    assert (spec.name, spec.workload) == ("my-first_task", "my-first_task.py:MyFirstTask")
    for path in ("my-first_task.yaml", "my-first_task.py"):
        assert f"{kind}.py" not in (tmp_path / path).read_text()
        assert "YOURS" in (tmp_path / path).read_text()


@pytest.mark.parametrize("kind", get_args(Kind))
def test_the_pruner_that_is_written_is_the_one_that_the_guide_recommends(tmp_path: Path, kind: Kind) -> None:
    assert bssearch("init", "of_pruners", "--kind", kind, cwd=tmp_path).returncode == 0
    shown = yaml.safe_load(next(block for block in blocks(DOCUMENTS["searching"], "yaml") if "pruner:" in block))
    recommended = re.findall(r"The default `(\w+)`", DOCUMENTS["searching"].split("## The pruner")[1])
    written = yaml.safe_load((tmp_path / "of_pruners.yaml").read_text())["pruner"]
    assert [written["name"]] == recommended == [shown["pruner"]["name"]] == [PrunerSpec().name]


@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_template_imports_no_more_than_it_may(kind: Kind) -> None:
    tree = ast.parse((TEMPLATES / f"{kind}.py").read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    modules |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    standard = {"__future__", "collections", "math", "pathlib", "sysconfig"}
    assert {name.split(".")[0] for name in modules} - standard <= {"torch", "numpy", "sklearn", "bssearch"}


@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_template_is_a_workload_whose_largest_batch_fits_its_data(kind: Kind) -> None:
    import torch

    spec = load_spec(TEMPLATES / f"{kind}.yaml")
    workload = resolve(spec.workload, spec.workload_settings, TEMPLATES)
    data = check_data(workload.load(torch.device("cpu")))
    assert len(data.train) >= 2 * spec.batch_sizes[-1]
    assert torch.equal(data.validation.targets, workload.load(torch.device("cpu")).validation.targets)
    torch.manual_seed(0)
    model = workload.build_model(dropout=0.0).eval()
    with torch.no_grad():
        metric = workload.evaluate(model, data.validation)[spec.target.metric]
    chance = workload.metrics[spec.target.metric].chance
    assert chance is not None
    assert metric == pytest.approx(chance, abs=0.15 if spec.target.goal == "maximize" else 0.8)


def test_the_text_template_reads_the_folder_of_the_settings_and_says_where_it_is_empty(tmp_path: Path) -> None:
    import torch

    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 50)
    settings = {"folder": str(tmp_path), "pattern": "*.txt"}
    data = resolve("text.py:Text", settings, TEMPLATES).load(torch.device("cpu"))
    assert torch.equal(data.train.inputs[0, 1:], data.train.targets[0, :-1])
    with pytest.raises(FileNotFoundError, match=r"no file \*\.md in"):
        resolve("text.py:Text", {**settings, "pattern": "*.md"}, TEMPLATES).load(torch.device("cpu"))


@pytest.mark.parametrize("existing", ["drafted.yaml", "drafted.py"])  # no module of this name may be importable
@pytest.mark.parametrize("target", ["kept", "nowhere"])
def test_an_existing_file_is_named_and_nothing_is_written(tmp_path: Path, existing: str, target: str) -> None:
    (tmp_path / "kept").write_text("mine\n")
    (tmp_path / existing).symlink_to(target)
    assert f"{existing} exists; choose another name" in refused(tmp_path, "init", "drafted", code=2)
    assert {path.name for path in tmp_path.iterdir()} == {"kept", existing}
    assert (tmp_path / "kept").read_text() == "mine\n"
    assert str((tmp_path / existing).readlink()) == target


def test_both_files_or_none_where_the_second_cannot_be_written(tmp_path: Path) -> None:
    there, missing = tmp_path / "task.yaml", tmp_path / "no" / "task.py"
    with pytest.raises(UsageError, match=r"task\.py cannot be written: No such file"):
        write_new({there: "name: task\n", missing: ""})
    assert not there.exists()


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "task.py").write_text("mine\n")
    monkeypatch.setattr("os.path.lexists", lambda path: False)
    with pytest.raises(UsageError, match=r"task\.py cannot be written: File exists"):
        write_new({tmp_path / "task.yaml": "", tmp_path / "task.py": ""})
    assert files_in(tmp_path) == {"task.py": b"mine\n"}


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which not even root can write")
def test_a_folder_that_cannot_be_written_is_said() -> None:
    assert "/proc/unwritten.yaml cannot be written" in refused(Path("/proc"), "init", "unwritten", code=2)


@pytest.mark.parametrize("name", ["yes", "No", "null", "on"])
def test_names_that_yaml_takes_for_something_else_stay_names(tmp_path: Path, name: str) -> None:
    printed(tmp_path, "init", name)
    assert load_spec(tmp_path / f"{name}.yaml").name == name


@pytest.mark.parametrize("name", ["", "3d", "_x", "a b", "a/b", "../a", "a.b", "ä", "x" * 101])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    assert f"NAME = {name!r} must have at most 100 letters" in refused(tmp_path, "init", name, code=2)
    assert files_in(tmp_path) == {}


def test_names_that_would_hide_a_module_or_are_no_class() -> None:
    for name in ("torch", "random", "sys"):
        with pytest.raises(UsageError, match=rf"{name}\.py would hide the module"):
            check_free(name)
    with pytest.raises(UsageError, match="None is not a valid class name"):
        class_name_of("none")
    assert class_name_of("resNet-50_v2--") == "ResNet50V2"
    check_free("no-such-module")


@pytest.mark.slow
@pytest.mark.parametrize("kind", SMALL)
def test_a_template_runs_as_it_is_and_its_winner_can_be_exported(tmp_path: Path, kind: Kind) -> None:
    assert bssearch("init", f"my-{kind}", "--kind", kind, cwd=tmp_path).returncode == 0
    printed(tmp_path, "run", f"my-{kind}.yaml", *[word for one in (*SMALL[kind], *FEW) for word in ("--set", one)])
    values = yaml.safe_load(bssearch("best", "--export", "yaml", cwd=tmp_path).stdout)
    spec = load_spec(tmp_path / f"my-{kind}.yaml")
    assert values["batch_size"] in spec.batch_sizes
    assert values["optimizer"] == spec.space.optimizers[0].name
    assert isinstance(values["learning_rate"], float)
