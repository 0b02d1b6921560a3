"""Optuna studies become studies as far as they say what they measured; nothing is written to their database."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from bssearch import BSSearchError, DatabaseError, Launch, NotFoundError, SchemaError, UsageError, open_store, run_study
from bssearch.exchange.importers.imported_run import Studies
from bssearch.exchange.importers.optuna_runs import import_optuna
from bssearch.exchange.importers.runs import FiguresAt
from bssearch.exchange.optuna_study import OptunaStudy, optuna_database, write_study
from bssearch.records import Configuration, Goal, StudyRecord, TrialOutcome, TrialState as State
from tests.cli.task import printed, read
from tests.factories import EPOCH, make_environment, make_spec, make_trial
from tests.postgres import Postgres
from tests.schema import execute
from tests.search.law import LawExecutor

SIZES = optuna.distributions.IntDistribution(1, 4096, log=True)
RATES = optuna.distributions.FloatDistribution(1e-5, 10.0, log=True)
BEGAN = datetime(2026, 1, 1)


def trial(
    value: float | None = None,
    state: str = "COMPLETE",
    *,
    reports: dict[int, float] | None = None,
    lasted: float = 0.0,
    size: int = 32,
    rate: str = "learning_rate",
    constraints: dict[str, Any] | None = None,
    **attributes: Any,
) -> FrozenTrial:
    finished = TrialState[state].is_finished()
    return FrozenTrial(
        number=0,
        trial_id=0,
        state=TrialState[state],
        value=value,
        datetime_start=None if state == "WAITING" else BEGAN,
        datetime_complete=BEGAN + timedelta(seconds=lasted) if finished else None,
        params={"batch_size": size, rate: 0.1},
        distributions={"batch_size": SIZES, rate: RATES},
        user_attrs=attributes,
        system_attrs=constraints or {},
        intermediate_values=reports or {},
    )


Write = Callable[..., str]


@cache
def _empty() -> bytes:
    """Return a database with Optuna's tables, which take long to make."""
    with TemporaryDirectory() as place:
        storage = optuna.storages.RDBStorage(f"sqlite:///{place}/optuna.db")
        storage.remove_session()
        storage.engine.dispose()
        return Path(place, "optuna.db").read_bytes()


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """Write trials into a database with Optuna itself; return its path."""
    opened = []

    def written(*trials: FrozenTrial, name: str = "theirs", url: str | None = None, **study: Any) -> str:
        if not (tmp_path / "optuna.db").exists():
            (tmp_path / "optuna.db").write_bytes(_empty())
        storage = optuna.storages.RDBStorage(url or f"sqlite:///{tmp_path / 'optuna.db'}")
        opened.append(storage)
        made = optuna.create_study(study_name=name, storage=storage, **(study or {"direction": "maximize"}))
        made.add_trials(trials)
        return url or str(tmp_path / "optuna.db")

    yield written
    for storage in opened:
        storage.remove_session()
        storage.engine.dispose()


def outcomes(made: Studies) -> list[TrialOutcome]:
    (study,) = made.studies
    return [one.outcome for one in study.trials]


def states(made: Studies) -> list[str]:
    return [one.state.value for one in outcomes(made)]


