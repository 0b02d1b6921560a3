"""The answers of stored studies do not change unnoticed.

`data/stored` holds two searches on scikit-learn's digits and an imported table, exported by an older version; their
JSON is that of `best`. A change of a number here changes every stored answer.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cli.task import bssearch

STORED = Path(__file__).parents[1] / "data" / "stored"


def close_to(number: str) -> Any:
    """Return a number that equals those with the same first digits: the last ones depend on the processor."""
    return pytest.approx(float(number), rel=1e-6)


@pytest.mark.parametrize("name", ["stored_digits", "stored_samples", "stored_runs"])
def test_the_answer_of_a_stored_study_stays_as_it_was(name: str, tmp_path: Path) -> None:
    call = partial(bssearch, cwd=tmp_path)
    imported = call("import", "study", str(STORED / f"{name}.study"))
    assert imported.returncode == 0, imported.stderr
    answer = json.loads(call("best", name, "--format", "json").stdout)
    assert answer == json.loads((STORED / f"{name}.json").read_text(encoding="utf-8"), parse_float=close_to)
