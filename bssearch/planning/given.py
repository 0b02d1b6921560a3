"""What a plan is given, checked: each error names the thing, its value and its bound."""

from __future__ import annotations

import math
from collections.abc import Collection
from difflib import get_close_matches

from bssearch.errors import UsageError

LARGEST_COUNT = 10**15
"""The most of anything that is counted: far above what there is, and exact as a float."""

SMALLEST_NUMBER, LARGEST_NUMBER = 1e-30, 1e30
"""The ends of all other numbers: far beyond what there is, and what is made of a few of them is finite."""


def check_count(name: str, value: int, *, least: int = 1, most: int = LARGEST_COUNT) -> None:
    """Raise `UsageError` unless a number is whole and from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UsageError(f"{name} = {shown(value)} must be a whole number from {least} to {most:,}")


def check_positive(name: str, value: float) -> None:
    """Raise `UsageError` unless a number is finite and above 0."""
    if not _is_number(value) or not SMALLEST_NUMBER <= value <= LARGEST_NUMBER:
        ends = f"{SMALLEST_NUMBER:g} to {LARGEST_NUMBER:g}"
        raise UsageError(f"{name} = {shown(value)} must be a finite number > 0, from {ends}")


def check_not_negative(name: str, value: float) -> None:
    """Raise `UsageError` unless a number is finite and at least 0."""
    if not _is_number(value) or not 0 <= value <= LARGEST_NUMBER:
        raise UsageError(f"{name} = {shown(value)} must be a finite number >= 0, at most {LARGEST_NUMBER:g}")


def check_finite(name: str, value: float) -> None:
    """Raise `UsageError` unless a number is finite."""
    if not _is_number(value):
        raise UsageError(f"{name} = {shown(value)} must be a finite number, at most {LARGEST_NUMBER:g} either way")


def check_text(name: str, value: str) -> None:
    """Raise `UsageError` unless something is a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise UsageError(f"{name} = {shown(value)} must be a text")


def check_share(name: str, value: float, *, below_one: bool = False) -> None:
    """Raise `UsageError` unless a number is in [0, 1], or in [0, 1) where it must be ``below_one``."""
    if not _is_number(value) or not 0 <= value <= 1 or (below_one and value == 1):
        raise UsageError(f"{name} = {shown(value)} must be in [0, 1{')' if below_one else ']'}")


def check_known(name: str, value: str, known: Collection[str]) -> None:
    """Raise `UsageError` for a name that is not known, with those that are written nearly so, else all."""
    if value not in known:
        near = get_close_matches(str(value).lower(), known, n=3, cutoff=0.5)
        advice = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
        raise UsageError(f"{name} = {value!r} is not known; {advice}")


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= LARGEST_NUMBER and not math.isnan(value)


def shown(value: object) -> str:
    """Return a value for a message, short even where it has thousands of digits."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST_COUNT:
        return f"a number of {len(str(abs(value))) if value.bit_length() < 10_000 else 'thousands of'} digits"
    return f"{value:g}" if isinstance(value, float) else repr(value)
