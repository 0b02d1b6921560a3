"""Runs that were made elsewhere become studies, or nothing at all."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from bssearch import StudySpec, open_store
from bssearch.records import Phase, StudyRecord, TrialOutcome, TrialRecord, TrialState
from tests.cli.task import bssearch, ran, read, refused
from tests.factories import not_none

HEADER = "batch_size,seed,reached,steps,train_seconds,final_metric,device,param.lr"
ROWS = (
    "32,0,true,100,2.5,0.91,A100,0.1",
    "32,1,yes,110,2.75,0.92,A100,0.1",
    "32,2,1,90,2.25,0.9,A100,0.1",
    "64,0,true,80,3.5,0.9,A100,0.2",
    "64,1,false,200,9,0.8,A100,0.2",
    "128,0,no,150,12,nan,A100,0.4",
)
RESNET = {
    "resnet_ref_1632": {
        "Benchmark": "resnet",
        "BS": 1632,
        "Hyperparams": {"optimizer": "lars", "opt_base_learning_rate": 7.4},
        "Epochs to converge": [34, 34, 35],
    },
    "resnet_ref_3264": {
        "Benchmark": "resnet",
        "BS": 3264,
        "Hyperparams": {"optimizer": "lars", "opt_base_learning_rate": 10.5},
        "Epochs to converge": [36, 35],
    },
}


def write_table(folder: Path, *rows: str, header: str = HEADER) -> None:
    (folder / "runs.csv").write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")


def imported(folder: Path, *arguments: str) -> tuple[list[str], str]:
    """Import into the folder's database; return the studies' names, and what was said of them."""
    done = ran(folder, "import", *arguments)
    return done.stdout.splitlines(), done.stderr


def import_runs(folder: Path, *options: str, rows: Sequence[str] = ROWS, header: str = HEADER) -> tuple[list[str], str]:
    """Import a table of runs; return the studies' names, and what was said of them."""
    write_table(folder, *rows, header=header)
    return imported(folder, "runs", "runs.csv", *options)


def stored(folder: Path, name: str = "runs") -> tuple[StudyRecord, StudySpec, list[TrialRecord]]:
    with open_store(f"sqlite:///{folder / 'bssearch.db'}", write=False) as store:
        study = store.studies.get(name)
        return study, StudySpec.model_validate(study.spec), store.trials.of(name)


def outcome(trial: TrialRecord) -> TrialOutcome:
    return not_none(trial.outcome)


def refuse(folder: Path, *arguments: str, said: str, code: int = 2) -> None:
    before = sorted(path.name for path in folder.iterdir())
    told = refused(folder, "import", *arguments, code=code)
    assert said in told, told
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_table_becomes_a_study(tmp_path: Path) -> None:
    names, said = import_runs(tmp_path, "--metric", "accuracy", "--target", "0.9", "--precision", "bf16")
    assert names == ["runs"]
    assert "study runs: 4 of 6 runs reached the target on device A100 in precision bf16" in said
    assert "all runs lack values: warmup_epochs, weight_decay, dropout, label_smoothing, optimizer" in said
    assert "final_metric is NaN (unknown) in 1 of 6 runs (first: runs.csv:7)" in said
    study, spec, trials = stored(tmp_path)
    assert (study.target.metric, study.target.value, study.objective) == ("accuracy", 0.9, "time_to_target")
    assert study.environment is not None
    assert (study.environment.device_name, study.environment.precision) == ("A100", "bf16")
    assert (study.environment.device_type, study.environment.host) == ("unknown", "imported")
    assert (spec.workload, spec.workload_settings) == ("imported", {"default_known": False})
    assert (spec.space.batch_size, spec.space.learning_rate) == ((32, 64, 128), (0.1, 0.2, 0.4))
    assert (spec.default.batch_size, spec.default.learning_rate) == (32, 0.1)
    assert (spec.confirm.top, spec.confirm.runs) == (3, 2)
    assert (spec.budget.trials, spec.budget.trial_train_seconds) == (6, 12.0)
    assert [(one.number, one.phase, one.seed) for one in trials] == [
        (1, Phase.CONFIRM, 0),
        (2, Phase.CONFIRM, 1),
        (3, Phase.CONFIRM, 2),
        (4, Phase.CONFIRM, 0),
        (5, Phase.CONFIRM, 1),
        (6, Phase.SEARCH, 0),
    ]


