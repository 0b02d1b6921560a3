"""Studies of the training logs of other tools: each run's batch size, and when it reached the target."""

import csv
import gzip
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from bssearch.errors import UsageError
from bssearch.exchange.importers import slurm as slurm_logs
from bssearch.exchange.importers.curves import import_curves
from bssearch.exchange.importers.imported_run import Studies
from bssearch.exchange.importers.logs import number_in, wandb_records
from bssearch.records import Goal, Phase, SecondsBasis, TrialState
from tests.cli.task import printed, ran, read, refused
from tests.factories import not_none

EVERY = 10


class Made(NamedTuple):
    """A training whose accuracy is step / 1000."""

    batch_size: int
    rate: float
    steps: int

    def rows(self) -> Iterator[tuple[int, float, float]]:
        """Yield (step, seconds, accuracy) of each evaluation."""
        for step in range(EVERY, self.steps + 1, EVERY):
            yield step, step * self.batch_size / 1000, step / 1000


RUNS = [Made(size, rate, 500) for size in (16, 32, 64) for rate in (0.1, 0.2)]


def lightning(folder: Path) -> Path:
    for number, one in enumerate(RUNS):
        version = folder / "logs" / f"version_{number}"
        version.mkdir(parents=True)
        settings = {"batch_size": one.batch_size, "lr": one.rate, "seed": number, "nested": {"width": 5}}
        (version / "hparams.yaml").write_text(yaml.safe_dump(settings) + "model: !!python/name:os.system ''\n")
        with (version / "metrics.csv").open("w") as file:
            table = csv.writer(file)
            table.writerow(["elapsed", "epoch", "step", "train_loss", "val_acc"])
            for step, seconds, accuracy in one.rows():
                table.writerow(["", 0, step - 1, 1 - accuracy, ""])
                table.writerow([seconds, 0, step - 1, "", accuracy])
    return folder / "logs"


