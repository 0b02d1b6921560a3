"""The samples that the runs of a batch size took: what the law of steps is fitted to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LawPoint:
    """The runs of the tuned configuration at one batch size.

    ``samples`` are those to the target of the runs that reached it, ``missed_at`` those at which the others were last
    seen to miss it: they need more. ``untuned``: known not to be retuned, for its steps rise or its learning rate lies
    at an edge.
    """

    batch_size: int
    samples: tuple[float, ...]
    missed_at: tuple[float, ...] = ()
    untuned: bool = False