def test_what_a_run_reached_and_what_it_missed(tmp_path: Path) -> None:
    import_runs(tmp_path, "--target", "0.9")
    trials = stored(tmp_path)[2]
    reached, missed = outcome(trials[0]), outcome(trials[4])
    assert (reached.state, missed.state) == (TrialState.REACHED, TrialState.EXHAUSTED)
    assert (reached.steps, reached.samples, reached.train_seconds) == (100, 3200, 2.5)
    assert (missed.steps, missed.samples, missed.train_seconds) == (200, 12_800, 9.0)
    assert (reached.time_to_target_s, reached.steps_to_target) == (2.5, 100)
    assert (reached.first_hit_step, reached.first_hit_seconds) == (100, 2.5)
    assert (reached.last_miss_step, reached.last_miss_seconds) == (90, None)  # all steps are multiples of ten
    assert (missed.time_to_target_s, missed.steps_to_target, missed.first_hit_step) == (None, None, None)
    assert (missed.last_miss_step, missed.last_miss_seconds) == (200, 9.0)
    assert (reached.final_metric, missed.final_metric, outcome(trials[5]).final_metric) == (0.91, 0.8, None)
    assert missed.reason == "ended without metric 0.9 (imported, runs.csv:6)"


def test_the_commands_that_ask_find_the_study(tmp_path: Path) -> None:
    write_table(tmp_path, *ROWS)
    told = read(tmp_path, "import", "runs", "runs.csv", "--name", "mine")
    assert told == [{"study": "mine", "runs": 6, "reached": 4}]
    (study,) = read(tmp_path, "study", "list")
    assert (study["name"], study["workload"], study["trials"], study["reached"]) == ("mine", "imported", 6, 4)
    assert [one["batch_size"] for one in read(tmp_path, "trial", "list", "mine")] == [32, 32, 32, 64, 64, 128]
    assert study["best_batch_size"] == 32
    answer = read(tmp_path, "best", "mine")
    assert answer["optimal"]["batch_size"] == 32
    assert answer["optimal"]["parameters"]["learning_rate"] == 0.1
    assert answer["optimal"]["parameters"]["weight_decay"] is None


def test_without_a_target_it_is_the_worst_metric_of_a_run_that_reached_it(tmp_path: Path) -> None:
    _, said = import_runs(tmp_path, rows=["8,0,1,10,1,0.91,,", "16,0,1,10,1,0.95,,", "32,0,0,10,1,0.5,,"])
    assert "the target is metric ≥ 0.91, the worst final_metric of a run that reached the target" in said
    assert stored(tmp_path)[0].target.value == 0.91
    _, said = import_runs(
        tmp_path,
        *("--name", "loss", "--metric", "loss", "--goal", "minimize"),
        rows=["8,0,1,10,1,0.91,,", "16,0,1,10,1,0.95,,", "32,0,0,10,1,1.5,,"],
    )
    assert "the target is loss ≤ 0.95" in said
    assert stored(tmp_path, "loss")[0].target.value == 0.95


def test_metrics_that_do_not_agree_with_reached_are_noted(tmp_path: Path) -> None:
    _, said = import_runs(tmp_path, "--target", "0.5", rows=["8,0,1,10,1,0.1,,", "16,0,0,10,1,0.9,,"])
    assert (
        "disagree in 2 of 2 runs (first: runs.csv:2 reached metric ≥ 0.5 with 0.1); check --goal and --target" in said
    )


def test_missing_seeds_are_numbered_and_a_seed_that_stands_twice_gets_the_next_free_one(tmp_path: Path) -> None:
    rows = ("8,,1,10,1", "8,,1,11,2", "8,1,1,12,3", "8,1,1,13,4", "8,1,1,14,5", "16,7,1,9,1", "32,,1,9,1")
    _, said = import_runs(tmp_path, "--target", "1", rows=rows, header="batch_size,seed,reached,steps,train_seconds")
    _, spec, trials = stored(tmp_path)
    assert [trial.seed for trial in trials] == [0, 2, 1, 3, 4, 7, 0]
    assert [outcome(trial).steps for trial in trials] == [10, 11, 12, 13, 14, 9, 9]
    assert [trial.phase for trial in trials] == [Phase.CONFIRM] * 5 + [Phase.SEARCH] * 2
    assert spec.confirm.runs == 5
    assert "2 of 7 runs repeat the seed of an earlier run of the same configuration" in said
    assert "(first: runs.csv:5)" in said


