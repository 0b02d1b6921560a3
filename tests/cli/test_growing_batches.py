"""A real study with trials whose batch grows, as its commands show it, repeat it, and take it elsewhere."""

import ast
import csv
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from bssearch.analysis.answer import Answer
from bssearch.records import batch_schedule_of
from bssearch.storage.repository import open_store
from tests.cli.task import INLINE, bssearch, printed, read, refused, space_of, write_task
from tests.factories import not_none

pytestmark = pytest.mark.slow  # its study takes seconds

STAGES = "200:32 600:64/32"
SHARES = (1.0, 50.0)
"""The last lets a batch grow before the first step, whatever the seed."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study that searched for a schedule, and ran two of a person's own."""
    place = tmp_path_factory.mktemp("growing")
    spec = write_task(
        place,
        space={**space_of(16, 32, 64), "warmup_epochs": 0, "batch_schedule": {"name": "geometric"}},
        budget={"trials": 4, "trial_train_seconds": 0.5, "schedule_trials": 2},
        executor=INLINE,
        confirm={"top": 1, "runs": 2},
    )
    printed(place, "run", spec.name)
    printed(place, "trial", "add", "task", "batch_size=16", f"batch_stages={STAGES}")
    for share in SHARES:
        by_noise = ["batch_schedule=noise_scale", "batch_stages=32 64", f"batch_noise_share={share}"]
        printed(place, "trial", "add", "task", "batch_size=16", "learning_rate=0.03", *by_noise)
    printed(place, "run", spec.name)
    return place