def refuse(kind: type[BSSearchError], file: str, *words: str, said: str, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        import_optuna(file, *words, **options)
    told = f"{caught.value.message} {caught.value.hint or ''}"
    assert said in told, told
    return told


# What became of a trial -----------------------------------------------------------------------------------------------


def test_states_are_those_of_the_metric_and_what_has_not_ended_is_left_out(write: Write) -> None:
    file = write(
        trial(0.91, to_target_s=2.0),
        trial(0.8, to_target_s=9.0),
        trial(state="PRUNED", reports={1: 0.5}, to_target_s=3.0),
        trial(state="PRUNED", reports={1: 0.95}, to_target_s=4.0),
        trial(state="FAIL"),
        trial(state="FAIL"),
        trial(state="RUNNING"),
        trial(state="WAITING"),
    )
    made = import_optuna(file, target=0.9, metric="accuracy", seconds="user_attr:to_target_s")
    assert states(made) == ["reached", "exhausted", "pruned", "reached"]
    assert [one.time_to_target_s for one in outcomes(made)] == [2.0, None, None, 4.0]
    assert [one.train_seconds for one in outcomes(made)] == [2.0, 9.0, 3.0, 4.0]
    assert [one.last_miss_seconds for one in outcomes(made)] == [None, 9.0, 3.0, None]
    assert [one.final_metric for one in outcomes(made)] == [0.91, 0.8, 0.5, 0.95]
    said = " ".join(made.notes)
    assert "2 FAIL trials" in said and "1 RUNNING trial" in said and "1 WAITING trial" in said
    (study,) = made.studies
    assert (study.study.name, study.study.target.metric, study.study.target.value) == ("theirs", "accuracy", 0.9)


def test_the_direction_is_the_goal_unless_another_is_given(write: Write) -> None:
    file = write(trial(0.1, took=1.0), trial(0.3, took=2.0, size=64), direction="minimize")
    assert states(import_optuna(file, target=0.2, seconds="user_attr:took")) == ["reached", "exhausted"]
    other = import_optuna(file, target=0.2, goal=Goal.MAXIMIZE, seconds="user_attr:took")
    assert states(other) == ["exhausted", "reached"]


def test_parameters_have_our_names_and_others_stay(write: Write) -> None:
    file = write(trial(0.95, rate="lr", to_target_s=1.0))
    (study,) = import_optuna(file, target=0.9, seconds="user_attr:to_target_s", param=["lr=learning_rate"]).studies
    assert study.trials[0].configuration.learning_rate == 0.1
    (study,) = import_optuna(file, target=0.9, seconds="user_attr:to_target_s", param=["lr=peak"], name="mine").studies
    assert (study.trials[0].configuration.parameters["peak"], study.study.name) == (0.1, "mine")


def test_a_trial_that_violates_a_constraint_is_left_out(write: Write) -> None:
    def constrained(size: int, **constraints: Any) -> FrozenTrial:
        return trial(0.95, reports={100: 0.5, 200: 0.95}, size=size, lasted=float(size), constraints=constraints)

    file = write(
        constrained(16, constraints=[2.0]),  # the list of optuna < 5
        constrained(32, constraints=[0.0]),  # a bound that is just met
        constrained(64, **{"constraints:time": -1.0, "constraints:memory": 0.5}),  # one constraint of two
        constrained(128, constraints=[float("nan")]),
        trial(0.95, reports={100: 0.5, 200: 0.95}, size=256, lasted=256.0),  # no constraint
        trial(state="PRUNED", reports={100: 0.5}, size=512),
    )
    made = import_optuna(file, target=0.9, seconds="duration", steps="step")
    assert [one.configuration.batch_size for one in made.studies[0].trials] == [32, 256, 512]
    assert any("skipped 3 trials with a violated constraint (first: trial 0)" in note for note in made.notes)
    write(constrained(16, constraints=[2.0]), name="none")
    refuse(UsageError, file, "none", said="that meets all constraints", target=0.9, seconds="duration")


def test_accumulation_and_devices_are_parts_of_the_batch_also_under_other_names(write: Write) -> None:
    counts = optuna.distributions.IntDistribution(1, 64)

    def accumulated(size: int, steps: int, number: int = 1) -> FrozenTrial:
        made = trial(0.95, reports={100: 0.5, 200: 0.95}, size=size, lasted=5.0)
        made.distributions = made.distributions | {"grad_accum": counts, "replicas": counts}
        made.params = made.params | {"grad_accum": steps, "replicas": number}
        return made

    file = write(accumulated(32, 1), accumulated(32, 4, 2), accumulated(32, 16))
    words: dict[str, Any] = {"target": 0.9, "seconds": "duration", "steps": "step"}

    def batches(*param: str) -> list[tuple[int, int, int, int]]:
        found = [one.configuration for one in import_optuna(file, param=list(param), **words).studies[0].trials]
        return [(one.batch_size, one.micro_batch_size, one.accumulation_steps, one.world_size) for one in found]

    whole = [(32, 32, 1, 1), (256, 32, 4, 2), (512, 32, 16, 1)]
    assert batches("replicas=world_size") == batches("replicas=n_gpus", "batch_size=micro_batch_size") == whole
    assert batches()[1] == (128, 32, 4, 1)
    refuse(
        UsageError, write(accumulated(64, 4), name="one"), "one", said="--param batch_size=micro_batch_size", **words
    )
    said = import_optuna(file, "one", param=["batch_size=effective_batch_size"], **words).studies[0].trials
    assert (said[0].configuration.batch_size, said[0].configuration.micro_batch_size) == (64, 16)


def suggested(*params: dict[str, Any]) -> list[FrozenTrial]:
    """Return trials of other parameters, which met 0.9 at their last report."""
    texts = sorted({one for each in params for one in each.values() if isinstance(one, str)})
    numbers = optuna.distributions.FloatDistribution(-9.0, 1e4)
    kind = optuna.distributions.CategoricalDistribution(texts) if texts else numbers
    made = [trial(0.95, reports={100: 0.5, 200: 0.95}, lasted=5.0) for _ in params]
    for one, values in zip(made, params, strict=True):
        one.distributions, one.params = dict.fromkeys(values, kind), values
    return made


WORDS: dict[str, Any] = {"target": 0.9, "seconds": "duration", "steps": "step"}


@pytest.mark.parametrize(
    ("trials", "options", "batches"),
    [
        ([{"batch_size": 64}, {}, {"batch_size": 61.7}], {}, [64]),
        ([{"batch_size": 64}, {}], {"batch_size": 128}, [64, 128]),
        ([{"batch_size": "64"}, {"batch_size": "256"}, {"batch_size": "many"}], {}, [64, 256]),
        ([{}, {}], {}, None),
        ([{"log2": 7}, {"log2": 8}], {"param": ["2**log2=batch_size"]}, [128, 256]),
        ([{"log2": 7}, {"log2": 8}], {"param": ["1*log2=batch_size"]}, [7, 8]),
        ([{"log2": 7}, {"log2": 8}], {"param": ["log2=batch_size"]}, None),
        ([{"units": 3}, {"units": 4}], {"param": ["16*units=batch_size"]}, [48, 64]),
        ([{"batch_size": size} for size in (5, 6, 7, 8)], {}, None),
        ([{"batch_size": size} for size in (5, 6, 7, 8)], {"param": ["1*batch_size=batch_size"]}, [5, 6, 7, 8]),
        ([{"batch_size": size} for size in (2, 4, 8, 16)], {}, [2, 4, 8, 16]),
    ],
)
def test_trials_without_a_batch_size_are_left_out_and_powers_are_never_taken_for_batches(
    write: Write, trials: list[dict[str, Any]], options: dict[str, Any], batches: list[int] | None
) -> None:
    file = write(*suggested(*trials))
    if batches is None:
        refuse(UsageError, file, said="batch_size", **WORDS, **options)
        return
    made = import_optuna(file, **WORDS, **options)
    assert [one.configuration.batch_size for one in made.studies[0].trials] == batches
    assert any(f"skipped {len(trials) - len(batches)} of " in note for note in made.notes) is (
        len(batches) < len(trials)
    )
    assert {f"parameter {name!r}" for params in trials for name in params} <= {
        note.partition(":")[0] for note in made.notes
    }


def test_a_trial_whose_reports_have_no_whole_step_is_left_out(write: Write) -> None:
    file = write(trial(0.95, reports={100: 0.95}, to_target_s=2.0), trial(0.96, reports={200: 0.96}, to_target_s=3.0))
    execute(Path(file), "UPDATE trial_intermediate_values SET step = 9e999 WHERE step = 200")
    made = import_optuna(file, target=0.9, seconds="user_attr:to_target_s")
    assert [one.time_to_target_s for one in outcomes(made)] == [2.0]
    assert "skipped 1 of 2 trials" in " ".join(made.notes)


def test_the_note_on_a_trial_that_is_left_out_has_the_remedy(write: Write) -> None:
    odd = trial(0.96, to_target_s=3.0)
    odd.params, odd.distributions = {"learning_rate": 0.1}, {"learning_rate": RATES}
    made = import_optuna(write(trial(0.95, to_target_s=2.0), odd), target=0.9, seconds="user_attr:to_target_s")
    assert "or --batch-size N" in next(note for note in made.notes if note.startswith("skipped 1 of 2 trials"))


def test_a_transformed_learning_rate_is_a_learning_rate(write: Write) -> None:
    file = write(*suggested({"batch_size": 64, "log_lr": -2.0}, {"batch_size": 128, "log_lr": -3.0}))
    made = import_optuna(file, **WORDS, param=["10**log_lr=learning_rate"])
    assert [one.configuration.learning_rate for one in made.studies[0].trials] == pytest.approx([0.01, 0.001])
    refuse(UsageError, file, said="10**", **WORDS, param=["log_lr=learning_rate"])


def test_a_metric_in_percent_and_a_target_as_a_fraction_are_refused(write: Write) -> None:
    file = write(trial(95.0, reports={100: 50.0, 200: 95.0}, lasted=5.0))
    refuse(UsageError, file, said="--target 90", target=0.9, seconds="duration")
    assert states(import_optuna(file, target=90, seconds="duration")) == ["reached"]


def test_one_of_several_objectives_is_the_metric_and_the_others_are_attributes(write: Write) -> None:
    file = write(name="other")
    storage = optuna.storages.RDBStorage(f"sqlite:///{file}")
    made = optuna.create_study(study_name="both", storage=storage, directions=["minimize", "maximize"])
    with pytest.warns(optuna.exceptions.ExperimentalWarning):
        made.set_metric_names(["took", "acc"])
    for size, took, metric in ((32, 40.0, 0.95), (64, 26.0, 0.93), (128, 9.0, 0.5)):
        one = trial(size=size)
        one.values = [took, metric]
        made.add_trial(one)
    storage.remove_session()
    storage.engine.dispose()
    refuse(UsageError, file, "both", said="took, acc", target=0.9)
    for figures_at, times in ((None, [None] * 3), (FiguresAt.TARGET, [40.0, 26.0, None])):
        words: dict[str, Any] = {"seconds": "user_attr:took", "figures_at": figures_at}
        found = import_optuna(file, "both", target=0.9, metric="acc", **words)
        assert [one.time_to_target_s for one in outcomes(found)] == times


# Steps and seconds, where somebody says where they stand --------------------------------------------------------------


def test_reports_by_step_tell_the_steps_to_the_target_and_seconds_stay_unknown(write: Write) -> None:
    file = write(
        trial(0.95, reports={100: 0.5, 200: 0.8, 300: 1.0, 400: 0.95}, lasted=5.0),
        trial(0.7, reports={100: 0.5, 500: 0.7}, lasted=5.0, size=64),
    )
    made = import_optuna(file, target=0.9, steps="step")
    first, second = outcomes(made)
    assert (first.steps_to_target, first.last_miss_step) == (250, 200)
    assert (second.state.value, second.last_miss_step) == ("exhausted", 500)
    assert first.time_to_target_s is None and second.last_miss_seconds is None
    assert made.studies[0].study.objective == "samples_to_target"


def test_reports_by_milliseconds_tell_the_seconds_to_the_target(write: Write) -> None:
    file = write(
        trial(0.95, reports={1000: 0.8, 2000: 1.0, 4000: 0.95}, lasted=77.0),
        trial(state="PRUNED", reports={500: 0.5, 1500: 0.6, 2500: float("nan")}, size=64),
        trial(0.95, reports={500: 0.5}, size=128),  # its value was measured after its last report
    )
    made = import_optuna(file, target=0.9, seconds="step_ms")
    first, second, third = outcomes(made)
    assert first.steps_to_target is None
    assert first.time_to_target_s == pytest.approx(1.5)
    assert (second.state.value, second.last_miss_seconds, second.final_metric) == ("pruned", 1.5, 0.6)
    assert (third.state.value, third.time_to_target_s) == ("reached", None)


def test_a_duration_is_the_time_to_the_target_only_of_a_trial_that_ended_there(write: Write) -> None:
    file = write(
        trial(0.95, reports={1: 0.5, 2: 0.95}, lasted=5.0),
        trial(0.96, lasted=6.0, size=64),
        trial(0.96, reports={1: 0.95, 2: 0.96}, lasted=7.0, size=128),
        trial(0.5, reports={1: 0.4, 2: 0.5}, lasted=8.0, size=256),
        trial(0.96, size=512),  # of no duration
        trial(0.96, reports={1: 0.96}, lasted=9.0, size=1024),  # of no report that missed
        trial(0.96, reports={1: 0.5, 2: 0.96, 3: float("nan")}, lasted=9.0, size=2048),
    )
    made = import_optuna(file, target=0.9, seconds="duration")
    assert [one.time_to_target_s for one in outcomes(made)] == [5.0, *[None] * 6]
    assert states(made) == [*["reached"] * 3, "exhausted", *["reached"] * 3]
    assert outcomes(made)[3].last_miss_seconds == 8.0
    assert any("target are unknown for 5 of 7 trials (first: trial 1)" in note for note in made.notes)
    silent = write(trial(0.96, lasted=6.0), name="silent")
    refuse(UsageError, silent, "silent", said="unknown for 1 of 1 trials", target=0.9, seconds="duration")


def test_steps_may_stand_in_an_attribute(write: Write) -> None:
    file = write(trial(0.95, target_step=120), trial(0.5, target_step=500, size=64), trial(0.95, size=128))
    made = import_optuna(file, target=0.9, steps="user_attr:target_step")
    assert [one.steps_to_target for one in outcomes(made)] == [120, None, None]
    assert outcomes(made)[1].last_miss_step == 500


def fixed(size: int, hit: int, *, epochs: int = 10, step: int = 1, first: int = 1, **options: Any) -> FrozenTrial:
    """Return a trial of a fixed number of epochs that met 0.9 at the end of epoch ``hit``."""
    reports = {step * (first + index): 0.95 if index + 1 >= hit else 0.5 for index in range(epochs)}
    return trial(options.pop("value", 0.95), reports=reports, size=size, **options)


def test_of_a_trial_that_went_on_past_the_target_the_figures_are_the_share_until_its_crossing(write: Write) -> None:
    falls_back = {100: 0.5, 200: 0.92, 300: 0.6, 400: 0.7, 500: 0.8}
    file = write(
        fixed(32, 2, step=100, took=1000.0, total=5000, lasted=1000.0),
        trial(0.8, reports=falls_back, size=64, took=500.0, total=4000, lasted=510.0),
        fixed(128, 10, step=100, took=400.0, total=3000, lasted=400.0),  # ended at the target
        fixed(256, 11, value=0.5, step=100, took=300.0, total=2000, lasted=300.0),  # missed it
        trial(0.95, reports={100: 0.95}, size=512, took=300.0, total=2000, lasted=300.0),  # may have met it long before
        trial(0.95, size=1024, took=300.0, total=2000, lasted=300.0),  # has no reports
        trial(0.97, reports={100: 0.5, 200: 0.91, 300: 0.92}, size=2048, took=300.0, total=2000),  # reports end early
        trial(state="PRUNED", reports={100: 0.5, 200: 0.95, 300: 0.96, 400: float("nan")}, size=8, took=40.0, total=40),
    )
    made = import_optuna(file, target=0.9, seconds="user_attr:took", steps="user_attr:total")
    assert states(made) == [*["reached"] * 3, "exhausted", *["reached"] * 4]
    times = [200.0, 200.0, 400.0, None, None, None, None, 20.0]
    assert [one.time_to_target_s for one in outcomes(made)] == pytest.approx(times)
    assert [one.steps_to_target for one in outcomes(made)] == [1000, 1600, 3000, None, None, None, None, 20]
    assert (outcomes(made)[3].last_miss_seconds, outcomes(made)[3].last_miss_step) == (300.0, 2000)
    by_steps = import_optuna(file, target=0.9, seconds="user_attr:took", steps="step")
    assert [one.time_to_target_s for one in outcomes(by_steps)] == pytest.approx(times)
    assert any("3 of 8 trials trained past the target (first: trial 0)" in note for note in made.notes)
    assert any("unknown for 3 of 8 trials (first: trial 4)" in note for note in made.notes)


@pytest.mark.slow
def test_attributes_of_trials_whose_reports_do_not_tell_are_refused_unless_they_are_said_to_be_to_the_target(
    write: Write,
) -> None:
    file = write(trial(0.95, took=3.0, count=30, lasted=9.0))
    for options in ({"seconds": "user_attr:took"}, {"steps": "user_attr:count"}, {"seconds": "duration"}):
        refuse(UsageError, file, said="--figures-at target", target=0.9, **options)
        refuse(UsageError, file, said="--figures-at target", target=0.9, figures_at=FiguresAt.END, **options)
    said: dict[str, Any] = {"target": 0.9, "figures_at": FiguresAt.TARGET}
    (one,) = outcomes(import_optuna(file, seconds="user_attr:took", steps="user_attr:count", **said))
    assert (one.time_to_target_s, one.steps_to_target) == (3.0, 30)
    assert outcomes(import_optuna(file, seconds="duration", **said))[0].time_to_target_s == 9.0


@pytest.mark.parametrize(("option", "value"), [("seconds", 20.0), ("steps", 200)])
def test_an_attribute_that_may_be_that_to_the_target_is_used_as_it_is_said_to_be(
    write: Write, option: str, value: float
) -> None:
    def figure(name: str, figures_at: FiguresAt | None = None) -> float | None:
        words: dict[str, Any] = {option: f"user_attr:{name}"}
        (one,) = outcomes(import_optuna(file, name, target=0.9, figures_at=figures_at, **words))
        return one.time_to_target_s or one.steps_to_target

    for name in ("figure", "figure_to_target"):
        attributes: dict[str, Any] = {name: value}
        file = write(fixed(32, 2, step=100, lasted=100.0, **attributes), name=name)
        assert figure(name, FiguresAt.TARGET) == value
        assert figure(name, FiguresAt.END) == value / 5
    assert figure("figure_to_target") == value
    refuse(UsageError, file, "figure", said="--figures-at end", target=0.9, **{option: "user_attr:figure"})


# Reports by epoch -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "step"), [(0, 1), (1, 1), (1, 5)])
def test_reports_by_epoch_tell_epochs_times_samples(write: Write, first: int, step: int) -> None:
    file = write(
        fixed(32, 4, first=first, step=step, took=100.0),
        fixed(64, 10, first=first, step=step, took=60.0),
        fixed(128, 11, value=0.5, first=first, step=step, took=40.0),
    )
    by_samples = import_optuna(file, target=0.9, steps="samples")
    assert [one.samples for one in outcomes(by_samples)][:1] == [32 * max(1, round((first + 3 * step) / 32))]
    made = import_optuna(file, target=0.9, seconds="user_attr:took", steps="epoch", samples_per_epoch=6400)
    early, late, missed = outcomes(made)
    assert [early.time_to_target_s, late.time_to_target_s, missed.last_miss_seconds] == [40.0, 60.0, 40.0]
    assert [early.samples, late.samples, missed.samples] == [6400 * step * epochs for epochs in (4, 10, 10)]
    assert (early.last_miss_step, early.steps_to_target) == (step * 600, step * 800)
    assert any("count epochs from 0" in note for note in made.notes) is (first == 0)
    assert outcomes(import_optuna(file, target=0.9, seconds="user_attr:took"))[0].time_to_target_s == 40.0


@pytest.mark.parametrize(
    ("unit", "options"),
    [(100, {"steps": "step"}), (1, {"steps": "epoch", "samples_per_epoch": 3200})],
)
def test_reports_answer_for_easier_targets(unit: int, options: dict[str, Any], write: Write, tmp_path: Path) -> None:
    reports = {unit: 0.5, 2 * unit: 0.7, 3 * unit: 0.95}
    write(trial(0.95, reports=reports, took=30.0), trial(0.96, reports={**reports, 4 * unit: 0.96}, took=80.0, size=64))
    words = ["--steps", options["steps"], *(["--samples-per-epoch", "3200"] if unit == 1 else [])]
    printed(tmp_path, "import", "optuna", "optuna.db", "--target", "0.9", "--seconds", "user_attr:took", *words)
    found = read(tmp_path, "best", "theirs", "--target", "0.6")
    assert [row["time_to_target_s"]["median"] for row in found["batches"]] == [pytest.approx(15), pytest.approx(30)]
    (study,) = import_optuna(str(tmp_path / "optuna.db"), target=0.9, seconds="user_attr:took", **options).studies
    half = 2 if unit == 1 else 1  # an epoch has half the steps at twice the batch size
    assert [[one.step for one in each.curve][:2] for each in study.trials] == [[100, 200], [100 // half, 200 // half]]


def test_reports_without_a_unit_are_no_curve(write: Write) -> None:
    (study,) = import_optuna(write(fixed(32, 4, took=1.0)), target=0.9, seconds="user_attr:took").studies
    assert study.trials[0].curve == ()


def test_the_same_successive_reports_at_every_batch_size_are_epochs_and_no_steps(write: Write) -> None:
    for first, places in ((0, {"steps": "step"}), (1, {"steps": "step"}), (1, {"seconds": "step_ms"})):
        name = f"{first} {places}"
        file = write(fixed(32, 4, first=first), fixed(64, 5, epochs=7, first=first), name=name)
        refuse(UsageError, file, name, said="--steps epoch --samples-per-epoch N", target=0.9, **places)
    file = write(fixed(32, 4), fixed(32, 5), name="one size")
    made = import_optuna(file, "one size", target=0.9, steps="step")
    assert any("--steps epoch --samples-per-epoch N" in note for note in made.notes)
    file = write(fixed(32, 4, step=5), fixed(64, 5, step=5), name="sparse")
    made = import_optuna(file, "sparse", target=0.9, steps="step")
    assert any("--steps epoch --samples-per-epoch N" in note for note in made.notes)
    file = write(fixed(32, 4, step=100), fixed(64, 5, step=100), name="steps")
    made = import_optuna(file, "steps", target=0.9, steps="step")
    assert not any("--steps epoch" in note for note in made.notes)


# A study that bssearch exported ---------------------------------------------------------------------------------------


def test_a_study_that_was_exported_comes_back_with_the_same_answer(tmp_path: Path) -> None:
    spec = make_spec(
        name="task",
        space={"batch_size": [16, 32, 64], "learning_rate": {"low": 0.05, "high": 0.5}},
        default={"batch_size": 32, "learning_rate": 0.1},
        budget={"trials": 10, "trial_train_seconds": 10.0},
        confirm={"top": 1, "runs": 0},
    )
    run_study(spec, Launch(db=f"sqlite:///{tmp_path / 'bssearch.db'}", make_executor=lambda *_: LawExecutor()))
    for words in (["export", "task", "--to", "optuna"], ["import", "optuna", "task.optuna.db", "--name", "back"]):
        printed(tmp_path, *words)
    with open_store(f"sqlite:///{tmp_path / 'bssearch.db'}", write=False) as store:
        before, after = store.trials.of("task"), store.trials.of("back")
        studies = [store.studies.get(name) for name in ("task", "back")]
    kept = ("state", "time_to_target_s", "steps_to_target", "train_seconds")
    assert [[getattr(one.outcome, name) for name in kept] for one in after] == [
        [
            getattr(one.outcome, name)
            if name != "train_seconds" or one.state.value != "reached"
            else one.outcome and one.outcome.time_to_target_s
            for name in kept
        ]
        for one in before
    ]
    for one, other in zip(before, after, strict=True):
        assert (one.configuration.batch_size, one.seed) == (other.configuration.batch_size, other.seed)
        assert one.configuration.learning_rate == pytest.approx(other.configuration.learning_rate)
    assert studies[0].target == studies[1].target and studies[0].objective == studies[1].objective
    assert studies[1].environment is not None and studies[1].environment.device_name == "Test CPU"
    first, second = (read(tmp_path, "best", n) for n in ("task", "back"))
    assert first["optimal"]["batch_size"] == second["optimal"]["batch_size"]
    assert first["optimal"]["time_to_target_s"]["median"] == second["optimal"]["time_to_target_s"]["median"]
    easier = import_optuna(str(tmp_path / "task.optuna.db"), target=0.5)
    assert all(one.time_to_target_s is None and one.steps_to_target for one in outcomes(easier) if one.first_hit_step)


def exported(path: Path, *, objective: str = "time_to_target") -> str:
    """Export a study of target 0.9 with two trials of 8 s: one that reached it, one that was stopped."""
    record = StudyRecord.created(make_spec(objective=objective).new_study("someone"), EPOCH, make_environment())
    trials = [make_trial(1, seconds=8.0, batch_size=32), make_trial(2, seconds=8.0, batch_size=64, state=State.PRUNED)]
    curves = {1: {0: 0.1, 40: 0.7, 80: 0.9}, 2: {0: 0.1, 80: 0.6}}
    write_study(OptunaStudy.of(record, trials, curves), optuna_database(str(path)))
    return str(path)


def test_values_of_a_study_that_was_exported_are_never_its_metric(tmp_path: Path) -> None:
    file = exported(tmp_path / "toy.db")
    whole = "user_attr:train_seconds"
    for seconds in (None, whole, "duration"):
        harder = import_optuna(file, target=0.999, seconds=seconds)
        assert states(harder) == ["exhausted", "pruned"]
        assert [one.final_metric for one in outcomes(harder)] == [0.9, 0.6]
        assert [one.time_to_target_s for one in outcomes(harder)] == [None, None]
    easier = import_optuna(file, target=0.6, seconds=whole)
    assert states(easier) == ["reached", "reached"]
    assert [one.time_to_target_s for one in outcomes(easier)] == [4.0, 8.0]
    assert any("1 of 2 trials trained past the target (first: trial 0)" in note for note in easier.notes)


def test_figures_of_a_study_that_was_exported_are_those_to_its_own_target(tmp_path: Path) -> None:
    file = exported(tmp_path / "toy.db")
    for seconds in ("value", "user_attr:time_to_target_s"):
        assert outcomes(import_optuna(file, seconds=seconds))[0].time_to_target_s == 8.0
        refuse(
            UsageError,
            file,
            said="seconds and steps to accuracy ≥ 0.9, but the target is accuracy ≥ 0.5",
            target=0.5,
            seconds=seconds,
        )
    refuse(UsageError, file, said="--steps user_attr:steps", target=0.5, steps="user_attr:steps_to_target")
    samples = exported(tmp_path / "samples.db", objective="samples_to_target")
    refuse(UsageError, samples, said="are samples_to_target", seconds="value")


# Wrong input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "add --target VALUE"),
        ({"target": float("inf")}, "--target = inf"),
        ({"target": 0.9, "seconds": "minutes"}, "--seconds = 'minutes' must be duration, step_ms, value or user_attr:"),
        ({"target": 0.9, "seconds": "user_attr:"}, "--seconds = 'user_attr:'"),
        ({"target": 0.9, "steps": "epochs"}, "--steps = 'epochs' must be step, samples, epoch or user_attr:NAME"),
        ({"target": 0.9, "steps": "epoch"}, "add --samples-per-epoch N"),
        ({"target": 0.9, "steps": "epoch", "samples_per_epoch": 9, "seconds": "step_ms"}, "cannot be combined"),
        ({"target": 0.9, "steps": "step", "samples_per_epoch": 9}, "--samples-per-epoch = 9 needs --steps epoch"),
        ({"target": 0.9, "steps": "step", "seconds": "step_ms"}, "cannot be combined"),
        ({"target": 0.9, "param": ["lr"]}, "--param = 'lr' must be THEIRS=OURS"),
        ({"target": 0.9, "param": ["lr=x"]}, "choose from batch_size, learning_rate"),
        ({"target": 0.9, "param": ["batch_size=b"]}, "--param THEIRS=batch_size"),
        ({"target": 0.9, "param": ["learning_rate=batch_size"]}, "two parameters are named batch_size"),
        ({"target": 0.9, "seconds": "user_attr:took"}, "took = -1.0 must be seconds > 0"),
        ({"target": 0.9, "seconds": "user_attr:word"}, "word = 'soon' must be seconds"),
        ({"target": 0.9, "steps": "user_attr:word"}, "word = 'soon' must be an integer"),
        ({"target": 0.9, "steps": "user_attr:epochs_to_target"}, "epochs"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_bound(write: Write, options: dict[str, Any], said: str) -> None:
    told = refuse(UsageError, write(trial(0.95, took=-1.0, word="soon")), said=said, **options)
    if "seconds >" in said:
        assert "optuna.db: trial 0" in told


def test_studies_that_are_none_or_several_or_of_several_objectives_are_named(write: Write) -> None:
    file = write(trial(0.95, took=1.0), name="one")
    refuse(NotFoundError, file, "two", said="has 'one'; name another", target=0.9)
    write(name="two")
    refuse(UsageError, file, said="'one', 'two'", target=0.9)
    refuse(UsageError, file, "two", said="no COMPLETE or PRUNED trial", target=0.9)
    write(name="three", directions=["maximize", "minimize"])
    refuse(UsageError, file, "three", said="Study.set_metric_names", target=0.9)


def test_other_databases_and_no_databases_are_refused_and_left_as_they_are(write: Write, tmp_path: Path) -> None:
    own = tmp_path / "bssearch.db"
    open_store(f"sqlite:///{own}").close()
    journal, empty = tmp_path / "journal.log", tmp_path / "empty.db"
    journal.write_text('{"op_code": 0}\n' * 100)
    empty.write_bytes(b"")
    for path, said in ((own, "is a bssearch database"), (journal, "copy_study"), (empty, "not an Optuna database")):
        before = path.read_bytes()
        refuse(UsageError, str(path), said=said)
        assert path.read_bytes() == before
    file = Path(write(trial(0.95, to_target_s=1.0)))
    file.chmod(0o444)
    before = file.read_bytes()
    assert states(import_optuna(str(file), target=0.9, seconds="user_attr:to_target_s")) == ["reached"]
    assert file.read_bytes() == before
    assert not list(tmp_path.glob("optuna.db?*"))


def test_a_server_is_read_and_its_password_is_never_shown(write: Write, postgres: Postgres) -> None:
    url = postgres.create_database(schema=False)
    write(trial(0.95, to_target_s=1.5), url=url.replace("postgresql:", "postgresql+psycopg:"))
    made = import_optuna(url, "theirs", target=0.9, seconds="user_attr:to_target_s")
    assert [one.time_to_target_s for one in outcomes(made)] == [1.5]
    refuse(UsageError, postgres.create_database(), said="is a bssearch database")
    for wrong, kind in (
        ("postgresql://me:hunter2@127.0.0.1:1/nowhere?connect_timeout=2", DatabaseError),
        ("postgres:/me:hunter2@host/db", UsageError),
        ("mysql://me:hunter2@host/db", UsageError),
    ):
        assert "hunter2" not in refuse(kind, wrong, said="")


def test_a_file_of_optuna_2_is_read_and_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "old.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript((Path(__file__).parents[2] / "data" / "optuna-2.10.1.sql").read_text())
    before = file.read_bytes()
    made = import_optuna(str(file), metric="acc", target=0.5, param=["lr=learning_rate"], steps="step")
    (study,) = made.studies
    assert [one.configuration.batch_size for one in study.trials] == [16, 16, 16, 32, 32, 32, 64, 64, 64]
    assert [one.outcome.steps_to_target for one in study.trials if one.configuration.batch_size == 64] == [None, 75, 38]
    assert file.read_bytes() == before


def test_tables_of_a_later_version_of_optuna_are_named(write: Write, tmp_path: Path) -> None:
    file = write(trial(0.95, to_target_s=1.0))
    execute(file, "UPDATE alembic_version SET version_num = 'v9.0.0.a'")
    refuse(SchemaError, file, said="optuna storage upgrade", target=0.9)


@pytest.mark.parametrize(
    "change",
    [
        'UPDATE trial_params SET distribution_json = \'{"name": "Nothing"}\'',
        "UPDATE trial_values SET value = 'soon'",
        "UPDATE trials SET state = 'DONE'",
        "UPDATE trial_user_attributes SET value_json = '{}'",
    ],
)
def test_rows_that_cannot_be_read_are_no_traceback(write: Write, change: str) -> None:
    file = write(trial(0.95, to_target_s=1.0))
    execute(file, change)
    refuse(UsageError, file, said="optuna.db", target=0.9, seconds="user_attr:to_target_s")


def test_a_configuration_of_the_same_parameters_twice_is_a_repeat(write: Write) -> None:
    file = write(trial(0.95, to_target_s=1.0), trial(0.95, to_target_s=1.1))
    (study,) = import_optuna(file, target=0.9, seconds="user_attr:to_target_s").studies
    assert [(one.phase.value, one.seed) for one in study.trials] == [("confirm", 0), ("confirm", 1)]
    assert isinstance(study.trials[0].configuration, Configuration)


def test_a_value_may_be_the_seconds_to_the_target(write: Write) -> None:
    file = write(trial(3.5), trial(state="PRUNED", reports={1000: 0.5}, size=64), direction="minimize")
    made = import_optuna(file, target=0.9, seconds="value")
    assert states(made) == ["reached", "pruned"]
    assert [one.time_to_target_s for one in outcomes(made)] == [3.5, None]
    assert outcomes(made)[0].final_metric is None


@pytest.mark.parametrize(
    "reports", [{1: 0.4, 2: 0.6, 3: 0.92}, {3: 0.92}], ids=["inherited reports", "from a checkpoint"]
)
def test_the_seconds_of_a_retried_trial_are_unknown(write: Write, reports: dict[int, float]) -> None:
    file = write(
        trial(state="FAIL", reports={1: 0.4, 2: 0.6}, lasted=9.0, train_s=2.0, to_target_s=2.0),
        trial(
            0.92,
            reports=reports,
            lasted=1.0,
            train_s=1.0,
            to_target_s=1.0,
            constraints={"failed_trial": 0, "retry_history": [0]},
        ),
        trial(0.92, reports={1: 0.4, 2: 0.6, 3: 0.92}, lasted=3.0, train_s=3.0, to_target_s=3.0),
    )
    for seconds in ("duration", "user_attr:train_s"):
        made = import_optuna(file, target=0.9, seconds=seconds)
        assert [one.time_to_target_s for one in outcomes(made)] == [None, 3.0]
        assert "resumed from checkpoints" in " ".join(made.notes)
    for name, moment in (("train_s", "end"), ("to_target_s", "target")):
        notes = import_optuna(file, target=0.9, seconds=f"user_attr:{name}").notes
        assert any(note.endswith(f"add --figures-at {moment}") for note in notes)
    said = import_optuna(file, target=0.9, seconds="user_attr:train_s", figures_at=FiguresAt.TARGET)
    assert [one.time_to_target_s for one in outcomes(said)] == [1.0, 3.0]


@pytest.mark.parametrize(("attribute", "value"), [("split_batches", True), ("num_nodes", 2)])
def test_an_attribute_that_may_divide_the_batch_is_asked_for(write: Write, attribute: str, value: Any) -> None:
    file = write(trial(0.92, steps_to_target=9, world_size=4, **{attribute: value}))
    refuse(UsageError, file, said=attribute, target=0.9, steps="user_attr:steps_to_target")


@pytest.mark.parametrize(
    ("name", "seconds"), [("to_target_ms", 0.25), ("to_target_min", 15_000.0), ("to_target_s", 250.0)]
)
def test_an_attribute_of_seconds_has_the_unit_of_its_name(write: Write, name: str, seconds: float) -> None:
    file = write(trial(0.92, **{name: 250.0}))  # type: ignore[arg-type]
    made = import_optuna(file, target=0.9, seconds=f"user_attr:{name}")
    assert [one.time_to_target_s for one in outcomes(made)] == [pytest.approx(seconds)]


@pytest.mark.parametrize(("lasted", "notes"), [(3.0, 1), (0.0, 0)])
def test_trials_that_ran_at_once_are_noted(write: Write, lasted: float, notes: int) -> None:
    file = write(*(trial(0.92, lasted=lasted, to_target_s=2.0) for _ in range(2)))
    made = import_optuna(file, target=0.9, seconds="user_attr:to_target_s")
    assert len([one for one in made.notes if one.startswith("up to 2 trials ran at once")]) == notes
