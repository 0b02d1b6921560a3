from collections.abc import Iterator
from pathlib import Path

import pytest

from bssearch.storage.repository import Store, open_store
from tests.commands.probing import SPEC


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store with a study that nothing was measured for."""
    with open_store(f"sqlite:///{tmp_path / 'study.db'}") as store:
        store.studies.create(SPEC.new_study("tester"))
        yield store
