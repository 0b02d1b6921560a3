import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from bssearch.analysis.objectives import SamplesToTarget
from bssearch.analysis.optimum import estimate
from bssearch.errors import NotFoundError, UsageError
from bssearch.exchange.importers.imported_run import LARGEST, RunTable
from bssearch.exchange.importers.runs import (
    FiguresAt,
    check_figures,
    import_runs,
    parse_runs,
    with_last_misses,
)
from bssearch.exchange.importers.step_times import read_step_times
from bssearch.records import LARGEST_METRIC, Goal
from tests.factories import make_trial

HEADER = "batch_size,seed,reached,steps,train_seconds,final_metric,device,precision,param.learning_rate,param.optimizer"
ROW = "32,7,true,120,2.5,0.91,A100,bf16,0.1,adam"


def parse(*lines: str) -> RunTable:
    return parse_runs("\n".join(lines) + "\n", "runs.csv")


def refuse(*lines: str, said: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        parse(*lines)
    assert said in caught.value.message
    return caught.value


def cell(column: str, text: str, *, reached: str = "true") -> tuple[str, str]:
    """Return a table with one row, in which one cell is this."""
    values = dict(zip(HEADER.split(","), ROW.split(","), strict=True)) | {"reached": reached, column: text}
    return ",".join(values), ",".join(values.values())


def test_every_cell_of_a_row_has_its_place() -> None:
    (run,) = parse(HEADER, ROW).runs
    assert (run.origin, run.seed, run.reached, run.steps) == ("runs.csv:2", 7, True, 120)
    assert (run.train_seconds, run.final_metric, run.device, run.precision) == (2.5, 0.91, "A100", "bf16")
    configuration = run.configuration
    assert (configuration.batch_size, configuration.learning_rate, configuration.optimizer) == (32, 0.1, "adam")
    assert (configuration.micro_batch_size, configuration.accumulation_steps, configuration.world_size) == (32, 1, 1)


def test_two_columns_are_enough_and_what_is_not_known_is_null_under_its_own_name() -> None:
    (run,) = parse("batch_size,reached", "32,no").runs
    assert (run.seed, run.steps, run.train_seconds, run.final_metric, run.device, run.precision) == (None,) * 6
    configuration = run.configuration
    assert (configuration.learning_rate, configuration.weight_decay, configuration.optimizer) == (1.0, 0.0, "unknown")
    assert configuration.parameters == dict.fromkeys(
        ["learning_rate", "warmup_epochs", "weight_decay", "dropout", "label_smoothing", "optimizer"]
    )


def test_an_empty_cell_is_not_known_in_its_row_alone() -> None:
    first, second = parse(
        "batch_size,reached,seed,param.learning_rate,param.momentum", "32,1,,,", "32,1,3,0.5,0.9"
    ).runs
    (at_the_bounds,) = parse("batch_size,reached,param.momentum,param.weight_decay", "32,1,0,0").runs
    assert at_the_bounds.configuration.weight_decay == at_the_bounds.configuration.parameters["momentum"] == 0
    assert (first.seed, second.seed) == (None, 3)
    assert first.configuration.parameters["learning_rate"] is None
    assert first.configuration.parameters["momentum"] is None
    assert second.configuration.learning_rate == 0.5
    assert "learning_rate" not in second.configuration.parameters
    assert second.configuration.parameters["momentum"] == 0.9


@pytest.mark.parametrize(
    ("text", "reached"),
    [("1", True), ("YES", True), (" True ", True), ("False", False), ("0", False), ("no", False)],
)
def test_booleans(text: str, reached: bool) -> None:
    assert parse(*cell("reached", text)).runs[0].reached is reached


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("0.9", 0.9), ("1e-3", 1e-3), ("true", True), ("False", False), ("cosine", "cosine"), ("1_0", "1_0")],
)
def test_parameters_are_numbers_booleans_or_texts(text: str, value: object) -> None:
    found = parse("batch_size,reached,param.x", f"32,1,{text}").runs[0].configuration.parameters["x"]
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    ("micro", "accumulation", "world", "split"),
    [
        ("8", "2", "4", (8, 2, 4)),
        ("8", "", "", (8, 8, 1)),
        ("8", "", "2", (8, 4, 2)),
        ("", "", "", (64, 1, 1)),
    ],
)
def test_the_split_into_micro_batches(micro: str, accumulation: str, world: str, split: tuple[int, int, int]) -> None:
    header = "batch_size,reached,param.micro_batch_size,param.accumulation_steps,param.world_size"
    table = parse(header, f"64,1,{micro},{accumulation},{world}")
    found = table.runs[0].configuration
    assert (found.micro_batch_size, found.accumulation_steps, found.world_size) == split
    assert table.notes == ()


SPLIT = "param.micro_batch_size,param.accumulation_steps,param.world_size"


