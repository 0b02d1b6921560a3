"""The script of measurements on a GPU: its calls fit their minutes, and their results are kept."""

import json
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bssearch.records import Configuration
from tests import gpu_evidence
from tests.documents import DOCUMENTS
from tests.evidence import runner
from tests.evidence.call_a import products
from tests.evidence.call_c import compared, told
from tests.evidence.peers import MISSES, Race, TrialFailed, fresh_seeds, paired_ratio, race_of
from tests.evidence.runner import (
    CALL_SECONDS,
    START_SECONDS,
    EvidenceFile,
    allowance,
    run_call,
    run_section,
    section_of,
)
from tests.evidence.task import Found, Section, Task
from tests.waiting import wait_for


@pytest.mark.parametrize("call", gpu_evidence.CALLS)
def test_the_limits_of_a_call_and_its_start_fit_its_minutes(call: str) -> None:
    sections = gpu_evidence.sections_of(call)
    assert sum(one.seconds for one in sections) <= CALL_SECONDS - START_SECONDS
    assert START_SECONDS >= 60 and CALL_SECONDS <= 600
    assert len({one.name for one in sections}) == len(sections)
    assert sections[0].name == "environment" and sections[0].seconds >= 60


def nothing(task: Task) -> Found:
    return {}


def test_a_section_may_use_spare_seconds_but_not_those_of_later_sections() -> None:
    waiting = [Section("one", nothing, 30), Section("two", nothing, 50), Section("three", nothing, 20, must=True)]
    assert [allowance(waiting, left) for left in (100.0, 160.0, 40.0)] == [30, 90, 20]
    assert allowance(waiting[2:], 200.0) == 200


def test_results_of_other_calls_are_kept_and_of_other_devices_replaced(tmp_path: Path) -> None:
    EvidenceFile(tmp_path, "A", "cuda", False).save("study", {"wall_seconds": 1.0})
    EvidenceFile(tmp_path, "B", "cuda", False).save("peers", {"rows": []})
    EvidenceFile(tmp_path, "B", "cuda", False).save("memory", {"passes": True})
    EvidenceFile(tmp_path, "B", "cuda", False).save("peers", {"rows": [1]})
    calls = json.loads((tmp_path / "evidence.json").read_text())["calls"]
    assert calls["A"]["sections"] == {"study": {"wall_seconds": 1.0}}
    assert calls["B"]["sections"] == {"peers": {"rows": [1]}, "memory": {"passes": True}}
    assert section_of(Task("cuda", False, tmp_path), "B", "peers") == {"rows": [1]}
    assert section_of(Task("cpu", True, tmp_path), "B", "peers") == {}
    EvidenceFile(tmp_path, "B", "cpu", True).save("peers", {"rows": [2]})
    calls = json.loads((tmp_path / "evidence.json").read_text())["calls"]
    assert calls["B"] == {"device": "cpu", "quick": True, "sections": {"peers": {"rows": [2]}}}
    assert calls["A"]["device"] == "cuda"


