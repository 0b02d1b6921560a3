"""Zeus's traces (NSDI 2023): epochs to a metric, seconds per epoch and watts by batch size, GPU and power limit.

https://github.com/ml-energy/zeus, ``examples/research_reproducibility/zeus_nsdi23/trace``.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from bssearch.errors import require
from bssearch.exchange.importers.imported_run import POWER, number
from bssearch.exchange.importers.logs import Log, LogKind, Row, chosen, table_rows
from bssearch.records import grouped

_SETTING = ("batch_size", "optimizer")
_TRAIN = ("dataset", "network", *_SETTING, "learning_rate", "run", "target_metric", "target_epoch")
_POWER = ("dataset", "network", *_SETTING, "power_limit", "time_per_epoch", "average_power")


def _read(folder: Path, choice: str) -> Iterator[Log]:
    file = folder / "summary_train.csv"
    runs = grouped((_workload(row), (line, row)) for line, row in _rows(file, _TRAIN))
    workload, rows = chosen(runs, choice, str(folder), "workloads")
    measured: dict[str, dict[tuple[str, ...], tuple[float, str]]] = {"": {}}  # seconds of an epoch, watts
    for power in sorted(folder.glob("summary_power_*.csv")):
        known = [row for _, row in _rows(power, _POWER) if _workload(row) == workload]
        # The highest power limit is the GPU's own
        by_limit = sorted(known, key=lambda row: number(row["power_limit"]))
        device = power.stem.removeprefix("summary_power_")
        measured[device] = {_setting(row): (number(row["time_per_epoch"]), row["average_power"]) for row in by_limit}
    of_runs = grouped(((*_setting(row), row["learning_rate"], row["run"]), (line, row)) for line, row in rows)
    ends = [reached for found in of_runs.values() if (reached := _reached(row for _, row in found))]
    is_falling = any(one[0][1] > one[-1][1] for one in ends)
    for device, of_setting in measured.items():
        for (*setting, rate, seed), found in of_runs.items():
            one_epoch, watts = of_setting.get(tuple(setting), (None, ""))
            if (one_epoch is None) is bool(device) or (not device and len(measured) > 1):
                continue
            settings = dict(zip(_SETTING, setting, strict=True)) | {"learning_rate": rate, "seed": seed}
            origin = f"{file}:{found[0][0]}" + (f" ({device})" if device else "")
            curve = [*_curve(_reached(row for _, row in found), is_falling, one_epoch, origin)]
            yield Log(origin=origin, rows=curve, settings={**settings, "device": device, POWER: watts})


def _rows(file: Path, names: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    found = list(table_rows(file))
    missing = [name for name in names if found and name not in found[0][1]]
    require(not missing, f"{file}:1 lacks the columns {', '.join(missing)} of Zeus's traces; add the columns")
    return [(line, {name: str(row.get(name, "")) for name in names}) for line, row in found]


def _workload(row: Mapping[str, str]) -> str:
    return f"{row['dataset']}/{row['network']}"


def _setting(row: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(row[name] for name in _SETTING)


def _reached(rows: Iterable[Mapping[str, str]]) -> list[tuple[float, float]]:
    # Epochs and the metrics that they reached; NaN: not reached
    found = ((number(row["target_epoch"]), number(row["target_metric"])) for row in rows)
    return sorted(one for one in found if not math.isnan(sum(one)))


def _curve(
    reached: Sequence[tuple[float, float]], is_falling: bool, one_epoch: float | None, origin: str
) -> Iterator[Row]:
    # The epoch before a metric is first reached had only the earlier metric.
    before: tuple[float, float] | None = None
    for epoch, levels in grouped(reached).items():
        level = min(levels) if is_falling else max(levels)
        if before is not None:
            require(
                (level < before[1]) is is_falling,
                f"target_metric {level:g} comes after the better target_metric {before[1]:g}; correct the trace "
                f"({origin})",
            )
            if epoch - 1 > before[0]:
                yield _row(epoch - 1, before[1], is_falling, one_epoch)
        yield _row(epoch, level, is_falling, one_epoch)
        before = epoch, level


def _row(epoch: float, level: float, is_falling: bool, one_epoch: float | None) -> Row:
    row = {"epoch": epoch, "val_error" if is_falling else "val_metric": level}
    return row if one_epoch is None else {**row, "train_seconds": epoch * one_epoch}


ZEUS = LogKind(("summary_train.csv",), _read, has_choices=True)
