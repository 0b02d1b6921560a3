"""Placement of the training data on device or host, and micro-batches drawn from the data."""

from __future__ import annotations

import copy
import itertools
import random
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from bssearch.errors import LaunchError, WorkloadError, require
from bssearch.records import Configuration
from bssearch.records.batch_schedule import Stage, batch_schedule_of, stages_of
from bssearch.records.text import plural
from bssearch.training.computation import Computation
from bssearch.training.course import first_line
from bssearch.workloads.data import (
    Batch,
    BatchStream,
    Data,
    DatasetPart,
    HostPart,
    Part,
    TokenPart,
    moved,
    pair_of,
    tensors,
)

DATA_SHARE = 0.3  # with data: auto, the largest share of device memory for the training part

SHARED_MEMORY = Path("/dev/shm")  # loader processes pass batches through this folder; containers have 64 MiB by default

# PyTorch's errors if shared memory is full; a process that touches an unavailable page dies of SIGBUS.
_PHRASES_OF_FULL_SHARED_MEMORY = (
    "Bus error",
    "insufficient shared memory",
    "unable to mmap",
    "unable to write to file </",
)

Placement = Literal["device", "host"]
Place = tuple[int, npt.NDArray[np.int64]]  # position of a micro-batch in the trial, and its rows
T = TypeVar("T")
Epochs = Generator[torch.Tensor, None, None]


def place(data: Data, computation: Computation, memory_bytes: int | None = None) -> tuple[Data, Placement]:
    """Move the data for training. Return the data and the training part's placement.

    The validation and test parts always move to the device. ``memory_bytes`` is the device's usable memory, by default
    all device memory.
    """
    train, device, wanted = data.train, computation.device, computation.settings.data
    if wanted == "auto" and device.type != "cpu":
        total = torch.cuda.get_device_properties(device).total_memory if memory_bytes is None else memory_bytes
        wanted = "device" if train.bytes <= DATA_SHARE * total else "host"
    if wanted != "host":
        train = train.to(device)
    placed = replace(data, train=train, validation=data.validation.to(device), test=data.test.to(device))
    return placed, placement_of(train, computation)


def placement_of(train: Part, computation: Computation) -> Placement:
    """Return a training part's placement. For tensors on the CPU, the ``data`` setting decides."""
    if isinstance(train, HostPart):
        return "host"
    if train.device.type != "cpu":
        return "device"
    elsewhere = computation.device.type != "cpu" or computation.settings.data == "host"
    return "host" if elsewhere else "device"


def micro_batches(train: Part, computation: Computation, seed: int, growth: Growth) -> Generator[Batch, None, None]:
    """Endlessly yield micro-batches on the device, as (inputs, targets), from ``growth``'s position on.

    The caller counts each step with `Growth.stepped`. An epoch drops its incomplete last batch; an epoch of a
    `BatchStream` drops only an incomplete micro-batch. Ranks share each step's micro-batches.
    """

    def shared(items: Generator[T, None, None]) -> Generator[T, None, None]:
        ranks = computation.ranks
        return items if ranks is None else ranks.shares(items, growth.stage.accumulation_steps)

    if isinstance(train, BatchStream):
        batches = _endless(train, growth.stage.micro_batch_size, computation.device, seed)
        for _ in range(growth.micro_batches):
            next(batches)
        return shared(batches)
    if isinstance(train, TokenPart):
        drawn = enumerate(_token_micro_batches(train, seed, growth.stage))
        for _ in range(growth.micro_batches):  # now, so that the next step's time does not include the work
            next(drawn)
        places = shared((place, np.array(rows)) for place, rows in drawn)
        return _streamed_from_host(train.samples, places, computation, seed)
    epochs = _epochs(len(train), seed, growth.epoch)
    if placement_of(train, computation) == "device":
        return _gathered(train, shared(rows_of_steps(_ready(epochs, computation), growth)))
    require(
        not growth.is_measured,
        "batch_schedule = 'noise_scale' needs the training data on the device; the data is on the host, where a loader "
        "prepares batches in advance",
        hint="set training: {data: device} if load() returns tensors as train, or name another batch_schedule",
        error=WorkloadError,
    )
    rows = rows_of_steps(epochs, copy.copy(growth), ahead=True)
    places = shared((place, one.numpy()) for place, one in enumerate(rows, growth.micro_batches))
    return _streamed_from_host(train, places, computation, seed)


