"""One of several processes that change one database at the same moment; see test_turns.py."""

import json
import sys
import time
from pathlib import Path

from bssearch import UsageError, open_store
from bssearch.storage import migrate
from tests.storage.conftest import add_study, start_after

STAGES = ("upgrade", "create", "claim", "start")
CLAIMS = 5
STARTS = 20


def _wait_for_the_others(stage: str) -> None:
    print(stage, flush=True)
    sys.stdin.readline()


def main(url: str, name: str, counter: Path) -> None:
    _wait_for_the_others("upgrade")
    before = migrate.upgrade(url).before
    with open_store(url) as store:
        _wait_for_the_others("create")
        try:
            created = bool(add_study(store, created_by=name))
        except UsageError:
            created = False
        _wait_for_the_others("claim")
        for _ in range(CLAIMS):
            while not store.leases.claim("toy", "probe", owner=name, lease_seconds=60.0, is_alive=lambda owner: None):
                time.sleep(0.002)
            value = int(counter.read_text())
            time.sleep(0.005)
            counter.write_text(str(value + 1))
            store.leases.release("toy", "probe", owner=name)
        _wait_for_the_others("start")
        numbers: list[int] = []
        while len(numbers) < STARTS:
            seen = max((trial.number for trial in store.trials.of("toy")), default=0)
            number = start_after(store, seen, name)
            if number is not None:
                assert number == seen + 1
                numbers.append(number)
    print(json.dumps({"name": name, "before": before, "created": created, "numbers": numbers}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
