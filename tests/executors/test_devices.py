"""Which device a slot takes, on machines that these tests make up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from bssearch.errors import LaunchError
from bssearch.executors.devices import CONTEXT_BYTES, device_of, memory_limit_of_slot, uuid_of
from bssearch.training import nvml
from tests.training.fake_nvml import FakeNvml

Machine = Callable[..., list[torch.device]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Make up CUDA devices and the programs on them; return the list of the devices that were made current."""

    def build(devices: int, busy: dict[int, list[tuple[int, str]]] | None = None) -> list[torch.device]:
        current: list[torch.device] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        others = {torch.device("cuda", index): programs for index, programs in (busy or {}).items()}
        monkeypatch.setattr(nvml, "other_processes", lambda device: others.get(device, []))
        return current

    return build


ONE = [(4711, "python3")]
TWO = [(12, "ollama"), (34, "train.py")]


@pytest.mark.parametrize("wanted", ["auto", "cpu"])
def test_without_cuda_it_is_the_cpu(machine: Machine, wanted: str) -> None:
    machine(0)
    assert device_of(wanted, slot=3)[0] == torch.device("cpu")


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_slots_take_turns(machine: Machine, wanted: str) -> None:
    current = machine(2)
    assert [device_of(wanted, slot)[0].index for slot in range(4)] == [0, 1, 0, 1]
    assert [device.index for device in current] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("devices", "wanted", "present"), [(0, "cuda", "cpu"), (0, "cuda:0", "cpu"), (2, "cuda:2", "cpu, cuda:0, cuda:1")]
)
def test_a_device_that_is_not_there_is_named_with_those_that_are(
    machine: Machine, devices: int, wanted: str, present: str
) -> None:
    machine(devices)
    with pytest.raises(LaunchError, match=f"'{wanted}' is not there; this machine has {present}$") as raised:
        device_of(wanted, slot=0)[0]
    assert raised.value.exit_code == 6


def test_idle_devices_are_preferred(machine: Machine) -> None:
    machine(3, busy={1: ONE})
    assert [device_of("auto", slot)[0].index for slot in range(4)] == [0, 2, 0, 2]


def test_a_busy_device_is_refused_naming_its_programs(machine: Machine) -> None:
    machine(2, busy={1: TWO})
    with pytest.raises(LaunchError, match=r"cuda:1 by process 12 \(ollama\), process 34 \(train.py\)") as raised:
        device_of("cuda:1", slot=0)[0]
    assert raised.value.exit_code == 6
    assert raised.value.hint is not None and "--allow-busy" in raised.value.hint


def test_auto_is_refused_where_every_device_is_busy(machine: Machine) -> None:
    machine(2, busy={0: ONE, 1: TWO})
    with pytest.raises(LaunchError, match=r"cuda:0 by process 4711 \(python3\); cuda:1 by process 12"):
        device_of("auto", slot=0)[0]


def test_busy_devices_are_taken_where_that_is_allowed(machine: Machine) -> None:
    machine(2, busy={0: ONE, 1: TWO})
    assert [device_of("auto", slot, allow_busy=True)[0].index for slot in range(3)] == [0, 1, 0]
    assert device_of("cuda:1", slot=0, allow_busy=True)[0].index == 1


def test_an_idle_device_is_preferred_even_where_busy_ones_are_allowed(machine: Machine) -> None:
    machine(2, busy={0: ONE})
    assert device_of("auto", slot=0, allow_busy=True)[0].index == 1


def test_a_gpu_and_a_part_of_one_are_told_apart_by_uuid_and_the_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(processes={"GPU-0": [], "MIG-1": []}).install(monkeypatch)
    assert [uuid_of(name) for name in ("cuda:0", "cuda:1", "cpu")] == ["GPU-0", "MIG-1", None]
    monkeypatch.setattr(nvml, "_library", lambda: None)
    assert uuid_of("cuda:0") == "GPU-0", "without NVML it is torch's"


CUDA, GIB = torch.device("cuda:0"), 2**30


@pytest.mark.parametrize(
    ("slots", "devices", "limit", "expected"),
    [
        (1, 1, None, None),
        (8, 8, None, None),
        (2, 1, None, 40 * GIB - CONTEXT_BYTES),
        (3, 2, None, 40 * GIB - CONTEXT_BYTES),
        (8, 2, None, 20 * GIB - CONTEXT_BYTES),
        (2, 1, 10 * GIB, 10 * GIB),
        (2, 1, 60 * GIB, 40 * GIB - CONTEXT_BYTES),
    ],
)
def test_slots_that_share_a_gpu_have_equal_shares_of_its_memory(
    slots: int, devices: int, limit: int | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GIB))
    assert memory_limit_of_slot(CUDA, 0, slots, devices, limit) == expected


def test_a_slot_alone_on_its_gpu_has_all_of_it_and_slots_on_the_cpu_share_nothing() -> None:
    assert memory_limit_of_slot(CUDA, 1, 3, 2, None) is None, "two share the first device, the second one is alone"
    assert memory_limit_of_slot(torch.device("cpu"), 0, 8, 1, None) is None
