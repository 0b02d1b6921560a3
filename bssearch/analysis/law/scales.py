"""The law of steps across scales: models of N parameters, trained on D samples."""

# log S(B; D, N) = s + q·log D + r·log N + log(1 + B_crit / B), with log B_crit = b + p·log D, and r = 0 if N follows D.
# B_crit grows with the data, hardly with the model (Zhang et al. 2024, arXiv 2410.21676; Bergsma et al. 2025, arXiv
# 2505.13738). Batch sizes need not be optimal (Schaipp 2026, arXiv 2607.01487).

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bssearch.analysis.answer import Answer
from bssearch.analysis.law.batch_model import StepTimeFit, around
from bssearch.analysis.law.beyond import BEYOND_SIZES, TAILS, nearest_law
from bssearch.analysis.posterior import Numbers
from bssearch.analysis.shape import Interval, LargerPlan, LeftOutScale, Notice, ScaleCheck, ScaleOfLaw
from bssearch.errors import require
from bssearch.records import FLAT_RATIO, half_life, learning_rate_factor, rule_of_optimizer, student_t
from bssearch.records.text import number, plural
from bssearch.spec.model import FEWEST_SCALES

FEWEST_BATCHES = 3  # of each scale: two for S_min and B_crit, and one for their errors
NEAR_LINE = math.log(2)  # N varies apart from D if N departs by more than a factor 2 from a power of D
B_CRITS = 121
POWERS = np.linspace(-0.5, 2.0, 101)
NEWTON_STEPS = 5
RIDGE = 1e-9
DRAWS = 500
TINY = -60.0  # log of a batch size far below B_crit, where log steps are linear in log B_crit
BRANCH_WEIGHT = 0.25  # error of steps (5 %) / error of a batch size between powers of two (20 %)


@dataclass(frozen=True, slots=True)
class ScaledSteps:
    """Steps to the target with N parameters and D samples."""

    parameters: float
    samples: float
    batch_size: int
    steps: float


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """A local critical batch size, found by branches after D samples."""

    samples: float
    batch_size: float


