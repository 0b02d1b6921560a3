"""The options of a registered class or function: its parameters, with their types and bounds.

    def import_runs(file: Path, *, metric: Annotated[str, Option("What final_metric is.")] = "metric") -> Studies: ...
    class Race(Cap): def __init__(self, lag: Annotated[float, Field(gt=1)] = 3.0) -> None: ...

The command line makes an argument of each parameter of an importer or a probe that may be given by position, and an
option of each other one. The calculator makes an input of a field of a plan. A spec gives the parameters of a sampler
or a pruner as ``options: {lag: 2}``.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from bssearch.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Option:
    """One parameter for people: its help, its least value, and how its value and its default are shown.

    ``flag`` is its name on the command line, and ``label`` its name in a form, if that is not the parameter's name.
    ``unit`` is that of a number. If there are ``choices``, a value is one of them.
    """

    help: str
    min: float | None = None
    metavar: str | None = None
    shown_default: str | None = None
    flag: str | None = None
    label: str | None = None
    unit: str = ""
    choices: Sequence[str] = ()


def made_with(kind: Callable[..., T], options: Mapping[str, Any], place: str, *given: Any) -> T:
    """Return ``kind(*given, **options)`` if the annotations of its parameters allow the options.

    Raises `UsageError` that names the option below ``place``, its value and its bound.
    """
    known = list(parameters_of(kind).values())[len(given) :]
    annotations = {one.name: one.annotation for one in known}
    for name in options:
        if name not in annotations:
            near = difflib.get_close_matches(name, annotations, n=1)
            there = f"choose from {', '.join(annotations)}" if annotations else "there is none"
            advice = f"did you mean {near[0]!r}?" if near else there
            raise UsageError(f"{place}.{name}: unknown option; {advice}")
    for one in known:
        if one.default is one.empty and one.name not in options:
            raise UsageError(f"{place}.{one.name} is missing")
    checked = {name: _checked(value, annotations[name], f"{place}.{name}") for name, value in options.items()}
    return kind(*given, **checked)


def parameters_of(kind: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the named parameters of a class or function, their annotations evaluated; `Any` if that is impossible."""
    scope = getattr(inspect.unwrap(getattr(kind, "__init__", kind)), "__globals__", {})
    named = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    parameters = inspect.signature(kind).parameters
    return {
        name: one.replace(annotation=_evaluated(one.annotation, scope))
        for name, one in parameters.items()
        if one.kind in named
    }


def _evaluated(annotation: Any, scope: dict[str, Any]) -> Any:
    if annotation is inspect.Parameter.empty:
        return Any
    try:
        return eval(annotation, scope) if isinstance(annotation, str) else annotation
    except NameError:  # a name that only type checkers import
        return Any


def _checked(value: Any, annotation: Any, place: str) -> Any:
    from pydantic import ConfigDict, TypeAdapter, ValidationError  # `bssearch --help` does without it

    config = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
    try:
        return TypeAdapter(annotation, config=config).validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise UsageError(f"{place} = {value!r}: {problem[0].lower()}{problem[1:]}") from None