def test_single_runs_confirm_nothing(tmp_path: Path) -> None:
    import_runs(tmp_path, "--target", "1", rows=["8,0,1,10,1,,,0.1", "8,1,1,10,1,,,0.2"])
    _, spec, trials = stored(tmp_path)
    assert {trial.phase for trial in trials} == {Phase.SEARCH}
    assert spec.confirm.runs == 0


def test_devices_and_precisions_are_never_pooled(tmp_path: Path) -> None:
    names, said = import_runs(
        tmp_path,
        *("--target", "1", "--name", "x", "--precision", "fp32"),
        rows=(
            "8,1,10,1,NVIDIA A100,bf16",
            "8,1,11,1,NVIDIA A100,",
            "8,1,12,1,H100,bf16",
            "8,1,13,1,nvidia a100,bf16",
            "8,1,14,1,,bf16",
            "8,1,15,1,H100,bf16",
        ),
        header="batch_size,reached,steps,train_seconds,device,precision",
    )
    assert names == ["x-nvidia-a100-bf16", "x-nvidia-a100-fp32", "x-h100", "x-nvidia-a100", "x-unknown"]
    steps = [[outcome(trial).steps for trial in stored(tmp_path, name)[2]] for name in names]
    assert steps == [[10], [11], [12, 15], [13], [14]]
    environments = [not_none(stored(tmp_path, name)[0].environment) for name in names]
    kinds = [(one.device_name, one.precision) for one in environments]
    assert kinds[:3] == [("NVIDIA A100", "bf16"), ("NVIDIA A100", "fp32"), ("H100", "bf16")]
    assert kinds[3:] == [("nvidia a100", "bf16"), ("unknown", "bf16")]
    assert "study x-h100: 2 of 2 runs reached the target on device H100 in precision bf16" in said


def test_devices_whose_names_look_alike_make_studies_of_their_own(tmp_path: Path) -> None:
    names, _ = import_runs(
        tmp_path, "--target", "1", rows=["8,1,A-100", "8,1,a 100", "8,1,a/100"], header="batch_size,reached,device"
    )
    assert names == ["runs-a-100", "runs-a-100-2", "runs-a-100-3"]


def test_of_imported_runs_nothing_is_said_to_have_been_searched_here(tmp_path: Path) -> None:
    import_runs(tmp_path, rows=["8,0,1,10,1,0.9,A,0.1", "8,0,1,10,2,0.9,A,0.2", "16,0,1,10,3,0.9,A,0.1"])
    status = bssearch("study", "show", cwd=tmp_path).stdout
    assert "3 imported runs" in status and "fastest: run 1, batch 8" in status
    for shown in (status, bssearch("best", cwd=tmp_path).stdout, bssearch("trial", "show", "1", cwd=tmp_path).stdout):
        said = shown.replace("bssearch", "")
        assert not [word for word in ("search", "so far", "until it is confirmed") if word in said], shown
    assert "unconfirmed" in {one["code"] for one in read(tmp_path, "best")["warnings"]}
    assert read(tmp_path, "study", "show")["trials"] == {"search": {"reached": 3}}


def test_the_default_is_what_is_in_use_at_the_given_batch_size(tmp_path: Path) -> None:
    import_runs(tmp_path, "--default-batch", "64")
    spec = stored(tmp_path)[1]
    assert spec.default_is_known
    assert (spec.default.batch_size, spec.default.learning_rate) == (64, 0.2)
    refuse(
        tmp_path,
        *("runs", "runs.csv", "--name", "x", "--default-batch", "48"),
        said="--default-batch = 48 must be one of 32, 64, 128",
    )


def test_a_device_without_a_run_at_the_default_batch_has_no_default(tmp_path: Path) -> None:
    _, said = import_runs(
        tmp_path, "--target", "1", "--default-batch", "16", rows=["8,1,A", "16,1,B"], header="batch_size,reached,device"
    )
    assert "study runs-a: no run has the batch size 16 of --default-batch" in said
    assert [stored(tmp_path, name)[1].default_is_known for name in ("runs-a", "runs-b")] == [False, True]


