"""What a person may set of an importer or a probe, as the annotation of its function's parameters.

    def import_runs(file: Path, *, metric: Annotated[str, Option("What final_metric is.")] = "metric") -> Studies: ...

The command line makes an argument of each parameter that may be given by position, and an option of each other one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    """One parameter for people: its help, its least value, and how its value and its default are shown.

    ``flag`` is what the option is called on the command line, where that is not the parameter's name.
    """

    help: str
    min: float | None = None
    metavar: str | None = None
    shown_default: str | None = None
    flag: str | None = None
