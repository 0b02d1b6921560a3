"""Studies of several scales, plans from stored studies, and a study that begins with another's best."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bssearch import (
    DatabaseError,
    Launch,
    NotFoundError,
    SpecError,
    StudySpec,
    UsageError,
    audit_study,
    best,
    confirm_study,
    load_spec,
    open_store,
    plan_beyond,
    plan_larger,
    plan_learning_rate,
    plan_scale,
    run_study,
)
from bssearch.analysis.law.batch_model import fit_step_time
from bssearch.commands.check import check, dry_run
from bssearch.figures.plans import larger_page, shown_larger
from bssearch.records import BranchMeasurement, Lease, Observation, Phase, TrialRecord, TrialRequest
from bssearch.search.finding import answer, save_quick
from tests.analysis.test_beyond import MEASURED, SIZES, STEP, curves
from tests.cli.task import ran
from tests.factories import (
    make_environment,
    make_plan,
    make_probe,
    make_quick,
    make_spec,
    make_trial,
    not_none,
    store_study,
)
from tests.search.law import LawExecutor, url_in

DATA = (1_000, 4_000, 16_000, 64_000)
POWER = 0.5


def spec_of(name: str = "law", data: tuple[int, ...] = DATA, **changes: object) -> StudySpec:
    return make_spec(
        name=name,
        scales=[
            {"parameters": 10 * one, "samples": one, "target": 0.9, "workload_settings": {"samples": one}}
            for one in data
        ],
        space={
            "batch_size": {"low": 8, "high": 256},
            "learning_rate": {"reference_batch": 32, "low": 0.05, "high": 0.2, "rule": "sqrt"},
            "weight_decay": [0.01],
            "warmup_epochs": 0.128,
            "schedule": {"name": "warmup_stable_decay", "horizon_samples": 256_000, "decay_share": 0.3},
            "optimizer": {"name": "adamw", "beta2": 0.99},
        },
        default={"batch_size": 32, "learning_rate": 0.1},
        budget={"trials": 18, "trial_train_seconds": 1000.0},
        confirm={"top": 1, "runs": 1},
        **changes,
    )


class ScaledLaw(LawExecutor):
    """Steps of B_crit = 20 · (D / 1000)^power and S_min = 100 · (D / 1000)^0.5."""

    samples = 1_000
    power = POWER

    def seconds_of(self, request: TrialRequest) -> float:
        configuration, more = request.plan.configuration, self.samples / 1_000
        off = 1 + math.log(configuration.learning_rate / 0.1 / math.sqrt(configuration.batch_size / 32)) ** 2
        steps: float = 100 * more**0.5 * (1 + 20 * more**self.power / configuration.batch_size) * off
        return steps * self.step_seconds_of(configuration)

    def observe(self, request: TrialRequest, share: float, seconds: float) -> Observation:
        found, size = super().observe(request, share, seconds), request.plan.configuration.batch_size
        step = round(found.train_seconds / self.step_seconds_of(request.plan.configuration))
        return replace(found, step=step, samples=step * size)


def launch(url: str, power: float = POWER) -> Launch:
    def make(spec: StudySpec, folder: Path) -> LawExecutor:
        executor = ScaledLaw()
        executor.samples, executor.power = int(str(spec.workload_settings.get("samples", 1_000))), power
        return executor

    return Launch(db=url, make_executor=make)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database with a study of each scale."""
    url = f"sqlite:///{tmp_path_factory.mktemp('scales') / 'study.db'}"
    found = run_study(spec_of(), launch(url))
    assert found.study == "law.4"
    return url


def test_each_scale_is_a_study_with_its_own_settings_and_target(searched: str) -> None:
    scaled = spec_of().at_scales
    assert [one.name for one in scaled] == ["law.1", "law.2", "law.3", "law.4"]
    assert [one.workload_settings for one in scaled] == [{"samples": one} for one in DATA]
    optima = [best(one.name, db=searched).optimal.batch_size for one in scaled]
    assert optima == sorted(optima) and optima[0] < optima[-1]
    plan, alone = dry_run(spec_of()), dry_run(scaled[-1])
    assert (plan.study, plan.studies, alone.studies) == ("law.4", 4, 1)
    assert plan.longest_search_s == 4 * alone.longest_search_s
    assert plan.longest_confirmation_s == 4 * alone.longest_confirmation_s
    checked, checked_alone = (check(one, launch(searched)) for one in (spec_of(), scaled[-1]))
    assert checked.longest_study_s == 4 * checked_alone.longest_study_s
    with pytest.raises(UsageError, match="4 scales"):
        confirm_study(spec_of(), launch(searched))


