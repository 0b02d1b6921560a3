import json
from pathlib import Path

import pytest

from bssearch.errors import NotFoundError, UsageError
from bssearch.exchange.importers.step_times import read_step_times


def write(folder: Path, text: str) -> Path:
    path = folder / "h200.csv"
    path.write_text(text)
    return path


def test_a_table_is_read(tmp_path: Path) -> None:
    found = read_step_times(write(tmp_path, "batch_size, step_seconds,micro_batch_size\n32,0.5,\n64,0.75,16\n"))
    assert {size: (one.step_seconds, one.micro_batch_size) for size, one in found.items()} == {
        32: (0.5, 32),
        64: (0.75, 16),
    }


def test_what_the_probe_prints_is_read_and_sizes_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    probes = [
        {"batch_size": 32, "micro_batch_size": 32, "step_seconds": 0.5, "out_of_memory": False},
        {"batch_size": 64, "micro_batch_size": 64, "step_seconds": None, "out_of_memory": True},
    ]
    assert list(read_step_times(write(tmp_path, json.dumps({"study": "x", "probes": probes})))) == [32]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no column batch_size and no step_seconds"),
        ("batch_size\n3\n", "no column step_seconds: it has 'batch_size'"),
        ("batch_size,step_seconds\n", "has no step times"),
        ("batch_size,step_seconds\n32,0\n", "h200.csv:2: step_seconds = '0' must be a finite number of seconds > 0"),
        ("batch_size,step_seconds\n32,-1\n", "step_seconds = '-1' must be"),
        ("batch_size,step_seconds\n32,nan\n", "step_seconds = 'nan' must be"),
        ("batch_size,step_seconds\n32.5,1\n", "batch_size = '32.5' must be a whole number in"),
        ("batch_size,step_seconds\n0,1\n", "batch_size = '0' must be a whole number in"),
        ("batch_size,step_seconds\n32,1\n32,2\n", "h200.csv:3: batch_size 32 occurs twice"),
        ("batch_size,step_seconds,micro_batch_size\n32,1,5\n", "micro_batch_size = 5 must divide batch_size = 32"),
        ("{", "is not valid JSON"),
        ('{"fit": 1}', "has no list 'probes'"),
        ("[3]", "probe 1: 3 is not an object"),
        ("batch_size,step_seconds\n32,1e300\n", "h200.csv:2: step_seconds = '1e300' must be"),
        ("batch_size,step_seconds\n32,1000001\n", "a finite number of seconds > 0, from 1e-09 to 1e+06"),
        ("batch_size,step_seconds\n32,1e-310\n", "step_seconds = '1e-310' must be"),
        ("batch_size,step_seconds\n32,1_0\n", "step_seconds = '1_0' must be"),
        (
            "batch_size,step_seconds\n2147483648,1\n",
            "batch_size = '2147483648' must be a whole number in [1, 2147483647]",
        ),
        ("batch_size,step_seconds\n32,0,5\n", "h200.csv:2: the row has 3 cells, but the header has 2 columns"),
        (f"batch_size,step_seconds\n32,{'9' * 200_000}\n", "h200.csv:2 is not valid CSV: field larger than"),
        (f"batch_size,step_seconds\n32,{'9' * 5000}\n", "step_seconds = '9999"),
        ("a" * 100_000 + ",b\n", "no column batch_size and no step_seconds: it has 'aaa"),
        ("[" * 100_000, "h200.csv cannot be read as JSON: its lists or objects are nested too deeply"),
        (f'[{{"batch_size": {"9" * 5000}, "step_seconds": 1}}]', "h200.csv, probe 1: batch_size = '9999"),
        (f'[{{"batch_size": 8, "step_seconds": {"9" * 500}}}]', "h200.csv, probe 1: step_seconds = '9999"),
        ('[{"batch_size": 8, "step_seconds": [1]}]', "step_seconds = [1] must be"),
        ('[{"batch_size": true, "step_seconds": 1}]', "batch_size = True must be"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_step_times(write(tmp_path, text))
    assert message in str(caught.value)
    assert len(str(caught.value)) < len(str(tmp_path)) + 200


def test_a_table_separated_otherwise_is_told_what_separates_columns(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it has 'batch_size;step_seconds'") as caught:
        read_step_times(write(tmp_path, "batch_size;step_seconds\n32;0.5\n"))
    assert caught.value.hint == "the columns are batch_size, step_seconds, micro_batch_size, separated by commas"


def test_the_shortest_and_the_longest_steps_are_read(tmp_path: Path) -> None:
    found = read_step_times(write(tmp_path, "batch_size,step_seconds\n1,1e-9\n2147483647,1e6\n"))
    assert {size: one.step_seconds for size, one in found.items()} == {1: 1e-9, 2**31 - 1: 1e6}


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"none\.csv"):
        read_step_times(tmp_path / "none.csv")
    path = tmp_path / "bytes.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not UTF-16 text"):
        read_step_times(path)
