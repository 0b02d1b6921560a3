"""The GPUs of this machine.

A driver holds a GPU by an abstract socket (Linux), whose name contains the GPU's UUID. The kernel frees the socket when
the driver ends. Workers see only their slot's GPUs, as ``cuda:0``, ``cuda:1``, …
"""

import re
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Self

import psutil

from bssearch.errors import LaunchError
from bssearch.records.text import plural
from bssearch.training.process_times import MPS_SERVER

VISIBLE = "CUDA_VISIBLE_DEVICES"

SMI = "nvidia-smi"

SOCKETS = Path("/proc/net/unix")  # lists the sockets that hold GPUs, also of other drivers

SMI_SECONDS = 30.0  # without persistence mode, nvidia-smi loads the driver for seconds


class Gpus:
    """The GPUs of a driver and its slots.

    ``allow_busy`` includes GPUs in use by other programs.
    """

    def __init__(self, uuids: Sequence[str], *, allow_busy: bool = False) -> None:
        self._uuids = list(uuids)
        self._allow_busy = allow_busy
        self._of_slots: dict[int, list[str]] = {}
        self._held: dict[str, socket.socket] = {}

    @classmethod
    def found(cls, device: str, environment: Mapping[str, str], *, allow_busy: bool = False) -> Self | None:
        """Return the GPUs of ``device`` (``auto``, ``cuda`` or ``cuda:N``), or None if no such GPU is visible."""
        uuids = [] if device == "cpu" or shutil.which(SMI) is None else visible(_smi("-L"), environment.get(VISIBLE))
        if device.startswith("cuda:"):
            uuids = uuids[int(device.removeprefix("cuda:")) :][:1]
        return cls(uuids, allow_busy=allow_busy) if uuids else None

    def usable(self) -> int:
        """Count the GPUs that this driver holds or can take."""
        in_use, sockets = self._in_use(), SOCKETS.read_text() if SOCKETS.exists() else ""
        return sum(
            uuid in self._held or not (uuid in in_use or f"@{_lock_of(uuid)}\n" in sockets) for uuid in self._uuids
        )

    def of_slot(self, slot: int, count: int) -> list[str]:
        """Return the slot's ``count`` GPUs. The GPUs change only after `give_back`, or if ``count`` changes.

        If no GPU is free, a slot with ``count`` = 1 shares a GPU of this driver. Raises `LaunchError` if too few GPUs
        are free, or if several GPUs include a MIG slice.
        """
        if len(self._of_slots.get(slot, ())) == count:
            return self._of_slots[slot]
        self.give_back(slot)
        own = Counter(uuid for uuids in self._of_slots.values() for uuid in uuids)
        in_use = self._in_use()
        free = (uuid for uuid in self._uuids if uuid not in own and uuid not in in_use and self._hold(uuid))
        taken = list(islice(free, count))
        if len(taken) < count == 1 and own:
            taken = [min(own, key=lambda uuid: own[uuid])]
        self._of_slots[slot] = taken
        if len(taken) < count:
            self.give_back(slot)
            users = "; ".join(f"{uuid} by {user}" for uuid, user in in_use.items())
            fewer = "set executor.devices lower" if count > 1 else "set executor.device: cpu"
            hint, others = fewer, "none"
            if users:
                hint = f"wait for these programs, {fewer}, or use --allow-busy to share GPUs"
            elif len(taken) < len(self._uuids):
                hint, others = f"{fewer}, or wait for other studies on this machine", "the other GPUs, by bssearch"
            raise LaunchError(
                f"a trial needs {plural(count, 'GPU')}; free GPUs: {len(taken)} of {len(self._uuids)}"
                f" (in use: {users or others})",
                hint=hint,
            )
        if count > 1 and any(uuid.startswith("MIG-") for uuid in taken):
            self.give_back(slot)
            raise LaunchError(
                f"executor.devices = {count} must be 1 on MIG slices, because CUDA shows a process only one slice",
                hint="set executor.devices: 1, or choose whole GPUs with CUDA_VISIBLE_DEVICES",
            )
        return taken

    def give_back(self, slot: int) -> None:
        """Free the slot's GPUs, except GPUs that other slots share."""
        for uuid in {*self._of_slots.pop(slot, [])}.difference(*self._of_slots.values()):
            self._held.pop(uuid).close()

    def close(self) -> None:
        for slot in list(self._of_slots):
            self.give_back(slot)

    def _in_use(self) -> dict[str, str]:
        return {} if self._allow_busy else busy(self._uuids)

    def _hold(self, uuid: str) -> bool:
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            lock.bind(f"\0{_lock_of(uuid)}")
        except OSError:  # another driver has the address
            lock.close()
            return False
        self._held[uuid] = lock
        return True


def _lock_of(uuid: str) -> str:
    return f"bssearch-gpu-{uuid}"


def visible(listed: str, chosen: str | None) -> list[str]:
    """Return the UUIDs that ``nvidia-smi -L`` lists and ``CUDA_VISIBLE_DEVICES`` chooses.

    If that variable (``chosen``) is unset, MIG slices replace their GPU. Device numbers follow the order of
    ``nvidia-smi``; see `CUDA_DEFAULTS`.
    """
    found: list[str] = []
    whole: list[str] = []
    for kind, uuid in re.findall(r"\(UUID: ((?:GPU|MIG))-([^)]+)\)", listed):
        if kind == "GPU":
            whole.append(f"GPU-{uuid}")
        elif found and found[-1] == whole[-1]:
            found.pop()
        found.append(f"{kind}-{uuid}")
    if chosen is None:
        return found
    names = filter(None, map(str.strip, chosen.split(",")))
    starts = (whole[int(one)] if one.isdigit() and int(one) < len(whole) else one for one in names)
    return [uuid for start in starts for uuid in dict.fromkeys([*found, *whole]) if uuid.startswith(start)]


def busy(uuids: Sequence[str]) -> dict[str, str]:
    """Map each busy GPU's UUID to a process of another program."""
    lines = _smi("--query-compute-apps=gpu_uuid,pid,process_name", "--format=csv,noheader").splitlines()
    rows = [[part.strip() for part in line.split(",", 2)] for line in lines if line.count(",") > 1]
    own = psutil.Process()
    family = {str(one.pid) for one in (own, *own.parents(), *own.children(recursive=True))}
    return {
        uuid: f"process {pid} ({name})"
        for uuid, pid, name in rows
        if uuid in uuids and pid not in family and Path(name).name != MPS_SERVER
    }


def _smi(*arguments: str) -> str:
    try:
        done = subprocess.run([SMI, *arguments], capture_output=True, text=True, timeout=SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