class ScalingLaw:
    """The joint law of ``points`` and ``branches``, with refits to bootstrap samples."""

    # Each draw adds resampled residuals to the fitted steps: divided by √(1 − leverage), and by the random root of χ² /
    # freedom, because few points determine the noise badly. Local critical batch sizes of branches are c·B_crit with a
    # free c: log steps at a tiny batch size, with a level and a weight of their own.

    def __init__(self, points: Sequence[ScaledSteps], branches: Sequence[LocalBatch] = ()) -> None:
        table = np.log([[one.samples, one.parameters, one.batch_size, one.steps] for one in points])
        self.middle: Numbers = table[:, :2].mean(axis=0)
        self.data, models = (table[:, :2] - self.middle).T
        self.sizes, logs = table[:, 2], table[:, 3]
        self.model_power = float(self.data @ models / (self.data @ self.data))
        self.columns = 3 if self._is_apart(self.data, models).any() else 2
        weights = np.repeat([1.0, BRANCH_WEIGHT], [len(points), len(branches)])
        terms = np.zeros((len(weights), self.columns + 1))
        terms[: len(points), :-1], terms[len(points) :, -1] = self._terms(self.data, models), BRANCH_WEIGHT
        self.data = np.append(self.data, np.log([one.samples for one in branches]) - self.middle[0])
        self.sizes = np.append(self.sizes, np.full(len(branches), TINY))
        logs = np.append(logs, np.log([one.batch_size for one in branches]) - TINY)
        self.ends = table[:, 2].min() - BEYOND_SIZES, table[:, 2].max() + BEYOND_SIZES
        inverse = np.linalg.pinv(terms)
        free = np.eye(len(weights)) - terms @ inverse
        self.rest = weights[:, None] * free
        self.branches = len(branches)
        self.freedom = len(weights) - self.columns - 2 - bool(branches)
        own = self._nearest(logs[None], POWERS)
        residuals, slopes = self._residuals(logs[None], own), self._slopes(own)[0]
        spare = np.diag(free) - (slopes * np.linalg.lstsq(slopes @ slopes.T, slopes, rcond=None)[0]).sum(axis=0)
        noise = residuals[0] / np.sqrt(np.maximum(spare, RIDGE))
        constant = self._residuals(logs[None], self._nearest(logs[None], np.zeros(1)))
        self.is_shown = bool(own[0, 1] > 0) and bool(
            (constant**2).sum() / (residuals**2).sum() - 1 > student_t(self.freedom) ** 2 / self.freedom
        )
        rng = np.random.default_rng(0)
        wide = np.sqrt(self.freedom / rng.chisquare(self.freedom, (DRAWS, 1)))
        drawn = logs + (wide * rng.choice(noise - noise.mean(), (DRAWS, len(weights))) - residuals) / weights
        self.found = np.concatenate([own, self._nearest(drawn, POWERS)])
        levels = np.concatenate([logs[None], drawn]) - self._shape(self.found, self.data, self.sizes)
        self.linear = (weights * levels @ inverse.T)[:, :-1]

    @property
    def power(self) -> Interval:
        """The exponent p of B_crit ∝ D^p."""
        return interval(self.found[:, 1])

    def knows(self, parameters: float, samples: float) -> bool:
        """False if N is a power of D in the fitted scales, but not at ``parameters`` and ``samples``."""
        data, model = np.log([samples, parameters]) - self.middle
        return self.columns == 3 or not self._is_apart(data, model)

    def b_crit(self, samples: float) -> Interval:
        return interval(np.exp(self.found[:, 0] + self.found[:, 1] * (math.log(samples) - self.middle[0])))

    def steps(self, parameters: float, samples: float, batch_sizes: Sequence[float]) -> Numbers:
        """Return the steps (1 + `DRAWS`, batch sizes) at N and D; the first row is the estimate."""
        data, model = np.log([samples, parameters]) - self.middle
        level = self.linear @ self._terms(np.array([data]), np.array([model]))[0]
        sizes = np.log(batch_sizes)
        return np.asarray(np.exp(level[:, None] + self._shape(self.found, np.full(len(sizes), data), sizes)))

    def _is_apart(self, data: Numbers, models: Numbers) -> NDArray[np.bool_]:
        return np.abs(models - self.model_power * data) > NEAR_LINE

    def _terms(self, data: Numbers, models: Numbers) -> Numbers:
        return np.column_stack([np.ones(len(data)), data, models][: self.columns])

    @staticmethod
    def _shape(found: Numbers, data: Numbers, sizes: Numbers) -> Numbers:
        return np.asarray(np.logaddexp(0, found[:, :1] + found[:, 1:] * data - sizes))

    def _residuals(self, logs: Numbers, found: Numbers) -> Numbers:
        return np.asarray((logs - self._shape(found, self.data, self.sizes)) @ self.rest)

    def _slopes(self, found: Numbers) -> Numbers:
        # Of the residuals by log B_crit and p: (n, 2, points)
        share = 1 - np.exp(-self._shape(found, self.data, self.sizes))
        return np.asarray(np.stack([share, share * self.data], axis=1) @ self.rest)

    def _nearest(self, logs: Numbers, powers: Numbers) -> Numbers:
        # Least-squares (log B_crit at the middle D, p) of each row of log steps; a grid, then Gauss-Newton steps
        b_crits = np.linspace(*self.ends, B_CRITS)
        grid = np.stack(np.meshgrid(b_crits, powers), axis=-1).reshape(-1, 2)
        free = self._shape(grid, self.data, self.sizes) @ self.rest
        found: Numbers = grid[((free**2).sum(axis=1) - 2 * logs @ self.rest @ free.T).argmin(axis=1)]
        count = min(2, len(powers))  # a single power stays
        most = np.array([b_crits[1] - b_crits[0], POWERS[1] - POWERS[0]])[:count]
        for _ in range(NEWTON_STEPS):
            slopes = self._slopes(found)[:, :count]
            squares = slopes @ slopes.transpose(0, 2, 1) + RIDGE * np.eye(count)
            change = np.linalg.solve(squares, slopes @ self._residuals(logs, found)[..., None])[..., 0]
            found[:, :count] += np.clip(change, -most, most)
        return found


def interval(drawn: Numbers) -> Interval:
    """Return the 90 % interval of draws; the first draw is the estimate."""
    low, high = np.quantile(drawn[1:], TAILS)
    return Interval(value=float(drawn[0]), low=float(low), high=float(high))


