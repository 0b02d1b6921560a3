"""The guide's scripts against the plain ones: what each diff adds, and that the script without it trains by itself."""

import os
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest

from tests.documents import DOCUMENTS, OWN_TRAINING, blocks

TEXT = DOCUMENTS["own-training"]
LIBRARIES = {"Lightning", "Hugging Face Trainer"}
MOST_ADDED = {"A loop of your own": 8, "Any program": 8, **dict.fromkeys(sorted(LIBRARIES), 5)}
"""How many lines a section's diff may add."""

each = pytest.mark.parametrize("section", MOST_ADDED)


def section_of(name: str) -> str:
    return TEXT.split(f"\n## {name}\n")[1].split("\n## ")[0]


def diff_of(section: str) -> str:
    (diff,) = blocks(section_of(section), "diff")
    return diff


def hunks(section: str) -> list[tuple[str, str]]:
    """Return the two sides of each hunk of a section's diff: the plain script's, and the trial's."""
    sides = []
    for is_line, lines in groupby(diff_of(section).splitlines(), key=lambda line: not line.startswith("@@")):
        if is_line:
            found = list(lines)
            sides.append(
                tuple("".join(f"{line[1:]}\n" for line in found if not line.startswith(other)) for other in "+-")
            )
    return sides  # type: ignore[return-value]


def script_of(section: str) -> str:
    """Return the script that a section shows, or names."""
    named = re.findall(r"tests/data/own_training/(\w+\.py)", section_of(section))
    shown = [(OWN_TRAINING / name).read_text(encoding="utf-8") for name in named]
    (script,) = shown or blocks(section_of(section), "python")
    return script


def plain(section: str) -> str:
    """Return the plain script of a section: its own, with the diff applied backwards."""
    script = script_of(section)
    for before, after in hunks(section):
        assert f"\n{script}".count(f"\n{after}") == 1, f"not once in the script:\n{after}"
        script = f"\n{script}".replace(f"\n{after}", f"\n{before}")[1:]
    return script


def counts(section: str) -> dict[str, int]:
    """Return how many lines a diff adds, changes and takes away; what stands for what was there is changed."""
    found = {"added": 0, "changed": 0, "gone": 0}
    for is_change, lines in groupby(diff_of(section).splitlines(), key=lambda line: line[:1] in ("+", "-")):
        signs = [line[0] for line in lines] if is_change else []
        added, gone = signs.count("+"), signs.count("-")
        found["changed"] += min(added, gone)
        found["added"] += max(0, added - gone)
        found["gone"] += max(0, gone - added)
    return found


@each
def test_the_guide_says_how_many_lines_its_diff_has_and_they_are_few(section: str) -> None:
    (said,) = re.findall(r"Against the plain script, (.*):\n\n```diff", section_of(section))
    told = {kind: int(number) for number, kind in re.findall(r"(\d+) (?:lines )?(?:are )?(added|changed|gone)", said)}
    found = counts(section)
    assert told == {kind: number for kind, number in found.items() if number}
    assert found["added"] <= MOST_ADDED[section]


@each
def test_the_diff_is_all_that_bssearch_asks_of_the_plain_script(section: str) -> None:
    script = plain(section)
    assert "bssearch" not in script and "trial" not in script
    compile(script, section, "exec")


@pytest.mark.slow
@each
def test_the_plain_script_trains_to_its_end_and_says_what_it_reaches(section: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(plain(section))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True, env=environment
    )
    reached = re.findall(r"accuracy\W+([\d.]+)", done.stdout)
    assert reached and float(reached[-1]) > 0.85, done.stdout
