"""The runs that would settle an imported study's answer, and the spec around its runs."""

from pathlib import Path

import pytest
import yaml

from bssearch.commands.trials import configuration_of
from bssearch.spec import load_spec
from tests.cli.task import printed, ran, read, refused

FAST = {16: 9.0, 32: 6.0, 64: 7.0}


def imported(folder: Path, *runs: tuple[int, float | str, float], seeds: int = 1) -> None:
    """Import runs of batch size, learning rate and seconds."""
    rows = [
        f"{size},{rate},{seed},{seconds + seed / 100},100,true" for size, rate, seconds in runs for seed in range(seeds)
    ]
    text = "\n".join(["batch_size,learning_rate,seed,train_seconds,steps,reached", *rows])
    (folder / "runs.csv").write_text(text)
    ran(
        folder,
        "import",
        "runs",
        "runs.csv",
        "--name",
        "mine",
        "--metric",
        "accuracy",
        "--target",
        "0.9",
        "--figures-at",
        "target",
    )


def missing(folder: Path) -> list[tuple[int, float | None]]:
    """Batch sizes and learning rates of the commands that the export proposes."""
    (folder / "my-mine.yaml").unlink(missing_ok=True)
    lines = ran(folder, "export", "mine", "--to", "spec").stderr.splitlines()
    commands = [line.partition("bssearch trial add my-mine ")[2].split() for line in lines]
    values = [dict(one.split("=") for one in command) for command in commands if command]
    return [(int(one["batch_size"]), float(one["learning_rate"]) if "learning_rate" in one else None) for one in values]


RATES = (0.1, 0.2, 0.4)


@pytest.mark.parametrize(
    ("best", "at_best", "at_others", "expected"),
    [
        (32, {0.1: 1, 0.2: 0, 0.4: 1}, {0.1: 1, 0.2: 0, 0.4: 1}, []),  # all are tuned and repeated
        (32, {0.1: 2, 0.2: 1, 0.4: 0}, {0.1: 1, 0.2: 0, 0.4: 1}, [(32, 0.8)]),  # the highest learning rate is best
        (32, {0.1: 0, 0.2: 1, 0.4: 2}, {0.1: 1, 0.2: 0, 0.4: 1}, [(32, 0.05)]),
        (64, {0.1: 1, 0.2: 0, 0.4: 1}, {0.1: 1, 0.2: 0, 0.4: 1}, [(128, 0.28)]),  # the largest batch size is best
        (16, {0.1: 1, 0.2: 0, 0.4: 1}, {0.1: 1, 0.2: 0, 0.4: 1}, [(8, 0.14)]),
        (32, {0.1: 1, 0.2: 0, 0.4: 1}, {0.2: 0}, [(64, 0.28), (16, 0.14)]),  # the others had a single learning rate
    ],
)
def test_the_missing_runs_are_beyond_the_ends_and_where_few_learning_rates_were_tried(
    best: int,
    at_best: dict[float, float],
    at_others: dict[float, float],
    expected: list[tuple[int, float]],
    tmp_path: Path,
) -> None:
    seconds = {**FAST, best: 5.0}
    runs = [
        (size, rate, seconds[size] + more)
        for size in FAST
        for rate, more in (at_best if size == best else at_others).items()
    ]
    imported(tmp_path, *runs, seeds=3)
    assert missing(tmp_path)[: len(expected)] == expected
    assert len(missing(tmp_path)) <= 3


def test_single_runs_are_repeated_and_unknown_learning_rates_are_not_named(tmp_path: Path) -> None:
    imported(tmp_path, *((size, "", seconds) for size, seconds in FAST.items()))
    assert missing(tmp_path) == [(32, None), (64, None), (16, None)]
    answer = read(tmp_path, "best", "mine")
    assert "batch 32 (1 run so far)" in answer["next"][0]["why"]
    assert "--to spec" in printed(tmp_path, "best", "mine"), "the screen says it too"


def test_the_spec_is_valid_and_holds_the_best_and_the_missing_runs(tmp_path: Path) -> None:
    rows = [
        f"{size},{rate},0.01,AdamW,{5 + 1 / size / rate if size < 64 else 9},100,true"
        for size in (16, 32, 64, 512)
        for rate in (RATES if size < 64 else RATES[:1])
    ]
    text = "\n".join(["batch_size,learning_rate,weight_decay,optimizer,train_seconds,steps,reached", *rows])
    (tmp_path / "mine.csv").write_text(text)
    ran(tmp_path, "import", "runs", "mine.csv", "--target", "0.9", "--figures-at", "target")
    proposed = missing(tmp_path)
    text = (tmp_path / "my-mine.yaml").read_text()
    spec = load_spec(yaml.safe_load(text))
    assert (spec.name, spec.target.value, spec.default.batch_size) == ("my-mine", 0.9, 32)
    assert spec.default_configuration.optimizer == "adamw"
    for size, rate in [(spec.default.batch_size, spec.default.learning_rate), *proposed]:
        configuration_of(spec, {"batch_size": size, **({} if rate is None else {"learning_rate": rate})})
    assert 512 not in spec.batch_sizes or 512 in dict(proposed), "it is far from the best"
    refused(tmp_path, "export", "mine", "--to", "spec", code=2)
    assert (tmp_path / "my-mine.yaml").read_text() == text, "nothing is overwritten"
