"""That columns and dataclass fields agree: a new one is one field, one column and one migration."""

from __future__ import annotations

import dataclasses
import types
import typing

import pytest

from bssearch.records import (
    BranchMeasurement,
    Environment,
    GradientNoise,
    Observation,
    ProbeRecord,
    StepTimeError,
    StudyRecord,
    TrialOutcome,
    TrialRecord,
    TrialState,
    Visit,
)
from bssearch.storage.columns import PREFIXES, column_types, from_columns, layout, to_columns
from bssearch.storage.models import (
    Base,
    BranchRow,
    EnvironmentRow,
    ObservationRow,
    ProbeRow,
    StudyRow,
    TrialRow,
    VisitRow,
)
from tests.factories import make_environment, make_trial

NOT_IN_THE_ROW = (Environment, StepTimeError)
ONLY_OF_NOISE = {"step", "metric", *(f"noise_{name}" for name in column_types(GradientNoise))}
TABLES: list[tuple[type[Base], type, set[str]]] = [
    (EnvironmentRow, Environment, {"id", "digest"}),
    (
        StudyRow,
        StudyRecord,
        {"id", "environment_id", "revision", "rewritten_at_revision", "probed_at_revision", "login"},
    ),
    (TrialRow, TrialRecord, {"id", "study_id", "environment_id", "revision", "plan_id"}),
    (ObservationRow, Observation, {"trial_id"}),
    (BranchRow, BranchMeasurement, {"id", "study_id", "environment_id", "measured_at"}),
    (VisitRow, Visit, {"id", "study_id", "environment_id", "measured_at"}),
    (ProbeRow, ProbeRecord, {"id", "study_id", "environment_id", "kind", "measured_at", *ONLY_OF_NOISE}),
]


def _fields(record_type: type, prefix: str = "") -> dict[str, object]:
    """Return the columns that a record needs, with the types that its fields say."""
    hints = typing.get_type_hints(record_type)
    found: dict[str, object] = {}
    for name, nested in layout(record_type).items():
        if nested is None:
            found[prefix + name] = hints[name]
        elif nested not in NOT_IN_THE_ROW:
            found.update(_fields(nested, PREFIXES[nested]))
    return found


@pytest.mark.parametrize(("table", "record_type", "own"), TABLES, ids=lambda value: getattr(value, "__name__", ""))
def test_the_columns_are_the_fields_and_a_column_is_nullable_where_its_field_may_be_none(
    table: type[Base], record_type: type, own: set[str]
) -> None:
    expected = _fields(record_type)
    columns = {column.name: column for column in table.__table__.columns}
    assert set(columns) - own == set(expected)
    for name, hint in expected.items():
        may_be_none = isinstance(hint, types.UnionType) and types.NoneType in hint.__args__
        assert columns[name].nullable == may_be_none, name


@pytest.mark.parametrize(("table", "record_type", "own"), TABLES, ids=lambda value: getattr(value, "__name__", ""))
def test_the_columns_are_annotated_as_the_fields(table: type[Base], record_type: type, own: set[str]) -> None:
    annotations = {name: typing.get_args(hint)[0] for name, hint in typing.get_type_hints(table).items() if hint}
    assert {name: hint for name, hint in annotations.items() if name in _fields(record_type)} == _fields(record_type)


def test_a_finished_trial_comes_back_from_its_columns() -> None:
    trial = make_trial(3, sampled={"lr": 0.5, "momentum": None}, peak_memory_bytes=2**40, traceback="…")
    columns = to_columns(trial)
    assert set(columns) == set(column_types(TrialRecord))
    assert from_columns(TrialRecord, columns) == trial


def test_an_inner_record_can_be_absent() -> None:
    trial = make_trial(3, state=TrialState.RUNNING)
    columns = to_columns(trial)
    assert columns["state"] is TrialState.RUNNING
    assert "reason" not in columns
    assert from_columns(TrialRecord, columns, absent="outcome") == trial


def test_no_two_fields_of_a_trial_share_a_column_but_the_state() -> None:
    names = [field.name for field in dataclasses.fields(TrialRecord) if field.name not in {"configuration", "outcome"}]
    inner = [name for nested in PREFIXES if nested is TrialOutcome for name in column_types(nested)]
    assert set(names) & set(inner) == {"state"}


def test_an_environment_of_a_joined_row_has_its_prefix() -> None:
    environment = make_environment()
    columns = {f"environment_{name}": value for name, value in to_columns(environment).items()}
    assert from_columns(Environment, columns, prefix="environment_") == environment
