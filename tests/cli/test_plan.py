"""``bssearch plan``, ``probe`` and ``check``: the same numbers as from Python, and wrong input told in a line."""

import json
import math
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

import bssearch as api
from bssearch import load_spec, open_store
from bssearch.cli import registered
from bssearch.planning.memory.parameters import MIXED, PRECISIONS, STATES
from bssearch.planning.requests import options_of
from bssearch.planning.start import QUESTIONS
from bssearch.search.calibration import FIRST_VISITS
from tests.cli.task import INLINE, bssearch, printed, ran, read, refused, space_of, write_task
from tests.search.law import LawExecutor

CASES = 200

Given = dict[str, Any]


def learning_rate(rng: random.Random) -> Given:
    given: Given = {
        "from_batch": rng.randint(1, 4096),
        "learning_rate": 10 ** rng.uniform(-5, 1),
        "batch": rng.randint(1, 65536),
        "optimizer": rng.choice(["sgd", "adamw", "lamb"]),
        "warmup_epochs": rng.choice([0.0, 1.5]),
        "weight_decay": 10 ** rng.uniform(-5, -1),
        "dropout": rng.uniform(0, 0.9),
    }
    return given if rng.random() < 0.5 else {**given, "rule": rng.choice(["linear", "sde", "timescale"])}


def accumulation(rng: random.Random) -> Given:
    micro, steps, devices = rng.randint(1, 64), rng.randint(1, 40), rng.randint(1, 16)
    return {"batch": micro * steps * devices, rng.choice(["micro", "max_micro"]): micro, "devices": devices}


def scale(rng: random.Random) -> Given:
    b_crit = rng.uniform(10, 1e5)
    return {
        "devices": rng.randint(1, 64),
        rng.choice(["batch", "per_device_batch"]): rng.randint(1, 4096),
        "alpha_s": rng.uniform(0, 0.1),
        "beta_s": 10 ** rng.uniform(-6, -2),
        "parameters": rng.randint(1, 10**10),
        "bandwidth_gb_s": rng.uniform(1, 900),
        "latency_us": rng.uniform(0, 50),
        "overlap": rng.uniform(0, 1),
        "b_crit": b_crit,
        "b_crit_low": b_crit / 2,
        "samples_to_target": rng.uniform(1e3, 1e9),
    }


def start(rng: random.Random) -> Given:
    return {
        "memory_gib": rng.uniform(16, 200),
        "parameters": rng.randint(10**5, 10**9) // 2,
        "devices": rng.choice([1, 2, 8]),
        "start": rng.choice(["scratch", "fine_tuning"]),
        "priority": rng.choice(["speed", "accuracy", "cost", "memory"]),
        "optimizer": rng.choice(["sgd", "adamw", "muon"]),
        "sample_mib": rng.uniform(1, 300),
        "seconds": 10 ** rng.uniform(-1, 4),
    }


def memory(rng: random.Random) -> Given:
    """Return what may be asked, some of it contradictory."""
    heads = rng.choice([4, 8, 12])
    asked: Given = {
        "parameters": rng.randrange(1, 10 ** rng.randrange(2, 12)),
        "precision": rng.choice(PRECISIONS),
        "optimizer": rng.choice(list(STATES)),
        "memory_gib": rng.choice([None, round(rng.uniform(1, 200), 3)]),
        "device": rng.choice([None, None, "h200", "l4"]),
        "mixed": rng.choice([None, None, *MIXED]),
        "checkpointing": rng.choice([None, True]),
        "stage": rng.choice([None, 0, 1, 2, 3]),
        "devices": rng.choice([None, 8, 64]),
        "layers": rng.randrange(1, 80),
        "hidden": 64 * heads,
        "heads": heads,
        "sequence": 2 ** rng.randrange(4, 14),
        "vocabulary": rng.choice([None, 50257]),
        "kv_heads": rng.choice([None, 2, 3]),
        "fused_attention": rng.choice([None, True, False]),
        "micro_batch": rng.choice([None, 7]),
    }
    return {name: value for name, value in asked.items() if value is not None}


COMMANDS: dict[str, tuple[Callable[[random.Random], Given], Callable[..., Any], list[str]]] = {
    "lr": (learning_rate, api.plan_learning_rate, []),
    "accumulation": (accumulation, api.plan_accumulation, []),
    "scale": (scale, api.plan_scale, []),
    "start": (start, api.plan_start, ["--defaults"]),
    "memory": (memory, api.plan_memory, []),
}


