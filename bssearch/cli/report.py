"""The commands that show a study as a whole, ``report``, and several side by side, ``compare``."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from bssearch.cli.answer import print_answer
from bssearch.cli.output import (
    DatabaseOption,
    Format,
    FormatOption,
    StudyArgument,
    cell,
    print_json,
    print_rows,
    print_table,
)
from bssearch.cli.query import study_name, trial_row
from bssearch.errors import UsageError

if TYPE_CHECKING:
    from bssearch.analysis.answer import Answer
    from bssearch.search.reporting import Comparison
    from bssearch.storage.repository import Store

TABLES = ("trials.csv", "batches.csv", "observations.csv")
COMPARED = (
    "study",
    "device",
    "precision",
    "workload",
    "objective",
    "target",
    "optimal",
    "figure",
    "ratio to first",
    "within 5 %",
    "critical batch",
    "largest that fits",
    "test metric",
)


def _path(text: str) -> Path:
    """Return a path that was given; raise `UsageError` where it is empty, which would stand for the folder at hand."""
    if not text:
        raise UsageError("a path is empty", hint="--html takes a file, --csv a folder; . is the folder at hand")
    return Path(text)


def report(
    study: StudyArgument = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", parser=_path, metavar="FILE", help="Write the page: one file that needs no network."),
    ] = None,
    tables: Annotated[
        Path | None,
        typer.Option(
            "--csv", parser=_path, metavar="FOLDER", help="Write trials.csv, batches.csv and observations.csv."
        ),
    ] = None,
    db: DatabaseOption = None,
) -> None:
    """Show a study as a whole: a page with its figures and tables, or all its rows as CSV."""
    from bssearch.analysis.page import render, require_plots
    from bssearch.search.answers import answer
    from bssearch.search.reporting import picture_of
    from bssearch.storage.repository import open_store

    if html is not None:
        require_plots()
        _check_file(html)
    if tables is not None:
        _check_folder(tables)
    with open_store(db, write=False) as store:
        name = study_name(store, study)
        if html is not None:
            page = render(picture_of(store, name))
            with _replacing([html]) as (file,):
                file.write(page)
            typer.echo(html)
        if tables is not None:
            for path in _write_tables(store, name, tables):
                typer.echo(path)
        if html is None and tables is None:
            print_answer(answer(store, name))
            typer.echo(f"bssearch report {name} --html report.html shows it with figures", err=True)


def compare(
    studies: Annotated[
        list[str], typer.Argument(metavar="STUDY STUDY…", help="The studies, the one to compare with first.")
    ],
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Show studies side by side, of one task on several devices, models or precisions."""
    from bssearch.search import reporting
    from bssearch.storage.repository import open_store

    if len(studies) < 2:
        raise UsageError(f"compare takes two studies or more, not only {studies[0]!r}")
    with open_store(db, write=False) as store:
        found = reporting.compare(store, studies)
    if form is Format.TABLE:
        print_table([_compared(one) for one in found], COMPARED)
        for one in found:
            if one.optimal_batch_size is None:
                typer.echo(f"{one.study}: {one.note}", err=True)
    elif form is Format.JSON:
        print_json([one.model_dump(mode="json") for one in found])
    else:
        print_rows([one.model_dump(mode="json") for one in found], (), form)


def _compared(one: Comparison) -> dict[str, Any]:
    """Return a comparison's row for people."""
    from bssearch.analysis.numbers import number

    objective = str(one.objective).replace("_", " ")
    head = [one.study, one.device, one.precision, one.workload, objective, one.target]
    if one.optimal_batch_size is None or one.flat_range is None:
        return dict(zip(COMPARED, [*head, None, "target not reached"], strict=False))
    figure, ratio, critical = one.objective_value, one.ratio_to_first, one.b_crit
    low, high = one.flat_range
    poor = "" if one.fit_verdict == "fits" else f" ({str(one.fit_verdict).replace('_', ' ')})"
    figures = [
        one.optimal_batch_size,
        figure and f"{number(figure.median)}{_ends(figure)} ({figure.runs} run{'' if figure.runs == 1 else 's'})",
        one.note if ratio is None else f"{ratio.value:.3g}{_ends(ratio)}",
        str(low) if low == high else f"{low}–{high}",
        critical and f"{number(critical.estimate)}{_ends(critical)}{poor}",
        one.largest_that_fits,
        cell(one.test_metric),
    ]
    return dict(zip(COMPARED, [*head, *figures], strict=True))


def _ends(figure: Any) -> str:
    from bssearch.analysis.numbers import number

    return "" if figure.low is None or figure.high is None else f" [{number(figure.low)}, {number(figure.high)}]"


