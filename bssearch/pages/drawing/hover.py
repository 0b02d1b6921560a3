"""The text of a point under the pointer: the subset of plotly's hover templates, and of d3's formats, in use."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from bssearch.pages.axes import Figure
from bssearch.pages.drawing.text import lines_of

FIELD = re.compile(r"%\{(\w+)(?::([^}]*))?\}")
FORMAT = re.compile(r"(,?)\.(\d+)(~?)([frgs])")
PREFIXES = {-9: "n", -6: "µ", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P"}
END = "<extra></extra>"
"""Plotly's way to say that a text ends without the name of the trace."""


def text_of(trace: Figure, index: int) -> str | None:
    """Return what is said of a trace's point, None where it says nothing."""
    template = trace.get("hovertemplate")
    if template is None or trace.get("hoverinfo") == "skip":
        return None
    values: dict[str, Any] = {name: trace[name][index] for name in ("x", "y", "text", "customdata") if name in trace}
    return filled(template, values)


def filled(template: str, values: Mapping[str, Any]) -> str:
    """Return a template with its fields filled in. Raises `ValueError` for a field or format that is not known."""
    if not template.endswith(END):
        raise ValueError(f"the hover template {template!r} is not drawn: it does not end with {END}")

    def field(found: re.Match[str]) -> str:
        name, form = found[1], found[2]
        if name not in values:
            raise ValueError(f"the hover template {template!r} is not drawn: it has no {name}")
        return _as_text(values[name]) if form is None else formatted(values[name], form)

    return lines_of(FIELD.sub(field, template.removesuffix(END))).rstrip()


def formatted(value: float, form: str) -> str:
    """Return a number in a format of d3 (https://d3js.org/d3-format): ``.3f``, ``.4~g``, ``,.4~r`` or ``.4~s``."""
    found = FORMAT.fullmatch(form)
    if found is None:
        raise ValueError(f"the format {form!r} is not drawn")
    groups, digits, trims, kind = found[1], int(found[2]), bool(found[3]), found[4]
    text = {"f": _fixed, "r": _rounded, "g": _general, "s": _prefixed}[kind](value, digits, groups)
    return _trimmed(text) if trims else text


def _fixed(value: float, digits: int, groups: str) -> str:
    return f"{value:{groups}.{digits}f}"


def _rounded(value: float, digits: int, groups: str) -> str:
    """Return significant digits without an exponent."""
    if value == 0:
        return f"{0:.{digits - 1}f}"
    short = float(f"{value:.{digits}g}")
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(short))))
    return f"{short:{groups}.{decimals}f}"


def _general(value: float, digits: int, groups: str) -> str:
    text = f"{value:#{groups}.{digits}g}"
    return re.sub(r"e([+-])0+(\d)", r"e\1\2", text)


def _prefixed(value: float, digits: int, groups: str) -> str:
    short = float(f"{value:.{digits}g}")
    power = 0 if short == 0 else 3 * math.floor(math.log10(abs(short)) / 3)
    power = min(max(power, min(PREFIXES)), max(PREFIXES))
    return f"{_rounded(short / 10**power, digits, groups)}{PREFIXES[power]}"


def _trimmed(text: str) -> str:
    """Return a number without zeros at the end of its decimals."""
    return re.sub(r"\.0*(?=\D|$)|(\.\d*[1-9])0+(?=\D|$)", lambda found: found[1] or "", text, count=1)


def _as_text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