FARTHEST = 30.0  # multiple of the largest samples; `tests/benchmarks/scales.py` tests this multiple
SIZES = 2.0 ** np.arange(24)  # batch sizes to choose from
CHECKED_SHARES = (0.125, 0.25, 0.5)  # of the samples, at which checkpoints tell whether B_crit grows as predicted


@dataclass(frozen=True, eq=False)
class Scale:
    """The answer of a study at N and D, with steps to the target by batch size."""

    parameters: float
    samples: float
    answer: Answer
    steps: Mapping[int, float]

    @property
    def points(self) -> list[ScaledSteps]:
        """Steps of the tuned batch sizes, or of all batch sizes if too few are tuned."""
        tuned = [row.batch_size for row in self.answer.batches if not row.untuned and row.batch_size in self.steps]
        sizes = tuned if len(tuned) >= FEWEST_BATCHES else sorted(self.steps)
        return [ScaledSteps(self.parameters, self.samples, size, self.steps[size]) for size in sizes]

    @property
    def timescale(self) -> float | None:
        """AdamW's τ = B/(ηλD) of the best run (Wang & Aitchison 2024); None without AdamW, η or λ."""
        best = self.answer.optimal
        rate, decay = best.parameters.get("learning_rate"), best.parameters.get("weight_decay")
        if best.parameters.get("optimizer") != "adamw" or not rate or not decay:
            return None
        return best.batch_size / (float(rate) * float(decay) * self.samples)


def plan_larger_run(
    scales: Sequence[Scale],
    parameters: float,
    samples: float,
    step_time: StepTimeFit | None,
    branches: Sequence[LocalBatch] = (),
) -> LargerPlan:
    """Plan a run too large to search; raise `UsageError` if the scales allow no prediction at ``samples``."""
    scales = sorted(scales, key=lambda one: one.samples)
    largest = scales[-1]
    different = len({one.samples for one in scales})
    require(
        different >= FEWEST_SCALES,
        f"the studies have {plural(different, 'different number')} of samples; the law needs {FEWEST_SCALES}",
        hint="search at more scales; see `scales` in `bssearch guide planning`",
    )
    for one in scales:
        require(
            len(one.points) >= FEWEST_BATCHES,
            f"study {one.answer.study!r} reaches the target at {plural(len(one.points), 'batch size')}; the law needs "
            f"{FEWEST_BATCHES}",
            hint=f"search more batch sizes of study {one.answer.study!r}",
        )
    require(
        samples >= largest.samples,
        f"samples = {samples:g} must be >= {largest.samples:g}, the samples of study {largest.answer.study!r}",
    )
    law = ScalingLaw([point for one in scales for point in one.points], branches)
    require(
        law.is_shown,
        f"a B_crit that grows with the samples fits no better than a constant B_crit (power {law.power.value:.2g}), "
        f"so the studies allow no prediction",
        hint="search at scales that are farther apart, or confirm more runs",
    )
    return _larger(scales, law, parameters, samples, step_time)


def _larger(
    scales: Sequence[Scale], law: ScalingLaw, parameters: float, samples: float, step_time: StepTimeFit | None
) -> LargerPlan:
    steps, b_crit = law.steps(parameters, samples, list(SIZES)), law.b_crit(samples)
    seconds = None if step_time is None else step_time.alpha_seconds + step_time.beta_seconds * SIZES
    if seconds is None:
        place, flat = int(np.searchsorted(SIZES, b_crit.value, side="right")) - 1, None
    else:
        times = steps[0] * seconds
        place = int(times.argmin())
        flat = around(place, times <= FLAT_RATIO * times.min())
    place = max(0, place)
    return LargerPlan(
        parameters=parameters,
        samples=samples,
        power=law.power,
        b_crit=b_crit,
        batch_size=int(SIZES[place]),
        flat_range=None if flat is None else [int(SIZES[flat[0]]), int(SIZES[flat[1]])],
        steps=interval(steps[:, place]),
        time_s=None if seconds is None else interval(steps[:, place] * seconds[place]),
        **_carried(scales, parameters, samples, SIZES[place]),
        left_out=left_out(scales),
        scales=[
            ScaleOfLaw(
                study=one.answer.study,
                parameters=one.parameters,
                samples=one.samples,
                b_crit=_own_b_crit(one),
                b_crit_by_law=law.b_crit(one.samples),
                timescale=one.timescale,
            )
            for one in scales
        ],
        checks=[ScaleCheck(samples=share * samples, b_crit=law.b_crit(share * samples)) for share in CHECKED_SHARES],
        notes=[
            Notice(code=code, message=text)
            for code, text in _notes(scales, law, parameters, samples, step_time is not None)
        ],
    )


