"""A study's trials and observations as tables: for spreadsheets as text, for pandas with their types."""

import csv
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from bssearch import NotFoundError, Store, UsageError, open_store
from bssearch.exchange.exporters import exports
from bssearch.exchange.exporters.exports import column_type, export_csv, export_parquet, export_table, typed_frame
from bssearch.records import Configuration, Lease, ParameterValue, TrialOutcome, TrialState
from tests.factories import make_curve, make_environment, make_plan, make_spec

FORMULA = "=HYPERLINK(A1)"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A study with a trial that reached its target, one that failed elsewhere, one that runs, and one that waits."""
    monkeypatch.chdir(tmp_path)
    with open_store("sqlite:///bssearch.db") as opened:
        opened.studies.create(make_spec().new_study("someone"))
        parameters: dict[str, ParameterValue] = {"momentum": 0.9, "note": FORMULA}
        configuration = Configuration(batch_size=32, micro_batch_size=32, learning_rate=0.1, parameters=parameters)
        start(opened, 0, "cpu-1", configuration=configuration, sampled={"learning_rate": 0.1})
        opened.trials.append_observations("toy", [(1, one) for one in make_curve((0.0, 0.1), (1.5, 0.9))])
        opened.trials.finish(
            "toy",
            1,
            TrialOutcome(
                state=TrialState.REACHED,
                reason=FORMULA,
                time_to_target_s=1.5,
                steps_to_target=10,
                warnings=("slow", "hot"),
            ),
            steps_x_step_time_s=1.25,
        )
        start(opened, 1, "cpu-2", seed=2**62)
        failed = TrialOutcome(state=TrialState.FAILED, reason="broke", traceback="Traceback: here")
        opened.trials.finish("toy", 2, failed, steps_x_step_time_s=None)
        start(opened, 2, "cpu-1")
        opened.trials.enqueue("toy", make_plan())
        yield opened


def start(store: Store, after: int, device: str, **changes: Any) -> None:
    environment = make_environment(device_name=device)
    lease = Lease(owner="me", seconds=60.0)
    assert (
        store.trials.start("toy", make_plan(after=after, **changes), environment=environment, lease=lease) is not None
    )


def test_csv_has_a_row_for_each_trial_with_where_it_ran_and_no_formula(store: Store) -> None:
    assert export_csv(store, "toy").written == ["toy.csv", "toy.observations.csv"]
    with Path("toy.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["number"] for row in rows] == ["1", "2", "3", "4"]
    assert [row["state"] for row in rows] == ["reached", "failed", "running", "queued"]
    assert [row["environment.device_name"] for row in rows] == ["cpu-1", "cpu-2", "cpu-1", ""]
    first = rows[0]
    assert (first["study"], first["time_to_target_s"], first["steps_x_step_time_s"]) == ("toy", "1.5", "1.25")
    assert (first["reason"], first["note"]) == (f"'{FORMULA}", f"'{FORMULA}")
    assert json.loads(first["warnings"]) == ["slow", "hot"]
    assert datetime.fromisoformat(first["ended_at"]).tzinfo is not None
    assert rows[1]["traceback"] == "Traceback: here" and rows[2]["ended_at"] == ""
    observed = pd.read_csv("toy.observations.csv")
    assert list(observed["trial"]) == [1, 1] and list(observed["metric"]) == [0.1, 0.9]
    assert list(observed["train_seconds"]) == [0.0, 1.5]


def test_pandas_columns_have_the_types_of_their_fields(store: Store) -> None:
    frame = typed_frame(*export_table(store, "toy"))
    kinds = {column: str(kind) for column, kind in frame.dtypes.items()}
    for column, kind in {
        "number": "Int64",
        "batch_size": "Int64",
        "steps_to_target": "Int64",
        "retry_of": "Int64",  # of no trial here
        "seed": "Int64",
        "peak_memory_bytes": "Int64",
        "environment.device_memory_bytes": "Int64",
        "learning_rate": "float64",
        "momentum": "float64",
        "test_metric": "float64",
        "noise_scale": "float64",
        "contended": "boolean",
        "uncapped": "boolean",
        "created_at": "datetime64[us, UTC]",
        "ended_at": "datetime64[us, UTC]",
        "state": "string",
        "warnings": "string",
        "environment.cuda_version": "string",
    }.items():
        assert kinds[column] == kind, column
    assert frame["seed"].tolist()[1] == 2**62  # which a float would round
    assert frame["steps_to_target"].isna().tolist() == [False, True, True, True]
    assert frame["reason"][0] == FORMULA
    assert frame["created_at"][0].to_pydatetime() == store.trials.get("toy", 1).created_at
    assert json.loads(frame["warnings"][0]) == ["slow", "hot"]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, 2, None], "Int64"),
        ([1, 0.5], "float64"),
        ([2**63, 1], "float64"),
        ([int(sys.float_info.max), -int(sys.float_info.max)], "float64"),
        ([10**400], "string"),
        ([-(10**400), 0.5, None], "string"),
        ([True, None], "boolean"),
        ([True, 1], "string"),
        ([1, "1"], "string"),
        ([None], "string"),
        ([datetime(2026, 1, 1, tzinfo=UTC)], "datetime64[us, UTC]"),
    ],
)
def test_a_column_of_the_users_own_has_the_type_of_its_values(values: list[Any], kind: str) -> None:
    assert column_type("mine", values) == kind
    assert str(typed_frame(["mine"], [{"mine": one} for one in values])["mine"].dtype) == kind


def test_without_pyarrow_the_extra_is_named_and_nothing_is_written(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match="pyarrow") as caught:
        export_parquet(store, "toy")
    assert caught.value.hint == "pip install 'bssearch[parquet]'"
    assert not list(Path().glob("*.parquet"))


def test_parquet_writes_the_typed_frames_both_or_none(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of our own stands for pyarrow's: what it is given is what a file would have."""
    written: list[tuple[pd.DataFrame, dict[str, Any]]] = []

    def to_parquet(frame: pd.DataFrame, file: Any, **options: Any) -> None:
        file.write(b"parquet")
        written.append((frame, options))
        if len(written) > 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(exports, "require_parquet", lambda: None)
    monkeypatch.setattr(pd.DataFrame, "to_parquet", to_parquet)
    assert export_parquet(store, "toy", "out.parquet").written == ["out.parquet", "out.observations.parquet"]
    (trials, options), (observed, _) = written
    assert options == {"engine": "pyarrow", "index": False}
    assert trials["number"].tolist() == [1, 2, 3, 4]
    assert observed["trial"].dtype == "Int64" and observed["metric"].tolist() == [0.1, 0.9]
    with pytest.raises(UsageError, match="No space left"):
        export_parquet(store, "toy", "again.parquet")
    assert not list(Path().glob("*again*"))


def test_parquet_files_are_read_back_with_their_types(store: Store) -> None:
    pytest.importorskip("pyarrow")
    export_parquet(store, "toy")
    trials, observed = pd.read_parquet("toy.parquet"), pd.read_parquet("toy.observations.parquet")
    wanted = typed_frame(*export_table(store, "toy"))
    assert trials["seed"].tolist() == wanted["seed"].tolist() and str(trials["seed"].dtype) == "Int64"
    assert trials["retry_of"].isna().all() and str(trials["retry_of"].dtype) == "Int64"
    assert str(trials["created_at"].dt.tz) == "UTC"
    assert trials["reason"].tolist()[0] == FORMULA
    assert observed["train_seconds"].tolist() == [0.0, 1.5]


def test_what_cannot_be_exported_is_named(store: Store) -> None:
    with pytest.raises(NotFoundError, match="nobody"):
        export_csv(store, "nobody")
    with pytest.raises(UsageError, match="no folder"):
        export_csv(store, "toy", "nowhere/toy.csv")
    Path("taken.observations.csv").mkdir()
    with pytest.raises(UsageError, match=r"taken\.observations\.csv"):
        export_csv(store, "toy", "taken.csv")
    assert not Path("taken.csv").exists()
