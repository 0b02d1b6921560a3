"""What holds for every importer of runs: it makes studies of a file, all or none, and names one that it cannot read.

`import study` takes in studies that are made already: `tests/storage/transfer`.

A new importer needs a file of its own kind here, or the first test fails. The last tests are about unusual files.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from bssearch import StudySpec, open_store, registry
from bssearch.errors import UsageError
from bssearch.exchange.importers.curves import import_curves
from bssearch.exchange.optuna_study import OptunaStudy, optuna_database, write_study
from bssearch.records import Goal, StudyRecord, TrialRecord, TrialState
from tests.cli.task import bssearch, printed, ran, read, refused
from tests.factories import EPOCH, make_environment, make_spec, make_trial
from tests.storage.transfer.copies import rows


@cache
def _optuna_database() -> bytes:
    """Return what `export --to optuna` writes."""
    trials = [
        make_trial(3 * index + seed, batch_size=size, seconds=2.5 + seed, steps=100 + seed, seed=seed)
        for index, size in enumerate((32, 64))
        for seed in range(3)
    ]
    trials.append(make_trial(7, batch_size=128, state=TrialState.PRUNED, steps=500))
    record = StudyRecord.created(make_spec(name="optuna").new_study("someone"), EPOCH, make_environment())
    with TemporaryDirectory() as place:
        path = Path(place, "optuna.db")
        write_study(OptunaStudy.of(record, trials, {}), optuna_database(str(path)))
        return path.read_bytes()


IMPORTERS = tuple(name for name in registry.names("importers") if name != "study")

FILES: dict[str, str | Callable[[], bytes]] = {
    "runs": "batch_size,seed,reached,steps,train_seconds,final_metric\n"
    + "".join(f"{size},{seed},true,{100 + seed},{2.5 + seed},0.9{seed}\n" for size in (32, 64) for seed in range(3))
    + "128,0,false,500,60,0.8\n",
    "rcp": json.dumps(
        {
            f"resnet_{size}": {
                "Benchmark": "resnet",
                "BS": size,
                "Hyperparams": {"optimizer": "lars", "opt_base_learning_rate": 7.4},
                "Epochs to converge": epochs,
            }
            for size, epochs in ((1632, [34, 34, 35]), (3264, [36, 35, 37]))
        }
    ),
    "optuna": _optuna_database,
    "curves": "run,seed,batch_size,step,train_seconds,val_acc\n"
    + "".join(
        f"{size}-{seed},{seed},{size},{step},{0.1 * step * size + seed},{step / 50}\n"
        for size in (32, 64)
        for seed in range(3)
        for step in range(10, 41, 10)
    ),
}
"""For each importer a file of runs at two batch sizes or more, each with several seeds, or what makes it."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file of each importer's kind, and a database with nothing in it."""
    for name, content in FILES.items():
        (tmp_path / f"{name}.txt").write_bytes(content.encode() if isinstance(content, str) else content())
    open_store(f"sqlite:///{tmp_path}/bssearch.db").close()
    return tmp_path


def do(folder: Path, importer: str, *arguments: str) -> list[str]:
    """Import the importer's file; return the studies' names."""
    return ran(folder, "import", importer, f"{importer}.txt", *arguments).stdout.splitlines()


def stored(folder: Path) -> dict[str, tuple[StudyRecord, StudySpec, list[TrialRecord]]]:
    """Return what the folder's database holds, by the studies' names."""
    with open_store(f"sqlite:///{folder}/bssearch.db", write=False) as store:
        studies = [store.studies.get(one.name) for one in store.studies.summaries()]
        return {one.name: (one, StudySpec.model_validate(one.spec), store.trials.of(one.name)) for one in studies}


def refuse(folder: Path, importer: str, *arguments: str, code: int) -> str:
    """Have an import refused with nothing stored; return what was said."""
    before = stored(folder)
    told = refused(folder, "import", importer, *arguments, code=code)
    assert stored(folder) == before
    return told


def test_every_importer_has_a_file_here() -> None:
    assert set(IMPORTERS) == set(FILES)


