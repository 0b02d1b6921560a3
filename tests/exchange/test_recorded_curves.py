"""Tables of recorded curves are read as written, and refused if they are wrong."""

import gzip
import json
from pathlib import Path

import pytest

from bssearch.errors import NotFoundError, UsageError
from bssearch.exchange.exporters.exports import RecordedTable, RecordedTrial, write_table
from bssearch.records import Goal, Target
from tests.benchmarks.simulate.tables import read_table

HEADER = "trial,param.batch_size,param.note,seed,step,train_seconds,metric"
ROWS = ("0,32,,1,10,0.5,0.6", "0,32,,1,20,1.0,0.8", "3,64,true,2,10,0.25,0.7")
ABOUT = {"name": "toy", "metric": "accuracy", "goal": "maximize", "target": 0.9, "max_train_seconds": 4}


def write(folder: Path, *rows: str, header: str = HEADER, **about: object) -> Path:
    path = folder / "toy.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    (folder / "toy.json").write_text(json.dumps({**ABOUT, **about}))
    return path


def test_a_table_is_read(tmp_path: Path) -> None:
    found = read_table(write(tmp_path, *ROWS))
    assert (found.name, found.max_train_seconds) == ("toy", 4.0)
    assert found.target == Target(metric="accuracy", value=0.9, goal=Goal.MAXIMIZE)
    first, second = found.trials
    assert first == RecordedTrial(0, {"batch_size": 32}, 1, (10, 20), (0.5, 1.0), (0.6, 0.8))
    assert second.parameters == {"batch_size": 64, "note": True}


@pytest.mark.parametrize("name", ["again.csv.gz", "again.csv"])
def test_a_written_table_is_read_back_and_gives_the_same_bytes_again(tmp_path: Path, name: str) -> None:
    trials = (
        RecordedTrial(1, {"batch_size": 8, "learning_rate": 0.1 + 0.2}, 5, (1,), (1e-9,), (0.1,)),
        RecordedTrial(7, {"optimizer": "adam, w"}, 0, (3, 4), (2.0, 2.0), (0.2, 0.3)),
    )
    table = RecordedTable("again", Target(metric="loss", value=1.5, goal=Goal.MINIMIZE), None, trials)
    paths = write_table(table, tmp_path / name)
    assert [path.name for path in paths] == [name, "again.json"]
    assert read_table(tmp_path / name) == table
    before = paths[0].read_bytes()
    assert write_table(table, tmp_path / name)[0].read_bytes() == before


@pytest.mark.parametrize(
    ("rows", "header", "about", "place"),
    [
        (ROWS, HEADER.replace(",step", ""), {}, "toy.csv:1: "),
        (ROWS, f"{HEADER},seed", {}, "toy.csv:1: "),
        (("0;1,5",), HEADER.replace(",", ";"), {}, "toy.csv:1: "),
        (("0,32,,1,10,2.0,0.6", "0,32,,1,20,1.0,0.8"), HEADER, {}, "toy.csv:3: train_seconds = 1 "),
        (("0,32,,1,10,-1,0.6",), HEADER, {}, "toy.csv:2: train_seconds = '-1'"),
        (("0,32,,1,10,nan,0.6",), HEADER, {}, "toy.csv:2: train_seconds = 'nan'"),
        (("0,32,,1,ten,1,0.6",), HEADER, {}, "toy.csv:2: step = 'ten'"),
        (("0,32,,1,10,1,good",), HEADER, {}, "toy.csv:2: metric = 'good'"),
        (("0,32,,1,10,1",), HEADER, {}, "toy.csv:2: "),
        (("0,32,,1,10,1,0.6,7",), HEADER, {}, "toy.csv:2: "),
        (("0,32,,1,10,1,0.6", "0,64,,1,20,2,0.7"), HEADER, {}, "toy.csv:3: trial 0 "),
        (("0,32,,1,10,1,0.6", "0,32,,2,20,2,0.7"), HEADER, {}, "toy.csv:3: trial 0 "),
        (('0,32,"a', 'b",1,10,1,0.6', "0,32,,1,ten,1,0.6"), HEADER, {}, "toy.csv:4: step = 'ten'"),
        ((), HEADER, {}, "toy.csv holds no trial"),
        (ROWS, HEADER, {"goal": []}, "toy.json: goal = []"),
        (ROWS, HEADER, {"goal": "up"}, "toy.json: goal = 'up'"),
        (ROWS, HEADER, {"target": 10**400}, "toy.json: target = "),
        (ROWS, HEADER, {"target": [0.8, 0.9]}, "toy.json: target = [0.8, 0.9]"),
        (ROWS, HEADER, {"max_train_seconds": 0}, "toy.json: max_train_seconds = 0"),
    ],
)
def test_an_error_names_the_place_and_the_value(
    tmp_path: Path, rows: tuple[str, ...], header: str, about: dict[str, object], place: str
) -> None:
    path = write(tmp_path, *rows, header=header, **about)
    with pytest.raises(UsageError) as raised:
        read_table(path)
    assert place in raised.value.message


def test_both_files_are_written_or_none(tmp_path: Path) -> None:
    (tmp_path / "x.json").mkdir()
    table = read_table(write(tmp_path, *ROWS))
    with pytest.raises(UsageError, match=r"x\.json cannot be written: the path is a folder"):
        write_table(table, tmp_path / "x.csv.gz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["toy.csv", "toy.json", "x.json"]


def test_missing_files_and_wrong_names_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, *ROWS)
    (tmp_path / "toy.json").unlink()
    with pytest.raises(NotFoundError, match=r"toy\.json"):
        read_table(path)
    with pytest.raises(UsageError, match=r"name the file NAME\.csv\.gz or NAME\.csv"):
        read_table(tmp_path / "toy.txt")
    write(tmp_path, *ROWS)
    path.unlink()
    with pytest.raises(NotFoundError, match=r"toy\.csv"):
        read_table(path)
    whole = gzip.compress("\n".join([HEADER, *ROWS * 50]).encode())
    (tmp_path / "toy.csv.gz").write_bytes(whole[:40] + bytes(20) + whole[60:])
    with pytest.raises(UsageError, match="cannot be read"):
        read_table(tmp_path / "toy.csv.gz")
    (tmp_path / "toy.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(UsageError, match="cannot be read: Not a gzipped file"):
        read_table(tmp_path / "toy.csv.gz")