def _write_tables(store: Store, name: str, folder: Path) -> list[Path]:
    """Write a study's trials, batch sizes and observations, or none of them."""
    from bssearch.search.answers import answer
    from bssearch.search.reporting import observations_of

    found, trials = answer(store, name), store.trials(name)
    made = not folder.exists()
    paths = [folder / table for table in TABLES]
    try:
        with _naming(folder):
            folder.mkdir(exist_ok=True)
        with _replacing(paths) as files:
            with _naming(paths[0]):
                _write_rows(files[0], [trial_row(trial) for trial in trials])
            with _naming(paths[1]):
                _write_rows(files[1], _batch_rows(found))
            with _naming(paths[2]):
                _write_observations(files[2], observations_of(store, name, trials))
    except BaseException:
        if made:
            with suppress(OSError):
                folder.rmdir()
        raise
    return paths


def _batch_rows(found: Answer) -> list[dict[str, Any]]:
    return [_flat(row.model_dump(mode="json")) for row in found.batches]


def _flat(row: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with dotted names."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        name = f"{path}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found


def _write_rows(file: TextIO, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with all their columns; of a mapping that some rows lack, only those of its parts."""
    flat = [_flat(row) for row in rows]
    names = dict.fromkeys(key for row in flat for key in row)
    columns = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
    writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for row in flat:
        writer.writerow(
            {key: json.dumps(value) if isinstance(value, list | tuple) else value for key, value in row.items()}
        )


def _write_observations(file: TextIO, observations: Iterable[tuple[int, Any]]) -> None:
    columns = ("step", "samples", "train_seconds", "metric", "loss", "learning_rate")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("trial", *columns))
    writer.writerows((number, *(getattr(one, column) for column in columns)) for number, one in observations)


def _check_file(path: Path) -> None:
    """Raise `UsageError` where a path cannot be that of a file."""
    _target(path)
    with _naming(path):
        if not path.parent.is_dir():
            raise UsageError(f"{path} cannot be written: there is no folder {path.parent}", hint="make it first")
        if path.exists() and not path.is_file():
            what = "a folder" if path.is_dir() else "no regular file"
            raise UsageError(f"{path} cannot be written: it is {what}")


def _check_folder(path: Path) -> None:
    """Raise `UsageError` where a path is neither a folder for the tables nor can be that of a new one."""
    _target(path)
    with _naming(path):
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is not a folder")
        if not path.parent.is_dir():
            raise UsageError(f"{path} cannot be made: there is no folder {path.parent}", hint="make it first")
        is_there = path.exists()
    for table in TABLES if is_there else ():
        _check_file(path / table)


def _target(path: Path) -> Path:
    """Return what a path leads to; raise `UsageError` where its links lead round in a circle."""
    try:
        with _naming(path):
            return path.resolve()
    except RuntimeError:  # an OSError from Python 3.13 on
        raise UsageError(f"{path} cannot be written: its symbolic links lead round in a circle") from None


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn what the file system refuses into a `UsageError` that names a path."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error


@contextmanager
def _replacing(paths: Sequence[Path]) -> Iterator[list[TextIO]]:
    """Open files beside the paths and rename them into place at the end: what fails leaves all as it was.

    A link stays one: what it leads to is replaced. Raises `UsageError` naming the file that cannot be written.
    """
    targets = [_target(path) for path in paths]
    drafts = [_beside(target, "new") for target in targets]
    try:
        with ExitStack() as stack:
            yield [stack.enter_context(_opened(path, draft)) for path, draft in zip(paths, drafts, strict=True)]
        _rename(paths, drafts, targets)
    finally:
        for draft in drafts:
            with suppress(OSError):
                draft.unlink(missing_ok=True)


@contextmanager
def _opened(path: Path, draft: Path) -> Iterator[TextIO]:
    """Open a draft; what cannot be written of it, also at its end, is said of the path."""
    with _naming(path), draft.open("w", encoding="utf-8", newline="") as file:
        yield file


def _rename(paths: Sequence[Path], drafts: Sequence[Path], targets: Sequence[Path]) -> None:
    """Rename drafts into place. Where one cannot be, those before it give way again to what they replaced.

    What stood at the last place, or at an only one, is there all the time; at the others it stands aside meanwhile.
    """
    aside = [_beside(target, "old") for target in targets[:-1]]
    placed: list[Path] = []
    try:
        for path, draft, target, old in zip_longest(paths, drafts, targets, aside):
            with _naming(path):
                if old is not None and target.exists():
                    target.replace(old)
                draft.replace(target)
            placed.append(target)
    except BaseException:
        for target, old in zip(targets, aside, strict=False):
            with suppress(OSError):
                if old.exists():
                    old.replace(target)
                elif target in placed:
                    target.unlink()
        raise
    for old in aside:
        with suppress(OSError):
            old.unlink(missing_ok=True)


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".bssearch-{os.getpid()}-{what}-{target.name[-40:]}")
