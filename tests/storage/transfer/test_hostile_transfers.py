"""Changed exports and databases are refused with a sentence and nothing stored, or taken in as bssearch stores them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile_transfers import Transfers

CASES = 200
"""``tests/benchmarks/fuzzed_transfers.py`` tries ten thousand."""


@pytest.mark.slow
def test_changed_files_and_databases(tmp_path: Path) -> None:
    transfers = Transfers(tmp_path)
    wrong = {case: said for case in range(CASES) if (said := transfers.fails(case)) is not None}
    transfers.close()
    assert not wrong
    assert sum(transfers.outcomes.values()) == CASES
    assert sum(count for name, count in transfers.outcomes.items() if name.endswith("taken")) > CASES / 50
