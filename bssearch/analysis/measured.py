"""Measured step time, memory and gradient noise."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import Any

from bssearch.analysis.law.batch_model import fit_memory, fit_step_time, throughput_knee
from bssearch.analysis.objectives import kind_of
from bssearch.analysis.shape import Model
from bssearch.records import FLAT_RATIO, GradientNoise, MemoryUse, NoiseMeasurement, ProbeRecord, TrialRecord, grouped
from bssearch.records.noise_scale import pooled
from bssearch.spec import MemoryBoundary

FEWEST_TRIALS = 3  # trials that show that a device is slower


class StepTimeAnswer(Model):
    """Step seconds α + β·B without accumulation; ``throughput_knee`` reaches 90 % of the highest throughput."""

    alpha_s: float
    beta_s: float
    max_residual: float
    throughput_knee: int


class MemoryAnswer(Model):
    """The micro-batch sizes at the memory limit, and the linear fit of peak memory; null if unknown."""

    largest_that_fits: int
    smallest_that_does_not: int | None
    fixed_bytes: float | None
    bytes_per_sample: float | None


class NoiseFigures(Model):
    """The gradient noise scale in samples with the 95 % interval; if ``scale`` is null, ``low`` is a lower bound."""

    scale: float | None
    low: float
    high: float | None
    adam_scale: float | None
    adam_low: float | None
    adam_high: float | None
    passes: int


class NoiseAnswer(NoiseFigures):
    """The gradient noise scale at one batch size, from a probe at ``step``, from ``trials``, or from one ``trial``."""

    batch_size: int
    step: int | None = None
    trial: int | None = None
    trials: int | None = None
    far_from_target: str | None = None


class BatchNoise(NoiseFigures):
    """The gradient noise scale near the target, from gradient moments averaged over ``trials``.

    With three trials or more, differences between trials give the interval.
    """

    trials: int


class Measured(Model):
    """The measured step time, memory and gradient noise scale; null if unknown."""

    step_time: StepTimeAnswer | None = None
    memory: MemoryAnswer | None = None
    noise_scale: NoiseAnswer | None = None


def measured(
    probes: Collection[ProbeRecord],
    uses: Sequence[MemoryUse],
    memory: MemoryBoundary,
    noise: Sequence[NoiseMeasurement],
    runs: Sequence[TrialRecord],
    by_batch: Mapping[int, BatchNoise] = MappingProxyType({}),
) -> Measured:
    """Collect step time, memory and noise scale.

    ``noise`` has the newest measurement first. ``runs`` are the optimum's runs. The first known source gives the noise
    scale: a probe near the target, pooled trials, one trial, or another probe.
    """
    return Measured(
        step_time=_step_time(probes), memory=_memory(uses, memory), noise_scale=_noise(noise, runs, by_batch)
    )


def _step_time(probes: Collection[ProbeRecord]) -> StepTimeAnswer | None:
    fit, knee = fit_step_time(list(probes)), throughput_knee(list(probes))
    if fit is None or knee is None:
        return None
    return StepTimeAnswer(
        alpha_s=fit.alpha_seconds, beta_s=fit.beta_seconds, max_residual=fit.max_residual, throughput_knee=knee
    )


def _memory(uses: Sequence[MemoryUse], memory: MemoryBoundary) -> MemoryAnswer | None:
    if memory.fits is None:
        return None
    fit = fit_memory(uses)
    return MemoryAnswer(
        largest_that_fits=memory.fits,
        smallest_that_does_not=memory.too_large,
        fixed_bytes=None if fit is None else fit.fixed_bytes,
        bytes_per_sample=None if fit is None else fit.bytes_per_sample,
    )


def noise_of_batches(trials: Iterable[TrialRecord]) -> dict[int, BatchNoise]:
    ended = (one for one in trials if one.state.has_result and _noise_of(one).passes)
    found = grouped((one.configuration.batch_size, one) for one in ended)
    return {size: one for size, here in sorted(found.items()) if (one := _noise_of_batch(here)) is not None}


def _noise_of_batch(trials: Sequence[TrialRecord]) -> BatchNoise | None:
    together = pooled([_noise_of(trial) for trial in trials])
    if together.low is not None:
        return BatchNoise(**_figures(together), trials=sum(_noise_of(trial).trace is not None for trial in trials))
    alone = _with_most_passes(trials)
    return None if alone is None else BatchNoise(**_figures(_noise_of(alone)), trials=1)


def _noise(
    probed: Sequence[NoiseMeasurement], runs: Sequence[TrialRecord], by_batch: Mapping[int, BatchNoise]
) -> NoiseAnswer | None:
    known = [one for one in probed if one.noise.low is not None]
    near = next((one for one in known if one.reason is None), None)
    if near is None and runs:
        size = runs[0].configuration.batch_size
        together, alone = by_batch.get(size), _with_most_passes(runs)
        if together is not None and together.trials > 1:
            return NoiseAnswer(batch_size=size, **together.model_dump())
        if alone is not None:
            return NoiseAnswer(batch_size=size, **_figures(_noise_of(alone)), trial=alone.number)
    probe = near or next(iter(known), None)
    if probe is None:
        return None
    return NoiseAnswer(
        batch_size=probe.batch_size, **_figures(probe.noise), step=probe.step, far_from_target=probe.reason
    )


def _with_most_passes(trials: Iterable[TrialRecord]) -> TrialRecord | None:
    known = [trial for trial in trials if _noise_of(trial).low is not None]
    return max(known, key=lambda trial: _noise_of(trial).passes or 0, default=None)


def _noise_of(run: TrialRecord) -> GradientNoise:
    return run.outcome.noise if run.outcome is not None else GradientNoise()


def _figures(noise: GradientNoise) -> dict[str, Any]:
    return {**{name: getattr(noise, name) for name in NoiseFigures.model_fields}, "passes": noise.passes or 0}


def about_devices(trials: Iterable[TrialRecord]) -> Iterator[tuple[str, str]]:
    """Yield a notice for each device with steps at least `FLAT_RATIO` times as long as on other devices.

    The notice compares medians over uncontended trials of equal `kind_of`. The device needs `FEWEST_TRIALS` trials.
    """
    ended = [(trial.configuration, trial.outcome) for trial in trials if trial.outcome is not None]
    paces = grouped(
        (kind_of(configuration), (one.device_uuid, one.train_seconds / one.steps))
        for configuration, one in ended
        if one.device_uuid is not None and not one.contended and one.steps and one.train_seconds
    )
    ratios: dict[str, list[float]] = defaultdict(list)
    counts: Counter[str] = Counter()
    for of_kind in paces.values():
        by_device = grouped(of_kind)
        medians = {device: median(seconds) for device, seconds in by_device.items()}
        for device in medians if len(medians) > 1 else ():
            ratios[device].append(
                medians[device] / median(seconds for other, seconds in medians.items() if other != device)
            )
            counts[device] += len(by_device[device])
    for device, found in sorted(ratios.items()):
        if counts[device] >= FEWEST_TRIALS and median(found) >= FLAT_RATIO:
            yield (
                "device_slower",
                f"steps on device {device} take {median(found):.3g} times as long as on other devices; set "
                f"CUDA_VISIBLE_DEVICES to leave device {device} out",
            )
