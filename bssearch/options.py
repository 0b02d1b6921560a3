"""What a person may set of an importer, a probe or a plan, as the annotation of a parameter or of a field.

    def import_runs(file: Path, *, metric: Annotated[str, Option("What final_metric is.")] = "metric") -> Studies: ...

The command line makes an argument of each parameter that may be given by position, and an option of each other one. The
calculator makes an input of a field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
