"""Unusual training logs: each is read right, or refused by what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bssearch.errors import UsageError
from bssearch.exchange.importers.curves import import_curves
from bssearch.records import Goal

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
        "write all decimals with a point",
    ),
    "a comment": ("a.csv", f"# mine\n{lines(accuracies)}", "3 cells, the header 1"),
    "spaces": ("a.txt", "step val_acc batch_size\n10 0.4 8\n", "has 'step val_acc batch_size'|ambiguous"),
    "thousands": ("a.tsv", lines(lambda s: f"{s},000\t{s / 100}\t8", HEADER.replace(",", "\t")), "no optimizer steps"),
    "thousands by letter": ("a.csv", lines(lambda s: f"{s}k,{s / 100},8"), "no optimizer steps"),
    "another minus": ("a.csv", lines(lambda s: f"{s},−{s / 100},8"), "must be a number"),
    "a column for each run": ("a.csv", lines(lambda s: f"{s},0.1,0.2", "step,a/val_acc,b/val_acc"), "ambiguous"),
    "Latin-1": ("a.csv", "step,val_acc,batch_size,note\n10,.4,8,é\n".encode("latin-1"), "a.csv:2 is not UTF-8"),
    "backwards": ("a.csv", "\n".join([HEADER, *map(accuracies, reversed(STEPS))]), "as if a run restarts"),
    "no gzip": ("a.csv.gz", lines(accuracies), "cannot be read"),
    "no known pattern": ("a.out", "Loading 3 files\nsrun: error\n", "a.out has no line with a known pattern"),
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
