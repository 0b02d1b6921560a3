"""Imports of study files and databases that were changed at random.

An import raises `BSSearchError` and leaves the database as before, or stores rows as bssearch does. A second import
changes nothing.
"""

import gzip
import hashlib
import json
import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from bssearch import BSSearchError, Store, open_store
from bssearch.search.finding import compute_answer
from bssearch.storage.integrity import Kind, first_fault
from bssearch.storage.models import METADATA
from bssearch.storage.transfer.study_copy import read_study
from tests.hostile import TOKENS, VALUES, mutated, put
from tests.storage.transfer.copies import everything, make_states

JSON_VALUES = (
    *("null", "true", "false", "0", "1", "-1", "2.5", "1e308", "-1e308", "1e-320", "1e999", "NaN", "-Infinity"),
    *("9223372036854775807", "9223372036854775808", "9" * 400, '""', '"text"', '"\\ud800"', '"\\u0000"', "[]", "[1]"),
    *(
        '{"a":1}',
        '{"a":{"b":null}}',
        "{}",
        '{"a":' * 60 + "1" + "}" * 60,
        '"2026-99-99"',
        '"9999-12-31T23:59:59+00:00"',
    ),
    *('"2026-01-01T00:00:00"', '"running"', '"queued"', '"reached"', '"paused"', '"' + "x" * 5000 + '"', "[" * 3000),
)
"""Replacements of a value, as JSON or similar text."""


@dataclass
class Transfers:
    """Cases of changed files and databases, imported into an empty database or an earlier state."""

    folder: Path
    outcomes: Counter[str] = field(default_factory=Counter)
    """Numbers of refused and taken cases."""

    def __post_init__(self) -> None:
        states = make_states(self.folder)
        self.last = states[-1]
        self.empty, self.earlier = self.folder / "empty.db", states[len(states) // 2]
        open_store(f"sqlite:///{self.empty}").close()
        with open_store(f"sqlite:///{self.last}", write=False) as store:
            store.transfer.write("toy", self.folder / "toy.gz")
        self.content = (self.folder / "toy.gz").read_bytes()
        self.lines = gzip.decompress(self.content).decode().splitlines()
        self.target = self.folder / "target.db"
        self._store = open_store(f"sqlite:///{self.target}")
        self._is_now: Path | None = None
        self._rows: dict[Path, dict[str, list[str]]] = {}

    def close(self) -> None:
        """Close the database."""
        self._store.close()

    def fails(self, seed: int) -> str | None:
        """Fault of one case, or None."""
        rng = random.Random(seed)
        kind = rng.choice(
            (self._bytes, self._text, self._values, self._values, self._values, self._lines, self._database)
        )
        template = self.empty if rng.random() < 0.3 else self.earlier
        store, before = self._store, self._restored(template)
        try:
            take = kind(rng)
            is_changed = take(store)
        except BSSearchError:
            self.outcomes[f"{kind.__name__.strip('_')}: refused"] += 1
            return None if everything(store) == before else f"refused, but rows were stored: {kind.__name__}"
        except Exception as error:
            self._is_now = None
            return f"{kind.__name__}: {type(error).__name__}: {error}"
        self.outcomes[f"{kind.__name__.strip('_')}: taken"] += 1
        if not is_changed:
            return None
        self._is_now = None
        return self._check_taken(store, take, rng)

    def _check_taken(self, store: Store, take: Callable[[Store], bool], rng: random.Random) -> str | None:
        with store.reading() as connection:
            for name, study_id in store._all_studies().items():
                if (fault := first_fault(connection, study_id)) is not None:
                    return f"imported rows are faulty: {name}: {fault}"
        if take(store):
            return "a second import changes the database"
        if rng.random() < 0.1:
            try:
                for name in store._all_studies():
                    with suppress(BSSearchError):
                        compute_answer(store, name)
            except Exception as error:
                return f"no answer: {type(error).__name__}: {error}"
        return None

    def _restored(self, template: Path) -> dict[str, list[str]]:
        """Restore the database from the template if needed; return its rows."""
        if self._is_now != template:
            with closing(sqlite3.connect(template)) as source, closing(sqlite3.connect(self.target)) as target:
                source.backup(target)
            self._is_now = template
            self._rows.setdefault(template, everything(self._store))
        return self._rows[template]

    def _take_file(self, content: bytes) -> Callable[[Store], bool]:
        file = self.folder / "case.gz"
        file.write_bytes(content)

        def take(store: Store) -> bool:
            return any(one.is_changed for one in store.transfer.join([read_study(file)]))

        return take

    def _bytes(self, rng: random.Random) -> Callable[[Store], bool]:
        """Change the compressed file."""
        content = bytearray(self.content)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(content) + 1)
            kind = rng.choice(("flip", "flip", "cut", "drop", "insert", "append"))
            if kind == "flip" and content:
                content[place % len(content)] ^= 1 << rng.randrange(8)
            elif kind == "cut":
                del content[place:]
            elif kind == "drop":
                del content[place : place + rng.choice((1, 5, 100))]
            elif kind == "insert":
                content[place:place] = rng.randbytes(rng.choice((1, 5, 100)))
            else:
                content += rng.choice((b"\0", b"x", self.content, bytes(content)))
        return self._take_file(bytes(content))

    def _text(self, rng: random.Random) -> Callable[[Store], bool]:
        """Change the lines as texts, without a new digest."""
        lines = list(self.lines)
        _shuffled(rng, lines)
        text = "".join(f"{line}\n" for line in lines)
        if rng.random() < 0.7:
            text = mutated(rng, text)
        return self._take_file(gzip.compress(text.encode("utf-8", "surrogatepass"), 1))

    def _lines(self, rng: random.Random) -> Callable[[Store], bool]:
        """Drop, double or swap rows, with a new digest and usually new counts."""
        lines = self.lines[1:-1]
        for _ in range(rng.randint(1, 4)):
            _shuffled(rng, lines)
        return self._take_file(gzip.compress(self._resealed(rng, lines), 1))

    def _values(self, rng: random.Random) -> Callable[[Store], bool]:
        """Change values of rows or delete columns, with a new digest."""
        lines = self.lines[1:-1]
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            place = rng.randrange(len(lines))
            with suppress(ValueError, RecursionError):  # an earlier change made the line invalid
                lines[place] = _with_another_value(rng, lines[place], lines)
        return self._take_file(gzip.compress(self._resealed(rng, lines), 1))

    def _resealed(self, rng: random.Random, lines: list[str]) -> bytes:
        header = json.loads(self.lines[0])
        counts = Counter(line[2 : line.find('"', 2)] for line in lines)
        if rng.random() < 0.95:
            header["header"]["counts"] = {kind.value: counts[kind.value] for kind in Kind}
        if rng.random() < 0.05:
            name = rng.choice(list(header["header"]))
            header["header"][name] = rng.choice((None, -1, 2, "x", {}, [], 10**30, {"trial": 10**12}))
        data = "".join(f"{line}\n" for line in [json.dumps(header), *lines]).encode("utf-8", "surrogatepass")
        end = {"counts": header["header"].get("counts"), "sha256": hashlib.sha256(data).hexdigest()}
        return data + json.dumps({"end": end}).encode() + b"\n"

    def _database(self, rng: random.Random) -> Callable[[Store], bool]:
        """Change a value in another database and import the database."""
        source = self.folder / "source.db"
        for left in self.folder.glob("source.db*"):
            left.unlink()
        shutil.copy(self.last, source)
        table = rng.choice(METADATA.sorted_tables)
        column = rng.choice(list(table.columns)).name
        one_row = rng.random() < 0.5
        put(source, table.name, column, rng.choice(VALUES), one_row=one_row)

        def take(store: Store) -> bool:
            with open_store(f"sqlite:///{source}", write=False) as there:
                copies = there.transfer.read(None, "there")
            return any(one.is_changed for one in store.transfer.join(copies))

        return take


