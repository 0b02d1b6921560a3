"""Changed exports and databases are refused with a sentence and nothing stored, or taken in as bssearch stores them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile_transfers import Transfers

CASES = 200
"""In the default tests; ``tests/benchmarks/fuzzed_transfers.py`` tries ten thousand."""


def tried(folder: Path, cases: range) -> None:
    transfers = Transfers(folder)
    wrong = {case: said for case in cases if (said := transfers.fails(case)) is not None}
    transfers.close()
    assert not wrong
    assert sum(transfers.outcomes.values()) == len(cases)
    assert sum(count for name, count in transfers.outcomes.items() if name.endswith("taken")) > len(cases) / 50


@pytest.mark.slow
def test_changed_files_and_databases(tmp_path: Path) -> None:
    tried(tmp_path, range(CASES))


@pytest.mark.slow
def test_many_changed_files_and_databases(tmp_path: Path) -> None:
    tried(tmp_path, range(CASES, 5 * CASES))