@pytest.mark.parametrize("cells", ["48,2,1", "8,2,2", "128,,", "64,4,1", "8,,3"])
def test_a_split_that_contradicts_the_batch_is_refused_with_its_columns(cells: str) -> None:
    error = refuse(f"batch_size,reached,{SPLIT}", f"64,1,{cells}", said="param.micro_batch_size = ")
    assert "batch_size = 64" in error.message and "(runs.csv:2)" in error.message


def split(table: RunTable) -> list[tuple[int, int, int, int]]:
    found = [run.configuration for run in table.runs]
    return [(one.batch_size, one.micro_batch_size, one.accumulation_steps, one.world_size) for one in found]


@pytest.mark.parametrize(
    ("columns", "rows", "expected"),
    [
        ("param.grad_accum", ["16,1", "16,2", "16,8"], [(16, 16, 1, 1), (32, 16, 2, 1), (128, 16, 8, 1)]),
        ("accumulate_grad_batches", ["8,1", "8,3"], [(8, 8, 1, 1), (24, 8, 3, 1)]),
        ("param.world_size", ["16,1", "16,4"], [(16, 16, 1, 1), (64, 16, 1, 4)]),
        ("num_gpus,param.accumulation_steps", ["4,8,2", "16,8,2"], [(64, 4, 2, 8), (256, 16, 2, 8)]),
        ("param.trainer.accumulate_grad_batches", ["8,16", "64,1"], [(128, 8, 16, 1), (64, 64, 1, 1)]),
    ],
)
def test_a_batch_size_that_must_be_that_of_a_device_counts_accumulation_and_devices(
    columns: str, rows: list[str], expected: list[tuple[int, ...]]
) -> None:
    header, *lines = (f"batch_size,{columns}", *rows)
    table = parse(f"{header},reached", *(f"{line},1" for line in lines))
    assert split(table) == expected
    assert "effective_batch_size" in table.notes[0]
    assert not {*columns.split(",")} & table.runs[0].configuration.parameters.keys()


def test_a_batch_size_that_grows_with_the_accumulation_is_that_of_a_step() -> None:
    table = parse("batch_size,reached,param.grad_accum", "32,1,1", "64,1,2", "256,1,8")
    assert split(table) == [(32, 32, 1, 1), (64, 32, 2, 1), (256, 32, 8, 1)]
    assert "name the column micro_batch_size" in table.notes[0]


