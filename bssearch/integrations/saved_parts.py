"""What a paused trial of a loop of the user's own goes on from; see `bssearch.training.trial_checkpoint.Saved`."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bssearch.training.trial_checkpoint import RandomState


class LateRandomState:
    """The random numbers of the moment of a pause, to be gone on with where the training does."""

    def __init__(self, device: torch.device) -> None:
        self._state = RandomState(device)
        self._saved: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        return self._state.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what was saved."""
        self._saved = state

    def apply(self) -> None:
        """Draw from now on what was saved; nothing where nothing was."""
        if self._saved is not None:
            self._state.restore(self._saved)


class Pass:
    """The pass over the data that a trial is in: the random numbers at its start, and the micro-batches behind it.

    Those that a loader draws from generators of its own (`generators_of`) are kept beside the global ones. ``own`` are
    those of the loader at hand. A trial that was paused as a pass ended has ``restored`` the latter alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._random = RandomState(device)
        self._at_start: dict[str, Any] = {}
        self._own_at_start: list[torch.Tensor] = []
        self.own: Sequence[torch.Generator] = ()
        self.micro_batches = 0
        self.restored = False

    def begin(self) -> None:
        """Begin a pass."""
        self._at_start, self.micro_batches, self.restored = self._random.state(), 0, False
        self._own_at_start = [generator.get_state() for generator in self.own]

    def end(self) -> None:
        """End the pass before its loader does: a trial that is paused now goes on with the next one."""
        self._at_start, self.micro_batches = {}, 0
        self._own_at_start = [generator.get_state() for generator in self.own]

    def rewind(self) -> None:
        """Draw as at the start of the pass."""
        self._random.restore(self._at_start)
        self.restored = False

    def rewind_own(self) -> None:
        """Let the loader's own generators draw as at the start of the pass."""
        for generator, state in zip(self.own, self._own_at_start, strict=False):  # of an older file there are none
            generator.set_state(state)

    @property
    def was_within(self) -> bool:
        """Return whether the trial was paused within the pass."""
        return self.restored and bool(self._at_start)

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        return {"at_start": self._at_start, "own_at_start": self._own_at_start, "micro_batches": self.micro_batches}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what was saved."""
        self._at_start, self.micro_batches = state["at_start"], state["micro_batches"]
        self._own_at_start = state.get("own_at_start", [])
        self.restored = bool(self._at_start or self._own_at_start)


def generators_of(loader: object) -> list[torch.Generator]:
    """Return the random generators of a `DataLoader` itself, and of its samplers, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


class StateDict:
    """An object of the user's with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        state: dict[str, Any] = self._owner.state_dict()
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what was saved."""
        self._owner.load_state_dict(state)


class Attributes:
    """Some attributes of an object, numbers."""

    def __init__(self, owner: object, names: tuple[str, ...]) -> None:
        self._owner = owner
        self._names = names

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        return {name: getattr(self._owner, name) for name in self._names}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what was saved; an older file may lack some of them."""
        for name in self._names:
            if name in state:
                setattr(self._owner, name, state[name])


def refuse_unreadable(state: dict[str, Any]) -> None:
    """Raise what reading a state raises where it holds more than tensors and plain values; tensors are not copied."""
    file = io.BytesIO()
    torch.save(_without_tensors(state), file)
    file.seek(0)
    torch.load(file, weights_only=True)


def _without_tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return None
    if type(value) in (dict, OrderedDict):
        return {name: _without_tensors(one) for name, one in value.items()}
    if type(value) in (list, tuple):
        return [_without_tensors(one) for one in value]
    return value


def first_non_finite(objects: Mapping[str, Any]) -> str | None:
    """Return the name of the first parameter that is not finite in the models among some objects; waits for them."""
    named = [
        (f"the parameter {name} of {owner}", parameter.detach())
        for owner, model in objects.items()
        if isinstance(model, torch.nn.Module)
        for name, parameter in model.named_parameters()
    ]
    if not named:
        return None
    finite = torch.stack([parameter.isfinite().all().cpu() for _, parameter in named]).tolist()
    return next((name for (name, _), is_finite in zip(named, finite, strict=True) if not is_finite), None)