def test_larger_run_is_planned_from_the_scales(searched: str) -> None:
    found = plan_larger(studies=["law"], parameters=10**7, samples=1e6, db=searched)
    truth = 20 * 1000**POWER
    assert found.b_crit.value == pytest.approx(truth, rel=0.3)
    assert found.batch_size <= found.b_crit.value < 2 * found.batch_size and found.time_s is None
    assert found.steps.value == pytest.approx(100 * 1000**0.5 * (1 + truth / found.batch_size), rel=0.2)
    assert found.left_out.study == "law.4" and found.left_out.steps_ratio == pytest.approx(1, abs=0.2)
    largest = best("law.4", db=searched).optimal
    ratio = found.batch_size / largest.batch_size
    assert found.learning_rate == pytest.approx(float(str(largest.parameters["learning_rate"])) * math.sqrt(ratio))
    assert found.beta2 == pytest.approx(0.99**ratio)
    assert found.beta2_half_life_samples == pytest.approx(largest.batch_size * math.log(0.5) / math.log(0.99))
    shares = {"warmup_epochs": 2.0, "horizon_samples": 4e6}  # 1e6 / 64,000 times as many
    assert found.schedule == {"schedule": "warmup_stable_decay", "decay_share": 0.3, **shares}
    assert found.timescale is not None and found.weight_decay == pytest.approx(
        found.batch_size / (found.learning_rate * found.timescale * 1e6)
    )
    assert [one.samples for one in found.checks] == [125_000, 250_000, 500_000]
    assert [one.code for one in found.notes] == ["predicted", "check", "no_times"]
    json.dumps(found.document(), allow_nan=False)


