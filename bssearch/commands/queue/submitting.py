"""``submit``: a study is queued, for a worker's template and values; never with code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from bssearch.errors import NotFoundError, SpecError, UsageError
from bssearch.queue.submission import NewSubmission, Submission, Value, WorkerRecord
from bssearch.queue.templates import OFFERS_NONE
from bssearch.queue.values import checked_values, value_type
from bssearch.settings import user_name
from bssearch.spec.yaml_values import read_yaml, shortened
from bssearch.storage.repository import Store

MOST_BYTES = 2**20
"""Bytes of a file at most, as of a spec."""

CODE = frozenset({"workload", "command", "arguments", "report", "preset"})


@dataclass(frozen=True, slots=True)
class Asked:
    """A template with values by dotted key, and the name of the study where a file gives one."""

    template: str
    values: Mapping[str, Value]
    name: str | None = None


def submit_study(
    store: Store,
    template: str,
    values: Mapping[str, Value],
    *,
    name: str,
    owner: str | None = None,
    priority: float = 1.0,
    tags: Sequence[str] = (),
    not_before: datetime | None = None,
) -> Submission:
    """Queue a study that a worker shall run from its template, with these values by dotted key of the spec.

    The owner is who asks, where none is given. Owners share the workers alike, the studies of one in proportion to
    ``priority``. Only a worker with all of the ``tags`` serves it, and none before the moment ``not_before``. Where
    workers have been seen, one of them must offer the template and take the values. Raises `UsageError` where none
    does, naming what there is, and where the name is taken.
    """
    new = NewSubmission(
        name=name,
        template=template,
        values=dict(values),
        owner=user_name() if owner is None else owner,
        priority=priority,
        tags=tuple(dict.fromkeys(tags)),
        not_before=not_before,
    )
    new.check()
    check_offered(store.workers(), template, new.values)
    return store.submit(new)


def check_offered(workers: Sequence[WorkerRecord], template: str, values: Mapping[str, Value]) -> None:
    """Raise `UsageError` unless one of the workers takes the values of a template; of no workers nothing is known."""
    if not workers:
        return
    offers = [worker for worker in workers if template in worker.templates]
    if not offers:
        known = ", ".join(sorted({name for worker in workers for name in worker.templates})) or "none"
        raise UsageError(f"no worker has a template {shortened(template)}; there are {known}")
    problems: list[UsageError] = []
    for worker in offers:
        try:
            types = {key: value_type(one) for key, one in dict(worker.templates[template]).items()}
            checked_values(template, types, values)
            return
        except (ValueError, TypeError):  # written by something else than a worker
            continue
        except UsageError as error:
            problems.append(error)
    if problems:
        raise problems[0]


def asked_in_file(path: Path) -> Asked:
    """Read a file of a submission: ``template``, ``name``, and values as a spec has them; raise `SpecError`."""
    try:
        content = path.read_bytes()
        if len(content) > MOST_BYTES:
            raise SpecError(f"{path} has more than {MOST_BYTES:,} bytes: it is no submission")
        data = read_yaml(content.decode("utf-8"))[0]
    except FileNotFoundError:
        raise NotFoundError(
            f"no file of a submission {str(path)!r}", hint="a template is named without a suffix"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise SpecError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, Mapping):
        raise SpecError(f"{path}: a submission is a mapping: template, name, and values as a spec has them")
    if code := sorted(CODE & {str(key) for key in data}):
        raise SpecError(
            f"{path}: {code[0]} cannot be submitted: a row of the queue carries no code, no path and no command",
            hint="write `template: NAME` in its place, one that a worker offers (bssearch queue), and the values that "
            "it takes; its operator puts the spec with the workload beside the worker",
        )
    if not isinstance(data.get("template"), str):
        raise SpecError(f"{path}: it must say which template of a worker it is for, as in `template: digits`")
    name = data.get("name")
    if name is not None and not isinstance(name, str):
        raise SpecError(f"{path}: name = {shortened(name)} must be a text")
    rest = {key: value for key, value in data.items() if key not in {"template", "name"}}
    values: dict[str, Value] = {}
    for key, value in _leaves(path, rest):
        if key in values:
            raise SpecError(f"{path}: {key} is given twice: {shortened(values[key])} and {shortened(value)}")
        values[key] = value
    return Asked(data["template"], values, name)


def _leaves(path: Path, data: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Value]]:
    for key, value in data.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(path, value, f"{dotted}.")
        else:
            yield dotted, checked_value(dotted, value, str(path))


def checked_value(key: str, value: Any, where: str) -> Value:
    """Return a value that a submission may carry; raise `SpecError` for one of no such type, or of no such field."""
    field = key.split(".")[0]
    if field in OFFERS_NONE:
        raise SpecError(f"{where}: {key} cannot be submitted: {field} is the worker's operator's")
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list) and all(isinstance(one, int | float) and not isinstance(one, bool) for one in value):
        return value
    raise SpecError(
        f"{where}: {key} = {shortened(value)} must be a number, true or false, a choice, or a list of numbers"
    )
