"""Which device a slot takes, on machines that these tests make up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

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


@pytest.mark.parametrize(
    ("devices", "busy", "wanted", "allow_busy", "taken"),
    [
        (0, {}, "auto", False, [None] * 4),
        (0, {}, "cpu", False, [None] * 4),
        (2, {}, "auto", False, [0, 1, 0, 1]),
        (2, {}, "cuda", False, [0, 1, 0, 1]),
        (3, {1: ONE}, "auto", False, [0, 2, 0, 2]),
        (2, {0: ONE, 1: TWO}, "auto", True, [0, 1, 0, 1]),
        (2, {0: ONE, 1: TWO}, "cuda:1", True, [1] * 4),
        (2, {0: ONE}, "auto", True, [1] * 4),
    ],
)
def test_slots_take_turns_on_the_idle_devices_and_on_busy_ones_only_if_that_is_allowed(
    machine: Machine, devices: int, busy: Any, wanted: str, allow_busy: bool, taken: list[int | None]
) -> None:
    current = machine(devices, busy)
    assert [device_of(wanted, slot, allow_busy=allow_busy)[0].index for slot in range(4)] == taken
    assert [device.index for device in current] == [index for index in taken if index is not None]


@pytest.mark.parametrize(
    ("devices", "busy", "wanted", "said"),
    [
        (0, {}, "cuda", "no device 'cuda'; this machine has cpu$"),
        (0, {}, "cuda:0", "no device 'cuda:0'; this machine has cpu$"),
        (2, {}, "cuda:2", "no device 'cuda:2'; this machine has cpu, cuda:0, cuda:1$"),
        (2, {1: TWO}, "cuda:1", r"cuda:1 by process 12 \(ollama\), process 34 \(train.py\)"),
        (2, {0: ONE, 1: TWO}, "auto", r"cuda:0 by process 4711 \(python3\); cuda:1 by process 12"),
    ],
)
def test_a_device_that_is_not_there_or_busy_is_refused_by_name(
    machine: Machine, devices: int, busy: Any, wanted: str, said: str
) -> None:
    machine(devices, busy)
    with pytest.raises(LaunchError, match=said) as raised:
        device_of(wanted, slot=0)
    assert raised.value.exit_code == 6
    assert ("--allow-busy" in (raised.value.hint or "")) is bool(busy)


def test_a_gpu_and_a_part_of_one_are_told_apart_by_uuid_and_the_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(processes={"GPU-0": [], "MIG-1": []}).install(monkeypatch)
    assert [uuid_of(name) for name in ("cuda:0", "cuda:1", "cpu")] == ["GPU-0", "MIG-1", None]
    monkeypatch.setattr(nvml, "_library", lambda: None)
    assert uuid_of("cuda:0") == "GPU-0", "without NVML it is torch's"


CUDA, GIB = torch.device("cuda:0"), 2**30


@pytest.mark.parametrize(
    ("slot", "slots", "devices", "limit", "expected"),
    [
        (0, 1, 1, None, None),
        (0, 8, 8, None, None),
        (1, 3, 2, None, None),  # two share the first device, the second one is alone
        (0, 2, 1, None, 40 * GIB - CONTEXT_BYTES),
        (0, 3, 2, None, 40 * GIB - CONTEXT_BYTES),
        (0, 8, 2, None, 20 * GIB - CONTEXT_BYTES),
        (0, 2, 1, 10 * GIB, 10 * GIB),
        (0, 2, 1, 60 * GIB, 40 * GIB - CONTEXT_BYTES),
    ],
)
def test_slots_that_share_a_gpu_have_equal_shares_of_its_memory(
    slot: int, slots: int, devices: int, limit: int | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GIB))
    assert memory_limit_of_slot(CUDA, slot, slots, devices, limit) == expected
    assert memory_limit_of_slot(torch.device("cpu"), slot, slots, devices, limit) == limit