@pytest.mark.parametrize("importer", IMPORTERS)
def test_the_studies_that_are_printed_are_those_that_are_stored(folder: Path, importer: str) -> None:
    names = do(folder, importer)
    assert names == [importer]  # the file's own
    assert list(stored(folder)) == names
    assert do(folder, importer, "--name", "mine") == ["mine"]
    assert {row["name"] for row in read(folder, "study", "list")} == {importer, "mine"}


@pytest.fixture
def imported(folder: Path, importer: str) -> None:
    """The importer's own file has been imported."""
    do(folder, importer)


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("importer", IMPORTERS)
def test_the_trials_of_a_study_are_finished_and_fit_its_spec(folder: Path, importer: str) -> None:
    (record, spec, trials) = stored(folder)[importer]
    assert record.spec_hash == spec.question_hash
    assert len(trials) == spec.budget.trials
    assert {trial.configuration.batch_size for trial in trials} <= set(spec.batch_sizes)
    assert len({(trial.configuration.key, trial.seed) for trial in trials}) == len(trials)
    for trial in trials:
        outcome = trial.outcome
        assert trial.state.is_finished and outcome is not None
        assert (outcome.steps_to_target is not None) is (trial.state is TrialState.REACHED)
        assert outcome.time_to_target_s is None or outcome.time_to_target_s > 0
        assert outcome.samples == outcome.steps * trial.configuration.batch_size
        assert outcome.wall_seconds >= 0.0


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("importer", IMPORTERS)
def test_the_studies_are_answered_and_cannot_be_run(folder: Path, importer: str) -> None:
    _, spec, _ = stored(folder)[importer]
    answer = read(folder, "best", importer)
    assert answer["optimal"]["batch_size"] in spec.batch_sizes
    assert [row["batch_size"] for row in answer["batches"]] == list(spec.batch_sizes)
    assert bssearch("study", "confirm", importer, cwd=folder).returncode == 2


@pytest.mark.parametrize("importer", IMPORTERS)
def test_a_name_that_is_taken_or_is_none_stores_nothing(folder: Path, importer: str) -> None:
    (other,) = {"runs", "curves"} - {importer} if importer in ("runs", "curves") else {"runs"}
    do(folder, other)
    assert other in refuse(folder, importer, f"{importer}.txt", "--name", other, code=2)
    assert "'a b'" in refuse(folder, importer, f"{importer}.txt", "--name", "a b", code=2)


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("importer", IMPORTERS)
def test_a_second_import_of_the_same_file_changes_nothing(folder: Path, importer: str) -> None:
    before = stored(folder)
    assert "stored already" in ran(folder, "import", importer, f"{importer}.txt").stderr
    assert stored(folder) == before