def test_what_nobody_knows_of_a_run_is_null_and_an_easier_target_is_refused(tmp_path: Path) -> None:
    header = "batch_size,seed,reached,steps,param.lr,param.optimizer"
    rows = [f"{size},{seed},true,{3200 // size + seed},0.1,adamw" for size in (32, 64) for seed in range(3)]
    import_runs(tmp_path, "--metric", "accuracy", "--target", "0.9", "--default-batch", "32", rows=rows, header=header)
    row = read(tmp_path, "trial", "list")[0]
    unknown = ("train_seconds", "wall_seconds", "evaluation_seconds", "threads", "uncapped", "contended")
    assert [row[name] for name in unknown] == [None] * len(unknown)
    assert (row["steps"], row["steps_to_target"]) == (100, 100)
    assert "have no learning curves" in refused(tmp_path, "best", "--target", "0.5", code=2)
    assert "runs: 6 imported runs" in bssearch("study", "show", cwd=tmp_path).stdout
    assert not any("trains with sgd" in rule["reason"] for rule in read(tmp_path, "study", "audit", "runs")["rules"])


def test_what_a_terminal_would_obey_does_not_reach_it(tmp_path: Path) -> None:
    rows = [f"32,{seed},true,{100 + seed},2.5,0.91,red\x1b[31m,0.1" for seed in range(3)]
    (name,), _ = import_runs(tmp_path, "--target", "0.9", rows=rows)
    for command in (("study", "compare", name, name), ("trial", "show", "1")):
        done = bssearch(*command, cwd=tmp_path)
        assert "\x1b" not in done.stdout + done.stderr
        assert "\ufffd" in done.stdout + done.stderr, command


def test_without_seconds_the_objective_is_samples(tmp_path: Path) -> None:
    _, said = import_runs(tmp_path, "--target", "1", rows=["8,1,10", "16,0,"], header="batch_size,reached,steps")
    study, spec, trials = stored(tmp_path)
    assert "study runs: no run has train_seconds; the objective is samples_to_target" in said
    assert "some of 2 runs lack values: steps in 1 run" in said
    assert (study.objective, spec.budget.trial_train_seconds) == ("samples_to_target", 1.0)
    first, second = map(outcome, trials)
    assert (first.time_to_target_s, first.steps_to_target, first.warnings) == (
        None,
        10,
        ("imported without train_seconds",),
    )
    assert (second.last_miss_step, second.warnings) == (None, ("imported without steps and train_seconds",))


def test_the_objective_is_the_one_asked_for(tmp_path: Path) -> None:
    _, said = import_runs(tmp_path, "--objective", "samples_to_target")
    assert "objective" not in said
    assert stored(tmp_path)[0].objective == "samples_to_target"


def test_learning_rates_that_are_not_known_are_in_no_space(tmp_path: Path) -> None:
    import_runs(tmp_path, "--target", "1", rows=["8,1,", "16,1,0.5", "32,1,"], header="batch_size,reached,param.lr")
    assert stored(tmp_path)[1].space.learning_rate == 0.5
    import_runs(tmp_path, "--target", "1", "--name", "none", rows=["8,1", "16,1"], header="batch_size,reached")
    assert stored(tmp_path, "none")[1].space.learning_rate == 1.0


@pytest.mark.parametrize(
    ("rows", "arguments", "said"),
    [
        (("0,0,1,10,1,,,",), (), "batch_size = '0' must be an integer in [1, 2147483647] (runs.csv:2)"),
        (("8,0,1,10,0,,,",), (), "train_seconds = '0' must be seconds > 0"),
        (("8,0,maybe,10,1,,,",), (), "reached = 'maybe' must be"),
        (("8,0,1,10,1,,,",), (), "the target is unknown: no run that reached the target has a final_metric"),
        (("8,0,1,10,1,,,",), ("--target", "nan"), "--target = nan must be a finite number"),
        (("8,0,1,10,1,0.9,,",), ("--name", "a b"), "invalid study name 'a b'"),
        (("8,0,1,10,1,0.9,A,", "8,0,1,10,1,0.9,B,"), ("--name", "x" * 99), "invalid study name"),
        (("8,0,1,10,1,0.9,,",), ("--objective", "fun"), "fun"),
        (("8,0,1,10,1,0.9,,",), ("--db", "nosuch://x/y"), "nosuch"),
    ],
)
def test_wrong_input_is_said_and_makes_no_database(
    tmp_path: Path, rows: tuple[str, ...], arguments: tuple[str, ...], said: str
) -> None:
    write_table(tmp_path, *rows)
    refuse(tmp_path, "runs", "runs.csv", *arguments, said=said)


