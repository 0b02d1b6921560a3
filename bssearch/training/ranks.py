"""Ranks of a trial: processes that train on shares of every batch and sum the gradients.

Before each collective call, rank 0 orders all other ranks to make the same call (`Link`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import distributed, nn

from bssearch.errors import WorkloadError, require
from bssearch.records import Branch, Configuration, grouped
from bssearch.training.clock import Clock
from bssearch.training.computation import Computation
from bssearch.training.trainer import Trainer
from bssearch.training.trial_checkpoint import Checkpoint, Identity, RandomState, State, continue_from
from bssearch.workloads.base import Workload
from bssearch.workloads.data import Data

# Bytes of gradients added at once, as in PyTorch's DDP. The first bucket is small, so that addition starts early.
FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20

# long, because gloo notices a rank that ended, and the driver kills a hanging rank after ``hang_seconds``
GLOO_TIMEOUT = timedelta(hours=1)

T = TypeVar("T")

Order = tuple[str, tuple[Any, ...]]  # a method of `Follower`, or of its `Trainer`, and its arguments


class Link(Protocol):
    """Rank 0's connection to the other ranks."""

    def tell(self, order: Order) -> None: ...

    def answers(self) -> list[Any]:
        """Wait for the other ranks' answers, and return the answers by rank."""

    def cause(self, error: Exception) -> Exception:
        """Return the error of another rank that failed, or ``error`` if unknown."""