POOL = 50  # micro-batches whose random samples are sorted together, as in transformers' LengthGroupedSampler

TokenStep = list[list[int]]  # rows of each micro-batch of a step


class TokenBatches:
    """Groups random samples of similar length into micro-batches of at most ``size`` tokens, padding included."""

    def __init__(self, lengths: Sequence[int], size: int, micro_batches: int, seed: int) -> None:
        longest = max(lengths)
        require(
            size >= longest,
            f"a micro-batch of {size} tokens must hold the longest training sample, {longest} tokens",
            hint="raise max_micro_batch_size and the smallest batch size, or cut long samples",
        )
        self.lengths = lengths
        self._tokens = torch.tensor(lengths)
        self._size = size
        self._micro_batches = micro_batches
        self._pool = max(1, POOL * size * len(lengths) // sum(lengths))
        self._generator = torch.Generator().manual_seed(seed)

    def epoch(self) -> Iterator[TokenStep]:
        """Yield the next epoch's complete steps."""
        step: TokenStep = []
        has_stepped = False
        for rows in torch.split(torch.randperm(len(self.lengths), generator=self._generator), self._pool):
            batches = self._cut(rows[self._tokens[rows].argsort(stable=True)].tolist())
            for place in torch.randperm(len(batches), generator=self._generator).tolist():
                step.append(batches[place])
                if len(step) == self._micro_batches:
                    yield step
                    step, has_stepped = [], True
        require(
            has_stepped,
            f"an epoch fills only {len(step)} of a step's {self._micro_batches} micro-batches of {self._size} tokens",
            hint="choose smaller batch sizes",
        )

    def _cut(self, rows: list[int]) -> list[list[int]]:
        found: list[list[int]] = [[]]
        for row in rows:  # ascending lengths, so that this row sets the padded length
            if (len(found[-1]) + 1) * self.lengths[row] > self._size:
                found.append([])
            found[-1].append(row)
        return found


def _token_micro_batches(train: TokenPart, seed: int, stage: Stage) -> Iterator[list[int]]:
    batches = TokenBatches(train.lengths, stage.micro_batch_size, stage.accumulation_steps, seed)
    while True:
        yield from itertools.chain.from_iterable(batches.epoch())


def tokens_trained(train: TokenPart, seed: int, growth: Growth) -> int:
    trained = itertools.islice(_token_micro_batches(train, seed, growth.stage), growth.micro_batches)
    return sum(train.lengths[row] for rows in trained for row in rows)


def _streamed_from_host(
    train: Part | DatasetPart, places: Iterable[Place], computation: Computation, seed: int
) -> Generator[Batch, None, None]:
    workers, is_cuda = computation.settings.loader_workers, computation.device.type == "cuda"
    loader: DataLoader[Batch] = DataLoader(
        _MicroBatches(train, seed),
        batch_size=None,
        sampler=places,
        collate_fn=_as_it_is,
        num_workers=workers,
        pin_memory=is_cuda,
        multiprocessing_context=start_method(train, computation.device) if workers else None,
        # The loader draws seeds for workers; with a separate generator, the trial's random numbers stay the same.
        generator=torch.Generator(),
    )
    batches = _until_closed(iter(loader))  # starts the loader processes before the first step is timed
    return _copied(batches, computation.device) if is_cuda else batches


def drawn_ahead(
    epochs: Iterator[torch.Tensor], prepare: Callable[[torch.Tensor], torch.Tensor]
) -> Generator[torch.Tensor, None, None]:
    """Yield each epoch's sample order, while a thread prepares the next epoch's order."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="epoch-order")

    def draw() -> torch.Tensor:
        return prepare(next(epochs))

    def drawn(coming: Future[torch.Tensor]) -> Generator[torch.Tensor, None, None]:
        try:
            while True:
                order, coming = coming.result(), thread.submit(draw)
                yield order
        finally:
            thread.shutdown(wait=False, cancel_futures=True)

    return drawn(thread.submit(draw))


def _ready(epochs: Epochs, computation: Computation) -> Epochs:
    if computation.device.type != "cuda":
        return epochs
    return _on_device(drawn_ahead(epochs, torch.Tensor.pin_memory), computation.device)


def _on_device(epochs: Epochs, device: torch.device) -> Epochs:
    with closing(epochs):
        for order in epochs:
            yield order.to(device, non_blocking=True)


def _epochs(samples: int, seed: int, first: int) -> Epochs:
    # With a separate CPU generator, the order depends on neither device nor dropout.
    generator = torch.Generator().manual_seed(seed)
    for _ in range(first):  # skip these epochs now, so that the next step's time does not include the work
        torch.randperm(samples, generator=generator)
    return (torch.randperm(samples, generator=generator) for _ in itertools.count())


def _gathered(train: Part, micro_batches: Generator[torch.Tensor, None, None]) -> Generator[Batch, None, None]:
    with closing(micro_batches):
        for rows in micro_batches:
            yield train.gather(rows)


def start_method(train: Part, device: torch.device) -> Literal["forkserver"] | None:
    """Return ``forkserver`` on CUDA if plain tensors fit twice into free shared memory, else None (default)."""
    # A fork copies the locks of CUDA's threads and may hang; forkserver cannot pickle user classes.
    if device.type != "cuda" or type(train) is not Part or not (_is_plain(train.inputs) and _is_plain(train.targets)):
        return None
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.exists() else 0
    return "forkserver" if 2 * train.bytes <= free else None


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    return type(value) is torch.Tensor or (type(value) in (list, tuple) and all(map(_is_plain, value)))


def _as_it_is(batch: Any) -> Any:
    return batch


def _until_closed(batches: Iterator[Batch]) -> Generator[Batch, None, None]:
    try:
        yield from batches
    except RuntimeError as error:
        if not any(phrase in str(error) for phrase in _PHRASES_OF_FULL_SHARED_MEMORY):
            raise
        mebibytes = shutil.disk_usage(SHARED_MEMORY).total / 2**20
        raise LaunchError(
            f"a data loader process ran out of shared memory: {SHARED_MEMORY} has {mebibytes:,.0f} MiB; give the "
            "container more (docker run --shm-size=8g or --ipc=host), or set training.loader_workers = 0 "
            f"({first_line(error)})"
        ) from error


def _copied(batches: Generator[Batch, None, None], device: torch.device) -> Generator[Batch, None, None]:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    try:
        for batch in batches:
            computing = torch.cuda.current_stream(device)
            with torch.cuda.stream(stream):
                copied: Batch = moved(batch, device, non_blocking=True)
            computing.wait_stream(stream)
            for tensor in tensors(copied):
                tensor.record_stream(computing)
            yield copied
    finally:
        batches.close()


@dataclass(eq=False)
class _MicroBatches(Dataset[Batch]):
    part: Part
    seed: int

    def __getitem__(self, place: Place) -> Batch:
        position, rows = place
        # A user's samples may be random; seeded by position, the samples are the same in any loader process.
        with seeded(self.seed, position) if isinstance(self.part, DatasetPart) else nullcontext():
            return self.part.gather(torch.from_numpy(rows))


_END = object()


def _endless(stream: BatchStream, size: int, device: torch.device, seed: int) -> Generator[Batch, None, None]:
    position, epoch = 0, 0
    while True:
        begun_at = position
        for batch in _whole_batches(_epoch(stream, size, seed, epoch, position), size):
            yield moved(batch, device)
            position += 1
        require(
            position > begun_at,
            f"train_batches(batch_size={size}) gave no batch of {plural(size, 'sample')} in an epoch; give at least "
            "one",
            error=WorkloadError,
        )
        epoch += 1


def _epoch(stream: BatchStream, size: int, seed: int, epoch: int, position: int) -> Iterator[Batch]:
    with seeded(seed, position):
        made = stream.train_batches(size, seed_of(seed, epoch))
        require(
            isinstance(made, Iterable),
            f"train_batches() returned {type(made).__name__}; return an iterable of batches",
            error=WorkloadError,
        )
        batches = iter(made)
    while True:
        with seeded(seed, position):
            batch: Any = next(batches, _END)
        if batch is _END:
            return
        yield pair_of(batch, "train_batches()")
        position += 1


def _whole_batches(batches: Iterator[Batch], size: int) -> Iterator[Batch]:
    short = None
    for batch in batches:
        found = [tensor for part in batch for tensor in tensors(part) if tensor.ndim]
        require(
            found,
            "train_batches() gave a batch without a tensor of shape (samples, …); give tensors with one row per sample",
            error=WorkloadError,
        )
        samples = len(found[0])
        if short is not None or samples > size:
            wrong = samples if short is None else short
            raise WorkloadError(
                f"train_batches(batch_size={size}) gave a batch of {plural(wrong, 'sample')}; give "
                f"{plural(size, 'sample')} in all batches but the last of an epoch"
            )
        if samples < size:
            short = samples
        else:
            yield batch


def seed_of(seed: int, position: int) -> int:
    return int(np.random.SeedSequence([seed % 2**63, position]).generate_state(1)[0])


@contextmanager
def seeded(seed: int, position: int) -> Iterator[None]:
    """Seed the random generators of Python, NumPy and PyTorch's CPU within the block."""
    drawn = seed_of(seed, position)
    with random_state_kept():
        random.seed(drawn)
        np.random.seed(drawn)
        torch.default_generator.manual_seed(drawn)
        yield


@contextmanager
def random_state_kept(*devices: torch.device) -> Iterator[None]:
    """Restore the random generators of the host and of ``devices`` after the block."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


_POSITION = ("samples", "micro_batches", "epoch", "offset", "place")  # attributes of `Growth` that steps change


class Growth:
    """The position in a trial's batch schedule.

    The next step is in stage ``place``, at sample ``offset`` of ``epoch``. ``train_samples`` is None for token batches
    and for batches that the workload makes.
    """

    def __init__(self, configuration: Configuration, train_samples: int | None) -> None:
        self._train_samples = train_samples
        self.schedule = batch_schedule_of(configuration)
        self.stages = stages_of(configuration, self.schedule)
        self.samples = self.micro_batches = self.epoch = self.offset = self.place = 0
        for stage in self.stages:
            require(
                train_samples is not None or stage.micro_batch_size == self.stages[0].micro_batch_size,
                f"batch {stage.batch_size} has micro-batches of {plural(stage.micro_batch_size, 'sample')}; keep "
                f"micro-batches of {plural(self.stages[0].micro_batch_size, 'sample')}, because the workload makes its "
                "own batches",
                error=WorkloadError,
            )
            require(
                train_samples is None or stage.batch_size <= train_samples,
                f"batch_size = {stage.batch_size} must be <= {train_samples}, the number of training samples",
                error=WorkloadError,
            )

    @property
    def stage(self) -> Stage:
        return self.stages[self.place]

    @property
    def next_size(self) -> int | None:
        return None if self.place + 1 == len(self.stages) else self.stages[self.place + 1].batch_size

    @property
    def position(self) -> int:
        """The step in the learning rate schedule: samples seen ÷ the first batch size."""
        return self.samples // self.stages[0].batch_size

    @property
    def rate_factor(self) -> float:
        return 1.0 if self.schedule is None else self.schedule.rate_factor(self.stage.batch_size)

    @property
    def is_measured(self) -> bool:
        return self.schedule is not None and self.schedule.is_measured

    def stepped(self) -> None:
        stage = self.stage
        self.samples += stage.batch_size
        self.offset += stage.batch_size
        self.micro_batches += stage.accumulation_steps
        if not self.is_measured:
            while self.place + 1 < len(self.stages) and self.stages[self.place + 1].start_samples <= self.samples:
                self.place += 1
        self._end_epoch()

    def grow(self) -> None:
        self.place += 1
        self._end_epoch()

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _POSITION}

    def restore(self, state: dict[str, Any]) -> None:
        vars(self).update({name: state[name] for name in _POSITION})

    def _end_epoch(self) -> None:
        if self._train_samples is not None and self.offset + self.stage.batch_size > self._train_samples:
            self.epoch, self.offset = self.epoch + 1, 0


def rows_of_steps(epochs: Epochs, growth: Growth, *, ahead: bool = False) -> Epochs:
    """Yield the sample indices of each micro-batch, shape (micro-batch size,), from ``growth``'s position on.

    With ``ahead``, move ``growth`` forward after each step.
    """
    with closing(epochs):
        for epoch, order in zip(itertools.count(growth.epoch), epochs):
            while growth.epoch == epoch:
                stage = growth.stage
                # split the rows of all steps at once, which is quicker than step by step
                rows = iter(torch.split(order[growth.offset :], stage.micro_batch_size))
                while growth.epoch == epoch and growth.stage is stage:
                    yield from itertools.islice(rows, stage.accumulation_steps)
                    if ahead:
                        growth.stepped()