def test_branches_of_a_large_run_are_points_of_the_law(searched: str) -> None:
    alone = plan_larger(studies=["law"], parameters=10**7, samples=1e6, db=searched)
    with open_store(searched) as store:
        store_study(store, make_spec(name="big"))
        for start in (10_000, 100_000, 1_000_000):
            holding = 64 * start // 10_000  # B_crit ∝ D
            ends = {holding // 2: (0.79, 0.8, 0.81), holding: (0.79, 0.8, 0.81), 2 * holding: (0.6, 0.6, 0.6)}
            for size, metrics in ends.items():
                for seed, metric in enumerate(metrics):
                    branch = BranchMeasurement(
                        digest=f"{start}/{size}/{seed}",
                        checkpoint="run.pt",
                        start_samples=start,
                        samples=8 * size,
                        batch_size=size,
                        micro_batch_size=size,
                        learning_rate=0.1,
                        seed=seed,
                        start_metric=0.5,
                        metric=metric,
                    )
                    store.probes.add_branch("big", make_environment(), branch)
    joined = plan_larger(studies=["law", "big"], parameters=10**7, samples=1e6, db=searched)
    assert joined.power.value > alone.power.value
    assert {"branches"} == {one.code for one in joined.notes} - {one.code for one in alone.notes}


def test_page_draws_the_law_the_left_out_scale_and_the_run(searched: str) -> None:
    found = plan_larger(studies=["law"], parameters=10**7, samples=1e6, db=searched)
    page = larger_page(found)
    assert f"Train with batch {found.batch_size}" in page and "<svg" in page
    assert all(one.study in page for one in found.scales)
    renamed = found.model_copy(update={"scales": [found.scales[0].model_copy(update={"study": "my_law.1"})]})
    assert "my_law.1" in str(shown_larger(renamed).tables[0].rows[0].cells[0].text)


def test_step_times_of_the_planned_model_give_its_time_and_optimum(searched: str, tmp_path: Path) -> None:
    times = tmp_path / "times.csv"
    times.write_text("batch_size,step_seconds\n16,0.0116\n64,0.0164\n256,0.0356\n")  # 0.01 + 0.0001 · B
    found = plan_larger(studies=["law"], parameters=10**7, samples=1e6, step_times=times, db=searched)
    optimum = math.sqrt(found.b_crit.value * 0.01 / 0.0001)
    assert found.batch_size / 1.5 < optimum < 1.5 * found.batch_size
    assert found.flat_range is not None and found.flat_range[0] <= found.batch_size <= found.flat_range[1]
    assert not_none(found.time_s).value == pytest.approx(
        found.steps.value * (0.01 + 0.0001 * found.batch_size), rel=0.01
    )
    measured = plan_larger(studies=["law"], parameters=10 * DATA[-1], samples=1e5, db=searched)
    assert measured.time_s is not None  # the largest study timed this model


def test_single_studies_with_their_numbers_are_scales_too(searched: str) -> None:
    stated = [f"law.{number}:{10 * one}:{one}" for number, one in enumerate(DATA, start=1)]
    by_name, by_number = (
        plan_larger(studies=studies, parameters="10M", samples=1e6, db=searched) for studies in (["law"], stated)
    )
    assert by_name == by_number


@pytest.mark.parametrize(
    ("studies", "samples", "says"),
    [
        (["law.1"], 1e6, "1 different number of samples"),
        (["law.1", "law.4"], 1e6, "2 different numbers of samples"),
        (["law"], 1e3, "samples = 1000 must be >= 64000"),
        (["law.1:10k", "law.2"], 1e6, "does not give its parameters and samples"),
        (["law.1:x:1", "law.2"], 1e6, "parameters = 'x'"),
        (["law", "other:1M:2e5"], 1e6, "differ in more than model and data: .*optimizer"),
    ],
)
def test_what_the_law_cannot_plan_is_refused(searched: str, studies: list[str], samples: float, says: str) -> None:
    other = make_spec(name="other", budget={"trials": 18, "trial_train_seconds": 1000.0})
    run_study(other, launch(searched))
    with pytest.raises(UsageError, match=says):
        plan_larger(studies=studies, parameters=10**7, samples=samples, db=searched)
    with pytest.raises(NotFoundError):
        plan_larger(studies=["missing"], parameters=1, samples=1e6, db=searched)


def test_no_growth_of_b_crit_is_said_and_predicts_nothing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    run_study(spec_of(data=DATA[:3]), launch(url, power=0.0))
    with pytest.raises(UsageError, match="no better than a constant B_crit"):
        plan_larger(studies=["law"], parameters=10**7, samples=1e6, db=url)


@pytest.mark.parametrize(
    ("scales", "says"),
    [
        ([{"parameters": 1, "samples": one, "target": 0.9} for one in (1, 2)], "scales has 2 entries"),
        ([{"parameters": 1, "samples": 5, "target": 0.9} for _ in range(3)], "samples = 5 more than once"),
        ([{"parameters": 0, "samples": 5, "target": 0.9}], "scales.0.parameters = 0"),
        ([{"parameters": 1, "samples": 5, "target": 0.8}], "scales has 1 entry"),
        ([{"parameters": 1, "samples": 5, "target": 0.9, "workload_settings": {"a": [1]}}], "scales has 1 entry"),
        ([{"parameters": 1, "samples": 5, "target": 0.9, "arguments": ["--deep"]}], "scales has 1 entry"),
        (
            [{"parameters": 1, "samples": one, "target": 0.9, "arguments": ["--deep"]} for one in (1, 2, 3)],
            "need a script or a command",
        ),
    ],
)
def test_wrong_scales_of_a_spec_are_refused(scales: list[object], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        load_spec({**spec_of().model_dump(mode="json"), "scales": scales})


@pytest.mark.parametrize(
    ("program", "whole"),
    [
        ({"workload": "train.py", "arguments": ["--seed"]}, ("--seed", "--layers", "2")),
        (
            {"workload": None, "command": ["train", "{batch_size}", "{learning_rate}"]},
            ("train", "{batch_size}", "{learning_rate}", "--layers", "2"),
        ),
    ],
)
def test_a_scale_has_further_arguments_for_a_program(program: dict[str, object], whole: tuple[str, ...]) -> None:
    given = {**spec_of().model_dump(mode="json", exclude_unset=True), **program}
    scales = [
        {"parameters": 1, "samples": one, "target": 0.9, "arguments": ["--layers", str(one)]} for one in (1, 2, 4)
    ]
    spec = load_spec({name: value for name, value in given.items() if value is not None} | {"scales": scales})
    second = spec.at_scales[1]
    assert (second.command or second.arguments) == whole
    assert load_spec(second.model_dump(mode="json")).at_scales == [second]
    if spec.command:
        scales[2]["arguments"] = ["{unknown}"]
        with pytest.raises(SpecError, match="unknown"):
            load_spec({**spec.model_dump(mode="json"), "scales": scales})


# Beyond ---------------------------------------------------------------------------------------------------------------


HARDER = 0.84


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
        with open_store(url_in(folder)) as store:
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
    return url_in(folder)


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
        ({"study": "frugal", "target": HARDER}, "has objective samples_to_target"),
    ):
        with pytest.raises(UsageError, match=says):
            plan_beyond(**asked, db=studied)
    with pytest.raises(UsageError, match="has objective samples_to_target"):
        best("frugal", db=studied, target=HARDER)
    with pytest.raises(NotFoundError):
        plan_beyond(study="missing", target=HARDER, db=studied)


# A study from another -------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the imported study ``old``, whose best batch size is the largest, at the highest learning rate."""
    rows = [f"{size},{rate},{1 / size / rate},100,true" for size in (16, 32, 64) for rate in (0.1, 0.2, 0.4)]
    (tmp_path / "old.csv").write_text("\n".join(["batch_size,learning_rate,train_seconds,steps,reached", *rows]))
    ran(tmp_path, "import", "runs", "old.csv", "--metric", "accuracy", "--target", "0.9", "--figures-at", "target")
    return tmp_path


def trials_of(folder: Path, *sizes: int) -> list[TrialRecord]:
    """Run a study of these batch sizes from ``old``; return its trials."""
    db = f"sqlite:///{folder / 'bssearch.db'}"
    spec = make_spec(
        name="new",
        space={
            "batch_size": list(sizes),
            "learning_rate": {"reference_batch": 32, "low": 0.01, "high": 1.0, "rule": "sqrt"},
        },
        default={"batch_size": 32, "learning_rate": 0.1},
        budget={"trials": 6, "trial_train_seconds": 10.0},
        confirm={"top": 1, "runs": 0},
    )
    run_study(spec, Launch(db=db, make_executor=lambda *_: LawExecutor()), from_study="old")
    with open_store(db, write=False) as store:
        return store.trials.of("new")


def begun(trials: list[TrialRecord]) -> list[tuple[int, float]]:
    return [(one.configuration.batch_size, round(one.configuration.learning_rate, 6)) for one in trials]


def test_the_best_and_the_missing_runs_are_tried_first_and_count_in_the_budget(folder: Path) -> None:
    trials = trials_of(folder, 16, 32, 64, 128)
    assert begun(trials)[:3] == [(64, 0.4), (128, 0.57), (64, 0.8)]
    assert len(trials) == 6
    assert len(trials_of(folder, 16, 32, 64, 128)) == 6, "a second call adds nothing"


def test_runs_outside_the_space_are_left_out(folder: Path) -> None:
    assert begun(trials_of(folder, 16, 32, 64))[:2] == [(64, 0.4), (64, 0.8)]


# Plans ----------------------------------------------------------------------------------------------------------------


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
def audited(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database with a finished study and its audit."""
    folder = tmp_path_factory.mktemp("studied")
    executor = LawExecutor()
    run_study(SPEC, Launch(db=url_in(folder), make_executor=lambda *_: executor))
    audit_study(SPEC, Launch(db=url_in(folder), make_executor=lambda *_: executor))
    return url_in(folder)


def test_what_audits_said_stands_beside_the_rule_that_they_are_about(audited: str) -> None:
    found = plan_learning_rate(from_batch=32, learning_rate=0.1, batch=256, db=audited)
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


def test_step_times_law_and_samples_are_the_studys(audited: str) -> None:
    found = plan_scale(devices=2, per_device_batch=64, study=SPEC.name, db=audited, parameters=10**6, bandwidth_gb_s=10)
    with open_store(audited, write=False) as store:
        best, line = answer(store, SPEC.name), fit_step_time(list(store.probes.by_batch_size(SPEC.name).values()))
    assert best.fit is not None and line is not None
    law = best.fit.b_crit
    assert (found.b_crit.estimate, found.b_crit.low, found.b_crit.high) == (law.estimate, law.low, law.high)
    assert found.rows[0].step_s == pytest.approx(line.alpha_seconds + 64 * line.beta_seconds)
    at_best = plan_scale(devices=1, batch=best.optimal.batch_size, study=SPEC.name, db=audited).rows[0]
    assert at_best.time_to_target_s == pytest.approx(
        best.optimal.samples_to_target / at_best.samples_per_s  # type: ignore[operator]
    )


def test_what_is_stated_goes_before_what_is_stored(audited: str) -> None:
    found = plan_scale(
        devices=1, batch=64, study=SPEC.name, db=audited, alpha_s=1.0, beta_s=0.5, b_crit=77.0, samples_to_target=1e4
    )
    assert found.b_crit.estimate == 77.0
    assert found.rows[0].step_s == pytest.approx(33.0)
    assert found.rows[0].time_to_target_s == pytest.approx(1e4 * 33 / 64)


def test_where_no_search_has_a_law_the_quick_answer_stands_in(audited: str, tmp_path: Path) -> None:
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
        plan_scale(devices=1, batch=64, study="missing", db=audited)


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


def test_the_cost_of_a_study_follows_from_its_samples(audited: str) -> None:
    asked: dict[str, Any] = {"devices": 1, "batch": 64, "study": SPEC.name, "db": audited}
    (row,) = plan_scale(**asked, price_per_device_hour=2.0).rows
    assert row.cost == pytest.approx(2 * (row.time_to_target_s or 0) / 3600)