def _shuffled(rng: random.Random, lines: list[str]) -> None:
    """Drop, double, swap or cut one line."""
    if not lines:
        return
    place, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    kind = rng.choice(("drop", "double", "swap", "cut", "end"))
    if kind == "drop":
        del lines[place]
    elif kind == "double":
        lines.insert(other, lines[place])
    elif kind == "swap":
        lines[place], lines[other] = lines[other], lines[place]
    elif kind == "cut":
        lines[place] = lines[place][: rng.randrange(len(lines[place]) + 1)]
    else:
        del lines[place:]


def _with_another_value(rng: random.Random, line: str, lines: list[str]) -> str:
    """Row with a replaced or deleted value, or with an extra column."""
    document = json.loads(line)
    ((kind, row),) = document.items()
    name = rng.choice(sorted(row))
    how = rng.random()
    if how < 0.05:
        del row[name]
    elif how < 0.1:
        row[rng.choice(("surplus", "id", "revision", "lease_owner"))] = 1
    elif how < 0.13:
        return line.replace(kind, rng.choice(list(Kind)).value, 1)
    elif how < 0.4:  # the value of another row
        others = [json.loads(one) for one in rng.sample(lines, min(5, len(lines)))]
        row[name] = rng.choice([other[name] for one in others for other in one.values() if name in other] or [None])
    elif how < 0.5 and isinstance(row[name], int | float) and not isinstance(row[name], bool):
        row[name] += rng.choice((1, -1, 0.5))
    else:
        row[name] = "REPLACED"
        value = rng.choice(JSON_VALUES) if rng.random() < 0.9 else json.dumps(rng.choice(TOKENS))
        return json.dumps(document, ensure_ascii=False).replace('"REPLACED"', value)
    return json.dumps(document, ensure_ascii=False)
