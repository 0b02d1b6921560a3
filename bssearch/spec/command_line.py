"""A program's command line with placeholders."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from bssearch.errors import UsageError, WorkloadError
from bssearch.records import Configuration, ParameterValue

PLACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")  # only a name in braces is a placeholder

# Names of every study, beside those of its space.
OWN_PLACES = (
    "batch_size",
    "micro_batch_size",
    "accumulation_steps",
    "learning_rate",
    "seed",
    "evaluate_every",
    "threads",
    "device",
)


def places_of(command: Sequence[str]) -> set[str]:
    """Placeholders of a command."""
    return {name for token in command for name in PLACE.findall(token)}


def filled(command: Sequence[str], values: Mapping[str, ParameterValue]) -> list[str]:
    """Fill in a command; raise `UsageError` for an unknown name."""

    def text(match: re.Match[str]) -> str:
        name = match[1]
        if name not in values:
            raise UsageError(
                f"command: {match[0]} is no name of this study; it has {', '.join(sorted(values))}",
                hint="a name in braces stands for its value; the space sets further ones",
            )
        value = values[name]
        return str(value).lower() if isinstance(value, bool) else str(value)

    return [PLACE.sub(text, token) for token in command]


def check_command(
    command: Sequence[str],
    report: Mapping[str, str],
    metric: str,
    set_parameters: Sequence[str],
    searched: Sequence[str],
) -> None:
    """Raise `ValueError` for an unknown placeholder or inconsistent log settings.

    A command whose log is read needs placeholders for all searched parameters; for others see `check_places`.
    """
    places = places_of(command)
    own = {name.rpartition(".")[2] for name in set_parameters}
    if unknown := places - own - set(OWN_PLACES):
        raise ValueError(
            f"command: {{{min(unknown)}}} is no name of this study; it has {', '.join(sorted({*own, *OWN_PLACES}))}"
        )
    if report and (lacking := _lacking(places, searched)):
        raise ValueError(lacking)
    for name, text in report.items():
        try:
            groups = re.compile(text).groups
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"report.{name}: {text} is no regular expression: {error}") from None
        if groups != 1:
            raise ValueError(f"report.{name}: {text} must have one group, the value; it has {groups}")
    for name in ("step", metric):
        if report and name not in report:
            raise ValueError(f"report has no expression for {name}; it has {', '.join(report)}")


def check_places(places: Collection[str], searched: Sequence[str]) -> None:
    """Raise `WorkloadError` if a command that does not ask for its trial lacks a searched placeholder."""
    if lacking := _lacking(places, searched):
        raise WorkloadError(lacking, hint="or have the program ask: trial = bssearch.current_trial(...)")


def _lacking(places: Collection[str], searched: Sequence[str]) -> str | None:
    return next(
        (
            f"command: {name} is searched, and the command does not take {{{name}}}"
            for name in searched
            if name not in places and not (name == "batch_size" and "micro_batch_size" in places)
        ),
        None,
    )


def values_of(
    configuration: Configuration,
    parameters: Mapping[str, ParameterValue],
    *,
    seed: int,
    evaluate_every: int,
    threads: int,
    device: str,
) -> dict[str, ParameterValue]:
    """Placeholders' values."""
    return {
        **parameters,
        "batch_size": configuration.batch_size,
        "micro_batch_size": configuration.micro_batch_size,
        "accumulation_steps": configuration.accumulation_steps,
        "learning_rate": configuration.learning_rate,
        "seed": seed,
        "evaluate_every": evaluate_every,
        "threads": threads,
        "device": device,
    }
