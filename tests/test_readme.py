"""What the README shows works, and its answer and its picture are of one study."""

import re
import shutil
from datetime import date
from itertools import zip_longest
from pathlib import Path
from unittest.mock import Mock

import pytest

from bssearch.analysis.answer import Answer
from bssearch.analysis.headline import headline
from bssearch.cli.answer import print_answer
from bssearch.figures.plots import objective_picture
from bssearch.settings import shipped_studies
from bssearch.spec import load_spec
from tests.cli.task import printed, read
from tests.documents import GUIDE, OWN_TRAINING, README, ROOT, blocks

ANSWER = Answer.model_validate_json((ROOT / "tests" / "data" / "digits.best.json").read_text(encoding="utf-8"))
PICTURE = (GUIDE / "pictures" / "digits.svg").read_text(encoding="utf-8")


def flat(text: str) -> str:
    return " ".join(text.split())


def test_the_readme_is_read_in_one_go() -> None:
    assert len(README.splitlines()) <= 130 and len(README.split()) <= 1100


@pytest.mark.slow
def test_the_workload_and_spec_of_the_guide_run_as_they_stand(tmp_path: Path) -> None:
    for name in ("my_task.py", "my_study.yaml"):
        shutil.copy(OWN_TRAINING / name, tmp_path)
    changes = ["budget.trials=4", "confirm.runs=0", "executor.name=inline", "space.batch_size.low=64"]
    overrides = [word for one in changes for word in ("--set", one)]
    printed(tmp_path, "run", "my_study.yaml", *overrides)
    answer = read(tmp_path, "best", "my-task")
    assert answer["optimal"]["batch_size"] in (64, 128, 256, 512)


def test_the_script_and_spec_of_the_readme_are_right(tmp_path: Path) -> None:
    (tmp_path / "my_study.yaml").write_text(next(block for block in blocks(README, "yaml") if "train.py" in block))
    spec = load_spec(tmp_path / "my_study.yaml")
    assert spec.is_program and "model.hidden" in spec.set_parameters
    (script,) = (block for block in blocks(README, "python") if "current_trial" in block)
    evaluated: list[object] = []

    def accuracy(model: object) -> float:
        evaluated.append(model)
        return 0.5

    names = {"DataLoader": lambda data, batch_size, shuffle: range(len(data) // batch_size), "data": [0] * 256}
    model = Mock()
    exec(script, {**names, "model": model, "accuracy": accuracy, "SGD": Mock()})
    assert evaluated == [model], "alone it is evaluated after its one pass over the data"


def test_the_set_up_is_two_commands() -> None:
    commands = [line for block in blocks(README, "sh") for line in block.splitlines() if line.startswith("pip install")]
    assert commands == ["pip install . && bssearch run studies/digits.yaml", "pip install '.[dev]' && pytest"]
    assert re.search(r"^pip install( --[-\w]+)* '\.\[dev\]'$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


LEFT_OUT = "…"
"""A line of the README that stands for lines that are printed and not shown."""


def without_left_out(shown: list[str], printed: list[str]) -> list[str]:
    """Return the printed lines, `LEFT_OUT` in the place of those that the README leaves out."""
    if LEFT_OUT not in shown:
        return printed
    place = shown.index(LEFT_OUT)
    after = shown[place + 1]
    return [*printed[:place], LEFT_OUT, *printed[printed.index(after, place) if after in printed[place:] else place :]]


def differences(shown: list[str], wanted: list[str]) -> list[str]:
    """Return which lines of the README must change, each as "line NUMBER: what stands there → what must"."""
    first = README.splitlines().index(shown[0]) + 1
    pairs = enumerate(zip_longest(shown, wanted, fillvalue="(no line)"), first)
    return [f"line {number}: {old} → {new}" for number, (old, new) in pairs if old != new]


def test_the_sentence_under_the_picture_is_that_of_the_stored_study() -> None:
    (sentence,) = re.findall(r"^\*\*(Batch .*?)\*\*$", README, flags=re.MULTILINE | re.DOTALL)
    assert flat(sentence) == headline(ANSWER), f"README.md must say: {headline(ANSWER)}"


def test_the_printed_answer_is_that_of_the_stored_study(capsys: pytest.CaptureFixture[str]) -> None:
    print_answer(ANSWER)
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    shown = blocks(README, "text")[0].splitlines()
    changes = differences(shown, without_left_out(shown, printed))
    assert not changes, "README.md must change:\n" + "\n".join(changes)


def test_the_picture_is_that_of_the_stored_study() -> None:
    (day,) = re.findall(r"study digits, .*?, (\d{4}-\d\d-\d\d)<", PICTURE)
    default = load_spec(shipped_studies()["digits"]).default.batch_size
    drawn = objective_picture(ANSWER, default_batch_size=default, measured_on=date.fromisoformat(day))
    assert drawn == PICTURE
    assert "](bssearch/guide/pictures/digits.svg)" in README


def test_the_study_of_the_answer_is_named_with_its_command_machine_and_date() -> None:
    (day,) = re.findall(r"study digits, .*?, (\d{4}-\d\d-\d\d)<", PICTURE)
    (sentence,) = re.findall(r"`bssearch run digits` took .*?\.(?= |$)", flat(README.split("## Try it")[0]))
    assert ANSWER.device.name in sentence
    assert day in sentence
