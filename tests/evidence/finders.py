"""The batch size that other tools find on a device: the largest that fits into memory.

Lightning's and accelerate's own finders run. If a package is not installed, the row of its finder has the error.
"""

import gc
import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bssearch import Configuration, Data, Workload
from bssearch.training.computation import Computation
from bssearch.training.trainer import Trainer
from tests.evidence.task import Found

FIRST_SIZE = 2
"""Lightning's default ``init_val``."""

FIT_STEPS = 3
"""Steps after which a batch size fits: Lightning's ``steps_per_trial``."""


@dataclass(frozen=True)
class Memory:
    """Steps of a workload's default on a device; on a CPU, memory is full beyond ``samples_limit`` samples."""

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
        """Take three steps at a batch size and return the size; raise if memory runs out."""
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

    def free(self) -> None:
        """Release the GPU memory that PyTorch reserves."""
        if self.computation.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def find_all(memory: Memory, folder: Path, save: Callable[[list[Found]], None]) -> list[Found]:
    """Return the size that each installed tool finds, with its seconds; ``save`` gets all rows so far."""
    tools: dict[str, Callable[[], int]] = {
        "Lightning, power": lambda: lightning_finds(memory, folder, "power"),
        "Lightning, binsearch": lambda: lightning_finds(memory, folder, "binsearch"),
        "accelerate": lambda: accelerate_finds(memory),
    }
    found: list[Found] = []
    for tool, find in tools.items():
        began = time.perf_counter()
        try:
            row: Found = {"tool": tool, "found": find()}
        except Exception as error:  # not installed, or broken on this device
            row = {"tool": tool, "tool_failed": f"{type(error).__name__}: {error}"}
        memory.free()
        found.append({**row, "seconds": time.perf_counter() - began})
        save(found)
    return found


def accelerate_finds(memory: Memory) -> int:
    """Return the size of accelerate's finder, which starts at all training samples."""
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=memory.samples)  # type: ignore[untyped-decorator]
    def train(batch_size: int) -> int:
        return memory.steps(batch_size)

    found: int = train()
    return found


def lightning_finds(memory: Memory, folder: Path, mode: str) -> int:
    """Return the size of Lightning's finder in a mode, with the same model, loss, optimizer and precision."""
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