def left_out(scales: Sequence[Scale]) -> LeftOutScale:
    *others, largest = scales
    law, points = ScalingLaw([point for one in others for point in one.points]), largest.points
    predicted = law.steps(largest.parameters, largest.samples, [one.batch_size for one in points])[0]
    return LeftOutScale(
        study=largest.answer.study,
        b_crit=law.b_crit(largest.samples),
        b_crit_measured=_own_b_crit(largest),
        steps_ratio=float(np.exp(np.mean(np.log(predicted / [one.steps for one in points])))),
    )


def _own_b_crit(scale: Scale) -> float:
    sizes = np.array([float(one.batch_size) for one in scale.points])
    logs = np.log([[one.steps * one.batch_size for one in scale.points]])
    return float(np.exp(nearest_law(logs, sizes)[0][0]))


def _carried(scales: Sequence[Scale], parameters: float, samples: float, batch_size: float) -> dict[str, Any]:
    # From the best run of the largest scale: the rate by the optimizer's rule, the decay by τ, β₂ by half-life. τ is
    # a power of samples per parameter (Bergsma et al. 2025, arXiv 2505.13738), constant if these hardly vary.
    best = scales[-1].answer.optimal
    optimizer, decay = str(best.parameters.get("optimizer")), best.parameters.get("weight_decay")
    ratio, beta2 = batch_size / best.batch_size, best.parameters.get("beta2")
    factor = learning_rate_factor(rule_of_optimizer(optimizer), int(batch_size), best.batch_size)
    rate = float(best.parameters["learning_rate"] or 0.0) * factor
    known = [(math.log(one.samples / one.parameters), math.log(one.timescale)) for one in scales if one.timescale]
    timescale = None
    if len(known) == len(scales):
        shares, logs = np.array(known).T
        slope, level = np.polyfit(shares, logs, 1) if np.ptp(shares) > NEAR_LINE else (0.0, logs.mean())
        timescale = math.exp(level + slope * math.log(samples / parameters))
        decay = batch_size / (rate * timescale * samples)
    longer = samples / scales[-1].samples  # warmup and decay keep their shares of the samples
    return {
        "learning_rate": rate,
        "weight_decay": None if decay is None else float(decay),
        "beta2": None if beta2 is None else half_life(float(beta2), ratio),
        "beta2_half_life_samples": None if not beta2 else best.batch_size * math.log(0.5) / math.log(float(beta2)),
        "timescale": timescale,
        "schedule": {
            name: float(value) * longer if name in ("warmup_epochs", "horizon_samples") else value
            for name in ("schedule", "warmup_epochs", "horizon_samples", "decay_share")
            if (value := best.parameters.get(name)) is not None
        },
    }


def _notes(
    scales: Sequence[Scale], law: ScalingLaw, parameters: float, samples: float, is_timed: bool
) -> Iterator[tuple[str, str]]:
    largest = scales[-1]
    yield "predicted", f"the plan is a prediction; no trial ran with {parameters:g} parameters and {samples:g} samples"
    first, last = (law.b_crit(share * samples).value for share in (CHECKED_SHARES[0], CHECKED_SHARES[-1]))
    yield (
        "check",
        f"run `bssearch probe branch` from checkpoints after {number(CHECKED_SHARES[0] * samples)} and "
        f"{number(CHECKED_SHARES[-1] * samples)} samples; unless the local critical batch size grows by about "
        f"{last / first:.2g} ×, change the batch size",
    )
    if samples > FARTHEST * largest.samples:
        yield (
            "far",
            f"the run has {samples / largest.samples:.3g} × the samples of the largest study, but the intervals are "
            f"tested only up to {FARTHEST:g} ×",
        )
    if not law.knows(parameters, samples):
        yield (
            "model",
            "the planned run's parameters depart from the studies' trend over samples; the law uses only samples",
        )
    if law.branches:
        found = plural(law.branches, "local critical batch size")
        yield "branches", f"the law also uses {found} of `bssearch probe branch`"
    if not is_timed:
        yield (
            "no_times",
            "without step times, the batch size is the power of two below B_crit; give the planned model's step_times",
        )