HOSTILE = [0, -1, 1, 7, 10**15, 10**400, 1e-320, 1e30, 1e308, math.nan, math.inf, -math.inf, 0.5, True, None, "x", ""]


@pytest.mark.parametrize("name", COMMANDS)
def test_whatever_is_given_comes_to_finite_numbers_or_to_an_error_on_purpose(name: str) -> None:
    make, call, _ = COMMANDS[name]
    rng = random.Random(name)
    for _ in range(CASES):
        given = make(rng)
        given |= {key: rng.choice(HOSTILE) for key in rng.sample(sorted(given), k=min(len(given), rng.randint(1, 2)))}
        with suppress(api.BSSearchError):
            json.dumps(call(**given).document(), allow_nan=False)


def test_the_keys_that_programs_rely_on(tmp_path: Path) -> None:
    words = ["--from-batch", "256", "--learning-rate", "0.1", "--batch", "512", "--rule", "linear", "--rule", "sqrt"]
    rules = read(tmp_path, "plan", "lr", *words)["rules"]
    assert list(rules) == ["linear", "sqrt"]
    assert {"learning_rate", "warmup_epochs", "weight_decay"} <= rules["linear"].keys()
    words = ["--batch", "512", "--micro", "16", "--devices", "4"]
    split = read(tmp_path, "plan", "accumulation", *words)
    assert {"micro_batch": 16, "accumulation_steps": 8, "devices": 4, "batch": 512}.items() <= split.items()


SCALE = "--devices 32 --per-device-batch 32 --alpha-s 0.01 --beta-s 0.002 --parameters 1000 --bandwidth-gb-s 10"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("lr --from-batch 0 --learning-rate 1 --batch 8", 2, "from_batch = 0"),
        ("lr --from-batch 8 --learning-rate nan --batch 8", 2, "learning_rate = nan"),
        ("lr --from-batch 8 --learning-rate 1 --batch 8 --rule sqr", 2, "sqrt"),
        ("accumulation --batch 100 --micro 64", 2, "128 (2 accumulation steps)"),
        ("accumulation --batch many", 2, "--batch"),
        ("scale --devices 2 --batch 8 --per-device-batch 8", 2, "per_device_batch = 8"),
        ("memory --model-setting depth --parameters 5", 2, "KEY=VALUE"),
        ("memory --model a.py:b --input 3y4", 2, "3x224x224"),
        ("start --defaults --memory-gib -1", 2, "memory_gib = -1"),
        ("start --defaults --parameters 7GB", 2, "parameters = '7GB'"),
        ("start --defaults --parameters 70000000000", 6, "is too small"),
        ("start --defaults --out spec.json", 2, ".yaml"),
    ],
)
def test_wrong_input_is_told_in_a_line(words: str, code: int, said: str, tmp_path: Path) -> None:
    done = bssearch("plan", *words.split(), cwd=tmp_path)
    assert done.returncode == code
    assert said in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == "" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (f"scale {SCALE} --b-crit 300 --b-crit-low 200", ["B_crit: 10 ([7, –])", "more devices are always faster"]),
        ("lr --from-batch 64 --learning-rate 0.1 --batch 8192", ["weight decay", "arXiv 1706.02677", "LARS"]),
        ("accumulation --batch 640 --micro 16", ["Micro-batch: 16", "Accumulation steps: 40", "5e-16"]),
        ("lr --from-batch 64 --learning-rate 1e-3 --batch 1024 --rule sde --optimizer adamw", ["β₁", "β₂"]),
    ],
)
def test_people_read_the_key_figures_the_tables_and_what_is_put_right(
    words: str, shown: list[str], tmp_path: Path
) -> None:
    done = bssearch("plan", *words.split(), cwd=tmp_path)
    assert [one for one in shown if one not in done.stdout] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_an_option_for_each_field_of_its_request(name: str, tmp_path: Path) -> None:
    request = resolve_name(registered.COMMANDS[name][0])
    shown = bssearch("plan", name, "--help", cwd=tmp_path).stdout
    flags = [option.flag or f"--{field.replace('_', '-')}" for field, option in options_of(request).items()]
    assert [flag for flag in flags if flag not in shown] == []


