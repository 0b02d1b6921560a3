"""What limits a quick answer: when it is not to be trusted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from bssearch.analysis.answer import Notice
from bssearch.analysis.objectives.time_to_target import TimeToTarget
from bssearch.records import GradientNoise, NoiseMeasurement, Target, TrialRecord
from bssearch.space.usual_rates import FINE_TUNING
from bssearch.spec import StudySpec

MANY_EPOCHS = 5.0
"""Epochs to the target from which on the data are seen so often that samples to the target mislead: a choice."""

AFTER_SEARCH = Notice(
    code="after_search",
    message="the study's search has ended, and this rests on its trials too: it is not stored, and no promise to keep",
)
"""What a quick answer is told that comes after the search."""

PROXY = "1.5 to 8 times off the critical batch size"
"""What the noise scale is known to be, by measurements at several models."""


def about_noise(found: NoiseMeasurement) -> Iterator[Notice]:
    """Yield what is wrong with a noise scale that was measured."""
    if noise_scale_of(found.noise) is None:
        low = found.noise.adam_low or found.noise.low
        bound = "the gradient could not be told from its noise" if low is None else f"it is above {low:.3g} samples"
        yield Notice(code="noise_not_measured", message=f"no gradient noise scale: {bound}, and no more is known")
    elif found.reason is not None:
        yield Notice(
            code="noise_moving",
            message=f"the noise scale was not measured near the target, and grows on the way to it: {found.reason}",
        )


def noise_scale_of(noise: GradientNoise) -> float | None:
    """Return the noise scale as the optimizer sees it, None where its interval reaches 0 or infinity."""
    preconditioned = (noise.adam_scale, noise.adam_low, noise.adam_high)
    for scale, low, high in (preconditioned, (noise.scale, noise.low, noise.high)):
        if scale and low and high and 0 < low <= scale <= high < math.inf:
            return scale
    return None


def about_target(target: Target, spec: StudySpec) -> Iterator[Notice]:
    """Yield that runs are compared at a part of the way, where the default did not get to the study's target."""
    if target != spec.record_target:
        yield Notice(
            code="easier_target",
            message=f"the default did not reach {spec.target.metric} {spec.target.value:g} in the time: runs are "
            f"compared at {target.value:.4g}, and the critical batch size grows on the way to the target",
        )


def about_runs(runs: Sequence[TrialRecord], noise_scale: float | None) -> Iterator[Notice]:
    """Yield that the runs tell of one batch size alone, or of none."""
    sizes = {run.configuration.batch_size for run in runs if run.outcome and run.outcome.steps_to_target}
    if len(sizes) > 1:
        return
    rests = "no noise scale is known either" if noise_scale is None else "the answer rests on the noise scale alone"
    yield Notice(
        code="one_batch_size",
        message=f"only one batch size came to where runs are compared; {rests}"
        + ("" if noise_scale is None else f", which is {PROXY}"),
    )


def about_training(
    spec: StudySpec, preset: str | None, samples_to_target: float | None, train_samples: int | None
) -> Iterator[Notice]:
    """Yield what the training is, where it is not what a quick answer is made for: the time to a target from scratch.

    ``preset`` is what completed the spec. ``samples_to_target`` are those of the default, ``train_samples`` those of an
    epoch; None where they are not known.
    """
    if spec.objective != TimeToTarget.name:
        yield Notice(
            code="other_objective",
            message=f"the study's objective is {spec.objective}; a quick answer is of the time to the target",
        )
    parameters = spec.default_configuration.parameters
    horizon = parameters.get("horizon_samples")
    if horizon is not None:
        yield Notice(
            code="fixed_horizon",
            message=f"the default's {parameters['schedule']} schedule ends after {horizon:g} samples at every batch "
            "size: a fixed number of epochs asks which batch size ends best, not which is soonest at a target",
        )
    if preset == FINE_TUNING:
        yield Notice(
            code="fine_tuning",
            message="a fine-tuning: what is forgotten at a batch size, and how it generalises, is not measured here",
        )
    if samples_to_target is not None and train_samples and samples_to_target > MANY_EPOCHS * train_samples:
        yield Notice(
            code="many_epochs",
            message=f"the default needs {samples_to_target / train_samples:.1f} epochs: the law of the critical batch "
            "size holds for samples that are new, and overfitting depends on the batch size",
        )