def trials(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read(folder, "trial", "list", "task")
    return found


def with_stages(folder: Path, stages: str) -> dict[str, Any]:
    return next(one for one in trials(folder) if one.get("batch_stages") == stages)


def one_by_noise(folder: Path) -> dict[str, Any]:
    """Return the trial that grew most often of those that decided by the noise scale, with its stages."""
    numbers = [one["number"] for one in trials(folder) if one.get("batch_schedule") == "noise_scale"]
    found = [json.loads(printed(folder, "trial", "show", "task", str(one), "--format", "json")) for one in numbers]
    best: dict[str, Any] = max(
        found, key=lambda one: (one["state"] == "reached", len(one["stages"]), one["samples"] / one["steps"])
    )
    return best


def answer_in(folder: Path) -> Answer:
    return Answer.model_validate_json(printed(folder, "best", "task", "--format", "json"))


def test_a_trial_shows_its_schedule_and_what_it_ran_of_each_stage(stored: Path) -> None:
    trial = with_stages(stored, STAGES)
    shown = printed(stored, "trial", "show", "task", str(trial["number"]))
    words = "batch 16, then 32 from 200 samples on, 64 from 600 samples on; learning rate ∝ √batch"
    assert words in " ".join(shown.split())
    document = json.loads(printed(stored, "trial", "show", "task", str(trial["number"]), "--format", "json"))
    first, second, *rest = document["stages"]
    assert (first["batch_size"], first["steps"], first["samples"]) == (16, 13, 208)
    assert (second["start_samples"], second["batch_size"]) == (208, 32)
    assert sum(one["steps"] for one in document["stages"]) == trial["steps"]
    assert sum(one["samples"] for one in document["stages"]) == trial["samples"]
    with open_store(f"sqlite:///{stored}/bssearch.db", write=False) as store:
        schedule = batch_schedule_of(store.trials.get("task", trial["number"]).configuration)
    assert schedule is not None and schedule.samples_after(trial["steps"]) == trial["samples"]
    assert sum(one["train_seconds"] for one in document["stages"]) == pytest.approx(trial["undelayed_train_seconds"])
    assert all(one["micro_batch_size"] == 32 for one in rest)
    assert re.search(r"^ +0 +16 +16 .* 13 +208 ", shown, re.MULTILINE)


def test_a_trial_that_measured_shows_the_sizes_that_it_had(stored: Path) -> None:
    trial = one_by_noise(stored)
    stages = trial["stages"]
    assert {one["batch_size"] for one in stages} <= {16, 32, 64} and stages[-1]["batch_size"] > 16, "it grew"
    assert [one["samples"] for one in stages] == [one["steps"] * one["batch_size"] for one in stages]
    assert sum(one["samples"] for one in stages) == trial["samples"] != 16 * trial["steps"]
    changes = {one["start_samples"] for one in stages}
    with open_store(f"sqlite:///{stored}/bssearch.db", write=False) as store:
        assert changes <= {one.samples for one in store.trials.observations("task", trial["number"])}


def test_a_trial_whose_batch_stays_has_no_stages(stored: Path) -> None:
    number = next(one["number"] for one in trials(stored) if "batch_stages" not in one)
    assert json.loads(printed(stored, "trial", "show", "task", str(number), "--format", "json"))["stages"] is None
    assert "learning rate ∝" not in printed(stored, "trial", "show", "task", str(number))


def test_lists_name_the_sizes_and_programs_get_a_number(stored: Path) -> None:
    assert "16 → 32 → 64" in printed(stored, "trial", "list", "task", "--phase", "growth")
    assert {one["batch_size"] for one in trials(stored)} <= {16, 32, 64}
    printed(stored, "export", "task", "--to", "csv")
    with (stored / "task.csv").open() as file:
        rows = {int(row["number"]): row for row in csv.DictReader(file)}
    trial = with_stages(stored, STAGES)
    row = rows[trial["number"]]
    assert (row["batch_size"], row["batch_stages"], row["samples"]) == ("16", STAGES, str(trial["samples"]))


def test_recorded_curves_are_of_the_search_alone_so_that_no_batch_in_them_grows(stored: Path) -> None:
    (name, *_) = printed(stored, "export", "task", "--to", "curves", "--file", "curves.csv").splitlines()
    with (stored / name).open() as file:
        found = {int(row["trial"]) for row in csv.DictReader(file)}
    assert found
    assert found <= {one["number"] for one in trials(stored) if one["phase"] == "search"}


def test_a_scheduled_trial_is_repeated_bit_for_bit(folder: Path) -> None:
    for trial in (with_stages(folder, STAGES), one_by_noise(folder)):
        found = json.loads(printed(folder, "trial", "rerun", "task", str(trial["number"]), "--format", "json"))
        assert (found["identical"], found["runs"][0]["steps"]) == (True, trial["steps"])
        assert len(found["runs"][0]["evaluations"]) > 2
        shown = printed(folder, "trial", "show", "task", str(trial["number"]), "--repro")
        assert shown == f"bssearch trial rerun task {trial['number']}\n"
    assert "batch 16 → 32 → 64, seed" in bssearch("trial", "rerun", "task", str(trial["number"]), cwd=folder).stderr


def test_yaml_carries_the_stages_and_enqueue_takes_its_values(folder: Path) -> None:
    grown = not_none(answer_in(folder).batch_schedule)
    done = bssearch("best", "task", "--export", "yaml", "--schedule", cwd=folder)
    values = yaml.safe_load(done.stdout)
    assert [(one["start_samples"], one["batch_size"], one["learning_rate"]) for one in values["stages"]] == [
        (one.start_samples, one.batch_size, float(f"{one.learning_rate:.4g}")) for one in grown.stages
    ]
    assert all(one["accumulation_steps"] * one["micro_batch_size"] == one["batch_size"] for one in values["stages"])
    assert (values["batch_size"], values["learning_rate"]) == (
        grown.stages[0].batch_size,
        float(f"{grown.stages[0].learning_rate:.4g}"),
    )
    assert all("best constant batch size" in text for text in (done.stdout, done.stderr))
    names = [name for name in values if name not in {"stages", "nesterov", "schedule"}]
    printed(folder, "trial", "add", "task", *(f"{name}={values[name]}" for name in names))
    queued, best = trials(folder)[-1], trials(folder)[grown.trial_numbers[0] - 1]
    assert queued["learning_rate"] == pytest.approx(best["learning_rate"], rel=5e-4)
    same = ("batch_size", "batch_schedule", "batch_stages", "batch_rate_rule", "momentum", "optimizer")
    assert {name: queued[name] for name in same} == {name: best[name] for name in same}


def test_arguments_carry_the_schedule_as_a_configuration_has_it(stored: Path) -> None:
    values = yaml.safe_load(printed(stored, "best", "task", "--export", "yaml", "--schedule"))
    line = printed(stored, "best", "task", "--export", "args", "--schedule")
    assert f"--batch-stages {values['batch_stages']} --batch-rate-rule sqrt" in line.replace("'", "")
    assert "stages-" not in line and line.count("\n") == 1


def test_the_python_trains_a_model_to_the_target_with_a_batch_that_grows(stored: Path) -> None:
    text = printed(stored, "best", "task", "--export", "python", "--schedule")
    ran = [(one.start_samples or 0, one.batch_size) for one in not_none(answer_in(stored).batch_schedule).stages]
    assert text.startswith("# study task: accuracy >= 0.93\n")
    assert ast.parse(text)
    names: dict[str, Any] = {}
    exec(compile(text, "loop.py", "exec"), names)
    assert [stage[:2] for stage in names["STAGES"]] == ran
    model, accuracy, sizes, rates = trained(names)
    assert accuracy >= 0.93
    assert set(sizes) == {size for _, size in ran}, "every size was trained with"
    by_size = dict(zip(sizes, rates, strict=True))
    first = ran[0][1]
    for size, rate in by_size.items():
        assert rate == pytest.approx(by_size[first] * (size / first) ** 0.5, rel=5e-4)  # of four digits
    assert isinstance(model, torch.nn.Module)


def trained(names: dict[str, Any]) -> tuple[torch.nn.Module, float, list[int], list[float]]:
    """Train a model on the task's data by an exported loop; return it, its accuracy, and each step's size and rate."""
    inputs = torch.randn(900, 10, generator=torch.Generator().manual_seed(0))
    targets = (inputs[:, :5].sum(1) > inputs[:, 5:].sum(1)).long()
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=names["CONFIGURATION"]["momentum"], nesterov=True)
    seen, rates = [0], list[float]()

    def has_ended(_: torch.nn.Module, samples: int) -> bool:
        if samples:
            seen.append(samples)
            rates.append(optimizer.param_groups[0]["lr"])
        return samples >= 3000

    names["train"](model, optimizer, inputs[:500], targets[:500], torch.nn.functional.cross_entropy, has_ended)
    with torch.no_grad():
        accuracy = (model(inputs[500:700]).argmax(1) == targets[500:700]).float().mean().item()
    return model, accuracy, [after - before for before, after in pairwise(seen)], rates


def test_a_gain_is_named_beside_the_export_of_the_batch_that_stays(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = answer_in(stored)
    for saves, told in (("yes", 1), ("undecided", 0)):
        answer = found.model_copy(
            update={"batch_schedule": not_none(found.batch_schedule).model_copy(update={"saves_time": saves})}
        )
        monkeypatch.setattr("bssearch.commands.best.answer", lambda *_, answer=answer: answer)
        done = bssearch("best", "task", "--export", "python", cwd=stored)
        assert done.stderr.count("a growing batch saves time; export the schedule with --schedule") == told
        assert "batch_stages" not in ast.literal_eval(done.stdout), "what is exported without --schedule stays"
        scheduled = bssearch("best", "task", "--export", "yaml", "--schedule", cwd=stored)
        assert ("saves time" in scheduled.stderr) is not bool(told)


def test_a_schedule_that_there_is_not_is_refused(ended_by_law: Path) -> None:
    told = refused(ended_by_law, "best", "task", "--export", "yaml", "--schedule", code=2)
    assert "study 'task' has no schedule of growing batches that reached the target" in told