@pytest.mark.parametrize("form", ["csv", "jsonl"])
@pytest.mark.parametrize(
    ("name", "words", "rows"),
    [
        ("lr", "--from-batch 64 --learning-rate 0.1 --batch 640", 10),
        ("accumulation", "--batch 64 --micro 16", 1),
        ("scale", f"{SCALE} --b-crit 300", 32),
    ],
)
def test_every_plan_has_rows_for_programs(name: str, words: str, rows: int, form: str, tmp_path: Path) -> None:
    shown = bssearch("plan", name, *words.split(), "--format", form, cwd=tmp_path).stdout
    assert len(shown.splitlines()) == rows + (form == "csv")


def test_a_first_spec_is_written_to_a_new_file(tmp_path: Path) -> None:
    done = bssearch("plan", "start", "--defaults", "--out", "mine.yaml", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == ""
    assert "next: bssearch check mine.yaml" in done.stderr
    assert load_spec(tmp_path / "mine.yaml") == api.plan_start().spec
    assert "exists; choose another name" in refused(
        tmp_path, "plan", "start", "--defaults", "--out", "mine.yaml", code=2
    )


def test_on_a_terminal_what_no_option_says_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(text: str, *, default: Any, err: bool) -> Any:
        assert err, "stdout is for the spec"
        asked.append(text)
        if text.startswith("First priority") and asked.count(text) == 1:
            return "speeed"
        return {"Number of devices of the final training": 4}.get(text, default)

    monkeypatch.setattr("typer.prompt", answer)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    done = bssearch("plan", "start", "--memory-gib", "80", "--format", "json", cwd=tmp_path)
    assert json.loads(done.stdout) == api.plan_start(memory_gib=80.0, devices=4).document()
    assert len(asked) == len(QUESTIONS), "an option has said one of them, and one is asked again"
    assert "speeed" in done.stderr


def test_parameters_are_written_as_in_a_plan_of_memory(tmp_path: Path) -> None:
    scaled = api.plan_scale(
        devices=2, batch=64, alpha_s=0.1, beta_s=0.1, b_crit=9.0, parameters=25 * 10**6, bandwidth_gb_s=1.0
    )
    words = "--devices 2 --batch 64 --alpha-s 0.1 --beta-s 0.1 --b-crit 9 --parameters 25M --bandwidth-gb-s 1"
    done = bssearch("plan", "scale", *words.split(), "--format", "json", cwd=tmp_path)
    assert json.loads(done.stdout) == scaled.document()
    done = bssearch("plan", "start", "--defaults", "--parameters", "0.3B", "--format", "json", cwd=tmp_path)
    assert json.loads(done.stdout)["answers"]["parameters"] == 300_000_000


# Probe ----------------------------------------------------------------------------------------------------------------


NOISE_SECONDS = "60"
"""Far more than the passes take until the interval is narrow, 16 of them: a busy machine measures as many."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("probe")
    budget = {"trials": 4, "trial_train_seconds": 0.5}
    write_task(place, space=space_of(16, 32, 64), executor=INLINE, budget=budget, confirm={"top": 1, "runs": 0})
    (place / "step_time.json").write_text(
        json.dumps(read(place, "probe", "step-time", "task.yaml", "--seconds", "0.1"))
    )
    return place


@pytest.fixture(scope="module")
def searched(folder: Path) -> Path:
    """The folder after the noise scale was measured, and a study was run."""
    (folder / "noise.json").write_text(
        json.dumps(read(folder, "probe", "noise", "task.yaml", "--seconds", NOISE_SECONDS))
    )
    done = ran(folder, "run", "task.yaml")
    (folder / "stdout.txt").write_text(done.stdout)
    (folder / "stderr.txt").write_text(done.stderr)
    return folder


def test_step_times_are_fitted_and_stored(folder: Path) -> None:
    found = json.loads((folder / "step_time.json").read_text())
    assert [probe["batch_size"] for probe in found["probes"]] == [16, 32, 64]
    assert all(probe["step_seconds_low"] <= probe["step_seconds"] for probe in found["probes"])
    assert found["throughput_knee"] in {16, 32, 64}
    with open_store(f"sqlite:///{folder / 'bssearch.db'}", write=False) as store:
        stored = store.probes.by_batch_size("task")
    measured = {probe["batch_size"]: probe["step_seconds"] for probe in found["probes"]}
    assert {size: probe.step_seconds for size, probe in stored.items()} == measured


@pytest.mark.slow
def test_the_noise_scale_is_measured_at_the_default_and_shown_by_best(searched: Path) -> None:
    found = json.loads((searched / "noise.json").read_text())
    assert (found["study"], found["batch_size"]) == ("task", 32)
    assert found["noise_passes"] >= 8 and found["noise_low"] > 0 and found["noise_adam_scale"] is None
    assert "Gradient noise scale near the target:" in bssearch("best", "--details", cwd=searched).stdout
    best = read(searched, "best")
    assert best["measured"]["noise_scale"]["low"] == found["noise_low"]
    assert best["measured"].keys() == {"step_time", "memory", "noise_scale"}


@pytest.mark.slow
def test_a_run_visits_no_batch_size_that_a_probe_has_timed(searched: Path) -> None:
    told = [line for line in (searched / "stderr.txt").read_text().splitlines() if line.startswith("timing steps")]
    assert told == []
    with open_store(f"sqlite:///{searched / 'bssearch.db'}", write=False) as store:
        errors = [probe.error for probe in store.probes.by_batch_size("task").values()]
    assert [error and error.visits for error in errors] == [FIRST_VISITS] * 3


@pytest.mark.slow
def test_a_trial_tells_its_environment(searched: Path) -> None:
    told = read(searched, "trial", "show", "task", "1")
    environment = told["environment"]
    assert (environment["precision"], environment["compile_mode"]) == ("fp32", "none")
    assert environment["torch_version"] and environment["host"] and environment["workload_revision"]
    assert (told["data_placement"], told["energy_joules"], told["skipped_steps"]) == ("device", None, None)
    assert "environment" in bssearch("trial", "show", "task", "1", cwd=searched).stdout


def test_memory_is_probed_under_a_limit_that_binds_no_run(tmp_path: Path, by_law: LawExecutor) -> None:
    write_task(tmp_path)
    found = read(tmp_path, "probe", "memory", "task.yaml", "--limit-gib", "2")
    assert found["largest_that_fits"] == found["ceiling"] == by_law.train_samples
    assert [use["micro_batch_size"] for use in found["uses"]] == by_law.sizes_run
    with open_store(f"sqlite:///{tmp_path / 'bssearch.db'}", write=False) as store:
        bound = store.studies.get("task").environment
    assert bound is None or bound.device_memory_bytes != 2 * 2**30


# Check ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_check_tries_the_workload_and_stores_nothing(tmp_path: Path) -> None:
    write_task(tmp_path, executor=INLINE)
    found = json.loads(bssearch("check", "task.yaml", "--format", "json", cwd=tmp_path).stdout)
    assert [one["batch_size"] for one in found["batches"]] == [8, 32, 128]
    assert all(one["step_seconds"] > 0 for one in found["batches"])
    assert found["batches"][2]["dropped_share"] == (500 % 128) / 500
    # A busy machine is a finding too, about the measurement.
    assert {finding["code"] for finding in found["findings"]} - {"training"} == {"incomplete_batch_dropped"}
    assert not list(tmp_path.glob("*.db*"))


@pytest.mark.usefixtures("task")
def test_check_says_what_was_tried_in_words(tmp_path: Path, by_law: LawExecutor) -> None:
    shown = printed(tmp_path, "check", "task.yaml")
    assert "10 parameters; 1,000 training samples; 100 validation and 100 test samples" in shown
    assert "the default (batch 32), tried for up to 2 train seconds:" in shown
    assert len(by_law.requests) == 1


@pytest.mark.slow
def test_target_proposes_what_every_run_of_the_default_reaches_whatever_the_specs_own(tmp_path: Path) -> None:
    budget = {"trials": 12, "trial_train_seconds": 0.3}
    write_task(tmp_path, target={"metric": "accuracy", "value": 97}, budget=budget, executor=INLINE)
    shown = ran(tmp_path, "check", "--suggest-target", "task.yaml", "--runs", "2", "--format", "json")
    assert "run 2 of 2: best accuracy" in shown.stderr
    advice = json.loads(shown.stdout)
    row = next(row for row in advice["targets"] if row["target"] == advice["proposed"])
    assert row["reached"] == 2
    assert 0.8 < advice["proposed"] < advice["median_best"] <= 1.0
    assert not list(tmp_path.glob("*.db*"))


@pytest.mark.usefixtures("task")
def test_target_says_in_words_what_it_proposes(tmp_path: Path, by_law: LawExecutor) -> None:
    shown = ran(tmp_path, "check", "--suggest-target", "task.yaml", "--runs", "3")
    assert "run 3 of 3: best accuracy" in shown.stderr
    assert "← proposed" in shown.stdout
    assert "easier than" in shown.stdout
    assert len(by_law.requests) == 3