class Ranks:
    """This process as rank ``rank`` of ``size`` ranks. Only rank 0 has a ``link``.

    ``are_together`` is True within a collective call. If a collective call fails, ``is_broken`` becomes True, and other
    ranks may hang.
    """

    def __init__(
        self, rank: int, size: int, device: torch.device, *, folder: Path, seconds: float, link: Link | None = None
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.are_together = self.is_broken = False
        self._link = link
        self._group = _group(rank, size, device, folder / "store", timedelta(seconds=seconds))
        self.add(torch.zeros(1, device=device))  # connect now, outside a trial's time

    @contextmanager
    def together(self, order: str, *arguments: Any) -> Iterator[None]:
        """Return the context of a collective call. Rank 0 raises the failed rank's error if known."""
        try:
            if self._link is not None:
                self._link.tell((order, arguments))
            self.are_together = True
            yield
        except Exception as error:
            self.is_broken = True
            found = error if self._link is None else self._link.cause(error)
            if found is error:
                raise
            raise found from error
        finally:
            self.are_together = False

    def ask(self, order: str, *arguments: Any) -> list[Any]:
        """Return the other ranks' answers by rank. Only rank 0 gets answers."""
        if self._link is None:
            return []
        with self.together(order, *arguments):
            return self._link.answers()

    def states(self) -> State:
        return {"others": self.ask("state")}

    def restore(self, path: Path, identity: Identity, states: State) -> None:
        self.ask("restore", path, identity, states["others"])

    def add(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over all ranks in place."""
        self.start_adding(tensor).wait()

    def differentiable_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's sum over all ranks, with gradients to all ranks."""
        return _Sum.apply(tensor, self)  # type: ignore[no-untyped-call, no-any-return]

    def start_adding(self, tensor: torch.Tensor) -> distributed.Work:
        return self._group.allreduce([tensor], distributed.AllreduceOptions())  # type: ignore[no-any-return]

    def copy_from_first(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace dense tensors by rank 0's tensors."""
        dense = (tensor.detach() for tensor in tensors if _is_dense(tensor))
        views = [tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in dense]
        content = torch.cat(views)
        self._group.broadcast([content], distributed.BroadcastOptions()).wait()
        for view, piece in zip(views, torch.split(content, [len(view) for view in views]), strict=True):
            view.copy_(piece)

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Average tensors of equal type over all ranks in place."""
        content = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self.add(content)
        content /= self.size
        for tensor, piece in zip(tensors, torch.split(content, [one.numel() for one in tensors]), strict=True):
            tensor.copy_(piece.view_as(tensor))

    def shares(self, items: Generator[T, None, None], per_step: int) -> Generator[T, None, None]:
        """Yield this rank's share of the ``per_step`` items of each step."""
        share = per_step // self.size
        with closing(items):
            for place, item in enumerate(items):
                if place // share % self.size == self.rank:
                    yield item

    def gradient_sum(self, model: nn.Module) -> GradientSum:
        return GradientSum(model, self)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        context.ranks = ranks
        summed = tensor.clone()
        ranks.add(summed)
        return summed

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed = gradients[0].clone()
        context.ranks.add(summed)
        return summed, None


def _group(rank: int, size: int, device: torch.device, path: Path, timeout: timedelta) -> Any:
    store = distributed.FileStore(str(path), size)  # type: ignore[attr-defined]
    if device.type == "cuda":
        nccl = distributed.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return distributed.ProcessGroupNCCL(store, rank, size, nccl)
    gloo = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = GLOO_TIMEOUT
    gloo._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return distributed.ProcessGroupGloo(store, rank, size, gloo)


class GradientSum:
    """Adds the ranks' gradients during the last micro-batch's backward pass.

    A parameter that no rank used keeps the gradient None.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        parameters = list(model.parameters())
        self._frozen = {name: one for name, one in model.named_parameters() if not one.requires_grad}
        self._buckets = [_Bucket(one) for one in _in_buckets(one for one in reversed(parameters) if one.requires_grad)]
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(self._ready, bucket)
                )
        self._is_armed = False
        self._works: list[distributed.Work] = []

    def begin(self) -> None:
        """Add the ranks' gradients in the next backward pass."""
        self._is_armed = True
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def end(self) -> None:
        """Add the remaining gradients, and give each parameter the sum."""
        self._is_armed = False
        changed = [name for name, parameter in self._frozen.items() if parameter.grad is not None]
        require(
            not changed,
            f"requires_grad of {', '.join(changed)} has changed since build_model(); on several devices, do not change "
            "requires_grad",
            error=WorkloadError,
        )
        while len(self._works) < len(self._buckets):
            self._start_next()
        for work, bucket in zip(self._works, self._buckets, strict=True):
            work.wait()
            bucket.give()
        self._works.clear()

    def _ready(self, bucket: _Bucket, _: torch.Tensor) -> None:
        if not self._is_armed:
            return
        bucket.missing -= 1
        # all ranks must add the buckets in the same order
        while len(self._works) < len(self._buckets) and self._buckets[len(self._works)].missing <= 0:
            self._start_next()

    def _start_next(self) -> None:
        bucket = self._buckets[len(self._works)]
        bucket.fill()
        self._works.append(self._ranks.start_adding(bucket.flat))


def _in_buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    limit = FIRST_BUCKET_BYTES
    for kind in grouped(((one.dtype, one.device), one) for one in parameters).values():
        bucket: list[nn.Parameter] = []
        size = 0
        for parameter in kind:
            bucket.append(parameter)
            size += parameter.numel() * parameter.element_size()
            if size >= limit:
                yield bucket
                bucket, size, limit = [], 0, BUCKET_BYTES
        if bucket:
            yield bucket


class _Bucket:
    # Gradients side by side in ``flat``, followed by the number of ranks that have each gradient.

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = len(parameters)
        first = parameters[0].detach()
        numbers = [parameter.numel() for parameter in parameters]
        self.flat = first.new_empty(sum(numbers) + len(parameters))
        *pieces, self._present = torch.split(self.flat, [*numbers, len(parameters)])
        self._views = [_shaped(piece, one.detach()) for piece, one in zip(pieces, parameters, strict=True)]
        self._lacks_some = False

    def fill(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters]
        found = [gradient for gradient in gradients if gradient is not None]
        self._present.fill_(1.0)
        self._lacks_some = len(found) < len(gradients)
        if self._lacks_some:
            missing = [place for place, gradient in enumerate(gradients) if gradient is None]
            self._present[missing] = 0.0
            for place in missing:
                self._views[place].zero_()
        views = [view for view, gradient in zip(self._views, gradients, strict=True) if gradient is not None]
        if views:
            torch._foreach_copy_(views, found)

    def give(self) -> None:
        # read the counts only if this rank lacks a gradient, because the read waits for the device
        counts = self._present.tolist() if self._lacks_some else None
        for place, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            parameter.grad = None if counts is not None and counts[place] == 0 else view


def _is_dense(tensor: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _shaped(piece: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    # optimizers need gradients laid out as their parameters, such as channels last
    if like.is_contiguous() or not _is_dense(like):
        return piece.view(like.shape)
    return piece.as_strided(like.shape, like.stride())


class Follower:
    """A rank other than 0, which obeys rank 0's orders."""

    def __init__(
        self,
        workload: Workload,
        data: Data,
        computation: Computation,
        *,
        rank: int,
        seconds: float,
        answer: Callable[[Any], None],
    ) -> None:
        self._workload, self._data, self._computation = workload, data, computation
        self._rank, self._seconds = rank, seconds
        self._answer = answer
        self._trainer: Trainer | None = None

    def obey(self, order: Order) -> None:
        name, arguments = order
        (getattr(self, f"_{name}", None) or getattr(self._training, name))(*arguments)

    def _join(self, size: int, folder: Path) -> None:
        self._computation.ranks = None
        self._computation.ranks = Ranks(
            self._rank, size, self._computation.device, folder=folder, seconds=self._seconds
        )

    def _build(self, configuration: Configuration, seed: int, compiles: bool) -> None:
        self._leave()
        self._computation.compiles = compiles
        self._trainer = Trainer(self._workload, configuration, self._data.train, self._computation, seed)

    def _losses(self, takes: bool) -> None:
        self._answer(self._training.losses_of_rank(takes=takes))

    def _ready(self) -> None:
        self._answer(None)

    def _branch(self, branch: Branch, batch_size: int) -> None:
        continue_from(self._training, branch, batch_size)

    def _state(self) -> None:
        random = RandomState(self._computation.device).state()
        self._answer({**self._training.state_of_rank(), "random": random})

    def _restore(self, path: Path, identity: Identity, states: list[State]) -> None:
        Checkpoint(path, identity, Clock(), on_progress=lambda: None).restore({"trainer": self._training}, {})
        state = states[self._rank - 1]
        self._training.restore_of_rank(state)
        RandomState(self._computation.device).restore(state["random"])
        self._answer(None)

    def _leave(self) -> None:
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None
            gc.collect()
            if self._computation.device.type == "cuda":
                torch.cuda.empty_cache()

    @property
    def _training(self) -> Trainer:
        assert self._trainer is not None, "rank 0 builds a trainer before other orders"
        return self._trainer
