"""GPUs that a made-up ``nvidia-smi`` lists, and that several drivers share."""

import multiprocessing
import os
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bssearch.errors import LaunchError
from bssearch.executors import gpus
from bssearch.executors.base import ExecutorSettings
from bssearch.executors.gpus import Gpus, visible
from bssearch.executors.slots import LocalExecutor, Slot

NAMES = [f"GPU-{index}a5b-test-{os.getpid()}" for index in range(8)]
WHOLE = "".join(f"GPU {index}: NVIDIA H200 (UUID: {name})\n" for index, name in enumerate(NAMES))
SLICED = (
    "GPU 0: NVIDIA H200 (UUID: GPU-0)\n"
    "  MIG 1g.18gb     Device  0: (UUID: MIG-a)\n"
    "  MIG 1g.18gb     Device  1: (UUID: MIG-b)\n"
    "GPU 1: NVIDIA H200 (UUID: GPU-1)\n"
)


@pytest.mark.parametrize(
    ("listed", "chosen", "uuids"),
    [
        (WHOLE, None, NAMES),
        (WHOLE, "2,0", [NAMES[2], NAMES[0]]),
        (WHOLE, NAMES[5], [NAMES[5]]),
        (WHOLE, "", []),
        (WHOLE, "99", []),
        (SLICED, None, ["MIG-a", "MIG-b", "GPU-1"]),
        (SLICED, "MIG-b", ["MIG-b"]),
        (SLICED, "1", ["GPU-1"]),
        ("", None, []),
    ],
    ids=["all", "two", "one", "none", "unknown", "slices", "slice", "unsliced", "no GPU"],
)
def test_what_the_environment_shows_of_a_node_is_used(listed: str, chosen: str | None, uuids: list[str]) -> None:
    assert visible(listed, chosen) == uuids


class TestSharing:
    @pytest.fixture(autouse=True)
    def _idle(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpus, "_smi", lambda *arguments: "")

    def test_each_slot_has_its_own_and_keeps_them(self) -> None:
        node = Gpus(NAMES[:4])
        assert [node.of_slot(slot, 1) for slot in range(3)] == [[name] for name in NAMES[:3]]
        assert node.of_slot(0, 1) == [NAMES[0]]
        node.close()

    def test_more_slots_than_gpus_share_them_evenly(self) -> None:
        node = Gpus(NAMES[:2])
        assert [node.of_slot(slot, 1)[0] for slot in range(5)] == [*NAMES[:2], *NAMES[:2], NAMES[0]]
        node.close()

    def test_another_driver_gets_the_others_until_all_are_taken(self) -> None:
        one, other = Gpus(NAMES[:4]), Gpus(NAMES[:4])
        assert one.of_slot(0, 2) == NAMES[:2]
        assert other.of_slot(0, 2) == NAMES[2:4]
        with pytest.raises(LaunchError, match="needs 1 GPUs; free GPUs: 0 of 4"):
            Gpus(NAMES[:4]).of_slot(0, 1)
        one.close()
        assert other.of_slot(1, 1) == NAMES[:1]
        other.close()

    def test_a_refused_driver_holds_nothing(self) -> None:
        one, other = Gpus(NAMES[:4]), Gpus(NAMES[:4])
        one.of_slot(0, 3)
        with pytest.raises(LaunchError, match="needs 2 GPUs; free GPUs: 1 of 4"):
            other.of_slot(0, 2)
        assert one.of_slot(1, 1) == [NAMES[3]]
        one.close()

    def test_gpus_of_other_programs_and_drivers_are_not_usable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        one, other, accepting = Gpus(NAMES[:4]), Gpus(NAMES[:4]), Gpus(NAMES[:4], allow_busy=True)
        one.of_slot(0, 1)
        monkeypatch.setattr(gpus, "_smi", lambda *arguments: f"{NAMES[1]}, 4194304, train\n")
        assert [node.usable() for node in (one, other, accepting)] == [3, 2, 3]
        one.close()
        assert other.usable() == 3

    def test_slices_do_not_train_together(self) -> None:
        with pytest.raises(LaunchError, match="MIG slices cannot train together"):
            Gpus(["MIG-a", "MIG-b"]).of_slot(0, 2)


def test_what_strangers_compute_on_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    apps = (
        f"{NAMES[0]}, 1, python\n{NAMES[1]}, {os.getpid()}, python\n{NAMES[2]}, 4194304, /bin/nvidia-cuda-mps-server\n"
    )
    apps += f"{NAMES[3]}, 4194304, train, with a comma\n"
    monkeypatch.setattr(gpus, "_smi", lambda *arguments: apps)
    assert gpus.busy(NAMES[1:]) == {NAMES[3]: "process 4194304 (train, with a comma)"}
    node = Gpus(NAMES[1:5])
    assert [node.of_slot(slot, 1) for slot in range(3)] == [[NAMES[1]], [NAMES[2]], [NAMES[4]]]
    node.close()
    accepting = Gpus(NAMES[3:4], allow_busy=True)
    assert accepting.of_slot(0, 1) == [NAMES[3]]
    accepting.close()


def take_and_give_back(turns: int, folder: Path) -> None:
    """Hold two of eight GPUs again and again; a second holder of a GPU would find its file."""
    for _ in range(turns):
        node = Gpus(NAMES)
        try:
            taken = node.of_slot(0, 2)
        except LaunchError:
            continue
        for uuid in taken:
            (folder / uuid).touch(exist_ok=False)
        for uuid in taken:
            (folder / uuid).unlink()
        node.close()


@pytest.mark.slow
def test_no_gpu_is_held_by_two_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_smi", lambda *arguments: "")
    fork = multiprocessing.get_context("fork")
    drivers = [fork.Process(target=take_and_give_back, args=(3400, tmp_path)) for _ in range(3)]
    for one in drivers:
        one.start()
    for one in drivers:
        one.join()
    assert [one.exitcode for one in drivers] == [0, 0, 0]


@pytest.mark.parametrize(
    ("settings", "busy", "shown", "devices"),
    [
        ({"device": "cuda:3"}, [], NAMES[3:4], 1),
        ({"devices": (2,)}, [], NAMES[:2], 8),
        ({"slots": 8}, NAMES[:1], NAMES[1:2], 7),
    ],
    ids=["one GPU", "two devices", "a busy GPU"],
)
def test_a_worker_sees_the_gpus_of_its_slot_alone(
    settings: dict[str, Any],
    busy: list[str],
    shown: list[str],
    devices: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apps = "".join(f"{name}, 4194304, train" for name in busy)
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\nif [ \"$1\" = -L ]; then printf '{WHOLE}'; else echo '{apps}'; fi\n")
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("bssearch.executors.slots.may_have_gpus", lambda: True)

    def worker(**asked: Any) -> Any:
        raise OSError(f"sees {asked['environment']['CUDA_VISIBLE_DEVICES']} alone")

    monkeypatch.setattr("bssearch.executors.slots.WorkerProcess", worker)
    slot = Slot(0, tmp_path / "log", keeps_log=True)
    slot.world_size = len(shown)
    with closing(LocalExecutor(ExecutorSettings(workload="digits", **settings))) as executor:
        with pytest.raises(LaunchError, match=f"sees {','.join(shown)} alone"):
            executor._started(slot, {})
        load = executor._load_of(slot)
    assert (load.settings.device, load.devices) == ("cuda:0", devices)
