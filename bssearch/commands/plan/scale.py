"""``plan scale``: how many devices are worth it, from numbers that are stated or those of a stored study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bssearch.analysis.answer import Answer
from bssearch.analysis.law.affine_step_time import fit_step_time
from bssearch.errors import TargetNotReachedError, UsageError
from bssearch.importers.step_times import read_step_times
from bssearch.planning.given import check_count, check_positive
from bssearch.planning.memory.request import parameter_count
from bssearch.planning.scale import Hardware, Interval, Load, ScalePlan, plan_devices
from bssearch.search.finding import answer, stored_quick
from bssearch.storage.repository import open_store

GRADIENT_BYTES = 4
"""Bytes of a parameter's gradient that are exchanged where nobody says: fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a study knows, None where it does not: the seconds of a step, B_crit, and the samples at a batch size."""

    alpha_s: float | None = None
    beta_s: float | None = None
    b_crit: Interval | None = None
    samples_to_target: float | None = None
    at_batch: int | None = None


def plan_scale(
    *,
    devices: int,
    batch: int | None = None,
    per_device_batch: int | None = None,
    max_micro: int | None = None,
    alpha_s: float | None = None,
    beta_s: float | None = None,
    step_times: Path | str | None = None,
    parameters: str | int | None = None,
    gradient_bytes: float = GRADIENT_BYTES,
    bandwidth_gb_s: float | None = None,
    latency_us: float = 0.0,
    overlap: float = 0.0,
    b_crit: float | None = None,
    b_crit_low: float | None = None,
    b_crit_high: float | None = None,
    samples_to_target: float | None = None,
    at_batch: int | None = None,
    price_per_device_hour: float | None = None,
    study: str | None = None,
    db: str | None = None,
) -> ScalePlan:
    """Return time, cost and efficiency of 1 … ``devices`` devices, and where more of them stop paying.

    A step of m samples takes ``alpha_s`` + ``beta_s``·m seconds: stated, from the file ``step_times`` (as `bssearch
    price` reads it), or the line through the step times of a ``study``. B_crit and the samples to the target are stated
    or the study's, its quick answer's where no search has found them; what is stated goes before what is stored.
    ``gradient_bytes`` are of each of the ``parameters``, which may be a text as ``"25M"``. Raises `UsageError` for what
    is wrong, missing, or contradicts itself, and of a study `NotFoundError` and `DatabaseError`.
    """
    if step_times is not None and (alpha_s is not None or beta_s is not None):
        raise UsageError(f"step_times = {step_times} and alpha_s, beta_s contradict each other: give one of them")
    if b_crit is None and (b_crit_low is not None or b_crit_high is not None):
        raise UsageError("b_crit_low and b_crit_high are the interval of b_crit, which is not given")
    if (alpha_s is None) != (beta_s is None):
        raise UsageError("alpha_s and beta_s go together: a step of m samples takes alpha_s + beta_s·m seconds")
    if isinstance(parameters, str):
        parameters = parameter_count(parameters)
    if parameters is not None:
        check_count("parameters", parameters)
    check_positive("gradient_bytes", gradient_bytes)
    stated = None if b_crit is None else Interval(estimate=b_crit, low=b_crit_low, high=b_crit_high)
    measured = Measured() if study is None else _measured(study, db)
    if step_times is not None:
        alpha_s, beta_s = _line(Path(step_times))
    elif alpha_s is None:
        alpha_s, beta_s = measured.alpha_s, measured.beta_s
    critical = stated or measured.b_crit
    if samples_to_target is None and at_batch is None:
        samples_to_target, at_batch = measured.samples_to_target, measured.at_batch
    where = "" if study is None else f", and study {study!r} has none"
    if alpha_s is None or beta_s is None:
        raise UsageError(f"the seconds of a step are not given{where}: alpha_s and beta_s, step_times, or a study")
    if critical is None:
        raise UsageError(f"the critical batch size is not given{where}: b_crit, or a study that has a law")
    return plan_devices(
        devices,
        Hardware(
            alpha_s=alpha_s,
            beta_s=beta_s,
            gradient_bytes=(parameters or 0) * gradient_bytes,
            bandwidth_gb_s=bandwidth_gb_s,
            latency_us=latency_us,
            overlap=overlap,
        ),
        Load(
            batch=batch,
            per_device_batch=per_device_batch,
            max_micro=max_micro,
            samples_to_target=samples_to_target,
            at_batch=at_batch,
            price_per_device_hour=price_per_device_hour,
        ),
        critical,
    )


def _line(path: Path) -> tuple[float, float]:
    """Return α and β of the line through a file's step times."""
    fit = fit_step_time(list(read_step_times(path).values()))
    if fit is None:
        raise UsageError(f"step_times = {path}: no line goes through them; it takes three sizes, the larger the slower")
    return fit.alpha_seconds, fit.beta_seconds


def _measured(study: str, db: str | None) -> Measured:
    """Return what a stored study knows: of its answer, else of its quick answer."""
    with open_store(db, write=False) as store:
        quick = stored_quick(store, study)
        line = fit_step_time(list(store.probes(study).values()))
        try:
            found = answer(store, study)
        except TargetNotReachedError:
            found = None
    critical = _critical(quick)
    alpha, beta = (None, None) if line is None else (line.alpha_seconds, line.beta_seconds)
    law = None if found is None else found.fit
    if law is not None and (critical is None or law.verdict != "too_few_points"):  # so few are the quick answer's own
        critical = Interval(estimate=law.b_crit.estimate, low=law.b_crit.low, high=law.b_crit.high)
    samples, at = _samples(found)
    return Measured(alpha_s=alpha, beta_s=beta, b_crit=critical, samples_to_target=samples, at_batch=at)


def _critical(quick: Mapping[str, Any] | None) -> Interval | None:
    """Return the critical batch size of a quick answer, None where there is no answer that can be read."""
    try:
        return None if quick is None else Interval(**{name: float(one) for name, one in quick["b_crit"].items()})
    except (KeyError, TypeError, ValueError, AttributeError):  # what something else has written there does not matter
        return None


def _samples(found: Answer | None) -> tuple[float | None, int | None]:
    """Return the samples to the target at the recommended batch size, and that size."""
    if found is None or found.optimal.samples_to_target is None:
        return None, None
    return found.optimal.samples_to_target, found.optimal.batch_size
