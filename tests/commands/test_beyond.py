"""A harder target than a stored study's, from its curves: ``best`` and ``plan beyond``."""

import json
from pathlib import Path

import pytest

from bssearch import NotFoundError, UsageError, best, open_store, plan_beyond
from bssearch.records import Lease, Observation, Phase
from tests.analysis.test_beyond import MEASURED, SIZES, STEP, curves
from tests.factories import make_environment, make_plan, make_probe, make_spec, make_trial, not_none, store_study

HARDER = 0.84


def url(folder: Path) -> str:
    return f"sqlite:///{folder / 'study.db'}"


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database with a study of seven batch sizes on the law, each with three runs and their curves."""
    folder, environment = tmp_path_factory.mktemp("studied"), make_environment()
    for name, objective in (("task", "time_to_target"), ("frugal", "samples_to_target")):
        spec = make_spec(
            name=name,
            objective=objective,
            target={"metric": MEASURED.metric, "value": MEASURED.value},
            space={"batch_size": list(SIZES), "learning_rate": 0.1},
            default={"batch_size": 32, "learning_rate": 0.1},
        )
        with open_store(url(folder)) as store:
            store_study(store, spec, environment)
            for size in SIZES:
                store.probes.add_step_time(name, environment, make_probe(size, step_seconds=STEP[size]), 1)
            for one in curves(noise=0.05):
                for seed, (steps, metrics) in enumerate(one.runs):
                    size, taken = one.batch_size, round(steps[-1])
                    trial = make_trial(
                        1, batch_size=size, steps=taken, seconds=taken * STEP[size], seed=seed, phase=Phase.CONFIRM
                    )
                    plan = make_plan(configuration=trial.configuration, phase=trial.phase, seed=seed)
                    lease = Lease(owner="test/1/1.00/x", seconds=60.0)
                    started = not_none(store.trials.start(name, plan, environment=environment, lease=lease))
                    seen = {round(step): metric for step, metric in zip(steps, metrics, strict=True)}
                    observations = [
                        Observation(
                            step=step,
                            samples=step * size,
                            train_seconds=step * STEP[size],
                            metric=float(metric),
                            loss=None,
                            learning_rate=0.1,
                        )
                        for step, metric in seen.items()
                    ]
                    store.trials.append_observations(name, [(started.number, row) for row in observations])
                    store.trials.finish(name, started.number, not_none(trial.outcome), steps_x_step_time_s=None)
    return url(folder)


def test_the_answer_for_a_harder_target_has_the_same_keys_and_claims_no_measurement(studied: str) -> None:
    measured, found = best("task", db=studied).to_dict(), best("task", db=studied, target=HARDER).to_dict()
    json.dumps(found, allow_nan=False)
    assert found.keys() == measured.keys()
    assert measured["predicted"] is None
    assert found["target"]["value"] == HARDER
    assert found["optimal"].keys() == measured["optimal"].keys()
    assert found["optimal"]["parameters"]["learning_rate"] == 0.1
    times = [found["optimal"]["time_to_target_s"], found["largest_that_fits"]["time_to_target_s"]]
    times += [row["time_to_target_s"] for row in found["batches"]]
    assert {(one["basis"], one["runs"]) for one in times} == {("predicted", 0)}
    assert all(one["low"] < one["median"] < one["high"] for one in times)
    assert found["optimal"]["trial_numbers"] == [] and found["optimal"]["test_metric"] is None
    assert {(row["trials"], row["reached"], row["confirmed"]) for row in found["batches"]} == {(0, 0, False)}
    assert found["provisional"] and found["warnings"][0]["code"] == "predicted"
    assert found["optimal"]["time_to_target_s"]["median"] > measured["optimal"]["time_to_target_s"]["median"]


def test_the_answer_and_the_plan_say_the_same(studied: str) -> None:
    answer, plan = best("task", db=studied, target=HARDER), plan_beyond(study="task", target=HARDER, db=studied)
    document = plan.document()
    json.dumps(document, allow_nan=False)
    assert answer.to_dict()["predicted"].items() <= document.items()
    assert document["measured_batch_size"] == best("task", db=studied).optimal.batch_size
    assert [one["code"] for one in document["notes"]][:2] == ["predicted", "test"]


def test_the_answer_is_drawn_and_told_as_a_prediction(studied: str) -> None:
    found = best("task", db=studied, target=HARDER)
    assert "predicted" in repr(found)
    assert found._repr_html_() and found.plot().svg
    assert set(found.frame["reached"]) == {0}


def test_more_samples_are_planned_from_the_same_curves(studied: str) -> None:
    by_target = plan_beyond(study="task", target=HARDER, db=studied)
    found = plan_beyond(study="task", samples=by_target.samples.value, db=studied)
    assert found.b_crit.estimate == pytest.approx(by_target.b_crit.estimate, rel=0.05)
    assert not_none(found.metric.low) <= HARDER <= not_none(found.metric.high)


def test_what_cannot_be_planned_is_refused(studied: str) -> None:
    for asked, says in (
        ({"study": "task"}, "give exactly one"),
        ({"study": "task", "target": HARDER, "samples": 1e5}, "give exactly one"),
        ({"study": "task", "target": 0.7}, "must be harder"),
        ({"study": "frugal", "target": HARDER}, "not samples_to_target"),
    ):
        with pytest.raises(UsageError, match=says):
            plan_beyond(**asked, db=studied)
    with pytest.raises(UsageError, match="not samples_to_target"):
        best("frugal", db=studied, target=HARDER)
    with pytest.raises(NotFoundError):
        plan_beyond(study="missing", target=HARDER, db=studied)
