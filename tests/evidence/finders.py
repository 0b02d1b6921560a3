"""The batch size that other tools find on a device: they look for the largest that fits into its memory.

Lightning's and accelerate's own finders run where these are installed. Elsewhere their documented rules do, against the
same memory: `lightning_power`, `lightning_binsearch` and `accelerate_shrinks` do what Lightning 2.6.6
(``pytorch/tuner/batch_size_scaling.py``) and accelerate 1.15.0 (``utils/memory.py``) do.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bssearch.records import Configuration
from bssearch.training.computation import Computation
from bssearch.training.memory import is_out_of_memory
from bssearch.training.trainer import Trainer
from bssearch.workloads.base import Data, Workload
from tests.evidence.task import Found

FIRST_SIZE = 2
MOST_TRIALS = 25
LARGEST = 8192
MARGIN = 0.05
"""Lightning's defaults: ``init_val``, ``max_trials``, ``max_val`` and ``margin``."""

SHRINKS_BY = 0.9
"""accelerate's factor after each failure."""

FIT_STEPS = 3
"""Steps after which a batch size fits: Lightning's ``steps_per_trial``."""

Fits = Callable[[int], bool]


def lightning_power(fits: Fits, samples: int) -> int:
    """Return what mode ``power`` finds: the size doubles until it does not fit, or no larger one is asked for.

    One that reaches `LARGEST` is returned without a try.
    """
    size, any_success = FIRST_SIZE, False
    for trial in range(MOST_TRIALS):
        if size >= LARGEST:
            break
        if fits(size):
            if trial + 1 >= MOST_TRIALS or size >= samples:
                break
            size, any_success = min(2 * size, LARGEST), True
        else:
            size //= 2
            if any_success:
                break
    return size


def lightning_binsearch(fits: Fits, samples: int) -> int:
    """Return what mode ``binsearch`` finds: doubled, then bisected, and 5 % taken off."""
    size, low, high = FIRST_SIZE, 1, 0
    successes = 0
    while size < LARGEST:
        if fits(size):
            successes += 1
            low = size
            if successes >= MOST_TRIALS or size >= samples or (high and high - low <= 1):
                break
            following = min((high + low) // 2 if high else 2 * size, LARGEST)
            if following == size:
                break
            size = following
        else:
            high = size
            size = (high + low) // 2
            if high - low <= 1:
                break
    return max(1, int(size * (1 - MARGIN)))


def accelerate_shrinks(fits: Fits, samples: int) -> int:
    """Return what ``find_executable_batch_size`` finds from all samples on: nine tenths after each failure."""
    size = samples
    while size and not fits(size):
        size = int(size * SHRINKS_BY)
    if not size:
        raise RuntimeError("No executable batch size found, reached zero.")
    return size


@dataclass(frozen=True)
class Memory:
    """Steps of a workload's default on a device; for a try on a CPU, memory ends beyond ``samples_limit``."""

    workload: Workload
    data: Data
    computation: Computation
    default: Configuration
    samples_limit: int | None = None

    @property
    def samples(self) -> int:
        """Return the training samples."""
        return len(self.data.train)

    def check(self, samples: int) -> None:
        """Raise `torch.OutOfMemoryError` beyond the limit."""
        if self.samples_limit is not None and samples > self.samples_limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory. {samples} samples, of {self.samples_limit} that fit.")

    def steps(self, batch_size: int) -> int:
        """Take three steps at a batch size and return it; raise what runs out of memory."""
        size = min(batch_size, self.samples)
        self.check(size)
        configuration = Configuration(
            batch_size=size,
            micro_batch_size=size,
            learning_rate=1e-6,
            optimizer=self.default.optimizer,
            parameters=self.default.parameters,
        )
        try:
            with Trainer(self.workload, configuration, self.data.train, self.computation, seed=0) as trainer:
                for _ in range(FIT_STEPS):
                    trainer.step()
                if self.computation.device.type == "cuda":
                    torch.cuda.synchronize(self.computation.device)
        finally:
            self.free()
        return batch_size

    def fits(self, batch_size: int) -> bool:
        """Return whether three steps at a batch size fit."""
        try:
            self.steps(batch_size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            error.__traceback__ = None
            return False
        finally:
            self.free()
        return True

    def free(self) -> None:
        """Give back what PyTorch keeps of the GPU's memory for later."""
        if self.computation.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def is_installed(package: str) -> bool:
    """Return whether a package is there to be imported."""
    return importlib.util.find_spec(package) is not None


@dataclass(frozen=True)
class Finder:
    """A tool's way to a batch size: its own code where its package is installed, else its rule."""

    tool: str
    package: str
    own: Callable[[], int]
    rule: Callable[[Fits, int], int]

    def find(self, memory: Memory) -> Found:
        """Return the size found, whose code found it, and the seconds that took; a tool that fails is told of."""
        found: Found = {"tool": self.tool}
        began = time.perf_counter()
        is_own = is_installed(self.package)
        try:
            size = self.own() if is_own else self.rule(memory.fits, memory.samples)
        except Exception as error:
            if not is_own:
                raise
            found["tool_failed"] = f"{type(error).__name__}: {error}"
            is_own = False
            memory.free()
            began = time.perf_counter()
            size = self.rule(memory.fits, memory.samples)
        seconds = time.perf_counter() - began
        memory.free()
        return {**found, "by": "the tool" if is_own else "its rule", "found": size, "seconds": seconds}


def find_all(memory: Memory, folder: Path, save: Callable[[list[Found]], None]) -> list[Found]:
    """Return what each tool finds; ``save`` gets all so far."""
    found: list[Found] = []
    for one in (
        Finder("Lightning, power", "lightning", lambda: lightning_finds(memory, folder, "power"), lightning_power),
        Finder(
            "Lightning, binsearch",
            "lightning",
            lambda: lightning_finds(memory, folder, "binsearch"),
            lightning_binsearch,
        ),
        Finder("accelerate", "accelerate", lambda: accelerate_finds(memory), accelerate_shrinks),
    ):
        found.append(one.find(memory))
        save(found)
    return found


def accelerate_finds(memory: Memory) -> int:
    """Return what accelerate's own finder finds, from all training samples on."""
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=memory.samples)  # type: ignore[untyped-decorator]
    def train(batch_size: int) -> int:
        return memory.steps(batch_size)

    found: int = train()
    return found


def lightning_finds(memory: Memory, folder: Path, mode: str) -> int:
    """Return what Lightning's own finder finds in a mode, with the same model, loss, optimizer and precision."""
    import lightning
    from lightning.pytorch.tuner import Tuner

    device, train = memory.computation.device, memory.data.train
    workload: Any = memory.workload

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = FIRST_SIZE
            self.model = workload.build_model(dropout=memory.default.dropout)

        def train_dataloader(self) -> Any:
            data = torch.utils.data.TensorDataset(train.inputs.cpu(), train.targets.cpu())
            return torch.utils.data.DataLoader(data, batch_size=self.batch_size, shuffle=True)

        def training_step(self, batch: Any, _: int) -> Any:
            memory.check(len(batch[0]))
            return workload.loss(self.model, *batch, label_smoothing=memory.default.label_smoothing)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-6, momentum=0.9, nesterov=True)

    on_gpu = {"accelerator": "gpu", "devices": [device.index or 0]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        trainer = lightning.Trainer(
            **(on_gpu if device.type == "cuda" else {"accelerator": "cpu"}),
            precision="bf16-mixed" if memory.computation.precision == "bf16" else "32-true",
            max_epochs=-1,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        found: int = Tuner(trainer).scale_batch_size(Module(), mode=mode)
    return found
