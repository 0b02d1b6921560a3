"""Plans that rest on what a database has: the verdicts of its audits, and what a study has measured."""

from pathlib import Path
from typing import Any

import pytest

from bssearch import (
    DatabaseError,
    Launch,
    NotFoundError,
    UsageError,
    audit_study,
    open_store,
    plan_learning_rate,
    plan_scale,
    run_study,
)
from bssearch.analysis.law.batch_model import fit_step_time
from bssearch.search.finding import answer, save_quick
from tests.factories import make_quick, make_spec
from tests.search.law import LawExecutor, url_in

SPEC = make_spec(
    space={
        "batch_size": [32, 64, 128, 256],
        "learning_rate": {"reference_batch": 32, "low": 0.02, "high": 0.5, "rule": "sqrt"},
        "warmup_epochs": [1.0, 2.0],
    },
    default={"batch_size": 32, "learning_rate": 0.1, "warmup_epochs": 1.0},
    budget={"trials": 16, "trial_train_seconds": 100.0},
    confirm={"top": 3, "runs": 3},
)


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database with a finished study and its audit."""
    folder = tmp_path_factory.mktemp("studied")
    executor = LawExecutor()
    run_study(SPEC, Launch(db=url_in(folder), make_executor=lambda *_: executor))
    audit_study(SPEC, Launch(db=url_in(folder), make_executor=lambda *_: executor))
    return url_in(folder)


def test_what_audits_said_stands_beside_the_rule_that_they_are_about(studied: str) -> None:
    found = plan_learning_rate(from_batch=32, learning_rate=0.1, batch=256, db=studied)
    verdicts = {one.rule: one for one in found.rules["linear"].audits}
    assert {one.study for one in found.rules["linear"].audits} == {SPEC.name}
    assert verdicts["LINEAR_RATE"].verdict in ("held", "broke", "undecided")
    assert {one.rule for one in found.rules["sqrt"].audits} == {"SQRT_RATE"} | ({"WARMUP"} & verdicts.keys())
    assert found.rules["sde"].audits == [], "SGD has no betas"


def test_without_a_database_nothing_is_known_and_none_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BSSEARCH_DB_URL", raising=False)
    found = plan_learning_rate(from_batch=32, learning_rate=0.1, batch=256)
    assert not any(one.audits for one in found.rules.values())
    monkeypatch.setenv("BSSEARCH_DB_URL", url_in(tmp_path))  # the command line passes this URL as its --db
    assert plan_learning_rate(from_batch=32, learning_rate=0.1, batch=256, db=url_in(tmp_path)) == found
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DatabaseError):
        plan_learning_rate(from_batch=32, learning_rate=0.1, batch=256, db="sqlite:///missing.db")


def test_step_times_law_and_samples_are_the_studys(studied: str) -> None:
    found = plan_scale(devices=2, per_device_batch=64, study=SPEC.name, db=studied, parameters=10**6, bandwidth_gb_s=10)
    with open_store(studied, write=False) as store:
        best, line = answer(store, SPEC.name), fit_step_time(list(store.probes.by_batch_size(SPEC.name).values()))
    assert best.fit is not None and line is not None
    law = best.fit.b_crit
    assert (found.b_crit.estimate, found.b_crit.low, found.b_crit.high) == (law.estimate, law.low, law.high)
    assert found.rows[0].step_s == pytest.approx(line.alpha_seconds + 64 * line.beta_seconds)
    at_best = plan_scale(devices=1, batch=best.optimal.batch_size, study=SPEC.name, db=studied).rows[0]
    assert at_best.time_to_target_s == pytest.approx(
        best.optimal.samples_to_target / at_best.samples_per_s  # type: ignore[operator]
    )


def test_what_is_stated_goes_before_what_is_stored(studied: str) -> None:
    found = plan_scale(
        devices=1, batch=64, study=SPEC.name, db=studied, alpha_s=1.0, beta_s=0.5, b_crit=77.0, samples_to_target=1e4
    )
    assert found.b_crit.estimate == 77.0
    assert found.rows[0].step_s == pytest.approx(33.0)
    assert found.rows[0].time_to_target_s == pytest.approx(1e4 * 33 / 64)


def test_where_no_search_has_a_law_the_quick_answer_stands_in(studied: str, tmp_path: Path) -> None:
    spec = SPEC.model_copy(update={"name": "fresh"})
    with open_store(url_in(tmp_path)) as store:
        store.studies.create(spec.new_study("tester"))
        save_quick(store, "fresh", make_quick(b_crit={"estimate": 60.0, "low": 30.0, "high": 120.0}))
    found = plan_scale(devices=1, batch=64, study="fresh", db=url_in(tmp_path), alpha_s=0.1, beta_s=0.1)
    assert (found.b_crit.low, found.b_crit.estimate, found.b_crit.high) == (30.0, 60.0, 120.0)
    with pytest.raises(UsageError, match="the step time is unknown in study 'fresh'"):
        plan_scale(devices=1, batch=64, study="fresh", db=url_in(tmp_path))
    with open_store(url_in(tmp_path)) as store:
        store.findings.save("fresh", store.findings.stamp("fresh"), {"quick": {"b_crit": "written by something else"}})
    with pytest.raises(UsageError, match="the critical batch size is unknown in study 'fresh'"):
        plan_scale(devices=1, batch=64, study="fresh", db=url_in(tmp_path), alpha_s=0.1, beta_s=0.1)
    with pytest.raises(NotFoundError):
        plan_scale(devices=1, batch=64, study="missing", db=studied)


def test_a_law_of_too_few_points_is_not_put_before_the_quick_answer(tmp_path: Path) -> None:
    spec = make_spec(
        name="few",
        space=SPEC.space.model_copy(update={"batch_size": (32, 64, 128)}),
        default=SPEC.default,
        budget={"trials": 3, "trial_train_seconds": 100.0},
    )
    executor = LawExecutor()
    run_study(spec, Launch(db=url_in(tmp_path), make_executor=lambda *_: executor))
    asked: dict[str, Any] = {"devices": 1, "batch": 64, "study": "few", "db": url_in(tmp_path)}
    with open_store(url_in(tmp_path)) as store:
        found = answer(store, "few").fit
        assert found is not None and found.verdict == "too_few_points"
        assert plan_scale(**asked, alpha_s=0.1, beta_s=0.1).b_crit.estimate == found.b_crit.estimate
        save_quick(store, "few", make_quick(b_crit={"estimate": 60.0, "low": 30.0, "high": 120.0}))
    assert plan_scale(**asked, alpha_s=0.1, beta_s=0.1).b_crit.estimate == 60.0


def test_step_times_of_a_file_are_a_line(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text("batch_size,step_seconds\n8,0.18\n16,0.26\n32,0.42\n")
    (row,) = plan_scale(devices=1, batch=20, step_times=path, b_crit=100.0).rows
    assert row.step_s == pytest.approx(0.3)
    path.write_text("batch_size,step_seconds\n8,0.18\n")
    with pytest.raises(UsageError, match="no line fits"):
        plan_scale(devices=1, batch=20, step_times=path, b_crit=100.0)


def test_a_law_must_be_given_or_stored() -> None:
    with pytest.raises(UsageError, match="b_crit"):
        plan_scale(devices=1, batch=20, alpha_s=1.0, beta_s=1.0)
    with pytest.raises(UsageError, match="alpha_s and beta_s"):
        plan_scale(devices=1, batch=20, b_crit=100.0)


def test_the_cost_of_a_study_follows_from_its_samples(studied: str) -> None:
    asked: dict[str, Any] = {"devices": 1, "batch": 64, "study": SPEC.name, "db": studied}
    (row,) = plan_scale(**asked, price_per_device_hour=2.0).rows
    assert row.cost == pytest.approx(2 * (row.time_to_target_s or 0) / 3600)