def as_section(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Replace each section by this code, which has ``save`` and ``out``."""
    start = "import json, sys, time; from pathlib import Path; out = Path(sys.argv[1])\n"
    save = "save = lambda found: (out / 'section.json').write_text(json.dumps(found))\n"
    text = start + save + textwrap.dedent(code)
    monkeypatch.setattr(
        runner, "command_of", lambda call, name, task, seconds: [sys.executable, "-c", text, str(task.out), name]
    )


def test_a_failed_section_is_recorded_with_its_results_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_section(monkeypatch, "save({'rows': [1]}); assert sys.argv[2] != 'one', 'its last line'")
    sections = [Section("one", nothing, 20), Section("two", nothing, 20)]
    assert not run_call("C", sections, Task("cpu", True, tmp_path, 60), ["one", "two"])
    found = json.loads((tmp_path / "evidence.json").read_text())["calls"]["C"]["sections"]
    assert found["one"]["rows"] == [1] and "its last line" in found["one"]["failed"][-1]
    assert found["one"]["passes"] is False
    assert found["two"]["rows"] == [1] and "failed" not in found["two"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evidence.json"]


@pytest.mark.slow
def test_a_late_section_is_killed_with_its_children_and_keeps_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_section(
        monkeypatch,
        """
        import subprocess
        save({'rows': [1, 2]})
        print('it hangs', flush=True)
        subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])
        """,
    )
    found = run_section("C", "one", Task("cpu", True, tmp_path), 2.0)
    assert found["rows"] == [1, 2] and found["seconds"] < 20
    assert "it hangs" in found["failed"] and "stopped after 2 s" in found["failed"]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise, as in a terminal; a shell ignores it for tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_call_ends_the_running_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruptible: None, number: signal.Signals
) -> None:
    as_section(
        monkeypatch,
        f"import os, time; save({{'pid': os.getpid()}}); os.kill(os.getppid(), {int(number)}); time.sleep(60)",
    )
    with pytest.raises(KeyboardInterrupt):
        run_section("C", "one", Task("cpu", True, tmp_path), 20.0)
    pid = json.loads((tmp_path / "section.json").read_text())["pid"]
    wait_for(lambda: not psutil.pid_exists(pid))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--device", "cpu"], "takes --quick"),
        (["--device", "gpu", "--quick"], "--device gpu: it is cuda, cuda:N, or cpu"),
        (["--quick", "--seconds", "0"], "--seconds 0: it must be more than 0"),
        (["--quick", "--seconds", "-5"], "--seconds -5: it must be more than 0"),
    ],
)
def test_a_wrong_call_is_refused_at_its_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], said: str
) -> None:
    with pytest.raises(SystemExit):
        gpu_evidence.main(["--out", str(tmp_path / "out"), "--call", "A", *given])
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_no_section_begins_without_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_section(monkeypatch, "save({})")
    sections = [Section("one", nothing, 20), Section("two", nothing, 20, must=True)]
    run_call("C", sections, Task("cpu", True, tmp_path, 22), ["one", "two"])
    found = json.loads((tmp_path / "evidence.json").read_text())["calls"]["C"]["sections"]
    assert found["one"]["failed"] == ["no time was left"]
    assert "failed" not in found["two"]


@pytest.mark.slow
def test_a_call_runs_only_the_named_sections(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        gpu_evidence.main(["--out", str(tmp_path), "--call", "A", "--quick", "--only", "peers"])
    given = ["--out", str(tmp_path), "--call", "C", "--quick", "--device", "cpu", "--only", "gpu_tests"]
    assert gpu_evidence.main(given) == 0
    found = json.loads((tmp_path / "evidence.json").read_text())["calls"]["C"]["sections"]
    assert list(found) == ["gpu_tests"] and "skipped" in found["gpu_tests"]["summary"]


def test_the_guide_has_the_three_commands_and_every_section() -> None:
    part = DOCUMENTS["figures"].split("\n## On a GPU")[1]
    for call in gpu_evidence.CALLS:
        assert f"python tests/gpu_evidence.py --out FOLDER --call {call}" in part
        assert [section for section in gpu_evidence.sections_of(call) if f"`{section.name}`" not in part] == []


def test_the_ratio_of_paired_runs_is_within_its_interval() -> None:
    found = paired_ratio([2.0, 4.2, 5.8], [1.0, 2.0, 3.0], cap=30.0)
    assert found["median"] == pytest.approx(2.0) and not found["at_least"] and found["pairs"] == 3
    assert 1.8 < found["low"] < 2.0 < found["high"] < 2.3, "the pairs agree, the runs do not"
    alike = paired_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0], cap=30.0)
    assert (alike["low"], alike["high"]) == pytest.approx((2.0, 2.0))


@pytest.mark.parametrize(
    ("theirs", "ours", "median", "at_least"),
    [
        ([None, None], [1.0, 2.0], 7.5, True),
        ([4.0, None, 6.0], [1.0, 1.0, 2.0], 4.0, False),
        ([4.0, None], [1.0, 1.0], 7.0, True),
        ([4.0, 4.0, 4.0], [1.0, None, 1.0], None, False),
    ],
)
def test_a_missed_run_counts_as_slower_than_the_cap_without_an_interval(
    theirs: list[float | None], ours: list[float | None], median: float | None, at_least: bool
) -> None:
    found = paired_ratio(theirs, ours, cap=10.0)
    assert found["median"] == (None if median is None else pytest.approx(median))
    assert found["at_least"] is at_least and found["low"] is None


def test_products_are_judged_by_undisturbed_trials() -> None:
    def trial(product: float | None, contended: bool = False) -> dict[str, Any]:
        return {
            "state": "reached" if product else "capped",
            "time_to_target_s": 1.0 if product else None,
            "steps_x_step_time_s": product,
            "contended": contended,
        }

    found = products([trial(1.0), trial(1.02), trial(1.04), trial(2.0, contended=True), trial(None)])
    assert found["median_alone"] == 1.02 and found["passes"] is True
    assert found["ended"] == {"capped": 1, "reached": 4}
    assert products([trial(1.1)])["passes"] is False
    assert products([trial(None)])["passes"] is None


@pytest.mark.parametrize(
    ("scale", "critical", "passes"),
    [(400.0, 100.0, True), (10.0, 100.0, False), (None, 100.0, None), (400.0, None, None)],
)
def test_noise_scale_and_critical_batch_size_differ_by_a_factor_of_a_few(
    scale: float | None, critical: float | None, passes: bool | None
) -> None:
    assert compared(scale, None if critical is None else {"estimate": critical})["passes"] is passes


@pytest.mark.parametrize(
    ("lines", "code", "passes"),
    [
        (["= 36 skipped in 1.11s ="], 0, None),
        (["= 30 passed, 6 skipped in 9s ="], 0, True),
        (["= 1 failed, 30 passed in 9s ="], 1, False),
        ([], 4, False),
    ],
)
def test_skipped_tests_are_no_result(lines: list[str], code: int, passes: bool | None) -> None:
    assert told(lines, code)["passes"] is passes


DEFAULT = Configuration(batch_size=100, micro_batch_size=100, learning_rate=0.1, parameters={"momentum": 0.9})
OURS = Configuration(batch_size=50, micro_batch_size=50, learning_rate=0.2)


def raced(seconds: dict[tuple[int, float], list[float | None]], seeds: int, left: float = 1e9) -> tuple[Race, int]:
    found = [{"tool": "tool", "found": 400, "seconds": 1.0}]
    race = race_of(found, OURS, DEFAULT, largest=200, samples=300, cap=10.0)
    order = fresh_seeds(seeds)

    def timed(configuration: Configuration, seed: int) -> float | None:
        if configuration.batch_size == 200:
            raise TrialFailed("oom: no memory")
        return seconds[configuration.batch_size, round(configuration.learning_rate, 4)][order.index(seed)]

    return race, race.run(order, timed, lambda: left, lambda: None)


ALL: dict[tuple[int, float], list[float | None]] = {
    (50, 0.2): [1.0, 2.0, 1.0, 2.0],
    (100, 0.1): [3.0, 6.0, 3.0, 6.0],
    (300, 0.1): [None] * 4,
    (300, 0.3): [None, 8.0, 4.0, 8.0],
    (300, 0.1732): [2.0, 4.0, 2.0, 4.0],
}


def test_candidates_are_compared_in_pairs_of_the_same_seed() -> None:
    race, rounds = raced(ALL, 4)
    rows = {(row["tool"], row["rule"]): row for row in race.rows()}
    assert rounds == 4
    assert rows["bssearch", "searched"]["over_ours"]["median"] == 1.0
    assert rows["the default", "unchanged"]["over_ours"]["median"] == 3.0
    sqrt = rows["tool", "sqrt"]
    assert sqrt["batch_size"] == 300, "a larger batch than the training data is cut"
    assert (sqrt["over_ours"]["median"], sqrt["over_ours"]["pairs"]) == (2.0, 4)


def test_a_candidate_that_always_misses_ends_and_a_failure_has_its_reason() -> None:
    race, _ = raced(ALL, 4)
    rows = {(row["tool"], row["rule"]): row for row in race.rows()}
    lost = rows["tool", "unchanged"]
    assert lost["seconds_to_target"] == [None] * MISSES and lost["over_ours"]["at_least"]
    assert len(rows["tool", "linear"]["seconds_to_target"]) == 4, "it missed once and hit then"
    failed = rows["the largest of the study", "linear"]
    assert failed["failed"] == "oom: no memory" and failed["over_ours"] is None
    assert failed["seconds_to_target"] == []


def test_a_round_without_time_is_not_started() -> None:
    assert raced(ALL, 4, left=-1.0)[1] == 0