END = "the learning rate is at an end of the tried rates"


@pytest.mark.parametrize(
    ("runs", "at_end"),
    [
        # (batch size, learning rate, optimizer, seconds), a missed target where they are None
        ([(32, 0.1, "sgd", 5), (32, 0.2, "sgd", 3), (32, 0.4, "sgd", 4)], []),
        ([(32, 0.1, "sgd", 5), (32, 0.2, "sgd", 3), (32, 0.4, "sgd", None)], []),
        ([(32, 0.1, "sgd", 5), (32, 0.2, "sgd", 4), (32, 0.4, "sgd", 3)], [32]),
        ([(32, 0.1, "sgd", 3), (32, 0.2, "sgd", 4), (64, 0.2, "sgd", 3), (64, 0.1, "sgd", 4)], [32, 64]),
        ([(32, 0.1, "sgd", 5), (32, 0.2, "sgd", 3), (32, 0.4, "sgd", 4), (64, 0.4, "sgd", 3)], [64]),
        ([(32, 0.1, "sgd", 5), (32, 0.2, "sgd", 3), (32, 0.4, "sgd", 4), (64, 0.3, "sgd", 3)], []),
        ([(32, 0.1, "sgd", 5), (64, 0.2, "sgd", 3), (128, 0.4, "sgd", 4)], []),
        ([(32, 0.1, "sgd", 5), (32, 0.001, "adamw", 3), (64, 0.2, "sgd", 3)], []),
        (
            [(32, 0.1, "sgd", 5), (32, 0.2, "sgd", 3), (32, 0.4, "sgd", 4), (64, 0.15, "sgd", 4), (64, 0.3, "sgd", 3)],
            [64],
        ),
        ([(32, "", "sgd", 3), (32, 0.2, "sgd", 6), (32, 0.4, "sgd", 5), (32, 1.0, "sgd", 7)], []),
    ],
)
def test_a_batch_size_whose_best_learning_rate_is_an_end_of_those_tried_is_untuned(
    tmp_path: Path, runs: list[tuple[int, float | str, str, int | None]], at_end: list[int]
) -> None:
    import_runs(
        tmp_path,
        "--target",
        "0.9",
        rows=[
            f"{size},{seed},{seconds is not None},{100 + 9 * seed},{seconds or 9},0.9,A100,{rate},{optimizer}".lower()
            for size, rate, optimizer, seconds in runs
            for seed in (0, 1)
        ],
        header=f"{HEADER},param.optimizer",
    )
    answer = read(tmp_path, "best")
    flagged = {row["batch_size"]: row["untuned"] for row in answer["batches"] if END in row["untuned_because"]}
    assert flagged == dict.fromkeys(at_end, True)
    edge = "learning_rate_at_edge" in {warning["code"] for warning in answer["warnings"]}
    assert edge is (answer["optimal"]["batch_size"] in at_end)


def test_reference_points_become_a_study_of_samples(tmp_path: Path) -> None:
    (tmp_path / "rcps_resnet.json").write_text(json.dumps(RESNET))
    names, said = imported(tmp_path, "rcp", "rcps_resnet.json")
    assert names == ["rcps_resnet"]
    assert "study rcps_resnet: 5 of 5 runs reached" in said
    study, spec, trials = stored(tmp_path, "rcps_resnet")
    assert (study.objective, study.target.metric, study.target.value) == ("samples_to_target", "accuracy", 0.759)
    assert (spec.confirm.runs, spec.confirm.top, spec.default_is_known) == (2, 2, False)
    assert [(one.phase, one.seed) for one in trials] == [(Phase.CONFIRM, seed) for seed in (0, 1, 2, 0, 1)]
    first = outcome(trials[0])
    assert (first.steps_to_target, first.time_to_target_s) == (round(34 * 1_281_167 / 1632), None)
    assert first.samples == first.steps * 1632
    answer = read(tmp_path, "best")
    assert (answer["optimal"]["batch_size"], answer["optimal"]["time_to_target_s"]) == (1632, None)
