"""``bssearch init``."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from bssearch.errors import UsageError

TEMPLATES = Path(__file__).resolve().parents[1] / "workloads" / "templates"
LONGEST_NAME = 100


Kind = Literal["image", "text", "tabular"]  # kinds of data


def init(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Letters, digits, dashes and underscores, starting with a letter.")
    ],
    kind: Annotated[Kind, typer.Option(help="Kind of your data.")] = "image",
) -> None:
    """Write a spec and a workload that run as they are."""
    files = filled_in(name, kind)
    check_new(files)
    check_free(name)
    write_new(files)
    for path in files:
        typer.echo(f"wrote {path}")
    typer.echo(
        f"next: bssearch check {name}.yaml\n"
        f"      bssearch run {name}.yaml\n"
        "then replace the lines marked YOURS in both files"
    )


def filled_in(name: str, kind: Kind) -> dict[Path, str]:
    """A template's two files by path, renamed.

    A template is a runnable study, named as its kind.
    """
    class_name = class_name_of(name)
    spec = (TEMPLATES / f"{kind}.yaml").read_text(encoding="utf-8")
    workload = (TEMPLATES / f"{kind}.py").read_text(encoding="utf-8")
    own = kind.capitalize()
    return {
        # Quoted, because YAML reads a bare yes, on or null as another type.
        Path(f"{name}.yaml"): spec.replace(f"name: {kind}\n", f'name: "{name}"\n').replace(
            f"{kind}.py:{own}", f"{name}.py:{class_name}"
        ),
        Path(f"{name}.py"): workload.replace(f"class {own}:", f"class {class_name}:"),
    }


def class_name_of(name: str) -> str:
    """Name in CamelCase; raise `UsageError` if it is invalid."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name) or len(name) > LONGEST_NAME:
        raise UsageError(
            f"NAME = {name!r} must begin with a letter and have only letters, digits, dashes and underscores, "
            f"at most {LONGEST_NAME} characters"
        )
    class_name = "".join(part[:1].upper() + part[1:] for part in re.split("[-_]+", name))
    if keyword.iskeyword(class_name):
        raise UsageError(
            f"NAME = {name!r}: {class_name} cannot be the name of a class", hint=f"bssearch init my-{name}"
        )
    return class_name


def check_free(name: str) -> None:
    """Raise `UsageError` if NAME.py would hide an importable module."""
    module = importlib.util.find_spec(name)
    if module is not None and module.origin is not None:
        raise UsageError(
            f"NAME = {name!r} is a module of Python or of an installed package, and {name}.py would hide it",
            hint=f"bssearch init my-{name}",
        )


def check_new(files: Collection[Path]) -> None:
    """Raise `UsageError` naming existing files."""
    there = [str(path) for path in files if os.path.lexists(path)]
    if there:
        raise UsageError(f"{' and '.join(there)} exist{'s' * (len(there) == 1)}: nothing is overwritten")


def write_new(files: Mapping[Path, str]) -> None:
    """Write all files or none; raise `UsageError` if one exists or cannot be written."""
    written: list[Path] = []
    try:
        for path, text in files.items():
            with path.open("x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
    except BaseException as error:
        for path in written:
            path.unlink()
        if isinstance(error, OSError):
            raise UsageError(
                f"{Path.cwd() / (error.filename or '')} cannot be written: {error.strerror}",
                hint="change to a writable folder with free space",
            ) from error
        raise