@pytest.mark.parametrize("rows", [["64,1,4"], ["32,1,4", "64,1,4"], ["32,1,1", "32,1,4", "64,1,4"]])
def test_a_batch_size_that_may_be_that_of_a_device_or_a_step_is_refused_until_its_column_says(rows: list[str]) -> None:
    error = refuse("batch_size,reached,param.grad_accum", *rows, said="param.grad_accum = 4")
    assert "micro_batch_size" in str(error.hint) and "effective_batch_size" in str(error.hint)
    size = int(rows[-1].split(",")[0])
    assert split(parse("micro_batch_size,reached,param.grad_accum", *rows))[-1] == (4 * size, size, 4, 1)
    assert split(parse("effective_batch_size,reached,param.grad_accum", *rows))[-1] == (size, size // 4, 4, 1)


def test_without_a_batch_size_its_parts_are_enough_and_what_is_assumed_is_noted() -> None:
    table = parse("reached,per_device_train_batch_size,gradient_accumulation_steps", "1,32,1", "1,32,4")
    assert split(table) == [(32, 32, 1, 1), (128, 32, 4, 1)]
    assert "world_size = 1" in table.notes[0]
    table = parse(f"reached,{SPLIT}", "1,8,2,4", "0,8,2,2")
    assert split(table) == [(64, 8, 2, 4), (32, 8, 2, 2)]
    refuse(f"reached,{SPLIT}", "1,8,2,4", "1,8,,4", said="unknown because accumulation_steps is missing")
    refuse(f"reached,{SPLIT}", "1,8,2,4", "1,,2,4", said="batch_size = ''")
    refuse("reached,micro_batch_size,param.micro_batch", "1,8,4", said="param.micro_batch = 4 differ")
    refuse("reached,micro_batch_size,world_size", f"1,{LARGEST},2", said=f"must be <= {LARGEST}")


def test_the_batch_of_a_step_beside_that_of_a_device_says_which_is_which() -> None:
    table = parse("batch_size,global_batch_size,reached,world_size", "32,256,1,8", "32,512,1,8", "32,32,1,1")
    assert split(table) == [(256, 32, 1, 8), (512, 32, 2, 8), (32, 32, 1, 1)]
    refuse("batch_size,global_batch_size,reached,world_size", "32,100,1,2", said="global_batch_size = 100")


@pytest.mark.parametrize(
    ("header", "row", "said"),
    [
        ("trainer.devices,trainer.num_nodes", "2,2", "trainer.num_nodes = 2: the total number of devices is unknown"),
        ("world_size,split_batches", "4,True", "split_batches = True: the devices may share one batch"),
        ("world_size,split_batches", "4,False", ""),
        ("trainer.devices,trainer.num_nodes", "2,1", ""),
        ("trainer.devices,trainer.num_nodes", "auto,1", "trainer.devices = 'auto' must be an integer"),
    ],
)
def test_columns_that_may_divide_the_batch_count_also_if_they_are_the_same_in_all_rows(
    header: str, row: str, said: str
) -> None:
    lines = [f"per_device_train_batch_size,reached,{header}", f"32,1,{row}", f"64,1,{row}"]
    if said:
        refuse(*lines, said=said)
    else:
        assert [run.configuration.world_size for run in parse(*lines).runs] == [int(row[0])] * 2


def test_the_workers_of_ray_are_devices_and_those_of_a_loader_are_not() -> None:
    header = (
        "config/train_loop_config/batch_size,config/scaling_config/num_workers,config/train_loop_config/num_workers"
    )
    table = parse(header + ",reached", "32,1,8,1", "32,2,8,1")
    assert [run.configuration.batch_size for run in table.runs] == [32, 64]
    assert any("batch_size is per device" in one for one in table.notes)


def test_a_column_of_epochs_is_no_column_of_steps() -> None:
    lines = "batch_size,reached,epochs_to_target\n32,1,4\n"
    with pytest.raises(UsageError, match="may hold epochs"):
        parse_runs(lines, "runs.csv", column=["epochs_to_target=steps"])
    assert parse_runs(lines, "runs.csv", column=["1*epochs_to_target=steps"]).runs[0].steps == 4


def test_a_list_of_devices_is_their_number() -> None:
    (run,) = parse("micro_batch_size,devices,reached", '32,"[0, 3]",1').runs
    assert (run.configuration.batch_size, run.configuration.world_size) == (64, 2)


def test_rows_that_are_copies_are_noted() -> None:
    table = parse("batch_size,reached,train_seconds", "32,1,2.5", "32,1,2.6", "32,1,2.5")
    assert any("1 of 3 rows are copies of other rows (first: runs.csv:4)" in one for one in table.notes)


def test_devices_on_several_nodes_are_asked_for() -> None:
    refuse("batch_size,reached,param.num_nodes,gpus", "16,1,2,8", said="the total number of devices is unknown")
    table = parse("batch_size,reached,param.num_nodes,gpus", "16,1,1,8", "16,1,1,1")
    assert [run.configuration.batch_size for run in table.runs] == [128, 16]


HONEST = {16: (300, 320, 340), 32: (160, 180, 180), 64: (100, 110, 120), 128: (70, 70, 80)}
"""Steps to a target by batch size, of runs that were evaluated every 10 steps."""


def figures(
    steps: Mapping[int, tuple[int, ...]],
    *,
    missed: int = 0,
    columns: str = "steps",
    seconds: float = 0.01,
    rates: int = 1,
) -> list[str]:
    """Return a table of runs with the steps, or the seconds of so many steps; the last ``missed`` of a size missed."""
    lines = [f"batch_size,reached,{columns},param.learning_rate"]
    for size, counts in steps.items():
        for index, count in enumerate(counts):
            given = {"steps": str(count), "train_seconds": str(0.01 * count * (1 + 0.001 * index))}
            cells = [given[name] for name in columns.split(",")]
            reached = str(index < len(counts) - missed)
            lines.append(",".join([str(size), reached, *cells, str(0.1 * 2 ** (index % rates))]))
    return lines


def check(lines: list[str], figures_at: FiguresAt | None = None) -> None:
    check_figures(parse(*lines).runs, figures_at)


WHOLE = {size: (12 * -(-2000 // size),) * 4 for size in (16, 32, 64, 128, 256)}
"""Twelve epochs of 2,000 samples."""


@pytest.mark.parametrize(
    "lines",
    [
        figures(WHOLE, rates=2),
        figures(WHOLE, missed=2),
        figures({16: (100,) * 3, 64: (50,) * 2}, missed=1),
        figures({16: (100,) * 2, 32: (70,) * 2, 64: (50,) * 2}, missed=1),
        figures({size: (12 * (2000 // size),) * 3 for size in (16, 32, 64)}),  # a last partial batch is left out
        figures({16: (1000,) * 4, 64: (1000,) * 4}, rates=2),
        figures({size: (5000 // round(size**0.5),) * 4 for size in (16, 64, 256)}, rates=2),
        figures(WHOLE, columns="train_seconds", missed=2),
        figures({16: (6001, 6002, 6000), 64: (6003, 6000, 5998)}, columns="train_seconds", missed=1),  # ten minutes
        figures({16: (300,) * 2, 32: (150,) * 2}),
        figures({16: (300,), 32: (150,), 64: (75,)}),
        figures({16: (300, 300), 32: (160, 100)}, missed=1),
        ["batch_size,reached,train_seconds", "32,1,3600", "64,1,3600", "128,1,3600", "256,0,3600"],
    ],
)
def test_figures_of_whole_trainings_are_refused_unless_they_are_said_to_be_those_to_the_target(
    lines: list[str], tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        check(lines)
    assert "--figures-at target" in str(caught.value.hint)
    check(lines, FiguresAt.TARGET)
    file = tmp_path / "runs.csv"
    file.write_text("\n".join(lines))
    with pytest.raises(UsageError):
        import_runs(file, target=0.9)
    assert import_runs(file, target=0.9, figures_at=FiguresAt.TARGET).studies


@pytest.mark.parametrize(
    "lines",
    [
        figures(HONEST),
        figures(HONEST, rates=2),
        figures({size: (*counts, 500) for size, counts in HONEST.items()}, missed=1),
        figures({size: (*counts, 300) for size, counts in HONEST.items() if size > 16}, missed=1),
        figures({size: counts[:1] for size, counts in HONEST.items()}),
        figures({16: (300,), 32: (150,)}),
        figures({32: (620,) * 3, 64: (310,) * 3, 128: (186,) * 3, 256: (112,) * 3}),  # 5, 5, 6, 7 epochs
        figures({32: (620, 620, 1240), 64: (310, 310, 1240)}, missed=1),
        figures(HONEST, columns="steps,train_seconds"),
        figures({32: (100,) * 9}, rates=3),
        ["batch_size,reached", "8,1", "8,1"],
    ],
)
def test_figures_that_may_well_be_to_the_target_are_taken(lines: list[str]) -> None:
    check(lines)


def test_the_refusal_counts_the_runs_that_have_the_common_end() -> None:
    with pytest.raises(UsageError, match="19 of 20 runs that reached the target, at 2 batch sizes, have steps = 100"):
        check(figures({16: (100,) * 10, 32: (*(100,) * 9, 50)}))


def test_figures_at_the_end_of_a_run_that_reached_the_target_do_not_tell_when() -> None:
    with pytest.raises(UsageError):
        check(figures(HONEST), FiguresAt.END)


def test_a_metric_that_is_nan_is_not_known_and_counted() -> None:
    table = parse("batch_size,reached,final_metric", "8,1,0.5", "8,0,nan", "8,0,NaN", "8,0,")
    assert [run.final_metric for run in table.runs] == [0.5, None, None, None]
    assert table.notes == ("final_metric is NaN (unknown) in 2 of 4 runs (first: runs.csv:3)",)


@pytest.mark.parametrize(
    ("column", "text", "reached"),
    [
        ("batch_size", "0", "true"),
        ("batch_size", "32.5", "true"),
        ("batch_size", "", "true"),
        ("batch_size", "nan", "true"),
        ("batch_size", "1e30", "true"),
        ("reached", "maybe", "true"),
        ("seed", "-1", "true"),
        ("steps", "0", "true"),
        ("steps", "-1", "false"),
        ("train_seconds", "0", "true"),
        ("train_seconds", "-1", "false"),
        ("train_seconds", "nan", "true"),
        ("train_seconds", "inf", "false"),
        ("final_metric", "inf", "true"),
        ("final_metric", "-1.1e100", "true"),
        ("final_metric", "good", "true"),
        ("param.learning_rate", "0", "true"),
        ("param.learning_rate", "high", "true"),
        ("param.weight_decay", "-0.1", "true"),
        ("param.dropout", "1", "true"),
        ("param.label_smoothing", "false", "true"),
        ("param.momentum", "nan", "true"),
        ("param.world_size", "0", "true"),
    ],
)
def test_a_wrong_cell_is_named_with_its_column_and_line(column: str, text: str, reached: str) -> None:
    table = cell(column, text, reached=text if column == "reached" else reached)
    message = refuse(*table, said="(runs.csv:2)").message
    assert message.startswith(f"{column} = ") and " must be " in message


def test_a_run_that_missed_may_have_neither_steps_nor_seconds() -> None:
    (run,) = parse("batch_size,reached,steps,train_seconds", "8,0,0,0").runs
    assert (run.steps, run.train_seconds) == (0, 0.0)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            ["reached,world_size", "1,1"],
            "the table lacks the column 'batch_size'; existing columns: 'reached', 'world_size'",
        ),
        (["reached", "1"], "the table lacks the column 'batch_size'; existing columns: 'reached' (runs.csv:1)"),
        ([""], "the table lacks the columns 'batch_size', 'reached'; existing columns: none (runs.csv:1)"),
        (["batch_size;reached", "8;1,5"], "separated by ';'; expected commas (runs.csv:1)"),
        (["batch_size\treached", "8\t1"], "separated by '\\t'; expected commas (runs.csv:1)"),
        (["batch_size,reached"], "no runs: runs.csv has no row under its header"),
        (["batch_size,reached,seed,seed", "8,1,1,1"], "both mean seed (runs.csv:1)"),
        (["batch_size,reached,param.lr,param.learning_rate", "8,1,1,1"], "both mean param.learning_rate"),
        (["batch_size,reached,param.batch_size", "8,1,1"], "both mean batch_size"),
        (["batch_size,reached,param.", "8,1,1"], "unknown column 'param.'"),
        (["batch_size,reached,step,depth", "8,1,1,2", "8,1,1,3"], "unknown columns 'step' (steps?), 'depth'"),
        (["batch_size,reached", "8,1", "8,1,5"], "the row has 3 cells, but the header has 2 columns (runs.csv:3)"),
        (["batch_size,reached", "8"], "the row has 1 cell, but the header has 2 columns (runs.csv:2)"),
        (["batch_size,reached", '8,"1'], "runs.csv:2 is not valid CSV"),
    ],
)
def test_a_table_that_is_none_is_refused(lines: list[str], said: str) -> None:
    refuse(*lines, said=said)


def test_lines_are_counted_as_an_editor_counts_them() -> None:
    table = parse("", "batch_size,reached,param.note", '8,1,"two', 'lines"', "", "16,0,x")
    assert [run.origin for run in table.runs] == ["runs.csv:3", "runs.csv:6"]


def test_the_index_that_pandas_writes_is_left_out_and_noted() -> None:
    table = parse(",batch_size,reached", "0,8,1", "1,16,1")
    assert [run.configuration.batch_size for run in table.runs] == [8, 16]
    assert "ignored" in table.columns[0]


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    broken = tmp_path / "broken.csv"
    broken.write_bytes(b"batch_size,reached\n8,1\n\xff,1\n")
    with pytest.raises(UsageError, match=r"broken\.csv:3 is not UTF-8 text: byte 0xff"):
        import_runs(broken, target=0.5)
    broken.write_bytes(b"\xef\xbb\xbfbatch_size,reached\r\n8,1\r\n")
    assert len(import_runs(broken, target=0.5).studies) == 1


EXPORT = [
    "Name,State,Runtime,batch_size,lr,seed,epochs,_step,trainer/global_step,val/acc,train/loss",
    "a,finished,612,64,0.01,0,10,20,7810,0.931,0.21",
    "b,finished,401,256,0.02,1,10,21,1950,0.921,0.25",
    "c,finished,380,512,0.02,1,10,22,900,0.5,0.9",
    "d,crashed,33,1024,0.04,0,10,23,50,NaN,NaN",
]


def write_table(folder: Path, lines: Sequence[str]) -> Path:
    file = folder / "runs.csv"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_a_table_of_another_tool_is_read_once_its_figures_are_said_to_be_those_to_the_target(tmp_path: Path) -> None:
    file = write_table(tmp_path, EXPORT)
    words: dict[str, Any] = {"metric": "val/acc", "target": 0.9}
    with pytest.raises(UsageError, match=r"Runtime and trainer/global_step cover the whole run"):
        import_runs(file, **words)
    made = import_runs(file, figures_at=FiguresAt.TARGET, **words)
    found = [(one.configuration.batch_size, one.outcome.time_to_target_s) for one in made.studies[0].trials]
    assert found == [(64, 612.0), (256, 401.0), (512, None)]
    assert [one.configuration.learning_rate for one in made.studies[0].trials] == [0.01, 0.02, 0.02]
    assert sum(note.startswith("column ") for note in made.notes) == 11
    other = import_runs(
        file, column=["trainer/global_step=param.length", "Runtime=train_seconds"], figures_at=FiguresAt.TARGET, **words
    )
    assert other.studies[0].trials[0].configuration.parameters["length"] == 7810


@pytest.mark.parametrize(
    ("header", "row", "batch", "rate"),
    [
        ("params.batch_size,params.lr,metrics.acc,status", "64,0.1,0.95,FINISHED", 64, 0.1),  # MLflow
        ("params_batch_size,params_lr,acc,state,number", "64,0.1,0.95,COMPLETE,0", 64, 0.1),  # Optuna
        ("config/batch_size,config/lr,acc,trial_id,logdir", "64,0.1,0.95,x,y", 64, 0.1),  # Ray
        ("config/train_loop_config/batch_size,learning_rate,acc", "64,0.1,0.95", 64, 0.1),
        ("per_device_train_batch_size,num_processes,lr,acc", "16,4,0.1,0.95", 64, 0.1),
    ],
)
def test_columns_are_known_under_the_names_of_other_tools(header: str, row: str, batch: int, rate: float) -> None:
    text = f"{header},steps\n{row},100\n"
    (run,) = parse_runs(text, "runs.csv", metric="acc", target=0.9).runs
    found = (run.configuration.batch_size, run.configuration.learning_rate, run.steps, run.final_metric, run.reached)
    assert found == (batch, rate, 100, 0.95, True)


def test_a_transformed_column_is_transformed_and_a_logarithm_is_never_taken_for_a_batch() -> None:
    lines = "log2_batch,log_lr,reached\n7,-2,1\n8,-3,1\n"
    runs = parse_runs(lines, "runs.csv", column=["2**log2_batch=batch_size", "10**log_lr=learning_rate"]).runs
    assert [run.configuration.batch_size for run in runs] == [128, 256]
    assert [run.configuration.learning_rate for run in runs] == pytest.approx([0.01, 0.001])
    same = parse_runs(lines, "runs.csv", column=["1*log2_batch=batch_size"], ignore=["log_lr"]).runs
    assert [run.configuration.batch_size for run in same] == [7, 8]
    for wrong in (["log2_batch=batch_size"], ["2**log2_batch=batch"], ["nothing=batch_size"], ["log2_batch"]):
        with pytest.raises(UsageError):
            parse_runs(lines, "runs.csv", column=wrong, ignore=["log_lr"])


@pytest.mark.parametrize(
    ("column", "text", "value"),
    [
        ("train_seconds", "0:02:00", 120.0),
        ("train_seconds", '"1 day, 2:03:04"', 93784.0),
        ("train_seconds", "0 days 00:00:01.5", 1.5),
        ("train_seconds", "2.5 min", 150.0),
        ("train_seconds", "450ms", 0.45),
        ("took_ms", "1500", 1.5),
        ("took (h)", "2", 7200.0),
        ("final_metric", "91%", 0.91),
        ("train_seconds", '"120,5"', None),
        ("train_seconds", "2:00", None),
        ("final_metric", '"0,951"', None),
        ("steps", '"1,000"', None),
        ("batch_size", '"1,024"', None),
    ],
)
def test_number_formats_are_read_or_refused_by_their_cause(column: str, text: str, value: float | None) -> None:
    header, batch = ("reached", "1") if column == "batch_size" else ("reached,batch_size", "1,8")
    mapped = [f"{column}=train_seconds"] if column.startswith("took") else []
    lines = f"{header},{column}\n{batch},{text}\n"
    if value is None:
        with pytest.raises(UsageError) as caught:
            parse_runs(lines, "runs.csv")
        assert "," not in text or "point" in str(caught.value.hint)
    else:
        (run,) = parse_runs(lines, "runs.csv", column=mapped).runs
        assert (run.final_metric if column == "final_metric" else run.train_seconds) == pytest.approx(value)


@pytest.mark.parametrize(
    ("options", "metrics", "reached"),
    [
        ({"metric": "acc", "target": 0.9}, ["0.95", "0.8", "NaN"], [True, False, False]),
        ({"metric": "val_loss", "target": 0.3, "goal": Goal.MINIMIZE}, ["0.2", "0.31"], [True, False]),
        ({"metric": "acc", "target": 0.9}, ["95%", "85%"], [True, False]),
        ({"metric": "acc", "target": 90}, ["95", "85"], [True, False]),
        ({"metric": "acc", "target": 0.9}, ["95", "85"], None),  # percent and a fraction
        ({"metric": "acc", "target": 90}, ["0.95", "0.85"], None),
        ({"metric": "acc", "target": 0.9}, ["0.95", "1.85"], None),  # sums, or percent and fractions
        ({"metric": "reward", "target": 0.9}, ["0.95", "1.85"], [True, True]),
        ({"metric": "val_loss", "target": 0.3}, ["0.2", "0.31"], None),  # a loss to maximize
        ({"metric": "val/error", "target": 5.0, "goal": Goal.MINIMIZE}, ["0.04", "0.31"], None),
        ({"metric": "val/loss", "target": 5.0, "goal": Goal.MINIMIZE}, ["0.04", "0.31"], [True, True]),
        ({"metric": "acc"}, ["0.95"], None),
    ],
)
def test_without_a_column_reached_the_metric_and_the_target_tell(
    options: dict[str, Any], metrics: list[str], reached: list[bool] | None
) -> None:
    lines = f"batch_size,steps,{options['metric']}\n" + "".join(f"8,{90 + i},{m}\n" for i, m in enumerate(metrics))
    if reached is None:
        with pytest.raises(UsageError):
            parse_runs(lines, "runs.csv", **options)
    else:
        table = parse_runs(lines, "runs.csv", **options)
        assert [run.reached for run in table.runs] == reached
        assert table.unclear


@pytest.mark.parametrize(
    "text",
    ['{"log_history": [], "global_step": 3}', "Wall time,Step,Value\n1,2,0.5\n", "Step,a - acc,b - acc\n1,0.1,0.2\n"],
)
def test_of_a_file_of_another_kind_the_columns_are_named(text: str) -> None:
    with pytest.raises(UsageError, match="column") as caught:
        parse_runs(text, "runs.csv", metric="acc", target=0.9)
    assert "one row per run" in str(caught.value.hint)


def test_last_misses_come_from_their_columns_or_from_the_grid_of_the_steps() -> None:
    def misses(*lines: str) -> list[int | None]:
        found, notes = with_last_misses(parse(*lines).runs)
        assert bool(notes) is lines[0].endswith(",steps")
        return [run.last_miss_step for run in found]

    assert misses("batch_size,reached,steps,last_miss_step", "8,1,90,60", "8,1,90,") == [60, None]
    assert misses("batch_size,reached,steps,eval_every_steps", "8,1,90,40", "8,1,30,40", "8,0,90,40") == [50, 0, None]
    epochs = ["16,1,250", "16,1,750", "16,0,3000", "32,1,250", "32,1,125", "64,1,124", "64,1,124"]
    assert misses("batch_size,reached,steps", *epochs) == [0, 500, None, 125, 0, None, None]
    steps = ["16,1,100", "16,1,150", "32,1,100", "32,1,250", "64,1,200"]
    assert misses("batch_size,reached,steps", *steps) == [50, 100, 50, 200, None]


def test_an_interval_holds_the_last_miss(tmp_path: Path) -> None:
    lines = ["batch_size,reached,steps,seed,eval_every_steps", *(f"8,1,62,{seed},31" for seed in range(4))]
    (study,) = import_runs(write_table(tmp_path, lines), target=0.9, figures_at=FiguresAt.TARGET).studies
    trials = [replace(make_trial(one.seed + 1, batch_size=8), outcome=one.outcome) for one in study.trials]
    found = estimate(trials, SamplesToTarget())
    assert found.median == 62 * 8 and found.low is not None and found.low <= 31 * 8


POSITIVE = st.floats(min_value=1e-6, max_value=1e6)
ROWS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, LARGEST),
        "seed": st.none() | st.integers(0, 2**62),
        "reached": st.booleans(),
        "steps": st.none() | st.integers(1, LARGEST),
        "train_seconds": st.none() | POSITIVE,
        "final_metric": st.none() | st.floats(-LARGEST_METRIC, LARGEST_METRIC),
        "device": st.none() | st.sampled_from(["A100", 'a "quoted", one', "ü"]),
        "param.learning_rate": st.none() | POSITIVE,
        "param.x": st.none() | st.integers() | POSITIVE | st.booleans() | st.sampled_from(["text", "a,b"]),
    }
)


@given(st.lists(ROWS, min_size=1, max_size=5))
def test_what_is_written_is_read_back(rows: list[dict[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    runs = parse_runs(text.getvalue(), "runs.csv").runs
    for row, run in zip(rows, runs, strict=True):
        for name in ("seed", "reached", "steps", "train_seconds", "final_metric", "device"):
            assert getattr(run, name) == row[name]
        assert run.configuration.batch_size == row["batch_size"]
        assert run.configuration.learning_rate == (row["param.learning_rate"] or 1.0)
        assert run.configuration.parameters["x"] == row["param.x"]


class _Counted(int):
    """An integer that counts how often it is hashed."""

    hashed = 0

    def __hash__(self) -> int:
        _Counted.hashed += 1
        return super().__hash__()


def test_the_ends_of_many_runs_are_counted_once() -> None:
    (run,) = parse(HEADER, ROW).runs
    runs = [replace(run, seed=number, steps=_Counted(1000 + 7 * number)) for number in range(500)]
    _Counted.hashed = 0
    check_figures(runs, None)
    assert 500 <= _Counted.hashed <= 2000


@pytest.mark.parametrize(
    ("header", "rows", "said"),
    [
        ("trial_id", ["a,32,0.4,160", "a,32,0.9,320", "b,64,0.9,80"], "trial_id 'a' is in 2 rows"),
        (
            "epoch",
            ["1,32,0.4,4", "2,32,0.9,8", "3,32,0.9,9", "1,64,0.4,2", "2,64,0.9,4", "3,64,0.9,6"],
            "epoch counts up",
        ),
        ("step", ["9,32,,4", "9,32,0.4,4", "19,32,0.9,8", "29,32,0.9,9"], "step counts up"),
        ("epoch", ["5,32,0.9,4", "6,32,0.9,8", "7,32,0.9,9"], "unknown column 'epoch'"),
        ("epoch", ["1,32,0.9,4", "2,32,0.9,8", "1,64,0.9,9"], "unknown column 'epoch'"),
    ],
)
def test_rows_that_are_evaluations_are_named(header: str, rows: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_runs("\n".join([f"{header},batch_size,acc,steps", *rows]), "runs.csv", metric="acc", target=0.9)


def test_a_run_that_violates_a_constraint_is_left_out() -> None:
    lines = "params_batch_size,reached,constraints:memory,system_attrs_constraints"
    table = parse(lines, "32,1,-1.0,", "64,1,5.0,", '128,1,,"(-1.0, 2.0)"', "256,1,0.0,-1.0")
    assert [run.configuration.batch_size for run in table.runs] == [32, 256]
    assert "skipped 2 of 4 runs, because they violate a constraint" in table.notes


def test_a_result_table_of_ray_needs_no_further_names() -> None:
    header = "acc,checkpoint_dir_name,done,training_iteration,trial_id,time_this_iter_s,time_total_s,time_since_restore"
    lines = [header + ",iterations_since_restore,config/batch_size", "0.93,c_7,True,8,d0,0.1,1.3,1.3,8,128"]
    lines.append("0.94,c_9,True,9,d1,0.2,2.8,1.6,4,32")
    table = parse_runs("\n".join(lines), "ray.csv", metric="acc", target=0.9)
    assert table.runs[0].train_seconds == 1.3 and "time_total_s" in table.unclear


# Tables of step times -------------------------------------------------------------------------------------------------


def write(folder: Path, text: str) -> Path:
    path = folder / "h200.csv"
    path.write_text(text)
    return path


def test_a_table_is_read(tmp_path: Path) -> None:
    found = read_step_times(write(tmp_path, "batch_size, step_seconds,micro_batch_size\n32,0.5,\n64,0.75,16\n"))
    assert {size: (one.step_seconds, one.micro_batch_size) for size, one in found.items()} == {
        32: (0.5, 32),
        64: (0.75, 16),
    }


def test_what_the_probe_prints_is_read_and_sizes_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    probes = [
        {"batch_size": 32, "micro_batch_size": 32, "step_seconds": 0.5, "out_of_memory": False},
        {"batch_size": 64, "micro_batch_size": 64, "step_seconds": None, "out_of_memory": True},
    ]
    assert list(read_step_times(write(tmp_path, json.dumps({"study": "x", "probes": probes})))) == [32]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no step times"),
        ("batch_size\n3\n", "h200.csv:2 has no step_seconds, only 'batch_size'"),
        ("batch_size,step_seconds\n", "has no step times"),
        ("batch_size,step_seconds\n32,0\n", "h200.csv:2: step_seconds = '0' must be a number of seconds from 1e-09"),
        ("batch_size,step_seconds\n32,-1\n", "step_seconds = '-1' must be"),
        ("batch_size,step_seconds\n32,nan\n", "step_seconds = 'nan' must be"),
        ("batch_size,step_seconds\n32.5,1\n", "batch_size = '32.5' must be an integer in"),
        ("batch_size,step_seconds\n0,1\n", "batch_size = '0' must be an integer in"),
        ("batch_size,step_seconds\n32,1\n32,2\n", "h200.csv:3: batch_size 32 occurs twice"),
        ("batch_size,step_seconds,micro_batch_size\n32,1,5\n", "micro_batch_size = 5 must divide batch_size = 32"),
        ("{", "is not valid JSON"),
        ('{"fit": 1}', "has no batch_size and no step_seconds, only 'fit'"),
        ("[3]", "h200.csv:1 must be a JSON object"),
        ("batch_size,step_seconds\n32,1e300\n", "h200.csv:2: step_seconds = '1e300' must be"),
        ("batch_size,step_seconds\n32,1000001\n", "a number of seconds from 1e-09 to 1e+06"),
        ("batch_size,step_seconds\n32,1e-310\n", "step_seconds = '1e-310' must be"),
        ("batch_size,step_seconds\n32,1_0\n", "step_seconds = '1_0' must be"),
        (
            "batch_size,step_seconds\n2147483648,1\n",
            "batch_size = '2147483648' must be an integer in [1, 2147483647]",
        ),
        ("batch_size,step_seconds\n32,0,5\n", "the row has 3 cells, but the header has 2 columns"),
        (f"batch_size,step_seconds\n32,{'9' * 200_000}\n", "h200.csv:2 is not valid CSV: field larger than"),
        (f"batch_size,step_seconds\n32,{'9' * 5000}\n", "step_seconds = '9999"),
        ("a" * 100_000 + ",b\n1,2\n", "no batch_size and no step_seconds, only 'aaa"),
        ("[" * 100_000, "h200.csv:1 is not valid JSON: maximum recursion depth exceeded"),
        (f'[{{"batch_size": {"9" * 5000}, "step_seconds": 1}}]', "is not valid JSON: Exceeds the limit"),
        (f'[{{"batch_size": 8, "step_seconds": {"9" * 500}}}]', "h200.csv:1: step_seconds = 9999"),
        ('[{"batch_size": 8, "step_seconds": [1]}]', "step_seconds = [1] must be"),
        ('[{"batch_size": true, "step_seconds": 1}]', "batch_size = 'True' must be"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_step_times(write(tmp_path, text))
    assert message in str(caught.value)
    assert len(str(caught.value)) < len(str(tmp_path)) + 200


def test_a_table_with_decimal_commas_is_read(tmp_path: Path) -> None:
    found = read_step_times(write(tmp_path, "batch_size;step_seconds\n32;0,5\n"))
    assert [(size, one.step_seconds) for size, one in found.items()] == [(32, 0.5)]


def test_the_shortest_and_the_longest_steps_are_read(tmp_path: Path) -> None:
    found = read_step_times(write(tmp_path, "batch_size,step_seconds\n1,1e-9\n2147483647,1e6\n"))
    assert {size: one.step_seconds for size, one in found.items()} == {1: 1e-9, 2**31 - 1: 1e6}


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"none\.csv"):
        read_step_times(tmp_path / "none.csv")
    path = tmp_path / "bytes.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not UTF-16 text"):
        read_step_times(path)