@pytest.mark.parametrize("importer", IMPORTERS)
def test_a_file_that_is_not_there_or_says_nothing_is_named(folder: Path, importer: str) -> None:
    assert "nowhere.txt" in refuse(folder, importer, "nowhere.txt", code=3)
    (folder / "empty.txt").write_text("")
    (folder / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    (folder / "folder").mkdir()
    for name in ("empty.txt", "bytes.txt", "folder"):
        assert name in refuse(folder, importer, name, code=2)
    for other in set(FILES) - {importer}:
        assert f"{other}.txt" in refuse(folder, importer, f"{other}.txt", code=2)


def rows_of(folder: Path, database: str) -> dict[str, Any]:
    with open_store(f"sqlite:///{folder}/{database}", write=False) as store:
        return {one.name: rows(store, one.name) for one in store.studies.summaries()}


@pytest.mark.usefixtures("imported")
@pytest.mark.slow
@pytest.mark.parametrize("importer", IMPORTERS)
def test_the_studies_go_into_other_databases_whole(folder: Path, importer: str) -> None:
    for words in (
        ("export", importer, "--to", "study", "--file", "whole.gz"),
        ("import", "study", "whole.gz", "--db", "sqlite:///through-a-file.db"),
        ("import", "study", "sqlite:///bssearch.db", "--db", "sqlite:///merged.db"),
    ):
        printed(folder, *words)
    assert rows_of(folder, "bssearch.db") == rows_of(folder, "through-a-file.db") == rows_of(folder, "merged.db")


STEPS = range(10, 60, 10)
HEADER = "step,val_acc,batch_size"


def lines(row: Callable[[int], str], header: str = HEADER, end: str = "\n") -> str:
    return end.join([header, *map(row, STEPS)]) + end


def objects(row: Callable[[int], dict[str, Any]]) -> str:
    return "\n".join(json.dumps(row(step)) for step in STEPS)


def accuracies(step: int) -> str:
    return f"{step},{step / 100},8"


TIMED = "step,{},val_acc,batch_size"
READ: dict[str, tuple[str, str | bytes, dict[str, Any], tuple[int, int, float | None]]] = {
    "header again": (
        "a.csv",
        lines(lambda s: f"{s},{s},{s / 100},8", TIMED.format("elapsed")) + f"{TIMED.format('elapsed')}\n60,60,.6,8\n",
        {},
        (8, 35, 35),
    ),
    "instants": (
        "a.csv",
        lines(lambda s: f"{s},2026-01-02T03:04:{s - 10:02d}Z,{s / 100},8", TIMED.format("time")),
        {},
        (8, 35, 35),
    ),
    "milliseconds of a clock": (
        "a.csv",
        lines(lambda s: f"{s},{1_700_000_000_000 + 1000 * s},{s / 100},8", TIMED.format("timestamp")),
        {},
        (8, 35, 35),
    ),
    "unit in a name": (
        "a.csv",
        lines(lambda s: f"{s},{1000 * s},{s / 100},8", TIMED.format("elapsed_ms")),
        {},
        (8, 35, 35),
    ),
    "hours and minutes": (
        "a.csv",
        lines(lambda s: f"{s},0:{s:02d}:00,{s / 100},8", TIMED.format("elapsed")),
        {},
        (8, 35, 2100),
    ),
    "a later part of a run": (
        "a.csv",
        lines(lambda s: f"{s + 5000},{s},{s / 100},8", TIMED.format("elapsed")),
        {},
        (8, 5035, 5035),
    ),
    "each row twice": (
        "a.csv",
        lines(lambda s: f"{s},{s},{s / 100},8\n{s},{s},{s / 100},8", TIMED.format("elapsed")),
        {},
        (8, 35, 35),
    ),
    "history of lists": (
        "a.json",
        json.dumps({"config": {"batch_size": 8}, "history": {"step": [*STEPS], "val_acc": [s / 100 for s in STEPS]}}),
        {},
        (8, 35, None),
    ),
    "history of objects": (
        "a.json",
        json.dumps(
            {"args": {"bs": 8}, "log": [{"step": s, "val": {"acc": s / 100}, "seconds": s} for s in STEPS]}, indent=1
        ),
        {},
        (8, 35, 35),
    ),
    "history of two parts": (
        "a.json",
        json.dumps(
            {"bs": 8, "step": [*STEPS], "val": {"acc": [s / 100 for s in STEPS]}, "train": {"acc": [1 for _ in STEPS]}}
        ),
        {},
        (8, 35, None),
    ),
    "nested names": (
        "a.jsonl",
        objects(lambda s: {"progress": {"step": s}, "metrics": {"val": {"acc": s / 100}}, "cfg": {"batch_size": 8}}),
        {},
        (8, 35, None),
    ),
    "texts": ("a.jsonl", objects(lambda s: {"step": str(s), "val_acc": f"{s} %", "bs": "8"}), {}, (8, 35, None)),
    "a part of a line": (
        "a.jsonl",
        objects(lambda s: {"step": s, "val_acc": s / 100, "bs": 8})[:-9],
        {},
        (8, 35, None),
    ),
    "a part of a row": ("a.csv", lines(accuracies) + "60,0.", {}, (8, 35, None)),
    "an index without a name": (
        "a.csv",
        lines(lambda s: f"{s // 10},{accuracies(s)}", f",{HEADER}"),
        {},
        (8, 35, None),
    ),
    "an empty column": ("a.csv", lines(lambda s: f"{accuracies(s)},", f"{HEADER},"), {}, (8, 35, None)),
    "Excel": ("a.csv", lines(lambda s: f"{s};0,{s};8", "sep=;\nstep;val_acc;batch_size"), {}, (8, 35, None)),
    "old line ends": ("a.csv", lines(accuracies, end="\r"), {}, (8, 35, None)),
    "a mark of UTF-8": ("a.csv", b"\xef\xbb\xbf" + lines(accuracies, end="\r\n").encode(), {}, (8, 35, None)),
    "Keras": (
        "training.log",
        lines(lambda s: f"{s // 10 - 1},1,{s / 100},2", "epoch,loss,val_accuracy,val_loss"),
        {"given": ["batch_size=32"], "epoch_samples": 320},
        (32, 35, None),
    ),
    "Ultralytics": (
        "results.csv",
        lines(lambda s: f"  {s // 10},  {s}.5,  1.2,  {s / 100}", "  epoch,  time,  val/box_loss,  metrics/mAP50(B)"),
        {"given": ["batch=16"], "epoch_samples": 160, "metric": "metrics/mAP50(B)"},
        (16, 35, 35.5),
    ),
    "fairseq": (
        "a.jsonl",
        objects(
            lambda s: {"epoch": s // 10, "valid_loss": f"{6 - s / 10}", "valid_num_updates": f"{s}", "valid_wall": s}
        ),
        {
            "given": ["batch_size=8"],
            "metric": "valid_loss",
            "step": "valid_num_updates",
            "seconds": "valid_wall",
            "goal": Goal.MINIMIZE,
            "target": 2.5,
        },
        (8, 35, 35),
    ),
    "TensorBoard's table": (
        "a.csv",
        lines(lambda s: f"{1.7e9 + s},{s},{s / 100}", "Wall time,Step,Value"),
        {"metric": "Value", "given": ["batch_size=8"]},
        (8, 35, 35),
    ),
    "rounds": (
        "a.csv",
        lines(lambda s: f"{s // 10},{s / 100},8", "round,val_acc,batch_size"),
        {"step": "round", "epoch_samples": 80},
        (8, 35, None),
    ),
    "a clock before the first evaluation": (
        "a.csv",
        "step,_timestamp,val_acc,batch_size\n"
        + "".join(f"{s},{1000 + s / 10},{'' if s % 50 else s / 1000},8\n" for s in range(10, 501, 10)),
        {},
        (8, 350, 35),
    ),
    "seconds without evaluations, and of evaluations": (
        "a.csv",
        "step,elapsed,val_acc,eval_time,batch_size\n"
        + "".join(f"{s},{s},{'' if s % 10 else s / 100},{'' if s % 10 else 5},8\n" for s in range(1, 51)),
        {},
        (8, 35, 35),
    ),
    "seconds of each epoch": (
        "a.csv",
        lines(lambda s: f"{s},{12 + s % 20 / 100},{s / 100},8", TIMED.format("time")),
        {},
        (8, 35, None),
    ),
    "seconds of each epoch, and of its half": (
        "a.csv",
        lines(lambda s: f"{s},{12 + s % 20 / 100},{s / 100},8\n{s + 5},12.1,{s / 100},8", TIMED.format("train_time")),
        {},
        (8, 38, None),
    ),
    "points between thousands, with decimal commas": (
        "a.csv",
        "step;val_acc;batch_size\n500;0,3;8\n1.000;0,4;8\n1.500;0,5;8\n",
        {},
        (8, 750, None),
    ),
    "single precision": ("a.csv", f"{HEADER}\n9,0.8999999761581421,8\n", {"target": 0.9}, (8, 9, None)),
    "batch size of the evaluation": (
        "a.csv",
        lines(lambda s: f"{s},{s / 100},256,8", "step,val_acc,config/eval.batch_size,config/data.batch_size"),
        {},
        (8, 35, None),
    ),
    "samples": (
        "a.csv",
        lines(lambda s: f"{8 * s},{s / 100},8", "samples_seen,val_acc,batch_size"),
        {"step": "samples_seen", "epoch_samples": 1},
        (8, 35, None),
    ),
}


@pytest.mark.parametrize("name", READ)
def test_an_unusual_file_is_read(name: str, tmp_path: Path) -> None:
    file, text, options, expected = READ[name]
    (tmp_path / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    (study,) = import_curves([str(tmp_path / file)], **{"target": 0.35, **options}).studies
    (trial,) = study.trials
    outcome = trial.outcome
    assert (trial.configuration.batch_size, outcome.steps_to_target) == expected[:2]
    assert outcome.time_to_target_s == (None if expected[2] is None else pytest.approx(expected[2]))


REFUSED: dict[str, tuple[str, str | bytes, str]] = {
    "decimal commas and points": (
        "a.tsv",
        "step\tval_acc\tbatch_size\n10\t0,35\t8.0\n",
        "val_acc = '0,35' must be a number",
    ),
    "thousands and points": (
        "a.csv",
        "step;samples;val_acc;batch_size\n10;80,000;0.325;8\n20;160,000;0.375;8\n",
        "write all numbers with decimal points",
    ),
    "a comment": ("a.csv", f"# mine\n{lines(accuracies)}", "3 cells, but the header has 1 column "),
    "spaces": (
        "a.txt",
        "step val_acc batch_size\n10 0.4 8\n",
        "the metric is unknown: the logs have 'step val_acc batch_size'",
    ),
    "thousands": ("a.tsv", lines(lambda s: f"{s},000\t{s / 100}\t8", HEADER.replace(",", "\t")), "no optimizer steps"),
    "thousands by letter": ("a.csv", lines(lambda s: f"{s}k,{s / 100},8"), "no optimizer steps"),
    "another minus": ("a.csv", lines(lambda s: f"{s},−{s / 100},8"), "must be a number"),
    "a column for each run": ("a.csv", lines(lambda s: f"{s},0.1,0.2", "step,a/val_acc,b/val_acc"), "ambiguous"),
    "Latin-1": ("a.csv", "step,val_acc,batch_size,note\n10,.4,8,é\n".encode("latin-1"), "a.csv:2 is not UTF-8"),
    "backwards": ("a.csv", "\n".join([HEADER, *map(accuracies, reversed(STEPS))]), "as if a run restarts"),
    "no gzip": ("a.csv.gz", lines(accuracies), "cannot be read"),
    "no known pattern": ("a.out", "Loading 3 files\nsrun: error\n", "a.out has no line with a step or epoch"),
    "tokens": ("a.jsonl", objects(lambda s: {"tokens": s, "val_acc": s / 100, "bs": 8}), "no optimizer steps"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unusual_file_is_refused_by_what_is_wrong(name: str, tmp_path: Path) -> None:
    file, text, message = REFUSED[name]
    (tmp_path / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=message):
        import_curves([str(tmp_path / file)], target=0.35)


@pytest.mark.parametrize("name", ["config.json", "args.yaml", ".hydra/config.yaml"])
def test_settings_may_be_in_a_file_beside_the_table(name: str, tmp_path: Path) -> None:
    for size in (8, 16):
        folder = tmp_path / f"run{size}"
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(json.dumps({"train": {"micro_batch_size": size // 2, "accum_steps": 2}, "lr": 0.5}))
        (folder / "log.jsonl").write_text(objects(lambda s: {"step": s, "val_acc": s / 100}))
    (study,) = import_curves([str(tmp_path)], target=0.35).studies
    found = [(one.configuration.batch_size, one.configuration.learning_rate) for one in study.trials]
    assert sorted(found) == [(8, 0.5), (16, 0.5)]


def test_a_learning_rate_that_changes_counts_by_its_peak(tmp_path: Path) -> None:
    text = "".join(f"{run},{s},{rate * (1 - s / 100)},{s / 100},8\n" for run, rate in ((1, 1), (2, 2)) for s in STEPS)
    (tmp_path / "a.csv").write_text(f"run,step,lr,val_acc,batch_size\n{text}")
    (study,) = import_curves([str(tmp_path / "a.csv")], target=0.35).studies
    assert [one.configuration.learning_rate for one in study.trials] == pytest.approx([0.9, 1.8])


PYTORCH = "".join(
    f"Epoch: [{epoch}][ 10/50]\tTime  0.512 ( 0.633)\tLoss 6.9e+00 (7.0e+00)\nTest: [ 0/20]\tAcc@1  12.0 ( 12.0)\n"
    f" * Acc@1 {10 * epoch + 5}.100 Acc@5 89.00\n"
    for epoch in range(5)
)
MNIST = "".join(
    f"Train Epoch: {epoch} [0/60000 (0%)]\tLoss: 2.3\n\nTest set: Average loss: 0.05, Accuracy: {epoch}000/10000 (9%)\n"
    for epoch in range(1, 6)
)
NANOGPT = "".join(
    f"step {250 * part}: train loss 4.0, val loss {4.1 - part * 0.3:.4f}\niter {250 * part}: loss 3.1, time 12.34ms\n"
    for part in range(6)
)
TRANSFORMERS = "".join(
    f"{{'loss': 0.5, 'lr': 0.1, 'epoch': {epoch}.0}}\n{{'eval_accuracy': {epoch / 10}, 'epoch': {epoch}.0}}\n"
    for epoch in range(1, 6)
)
BARS = "".join(f"Epoch {epoch}: 100%|████| 50/50 [00:05<00:00, 9.9it/s, val_acc=0.{epoch}00]\n" for epoch in range(5))
LOGGING = "".join(
    f"2026-01-02 03:{minute:02d}:00,500 INFO iter={minute} loss=2.1\n"
    f"2026-01-02 03:{minute:02d}:30,500 INFO eval: val/acc={minute / 100}\n"
    for minute in range(5, 55, 5)
)
TEXTS: dict[str, tuple[str, dict[str, Any], tuple[int, int, float | None]]] = {
    "PyTorch's example": (
        "Namespace(batch_size=256, lr=0.1)\n" + PYTORCH,
        {"metric": "Acc@1", "target": 35, "epoch_samples": 12_800},
        (256, 200, None),
    ),
    "MNIST": ("Namespace(batch_size=64, test_batch_size=1000)\n" + MNIST, {"epoch_samples": 60_000}, (64, 3281, None)),
    "nanoGPT": (
        "batch_size = 12\ngradient_accumulation_steps = 5\n" + NANOGPT,
        {"target": 3.0, "goal": Goal.MINIMIZE},
        (60, 917, None),
    ),
    "transformers": ("python run.py --batch-size 32\n" + TRANSFORMERS, {"epoch_samples": 3200}, (32, 350, None)),
    "objects": (
        "{'batch_size': 8, 'lr': 0.1}\n"
        + "".join(f"INFO {{'eval_accuracy': {s / 100}, 'step': {s}}}\n" for s in STEPS),
        {},
        (8, 35, None),
    ),
    "bars": (BARS, {"epoch_samples": 3200, "given": ["batch_size=64"]}, (64, 225, None)),
    # 4.5 minutes for 5 steps, and half a minute for an evaluation
    "times of lines": ("2026-01-02 03:00:00 INFO bs=16 lr=0.3\n" + LOGGING, {}, (16, 35, 35 * 54)),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_read(name: str, tmp_path: Path) -> None:
    text, options, expected = TEXTS[name]
    (tmp_path / "slurm-1.out").write_text(text)
    (study,) = import_curves([str(tmp_path)], **{"target": 0.35, **options}).studies
    (trial,) = study.trials
    assert (trial.configuration.batch_size, trial.outcome.steps_to_target) == expected[:2]
    seconds = trial.outcome.time_to_target_s
    assert seconds == (None if expected[2] is None else pytest.approx(expected[2]))
