"""Settings of runs in training logs, by our names: which of a log's values are hyperparameters, and whose."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bssearch.errors import UsageError
from bssearch.exchange.importers.columns import ABOUT, PARAMETER, RESULT_NAME, Formula, mappings
from bssearch.exchange.importers.imported_run import BATCH, SPLIT, TYPED, GivenBatch, is_about_batch
from bssearch.exchange.importers.logged import CLOCKS, EPOCH, SECONDS, STEPS, listed
from bssearch.exchange.importers.logs import RUN_NAMES, Log

# our name of a setting by the last part of the log's
_LEAVES = {
    **dict.fromkeys(("batch_size", "train_batch_size", "batchsize", "bs", "bsz"), BATCH),
    **dict.fromkeys(("learning_rate", "lr", "max_lr", "peak_lr"), "learning_rate"),
    **dict.fromkeys(("weight_decay", "wd"), "weight_decay"),
    **dict.fromkeys(("optimizer", "optim", "optimizer_name"), "optimizer"),
    **dict.fromkeys(("seed", "random_seed", "seed_everything"), "seed"),
    **{name: name for name in (*TYPED[1:], "device", "precision")},
}
_OF_THE_RUN = {"seed", "device", "precision"}  # no hyperparameters

_EVALUATION = re.compile(r"(?:^|[./_])(?:eval|val|valid|validation|test)(?:[./_]|$)")


@dataclass(frozen=True, slots=True)
class Setting:
    """A value, its name in the log, and how far that name is from ours: 0 if given by the user."""

    theirs: str
    value: Any
    distance: int = 0


Settings = Mapping[str, Setting]  # by our names, else by the log's


def settings_of(logs: Sequence[Log], column: Sequence[str], given: Sequence[str], run: str | None) -> list[Settings]:
    """Settings of each log.

    Args:
        column: Names of settings as THEIRS=OURS.
        given: Further settings as NAME=VALUE, which replace those of the logs.
        run: Name of the column that tells runs apart, which is no setting.

    Raises:
        UsageError: For an unknown name, or two values of one setting.
    """
    there = dict.fromkeys(name for log in logs for name in log.settings)
    renamed = mappings("--column", column, there, "setting")
    added = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not (name and separator and value):
            raise UsageError(f"--with {text}: must be NAME=VALUE, as in world_size=2")
        if not (_is_known(_ours(name)) or name in there):
            near = difflib.get_close_matches(name, [*_LEAVES, *SPLIT, "gradient_accumulation_steps"], n=1)
            raise UsageError(f"--with {text}: unknown setting {name!r}" + (f"; {near[0]}?" if near else ""))
        added[_ours(name)] = Setting("--with", value)
    return [{**_of_log(log, renamed, run), **added} for log in logs]


def _of_log(log: Log, renamed: Mapping[str, tuple[str, Formula]], run: str | None) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for name, value in log.settings.items():
        if name in renamed:
            ours, formula = renamed[name]
            one = Setting(name, formula(str(value)))
        elif name != run and _is_setting(name, value):
            ours = _ours(name)
            one = Setting(name, value, 1 + len(re.findall(r"[./]", PARAMETER.sub("", name, count=1))))
        else:
            continue
        known = found.get(ours)
        if known is not None and known.distance == one.distance and str(known.value) != str(one.value):
            raise UsageError(
                f"{known.theirs} = {known.value} and {name} = {value} are both {ours} ({log.origin})",
                hint=f"--column NAME={ours} says which",
            )
        if known is None or one.distance < known.distance:
            found[ours] = one
    return found


def _is_setting(name: str, value: Any) -> bool:
    if isinstance(value, list | dict | tuple) or str(value) in ("", "None") or name.lower() in RUN_NAMES:
        return False
    if _is_known(_ours(name)):
        return not _EVALUATION.search(name.lower())
    is_logged = name.lower() in (*STEPS, *SECONDS, *CLOCKS, EPOCH)
    return not (is_logged or ABOUT.fullmatch(name) or RESULT_NAME.fullmatch(name))


def _is_known(ours: str) -> bool:
    return ours in _LEAVES.values() or is_about_batch(ours)


def _ours(name: str) -> str:
    plain = PARAMETER.sub("", name, count=1)
    return _LEAVES.get(re.split(r"[./]", plain)[-1].lower().replace("-", "_"), plain)


def batch_of(settings: Settings, log: Log) -> GivenBatch:
    """The batch size and its parts; raise `UsageError` if unknown."""
    found = GivenBatch.of({name: one.value for name, one in settings.items() if is_about_batch(name)}, log.origin)
    if found.is_known:
        return found
    changing = [name for name in log.rows[0] if is_about_batch(_ours(name))] if log.rows else []
    if changing:
        raise UsageError(
            f"{changing[0]} changes or is missing in {log.origin}",
            hint="--run NAME names a column that tells runs apart",
        )
    raise UsageError(
        f"the batch size of {log.origin} is unknown: its settings are {listed(list(settings))}",
        hint="--with batch_size=N, or per_device_train_batch_size, gradient_accumulation_steps and world_size",
    )


def hyperparameters(settings: Iterable[Settings]) -> list[str]:
    """Names of hyperparameters that bssearch knows, and of settings with several values."""
    runs = list(settings)
    names = dict.fromkeys(name for one in runs for name in one if name not in _OF_THE_RUN and not is_about_batch(name))
    values = {name: {str(one[name].value) if name in one else None for one in runs} for name in names}
    return [name for name in names if name in TYPED or len(values[name]) > 1]


def sources(settings: Settings) -> str:
    """The log's names of the batch and the known hyperparameters, where they are not ours."""
    shown = {name: one.theirs for name, one in settings.items() if is_about_batch(name) or name in TYPED}
    return "; ".join(f"{name}: {theirs}" for name, theirs in shown.items() if name != theirs)