def trainer(folder: Path) -> Path:
    for one in RUNS:
        place = folder / "runs" / f"{one.batch_size}-{one.rate}" / "checkpoint-500"
        place.mkdir(parents=True)
        history: list[dict[str, Any]] = []
        for step, _, accuracy in one.rows():
            history.append({"step": step, "learning_rate": one.rate * (1 - (step - EVERY) / 1000), "loss": 1.0})
            history.append({"step": step, "eval_accuracy": accuracy, "eval_runtime": 0.5})
        whole = one.steps * one.batch_size / 1000 + 0.5 * (one.steps // EVERY)
        history.append({"step": one.steps, "train_runtime": whole})
        state = {"global_step": one.steps, "train_batch_size": one.batch_size // 4, "log_history": history}
        (place / "trainer_state.json").write_text(json.dumps(state))
        with zipfile.ZipFile(place / "training_args.bin", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", pickle.dumps({"learning_rate": one.rate, "seed": 0}))
    return folder / "runs"


def ray(folder: Path) -> Path:
    for number, one in enumerate(RUNS):
        place = folder / "tune" / f"train_{number}"
        place.mkdir(parents=True)
        config = {"batch_size": one.batch_size, "lr": one.rate}
        rows = [
            {"val_acc": accuracy, "steps": step, "time_total_s": seconds, "config": config}
            for step, seconds, accuracy in one.rows()
        ]
        (place / "result.json").write_text("\n".join(map(json.dumps, rows)))
    return folder / "tune"


def mlflow(folder: Path) -> Path:
    for number, one in enumerate(RUNS):
        place = folder / "mlruns" / "1" / f"run{number}"
        (place / "metrics" / "val").mkdir(parents=True)
        (place / "params").mkdir()
        (place / "params" / "batch_size").write_text(str(one.batch_size))
        (place / "params" / "learning_rate").write_text(str(one.rate))
        lines = [f"{round(1e12 + 1000 * seconds)} {accuracy} {step}\n" for step, seconds, accuracy in one.rows()]
        (place / "metrics" / "val" / "acc").write_text("".join(lines))
    return folder / "mlruns"


def wandb(folder: Path) -> Path:
    with (folder / "history.csv").open("w") as file:
        table = csv.writer(file)
        table.writerow(
            ["run_id", "_step", "trainer/global_step", "_runtime", "val/acc", "config/batch_size", "config/lr"]
        )
        for number, one in enumerate(RUNS):
            for place, (step, seconds, accuracy) in enumerate(one.rows()):
                table.writerow([f"r{number}", place, step - 1, seconds, accuracy, one.batch_size, one.rate])
    return folder / "history.csv"


def lines(folder: Path) -> Path:
    rows = [
        {"run": number, "global_step": step, "train_seconds": seconds, "val_acc": accuracy, "bs": one.batch_size}
        | {"lr": one.rate}
        for number, one in enumerate(RUNS)
        for step, seconds, accuracy in one.rows()
    ]
    with gzip.open(folder / "history.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, rows)))
    return folder / "history.jsonl.gz"


def semicolons(folder: Path) -> Path:
    text = "run;step;elapsed;val_acc;batch_size;lr\n"
    for number, one in enumerate(RUNS):
        for step, seconds, accuracy in one.rows():
            cells = (number, step, seconds, f"{100 * accuracy:.1f}%", one.batch_size, one.rate)
            text += ";".join(map(str, cells)).replace(".", ",") + "\n"
    (folder / "export.csv").write_bytes(text.encode("utf-16"))
    return folder / "export.csv"


def slurm(folder: Path, runs: Sequence[Made] = RUNS) -> Path:
    """Texts of jobs, whose clock includes evaluations that take a second."""
    (folder / "jobs").mkdir()
    for number, one in enumerate(runs):
        text = f"+ srun python train.py --batch-size {one.batch_size // 8} --lr={one.rate} --width 5\n"
        text += "Namespace(accumulate_grad_batches=4, world_size=2)\nLoaded 50,000 images in 3.2 s\n"
        for place, (step, seconds, accuracy) in enumerate(one.rows()):
            text += f"step {step} loss {1 - accuracy:.3f} time {seconds + place:.6f}s\r\n"
            text += f"\x1b[1m[eval] step={step}\x1b[0m, val_acc: {100 * accuracy:.1f}%, eval_time 1.0 s\n"
        (folder / "jobs" / f"slurm-{number}.out").write_text(text)
    return folder / "jobs"


def wandb_runs(folder: Path, runs: Sequence[Made] = RUNS) -> Path:
    """Offline runs of the real library. The last one is resumed, which adds a file."""
    import wandb

    settings = wandb.Settings(mode="offline", silent=True, x_disable_stats=True, x_disable_machine_info=True)

    def launch(number: int, points: Sequence[tuple[int, float, float]]) -> None:
        one = runs[number]
        config = {"per_device_batch_size": one.batch_size // 4, "world_size": 2, "model": {"lr": one.rate}}
        with wandb.init(id=f"r{number}", project="p", dir=folder, config=config, settings=settings) as run:
            run.config.update({"gradient_accumulation_steps": 2})
            for step, seconds, accuracy in points:
                run.log({"val/acc": accuracy, "train_seconds": seconds}, step=step)

    for number, one in enumerate(runs):
        points, last = [*one.rows()], number == len(runs) - 1
        half = len(points) // 2 if last else len(points)
        launch(number, points[:half])
        if last:
            launch(number, points[half:])
    wandb.teardown()  # else the files may not be written yet
    return folder / "wandb"


def event_files(folder: Path, runs: Sequence[Made] = RUNS) -> Path:
    """Event files of PyTorch's writer, and their hyperparameters beside them or in a folder inside."""
    from tensorboard.plugins.scalar.summary_v2 import scalar_pb as tensor_summary
    from torch.utils.tensorboard import SummaryWriter

    for number, one in enumerate(runs):
        with SummaryWriter(folder / "runs" / f"{number}") as writer:
            for step, seconds, accuracy in one.rows():
                writer.add_scalar("train/loss", 1 - accuracy, step, walltime=1e9 + seconds)
                if one.rate == 0.1:
                    writer.add_scalar("val/acc", accuracy, step, walltime=1e9 + seconds)
                else:  # as TensorFlow 2 writes it
                    file = writer._get_file_writer()
                    file.add_summary(tensor_summary("val/acc", accuracy), step, walltime=1e9 + seconds)
            place = "." if number % 2 else None
            writer.add_hparams({"batch_size": one.batch_size, "lr": one.rate}, {"hparam/acc": 0.5}, run_name=place)
    return folder / "runs"


def mlflow_database(folder: Path, runs: Sequence[Made] = RUNS, experiment: str = "e") -> Path:
    """Runs that MLflow's client puts into a database, and one that is deleted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
        place = client.create_experiment(experiment)
        for one in (*runs, runs[0]):
            run = client.create_run(place).info.run_id
            points = [
                Metric("val_acc", accuracy, round(1e12 + 1000 * seconds), step)
                for step, seconds, accuracy in one.rows()
            ]
            settings = {
                "micro_batch_size": one.batch_size // 2,
                "accumulate_grad_batches": 2,
                "learning_rate": one.rate,
            }
            client.log_batch(run, points, [Param(name, str(value)) for name, value in settings.items()])
        client.delete_run(run)
    return folder


HAND_MADE = [lightning, trainer, ray, mlflow, wandb, lines, semicolons, slurm]
BY_LIBRARIES = [pytest.param(make, marks=pytest.mark.slow) for make in (wandb_runs, event_files, mlflow_database)]


@pytest.mark.parametrize("make", [*HAND_MADE, *BY_LIBRARIES])
def test_each_kind_of_log_gives_every_run_s_batch_size_rate_and_crossing(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    more: dict[str, Any] = {"given": ["gradient_accumulation_steps=4"]} if make is trainer else {}
    made = import_curves([str(make(tmp_path))], target=0.255, **more)
    (study,) = made.studies
    found = {(one.configuration.batch_size, one.configuration.learning_rate): one.outcome for one in study.trials}
    assert sorted(found) == [(one.batch_size, one.rate) for one in RUNS]
    for (size, _), outcome in found.items():
        assert outcome.state is TrialState.REACHED
        assert (outcome.last_miss_step, outcome.steps_to_target, outcome.first_hit_step) == (250, 255, 260)
        assert outcome.time_to_target_s == pytest.approx(0.255 * size, rel=1e-6)
        basis = SecondsBasis.REPORTED if make in (trainer, lines, slurm, wandb_runs) else SecondsBasis.WALL
        assert outcome.seconds_basis is basis
    assert all([one.step for one in trial.curve] == list(range(EVERY, 501, EVERY)) for trial in study.trials)


def test_an_import_answers_and_names_missing_runs(tmp_path: Path) -> None:
    wandb(tmp_path)
    told = ran(tmp_path, "import", "curves", "history.csv", "--target", "0.4").stderr
    assert "batch 16 reaches val/acc ≥ 0.4" in told
    assert "--to spec" in told and "batch 8, learning rate" in told
    (tmp_path / "more.csv").write_text("step,val_acc,batch_size\n10,0.1,8\n")
    assert "study more: " in ran(tmp_path, "import", "curves", "more.csv", "--target", "0.4").stderr, "none reached it"


def test_curves_that_bssearch_wrote_come_back_with_their_name_metric_and_target(tmp_path: Path) -> None:
    wandb(tmp_path)
    printed(tmp_path, "import", "curves", "history.csv", "--target", "0.4")
    printed(tmp_path, "export", "history", "--to", "curves")
    printed(tmp_path, "import", "curves", "history.csv.gz", "--name", "again")
    first, again = (read(tmp_path, "best", name) for name in ("history", "again"))
    times = [
        [(row["batch_size"], row["time_to_target_s"]["median"]) for row in one["batches"]] for one in (first, again)
    ]
    assert times[0] == times[1]
    assert again["target"] == first["target"]


def table(folder: Path, text: str, name: str = "log.csv") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def only_run(made: Studies) -> Any:
    (study,) = made.studies
    (trial,) = study.trials
    return trial


def refuse(place: object, said: str, *, target: float = 0.4, **options: Any) -> str:
    """Have an import refused; return the hint."""
    with pytest.raises(UsageError, match=said) as caught:
        import_curves([str(place)], target=target, **options)
    return caught.value.hint or ""


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("_runtime", [1, 2, 3], [1, 2, 3]),  # the clock begins anew
        ("time_total_s", [1, 2, 3], [2, 3, 4]),  # it goes on from the checkpoint
        ("_timestamp", [1000, 1001, 1002], [90_000, 90_001, 90_002]),  # a night lies between
    ],
)
def test_after_a_resume_the_later_evaluations_count_and_lost_work_does_not(
    name: str, before: list[int], after: list[int], tmp_path: Path
) -> None:
    steps, accuracies = [10, 20, 30, 20, 30, 40], [0.1, 0.2, 0.3, 0.25, 0.35, 0.45]
    text = f"step,{name},val_acc,batch_size,lr\n"
    text += "".join(f"{a},{b},{c},8,0.1\n" for a, b, c in zip(steps, [*before, *after], accuracies, strict=True))
    made = import_curves([table(tmp_path, text)], target=0.4)
    assert any("count as resumed" in one for one in made.notes)
    trial = only_run(made)
    assert [one.step for one in trial.curve] == [10, 20, 30, 40]
    assert [one.train_seconds for one in trial.curve] == pytest.approx([1, 2, 3, 4])


def gaps(missing: str) -> str:
    return f"step,val_acc,batch_size\n10,0.1,8\n15,{missing},8\n20,0.5,8\n25,{missing},8\n30,0.6,8\n"


def seconds_of(first: str, second: str) -> str:
    """Two runs, of which the first may have seconds."""
    rows = f"a,10,{first},0.3,8,0.1\na,20,{second},0.5,8,0.2\nb,10,,0.3,8,0.1\nb,20,,0.5,8,0.2\n"
    return f"run,step,elapsed,val_acc,batch_size,lr\n{rows}"


REACHED, DIVERGED = TrialState.REACHED, TrialState.DIVERGED
NAMES = "Name,step,val_acc,batch_size,lr\na,5,0.25,8,0.1\na,10,0.5,8,0.1\nb,5,0.15,8,0.1\nb,10,0.4,8,0.1\n"
DIVERGES = "run,step,val_acc,batch_size,lr\na,10,0.5,8,0.1\nb,10,0.2,8,9\nb,20,nan,8,9\nb,30,nan,8,9\n"
GAPS_IN_SECONDS = "step,elapsed,val_acc,batch_size\n10,1,0.1,8\n20,2,0.2,8\n30,,0.35,8\n40,4,0.45,8\n50,,0.5,8\n"
IN_JSON = "\n".join(
    json.dumps({"step": step, "val_acc": value, "batch_size": 8})
    for step, value in ((10, math.nan), (20, 0.2), (30, math.nan), (40, 0.6))
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (DIVERGES, [(REACHED, 10, None, 1), (DIVERGED, None, None, 1)]),
        *((gaps(missing), [(REACHED, 18, None, 3)]) for missing in ("", "NaN", "None")),
        (IN_JSON, [(REACHED, 30, None, 2)]),
        (NAMES, [(REACHED, 8, None, 2), (REACHED, 10, None, 2)]),
        (GAPS_IN_SECONDS, [(REACHED, 35, 3.5, 5)]),
        (seconds_of("1.5", "3"), [(REACHED, 15, 2.25, 2), (REACHED, 15, None, 0)]),  # its zeros are no times
        (seconds_of("", ""), [(REACHED, 15, None, 2), (REACHED, 15, None, 2)]),
    ],
    ids=["diverges", "empty", "NaN", "None", "JSON", "named runs", "some seconds", "a run's seconds", "no seconds"],
)
def test_missing_values_and_divergence_leave_each_run_its_crossing(
    text: str, found: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    """State, steps and seconds to the target, and evaluations."""
    (study,) = import_curves([table(tmp_path, text, "log.jsonl" if text[0] == "{" else "log.csv")], target=0.4).studies
    outcomes = [(one.outcome, len(one.curve)) for one in study.trials]
    assert [(one.state, one.steps_to_target, one.time_to_target_s, points) for one, points in outcomes] == found


@pytest.mark.parametrize("place", ["{}", "{}/version_0"])
def test_settings_in_the_names_of_folders_are_used_and_named(place: str, tmp_path: Path) -> None:
    for name in ("lr_0.05-bs16_seed3", "LR-1e-1.BATCH_32"):
        folder = tmp_path / "runs" / place.format(name)
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text("step,val_acc,weight_decay\n10,0.1,0\n20,0.5,0\n")
    made = import_curves([str(tmp_path / "runs")], target=0.4)
    (study,) = made.studies
    found = [(one.configuration.batch_size, one.configuration.learning_rate, one.seed) for one in study.trials]
    assert sorted(found) == [(16, 0.05, 3), (32, 0.1, 0)]
    assert any("in the path" in one for one in made.notes)


def test_a_folder_of_a_history_in_json_and_w_b_s_config_is_read(tmp_path: Path) -> None:
    for size in (8, 16):
        folder = tmp_path / f"run{size}"
        folder.mkdir()
        rows = [{"_step": step, "global_step": step, "eval/f1": step / 100} for step in (10, 20)]
        (folder / "history.json").write_text(json.dumps(rows))
        (folder / "other.json").write_text("[1]")
        config = {"wandb_version": 1, "batch_size": {"desc": None, "value": size}, "lr": {"desc": None, "value": 0.1}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (study,) = import_curves([str(tmp_path)], target=0.2).studies
    found = sorted((one.configuration.batch_size, one.configuration.learning_rate) for one in study.trials)
    assert found == [(8, 0.1), (16, 0.1)]


def test_a_table_without_names_of_runs_is_told_apart_by_its_settings(tmp_path: Path) -> None:
    runs = [(size, rate) for size in (8, 16) for rate in (0.1, 0.2)]
    text = "".join(f"{step},{step * rate / 10},{size},{rate}\n" for size, rate in runs for step in (10, 20, 30))
    (study,) = import_curves(
        [table(tmp_path, "step,val_acc,minibatch,eta\n" + text)], target=0.3, column=["eta=learning_rate"]
    ).studies
    found = {(one.configuration.batch_size, one.configuration.learning_rate): len(one.curve) for one in study.trials}
    assert found == dict.fromkeys(runs, 3)


@pytest.mark.parametrize("size", ["", ",batch_size"])
def test_a_counter_of_batches_does_not_tell_runs_apart(size: str, tmp_path: Path) -> None:
    rows = [(100 * epoch + batch, batch, epoch / 10) for epoch in range(5) for batch in (20, 40)]
    text = f"step,batch,val_acc{size}\n" + "".join(f"{a},{b},{c}{',8' if size else ''}\n" for a, b, c in rows)
    with pytest.raises(UsageError) if not size else nullcontext():
        assert len(only_run(import_curves([table(tmp_path, text)], target=0.3)).curve) == 10


def test_an_unknown_default_did_not_miss_the_target(tmp_path: Path) -> None:
    text = "run,step,val_acc,batch_size\na,10,0.1,8\na,20,0.2,8\nb,10,0.3,16\nb,20,0.6,16\n"
    printed(tmp_path, "import", "curves", table(tmp_path, text), "--target", "0.4")
    assert "default_missed" not in {one["code"] for one in read(tmp_path, "best", "log")["warnings"]}
    known = ("--default-batch", "8", "--name", "known")
    printed(tmp_path, "import", "curves", str(tmp_path / "log.csv"), "--target", "0.4", *known)
    assert "default_missed" in {one["code"] for one in read(tmp_path, "best", "known")["warnings"]}


@pytest.mark.slow
def test_keras_s_folders_of_training_and_validation_are_one_run(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    for part, value in (("train", 1.0), ("validation", 0.1)):
        with SummaryWriter(tmp_path / "logs" / "batch_64" / part) as writer:
            for epoch in range(4):
                writer.add_scalar("epoch_accuracy", value * (epoch + 1), epoch, walltime=1e9 + epoch)
    trial = only_run(import_curves([str(tmp_path / "logs")], target=0.3, step="step", epoch_samples=6400))
    assert [one.metric for one in trial.curve] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert (trial.configuration.batch_size, trial.outcome.first_hit_step) == (64, 300)


def test_damaged_arguments_of_a_trainer_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(
        json.dumps({"train_batch_size": 8, "log_history": [{"step": 5, "eval_acc": 0.1}, {"step": 9, "eval_acc": 0.5}]})
    )
    file = tmp_path / "training_args.bin"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"learning_rate": 0.1, "x": list(range(500))}))
    whole = file.read_bytes()
    assert only_run(import_curves([str(tmp_path)], target=0.4)).configuration.learning_rate == 0.1
    file.write_bytes(whole[:60] + b"\xff" * 40 + whole[100:])
    assert "learning_rate" in only_run(import_curves([str(tmp_path)], target=0.4)).configuration.parameters


def test_hints_use_the_log_s_own_names(tmp_path: Path) -> None:
    text = "step,val_acc,bs,num_gpus\n10,0.1,8,2\n20,0.5,8,2\n"
    assert "--column bs=micro_batch_size" in refuse(table(tmp_path, text), "per device")
    made = import_curves([table(tmp_path, text)], target=0.3, column=["bs=micro_batch_size"])
    assert any("--with accumulation_steps=N" in one for one in made.notes)
    assert any("--column NAME=learning_rate" in one for one in made.notes)


def test_what_a_run_logs_once_is_no_setting(tmp_path: Path) -> None:
    text = "run,seed,step,val_acc,test_acc,host,batch_size,lr\n"
    for seed in range(2):
        text += f"r{seed},{seed},10,0.3,,,8,0.1\nr{seed},{seed},20,0.5,0.4{seed},h{seed},8,0.1\n"
    (study,) = import_curves([table(tmp_path, text)], target=0.4).studies
    assert {one.phase for one in study.trials} == {Phase.CONFIRM}, "they repeat one configuration"


def test_a_renamed_setting_comes_first_and_two_of_one_name_are_refused(tmp_path: Path) -> None:
    text = "step,val_acc,config/batch_size,config/total,train.lr,finetune.lr\n10,0.5,8,32,0.1,0.2\n"
    file = table(tmp_path, text)
    refuse(file, "both mean learning_rate")
    chosen = ["config/total=batch_size", "train.lr=learning_rate"]
    one = only_run(import_curves([file], target=0.4, column=chosen)).configuration
    assert (one.batch_size, one.learning_rate) == (32, 0.1)


def test_logs_of_epochs_need_the_samples_of_one(tmp_path: Path) -> None:
    file = table(tmp_path, "epoch,val_acc,batch_size,lr\n1,0.2,8,0.1\n2,0.4,8,0.1\n")
    assert "--epoch-samples" in refuse(file, "no optimizer steps")


def test_a_setting_that_differs_with_the_batch_size_is_named(tmp_path: Path) -> None:
    text = "run,step,val_acc,batch_size,weight_decay,width\n"
    text += "".join(f"{size},10,0.5,{size},{0.1 if size == 64 else 0.01},{size}\n" for size in (16, 32, 64))
    notes = import_curves([table(tmp_path, text)], target=0.4).notes
    told = [one for one in notes if "changes with the batch size" in one]
    assert [one.partition(" ")[0] for one in told] == ["weight_decay", "width"]
    assert told[0].endswith("0.01 at 16, 0.01 at 32, 0.1 at 64")


def test_a_later_import_adds_the_new_runs_and_what_others_logged_since(tmp_path: Path) -> None:
    whole = list(csv.reader(wandb(tmp_path).read_text().splitlines()))
    file = tmp_path / "history.csv"

    def write(runs: str, steps: int) -> None:
        rows = [row for row in whole[1:] if row[0] in runs.split() and int(row[2]) < steps]
        file.write_text("\n".join(map(",".join, [whole[0], *rows])))

    words = ("import", "curves", "history.csv", "--target", "0.4")
    write("r1 r3 r5", 200)
    printed(tmp_path, *words)
    write("r0 r1 r3 r4 r5", 500)
    assert "2 of 5 runs are new" in ran(tmp_path, *words).stderr
    trials = read(tmp_path, "trial", "list", "history")
    assert [(one["batch_size"], one["state"]) for one in trials] == [
        (size, "reached") for size in (16, 32, 64, 16, 64)
    ], "the first three keep their numbers"
    assert read(tmp_path, "best", "history")["optimal"]["time_to_target_s"]["median"] == pytest.approx(0.4 * 16)
    write("r0 r1", 500)
    assert "this import lacks 3 of the 5 runs" in refused(tmp_path, *words, code=2)
    assert len(read(tmp_path, "trial", "list", "history")) == 5


def test_a_dry_run_stores_nothing(tmp_path: Path) -> None:
    wandb(tmp_path)
    words = ("import", "curves", "history.csv", "--target", "0.4", "--dry-run", "-f", "json")
    assert json.loads(printed(tmp_path, *words)) == [{"study": "history", "runs": 6, "reached": 6}]
    assert not (tmp_path / "bssearch.db").exists()


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("step,val_acc,lr\n1,0.5,0.1\n", {}, "the batch size of .* is unknown"),
        ("step,val_acc,batch_size\n1,0.5,0\n", {}, "batch_size = '0'"),
        ("step,val_acc,batch_size\n1,0.5\n", {}, "2 cells, but the header has 3 columns"),
        ("step,val_acc,batch_size\n-1,0.5,8\n", {}, "step -1 must be in"),
        ("step,val_acc,batch_size\n1,inf,8\n", {}, "no run has a finite"),
        ("step,val_acc,batch_size\n0,0.5,8\n", {}, "before the first step"),
        ("step,val_acc,batch_size\n1,0.5,8\n", {"epoch_samples": 9}, "no column 'epoch', which --epoch-samples needs"),
        ("step,seconds,val_acc,batch_size\n1,-5,0.5,8\n", {}, "-5 seconds at step 1"),
        ("step,val_acc,val_f1,batch_size\n1,0.5,0.4,8\n", {}, "ambiguous: the logs have 'val_acc', 'val_f1'"),
        ("step,val_loss,batch_size\n1,0.5,8\n", {}, "metric val_loss has no goal"),
        ("step,val_acc,batch_size\n1,93,8\n", {}, "in percent"),
        ("step,val_acc,batch_size\n1,0.5,8\n", {"target": math.inf}, "--target = inf must be"),
        (
            "step,val_acc,batch_size\n1,0.5,8\n",
            {"metric": "f1"},
            "--metric f1: no log has 'f1'; choose from 'step'",
        ),
        ("step,val_acc,batch_size\n1,0.5,8\n", {"run": "name"}, "--run name: no column"),
        ("step,val_acc,batch_size\n1,0.5,8\n", {"given": ["batch_size"]}, "--with batch_size must be NAME=VALUE"),
        ("step,val_acc,batch_size\n1,0.5,8\n", {"column": ["bs=batch_size"]}, "no setting 'bs'"),
        ("step,val_acc,batch_size,accumulation\n1,0.5,8,2\n", {}, "may be per device or per step"),
        ("step,val_acc,batch_size\n1,,8\n", {}, "no run has a finite"),
        ('step,val_acc,batch_size\n1,"0.5,8\n', {}, "not valid CSV"),
        ('step,val_acc,batch_size\n500,0.2,8\n"1,000",0.5,8\n', {}, "step = '1,000' must be a number"),
        ("step,val_acc,batch_size\n1,O.9,8\n", {}, "val_acc = 'O.9' must be a number"),
        ("step,elapsed,val_acc,batch_size\n1,5,0.3,8\n2,soon,0.5,8\n", {}, "elapsed = 'soon' must be a number"),
        ("step,val_acc,val_acc,batch_size\n1,0.5,0.6,8\n", {}, "'val_acc' occurs twice"),
        ("step,val_acc,seed,batch_size\n1,0.3,0,8\n2,0.5,0,8\n1,0.2,1,8\n2,0.3,1,8\n", {}, "as if a run restarts"),
        ("step,val_acc,batch_size\n0,0.3,8\n0,0.5,8\n", {}, "as if a run restarts"),
        ("step,val_acc,batch_size\n1,0.3,8\n2,0.5,16\n", {}, "the batch size of .* is unknown"),
        ("step,val_acc,batch_size\n1,0.5,8\n", {"given": ["gradient_acumulation_steps=4"]}, "unknown setting"),
        ("Step,bs16 - val_acc,bs16 - val_acc__MIN\n1,0.5,0.5\n", {}, "is a W&B chart"),
    ],
)
def test_a_log_that_does_not_tell_is_refused_by_what_it_lacks(
    text: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    refuse(table(tmp_path, text), message, **options)


def test_runs_may_name_their_steps_and_seconds_unlike(tmp_path: Path) -> None:
    table(tmp_path, "step,seconds,val_acc,batch_size\n10,1,0.5,8\n", "a.csv")
    table(tmp_path, "global_step,runtime,val_acc,batch_size\n20,3,0.5,16\n", "b.csv")
    (study,) = import_curves([str(tmp_path)], target=0.4).studies
    outcomes = [one.outcome for one in study.trials]
    assert [(one.steps_to_target, one.time_to_target_s) for one in outcomes] == [(10, 1), (20, 3)]


def test_an_accumulation_that_a_log_lacks_shows_in_its_epochs(tmp_path: Path) -> None:
    text = "run,step,epoch,val_acc,batch_size\n"
    for run, steps in (("a", 100), ("b", 25)):
        text += "".join(f"{run},{steps * epoch},{epoch},{epoch / 5},32\n" for epoch in (1, 2, 3))
    notes = import_curves([table(tmp_path, text)], target=0.4).notes
    assert any("such as accumulation or devices" in one for one in notes)


def test_a_place_given_twice_counts_once(tmp_path: Path) -> None:
    wandb(tmp_path)
    (study,) = import_curves([str(tmp_path), str(tmp_path / "history.csv")], target=0.4).studies
    assert len(study.trials) == len(RUNS)


@pytest.mark.slow
def test_one_of_a_database_s_experiments_is_chosen_by_its_name(tmp_path: Path) -> None:
    for size in (16, 64):
        mlflow_database(tmp_path, [Made(size, 0.1, 500)], f"batch {size}")
    file = str(tmp_path / "mlflow.db")
    refuse(file, "has the experiments batch 16, batch 64")
    for place in (f"{file}#batch 64", f"sqlite:///{file}#batch 64"):
        assert only_run(import_curves([place], target=0.4)).configuration.batch_size == 64


@pytest.mark.slow
def test_a_tracking_server_of_mlflow_is_read(tmp_path: Path) -> None:
    mlflow_database(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    words = ["-m", "mlflow", "server", "--backend-store-uri", store, "--port", str(port), "--workers", "1"]
    with subprocess.Popen([sys.executable, *words], cwd=tmp_path, start_new_session=True) as server:
        try:
            deadline = time.monotonic() + 180
            while time.monotonic() < deadline:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.2)
            place = f"http://127.0.0.1:{port}"
            (study,) = import_curves([place], target=0.255, name="server").studies
            (same,) = import_curves([store], target=0.255, name="server").studies
            assert [one.curve for one in study.trials] == [one.curve for one in same.trials]
            assert [one.configuration for one in study.trials] == [one.configuration for one in same.trials]
            refuse(f"{place}#other", "has the experiments e")
        finally:
            os.killpg(server.pid, signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10])
def test_the_step_of_weights_and_biases_counts_only_if_it_is_no_count_of_calls(every: int, tmp_path: Path) -> None:
    import wandb

    settings = wandb.Settings(mode="offline", silent=True)
    with wandb.init(project="p", dir=tmp_path, config={"batch_size": 8}, settings=settings) as run:
        for step in range(every, 6 * every, every):
            run.log({"val/acc": step / 100}, step=step)
    wandb.teardown()
    if every > 1:
        (study,) = import_curves([str(tmp_path)], target=0.3).studies
        assert study.trials[0].outcome.steps_to_target == 30
        (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
        models = [record.environment.cpu.model for record in wandb_records(file)]
        assert study.environment.device_name == (max(models) or "unknown"), "a machine without a GPU"
    else:
        refuse(tmp_path, "no optimizer steps", target=0.03)


def test_a_run_without_the_metric_needs_no_batch_size(tmp_path: Path) -> None:
    text = "run,step,val_acc,batch_size\na,10,0.5,8\nb,10,,\n"
    made = import_curves([table(tmp_path, text)], target=0.4)
    assert only_run(made).configuration.batch_size == 8
    assert any("1 of 2 runs have no" in one for one in made.notes)


def test_numbers_are_read_as_people_write_them() -> None:
    found = [number_in(one) for one in ["97%", "0:01:30", " ", "1_000", None, True, 10**400, "nan", 3]]
    assert found[:2] == [0.97, 90.0] and found[6:7] == [math.inf] and found[8] == 3.0
    assert all(map(math.isnan, [*found[2:6], found[7]]))


ZEUS_TRAIN = "dataset,network,batch_size,optimizer,learning_rate,run,target_metric,target_epoch\n"
ZEUS_POWER = "dataset,network,batch_size,optimizer,power_limit,time_per_epoch,average_power\n"


def zeus(folder: Path) -> Path:
    """Traces of two tasks on two GPUs, as Zeus's public repository has them; the other task's metric falls."""
    place = folder / "trace"
    place.mkdir()
    train = ZEUS_TRAIN
    for size, rate, first in ((32, "1e-1", 2), (64, "2e-1", 4)):
        for run in (1, 2):
            for metric, epochs in ((0.2, first), (0.3, first), (0.4, 3 * first + run), (0.5, "nan")):
                train += f"cifar,net,{size},adam,{rate},{run},{metric},{epochs}\n"
            train += "".join(f"words,rnn,{size},adam,{rate},{run},{metric},{9 - metric // 10}\n" for metric in (60, 40))
    (place / "summary_train.csv").write_text(train)
    for gpu, seconds in (("v100", 10), ("a40", 7)):
        rows = [f"{task},{size},adam,{limit},{seconds + 100 / limit},{8 * seconds}\n" for task, size, limit in POWERS]
        (place / f"summary_power_{gpu}.csv").write_text(ZEUS_POWER + "".join(rows))
    return place


POWERS = [(task, size, limit) for task in ("cifar,net", "words,rnn") for size in (32, 64) for limit in (200, 100)]


def test_zeus_s_traces_give_the_epochs_to_each_metric_on_each_gpu(tmp_path: Path) -> None:
    place = zeus(tmp_path)
    refuse(place, "has the workloads cifar/net, words/rnn", epoch_samples=6400)
    made = import_curves([f"{place}#cifar/net"], target=0.4, epoch_samples=6400)
    assert [one.environment.device_name for one in made.studies] == ["a40", "v100"]
    for study, of_epoch in zip(made.studies, (7.5, 10.5), strict=True):
        assert [(one.configuration.batch_size, one.seed) for one in study.trials] == [
            (32, 1),
            (32, 2),
            (64, 1),
            (64, 2),
        ]
        seconds = [one.outcome.time_to_target_s for one in study.trials]
        assert seconds == pytest.approx([of_epoch * epochs for epochs in (7, 8, 13, 14)])
        assert [one.outcome.steps_to_target for one in study.trials] == [1400, 1600, 1300, 1400]
        assert study.trials[0].outcome.last_miss_step == 1200
        joules = [one.outcome.device_use.energy_joules for one in study.trials]
        watts = {"a40": 56, "v100": 80}[study.environment.device_name]
        assert joules == pytest.approx([watts * not_none(one) for one in seconds])
    refuse(f"{place}#words/rnn", "metric val_error has no goal", target=40, epoch_samples=6400)
    (_, wer) = import_curves([f"{place}#words/rnn"], target=40, goal=Goal.MINIMIZE, epoch_samples=6400).studies
    assert [one.outcome.time_to_target_s for one in wer.trials] == [pytest.approx(5 * 10.5)] * 4


def test_past_runs_with_their_power_are_compared_by_energy(tmp_path: Path) -> None:
    words = ("import", "curves", str(wandb(tmp_path)), "--target", "0.4", "--objective", "energy_to_target")
    assert "mean power" in refused(tmp_path, *words, code=2)
    printed(tmp_path, *words, "--with", "mean_power_watts=200")
    (first, *_) = read(tmp_path, "best", "history")["batches"]
    assert first["energy_joules"] == pytest.approx(200 * 0.4 * 16)
    refuse(tmp_path / "history.csv", "must be a number > 0", given=["mean_power_watts=-1"])


def test_zeus_s_train_trace_alone_counts_steps(tmp_path: Path) -> None:
    (zeus(tmp_path) / "summary_power_v100.csv").unlink()
    (tmp_path / "trace" / "summary_power_a40.csv").unlink()
    (study,) = import_curves([f"{tmp_path}/trace#cifar/net"], target=0.2, epoch_samples=6400).studies
    assert [one.outcome.steps_to_target for one in study.trials] == [400, 400, 400, 400]
    assert study.trials[0].outcome.time_to_target_s is None


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            "step 100 loss 2.3 val_acc 0.91 time 12.3s",
            {"step": "100", "loss": "2.3", "val_acc": "0.91", "time": "12.3"},
        ),
        ("step:1,250/1,390 val_loss:4.3 t:2ms", {"step": "1250", "val_loss": "4.3", "t": "0.002"}),
        ("2026-01-02 03:04:05,5 INFO [Epoch 3/10] val acc: 91.0% (best 92.0%)", {"epoch": "3", "val_acc": "91.0%"}),
        ("Test set: Average loss: 0.05, Accuracy: 9/10 (90%)", {"Average_loss": "0.05", "Accuracy": "0.9"}),
        ("Epoch 2 Train: acc 0.9 Val: acc 0.8, best val acc 0.85", {"Train_acc": "0.9", "Val_acc": "0.8"}),
        ("iter 5: train loss 2.0, val loss 2.1.", {"iter": "5", "train_loss": "2.0", "val_loss": "2.1"}),
        pytest.param(f"step 1 acc 5/{'9' * 5000}", {"step": "1", "acc": "0.0"}, id="5,000 digits"),
        ("Epoch: [0][ 10/50]\tTime 0.5 ( 0.6)\tAcc@1 70.10", {"epoch": "0", "Time": "0.5", "Acc@1": "70.10"}),
    ],
)
def test_lines_of_texts_are_pairs_of_names_and_numbers(line: str, found: dict[str, str]) -> None:
    assert dict(slurm_logs.pairs(" ".join(line.split()))).items() >= found.items()


def timed(folder: Path, names: str, rows: Iterator[tuple[Any, ...]], **options: Any) -> Any:
    text = f"{names},batch_size\n" + "".join(",".join(map(str, row)) + ",8\n" for row in rows)
    return only_run(import_curves([table(folder, text)], target=0.4, **options))


def test_seconds_of_evaluations_are_subtracted_also_after_a_resume(tmp_path: Path) -> None:
    # a step takes 1 s, an evaluation each 10 steps takes 5 s
    def rows(first: int, last: int, spent: float) -> Iterator[tuple[Any, ...]]:
        for step in range(first, last + 1, 10):
            spent += 15
            yield step, spent, step / 100, 5

    names = "step,_runtime,val_acc,eval/seconds"
    again = [*rows(10, 30, 0), *rows(20, 50, 0)]  # from step 10 on, with a new clock
    for log in (rows(10, 50, 0), again):
        one = timed(tmp_path, names, iter(log))
        assert (one.outcome.time_to_target_s, one.outcome.seconds_basis) == (40, SecondsBasis.REPORTED)


@pytest.mark.parametrize("counter", ["step", "epoch"])
@pytest.mark.parametrize("name", ["elapsed", "_timestamp", "time"])
def test_unknown_seconds_of_evaluations_are_left_out_by_the_step_time(counter: str, name: str, tmp_path: Path) -> None:
    per_step, options = (1, {}) if counter == "step" else (0.1, {"epoch_samples": 80})

    def rows() -> Iterator[tuple[Any, ...]]:
        for step in range(1, 51):
            now = 1 + step + 5 * ((step - 1) // 10)
            yield step * per_step, now, ""
            if step % 10 == 0:
                yield step * per_step, now + 5, step / 100

    outcome = timed(tmp_path, f"{counter},{name},val_acc", rows(), **options).outcome
    assert (outcome.steps_to_target, outcome.time_to_target_s) == (40, pytest.approx(40))
    assert outcome.seconds_basis is SecondsBasis.REPORTED


def test_one_learning_rate_with_several_seeds_is_untuned(tmp_path: Path) -> None:
    text = "run,seed,step,elapsed,val_acc,batch_size,lr\n"
    runs = [
        (size, rate, seed) for size, rates in ((16, [0.1]), (32, [0.1, 0.2, 0.4])) for rate in rates for seed in (0, 1)
    ]
    for number, (size, rate, seed) in enumerate(runs):
        speed = 200 if rate == 0.2 else 100
        text += "".join(
            f"{number},{seed},{s},{s * size},{s / 100 * speed / 100},{size},{rate}\n" for s in range(10, 60, 10)
        )
    table(tmp_path, text)
    printed(tmp_path, "import", "curves", "log.csv", "--target", "0.4")
    rows = {one["batch_size"]: one["untuned_because"] for one in read(tmp_path, "best", "log")["batches"]}
    assert "the runs tried only 1 learning rate" in rows[16] and rows[32] == []


def test_a_harder_target_is_answered_from_curves_that_go_on(tmp_path: Path) -> None:
    wandb(tmp_path)
    text = (tmp_path / "history.csv").read_text().splitlines()
    short = [one for one in text if not (one.startswith("r0,") and int(one.split(",")[2]) > 300)]
    (tmp_path / "history.csv").write_text("\n".join(short))
    printed(tmp_path, "import", "curves", "history.csv", "--target", "0.2")
    harder = read(tmp_path, "best", "history", "--target", "0.4")
    rows = {one["batch_size"]: one for one in harder["batches"]}
    assert rows[32]["time_to_target_s"]["median"] == pytest.approx(0.4 * 32)
    assert (rows[16]["reached"], rows[16]["ended"]) == (1, {"exhausted": 1, "reached": 1})
    assert harder["predicted"] is None
    assert "a prediction needs 4" in refused(tmp_path, "best", "history", "--target", "0.6", code=2)
