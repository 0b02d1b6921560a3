"""Probes of step times, memory and gradient noise.

A micro-batch *fits* if it leaves the reserve of `bssearch.training.probes` free, and *fails* if it exhausts all memory.
Sizes in between are *marginal*, because the memory of equal processes differs slightly.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, Protocol

from bssearch.analysis.law.batch_model import MemoryFit, StepTimeFit, fit_memory, fit_step_time, throughput_knee
from bssearch.analysis.objectives import least_of
from bssearch.commands.launch import Launch
from bssearch.commands.opening import OpenStudy, opened
from bssearch.errors import InterruptedRunError, LaunchError, require
from bssearch.executors.base import Executor
from bssearch.records import (
    Configuration,
    MemoryRequest,
    MemoryUse,
    NoiseMeasurement,
    NoiseRequest,
    Observation,
    Phase,
    ProbeRecord,
    TrialEnded,
    TrialObserved,
    TrialOutcome,
    TrialPlan,
    TrialRequest,
    TrialState,
    TrialStop,
)
from bssearch.records.text import noise_scale, percent, plural
from bssearch.registry import Option
from bssearch.search.calibration import default_at, measure_step_time_at, nothing_fits
from bssearch.search.driver import Interrupts
from bssearch.search.history import trial_seed
from bssearch.spec import StudySpec
from bssearch.spec.space import UNKNOWN, MemoryBoundary

POLL_SECONDS = 0.2  # poll interval for Ctrl-C


def step_time_of_default(
    spec: StudySpec, executor: Executor, batch_size: int, memory: MemoryBoundary = UNKNOWN
) -> ProbeRecord:
    """Time the default configuration at a batch size; raise `LaunchError` if no micro-batch fits."""
    too_large: list[MemoryUse] = []
    probe = measure_step_time_at(spec, executor, batch_size, memory, too_large.append)
    if probe is None:
        tried = ", ".join(str(use.micro_batch_size) for use in reversed(too_large))
        raise LaunchError(
            f"batch size {batch_size} does not fit into memory"
            + (f": micro-batches of {tried} {spec.training.batch_unit} ran out of memory" if tried else ""),
            hint="use a smaller model, smaller evaluation batches, or a device with more memory (see "
            "executor.memory_limit_gib)",
        )
    return probe


def run_default(
    spec: StudySpec,
    executor: Executor,
    index: int,
    *,
    probe: ProbeRecord,
    limit: float,
    stop_at_target: bool,
    configuration: Configuration | None = None,
) -> tuple[TrialOutcome, list[Observation]]:
    """Run the default, or ``configuration``, with the ``index``-th seed; return the outcome and the curve.

    ``limit`` is in train seconds. Unless ``stop_at_target``, the run continues past the target. Raises `LaunchError` if
    the run fails or memory runs out.
    """
    assert probe.eval_every_steps is not None, "the default was timed"
    full = stop_at_target and limit >= spec.budget.trial_train_seconds
    run = (configuration or spec.default_configuration).in_micro_batches(probe.micro_batch_size)
    outcome, curve = run_request(
        executor,
        TrialRequest(
            number=index + 1,
            plan=TrialPlan(
                configuration=run,
                sampled=None,
                phase=Phase.PROBE,
                seed=trial_seed(spec.seed, Phase.PROBE, index),
                train_seconds_limit=limit,
                limit_state=TrialState.EXHAUSTED if full else TrialState.CAPPED,
                eval_every_steps=probe.eval_every_steps,
                stop_at_target=stop_at_target,
                threads=spec.executor.threads,
            ),
            target=spec.record_target,
        ),
    )
    require(
        outcome.state not in {TrialState.FAILED, TrialState.OOM},
        f"the default configuration at batch {run.batch_size} fails: {outcome.reason}",
        hint="correct the workload, or the default in the spec",
        error=LaunchError,
    )
    return outcome, curve


def run_request(
    executor: Executor, request: TrialRequest, *, until_step: int | None = None
) -> tuple[TrialOutcome, list[Observation]]:
    """Run one trial up to ``until_step``; return its outcome and curve, or raise `InterruptedRunError`."""
    curve: list[Observation] = []
    try:
        with Interrupts(on_second=executor.kill) as interrupts:
            executor.submit(request)
            while True:
                if interrupts.count:
                    executor.stop(TrialStop(request.number, TrialState.CANCELLED, "stopped by the user"))
                for event in executor.events(timeout=POLL_SECONDS):
                    match event:
                        case TrialObserved(_, observation):
                            curve.append(observation)
                            if until_step is not None and observation.step >= until_step:
                                executor.stop(TrialStop(request.number, TrialState.CANCELLED, "the last step is done"))
                        case TrialEnded(_, outcome):
                            if interrupts.count:
                                raise InterruptedRunError("the user stopped the trial; bssearch drops the results")
                            return outcome, curve
    except KeyboardInterrupt:
        raise InterruptedRunError("the user killed the trial; bssearch drops the results") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """A probe's result: a JSON ``document`` and ``rows`` for programs, and a table and sentences for people."""

    document: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    table: Sequence[Mapping[str, Any]] = ()
    columns: Sequence[str] = ()
    sentences: Sequence[str] = ()


class Probe(Protocol):
    """A registered function that measures a study and stores the measurements.

    The function's docstring is the command's help. Keyword-only parameters with an `Option` are the command's options.
    """

    def __call__(self, spec: StudySpec, launch: Launch) -> ProbeReport: ...


SECONDS_LIMIT = 5.0  # default limit for timing one batch size


def step_time(
    spec: StudySpec,
    launch: Launch,
    *,
    seconds: Annotated[float, Option("Maximum seconds of timing per batch size.", min=0.1)] = SECONDS_LIMIT,
) -> ProbeReport:
    """Time optimizer steps at every batch size, one size at a time.

    Also fit a line: step seconds = α + β × batch size.
    """
    with opened(spec, launch) as study:
        probes = probe_step_times(study, seconds)
    fit, knee = fit_step_time(probes), throughput_knee(probes)
    rows = [asdict(probe) for probe in probes]
    return ProbeReport(
        document={
            "study": spec.name,
            "probes": rows,
            "fit": None if fit is None else asdict(fit),
            "throughput_knee": knee,
        },
        rows=rows,
        table=[_step_time_row(probe, fit) for probe in probes],
        columns=[
            "batch",
            "ms/step",
            "ms_low",
            "ms_high",
            "steps",
            "samples/s",
            *["host-bound"] * any(probe.host_bound_share is not None for probe in probes),
            "remark",
        ],
        sentences=_step_time_sentences(fit, knee),
    )


def _step_time_sentences(fit: StepTimeFit | None, knee: int | None) -> Sequence[str]:
    if knee is None:
        return [
            "No batch size fits into memory; use a smaller model or more memory, or raise executor.memory_limit_gib."
        ]
    smallest = f"Batch {knee} is the smallest size with at least 90 % of the highest throughput."
    if fit is None:
        return [smallest]
    line = (
        f"A step takes {1e3 * fit.alpha_seconds:.3g} ms + {1e3 * fit.beta_seconds:.3g} ms a sample (largest error "
        f"{percent(fit.max_residual, 1)}). Batch {fit.alpha_seconds / fit.beta_seconds:.3g} has half of the full "
        "throughput."
    )
    return [line, smallest]


def _step_time_row(probe: ProbeRecord, fit: StepTimeFit | None) -> dict[str, Any]:
    def ms(seconds: float | None) -> float | None:
        return None if seconds is None else 1000 * seconds

    remarks = [] if probe.settled else ["the timing ended before a precision of 2 %"]
    if probe.micro_batch_size < probe.batch_size:
        remarks.append(f"in micro-batches of {probe.micro_batch_size}")
        if fit is not None:
            predicted = fit.predict(probe.batch_size, probe.micro_batch_size, probe.update_seconds or 0.0)
            remarks.append(f"{1000 * predicted:.4g} ms expected from the micro-batch's step time")
    if probe.contended:
        remarks.append(f"contended: {probe.reason}")
    return {
        "batch": probe.batch_size,
        "ms/step": ms(probe.step_seconds),
        "ms_low": ms(probe.step_seconds_low),
        "ms_high": ms(probe.step_seconds_high),
        "steps": probe.steps_timed,
        "samples/s": None if probe.step_seconds is None else probe.batch_size / probe.step_seconds,
        "host-bound": None if probe.host_bound_share is None else percent(probe.host_bound_share),
        "remark": "; ".join(remarks) or None,
    }


def probe_step_times(study: OpenStudy, seconds_limit: float = SECONDS_LIMIT) -> list[ProbeRecord]:
    """Time the default configuration at every batch size that fits, in ascending order.

    A size's timing usually ends at a precision of 2 %, or after ``seconds_limit``. The result pools a size's timings.
    """
    spec, store, environment = study.spec, study.store, study.environment

    visit: int | None = None
    save = partial(store.probes.save_memory, spec.name, environment)
    for size in spec.batch_sizes:
        probe = measure_step_time_at(
            spec, study.executor, size, store.probes.memory_boundary(spec.name, environment), save, seconds_limit
        )
        if probe is not None:
            visit = store.probes.add_step_time(spec.name, environment, probe, visit)
            study.listener.note(f"batch {probe.batch_size}: timed {plural(probe.steps_timed, 'step')}")
    return list(store.probes.by_batch_size(spec.name, environment).values())


BRACKET = 1.05  # largest final ratio of the smallest failing to the largest fitting size

FINE = 1.01  # the same ratio below and above the marginal sizes, which span less than `BRACKET`

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProbe:
    """Micro-batch sizes that ran, and the boundary between fitting and failing sizes."""

    uses: tuple[MemoryUse, ...]
    largest_that_fits: int
    smallest_that_does_not: int | None
    ceiling: int  # training samples, or the largest batch size if unknown
    fit: MemoryFit | None
    marginal: tuple[MemoryUse, ...] = ()  # not stored

    @property
    def whole_training_part_fits(self) -> bool:
        return self.largest_that_fits >= self.ceiling


def memory(
    spec: StudySpec,
    launch: Launch,
    *,
    limit_gib: Annotated[
        float | None,
        Option(
            "Simulate a device with this memory; on the CPU, limit the process's data segment.",
            min=0.001,
            metavar="GIB",
        ),
    ] = None,
) -> ProbeReport:
    """Find the largest micro-batch that fits; each size gets its own process."""
    with opened(spec, replace(launch, pretended_gib=limit_gib)) as study:
        found = probe_memory(study)
    return ProbeReport(
        document={"study": spec.name, "limit_gib": limit_gib, **asdict(found)},
        rows=[asdict(use) for use in found.uses],
        table=[
            {
                "micro_batch": use.micro_batch_size,
                "fits": "yes" if use.fits else "marginal" if use in found.marginal else "no",
                "peak_gib": None if use.peak_memory_bytes is None else use.peak_memory_bytes / GIB,
                "reason": use.reason,
            }
            for use in sorted([*found.uses, *found.marginal], key=lambda use: use.micro_batch_size)
        ],
        columns=("micro_batch", "fits", "peak_gib", "reason"),
        sentences=list(memory_sentences(found, is_cpu=study.environment.device_type == "cpu")),
    )


def memory_sentences(found: MemoryProbe, *, is_cpu: bool) -> Iterator[str]:
    above = found.smallest_that_does_not
    if found.whole_training_part_fits:
        yield f"A micro-batch of {found.ceiling} samples, the largest size to try, fits."
    else:
        rest = "no size failed" if above is None else f"{above} does not fit"
        yield f"The largest micro-batch that fits is {found.largest_that_fits}; {rest}."
    if found.marginal:
        yield "Marginal sizes do not count as fitting, because they leave no memory reserve for a longer training."
    if found.fit is not None:
        yield (
            f"Peak memory = {found.fit.fixed_bytes / GIB:.3g} GiB + {found.fit.bytes_per_sample / MIB:.3g} MiB "
            f"a sample (largest error {percent(found.fit.largest_residual, 1)})."
        )
    if is_cpu:
        yield "The peak is the process's resident memory, including all libraries; --limit-gib limits the data segment."


def probe_memory(study: OpenStudy) -> MemoryProbe:
    """Find and store the largest micro-batch that fits; skip sizes that already ran on an equal device.

    Raises `LaunchError` if no size fits.
    """
    spec, executor, store, environment = study.spec, study.executor, study.store, study.environment

    def tell(use: MemoryUse) -> None:
        study.listener.note(f"micro-batch {use.micro_batch_size}: {'fits' if use.fits else use.reason}")

    ceiling = executor.describe().train_samples or spec.batch_sizes[-1]
    uses = store.probes.memory(spec.name, environment)
    marginal: list[MemoryUse] = []
    smallest = min(spec.batch_sizes)
    while (
        size := next_size(uses, smallest=smallest, ceiling=ceiling, marginal=[one.micro_batch_size for one in marginal])
    ) is not None:
        request = MemoryRequest(configuration=default_at(spec, size, size).configuration, threads=spec.executor.threads)
        use = executor.measure_memory(replace(request, reserve=True))
        if not use.fits:
            without_reserve = executor.measure_memory(request)
            if without_reserve.fits:
                use = replace(use, reason=f"fits only if no memory stays in reserve: {use.reason}")
                marginal.append(use)
                tell(use)
                continue
            use = without_reserve
        store.probes.save_memory(spec.name, environment, use)
        uses.append(use)
        tell(use)
    memory = boundary_of(uses)
    if memory.fits is None:
        raise nothing_fits(environment, [*uses, *marginal])
    return MemoryProbe(
        uses=tuple(uses),
        largest_that_fits=memory.fits,
        smallest_that_does_not=memory.too_large,
        ceiling=ceiling,
        fit=fit_memory(uses),
        marginal=tuple(marginal),
    )


def next_size(uses: Sequence[MemoryUse], *, smallest: int, ceiling: int, marginal: Collection[int] = ()) -> int | None:
    """Return the next micro-batch to try in [1, ``ceiling``], or None once the boundary is known.

    Start at ``smallest``, double or halve until one size fits and another fails, and bisect to `BRACKET`. If marginal
    sizes keep the boundary wider, bisect the gaps on both sides to `FINE`.
    """
    memory = boundary_of(uses)
    fits, too_large = memory.fits, memory.too_large
    between = [size for size in marginal if (fits or 0) < size < (too_large or ceiling + 1)]
    below, above = min([*between, too_large or ceiling + 1]), max([*between, fits or 0])
    if fits is None and below > ceiling:
        return min(smallest, ceiling)
    if fits is None:
        return None if below <= 1 else below // 2
    if too_large is None:
        if below > ceiling:
            return None if fits >= ceiling else min(2 * fits, ceiling)
        if above < ceiling:
            return min(ceiling, max(int(BRACKET * above), 2 * above - fits))
    if (too_large or ceiling + 1) <= max(fits + 1, BRACKET * fits):
        return None
    gaps = [(fits, below)] if too_large is None or not between else [(fits, below), (above, too_large)]
    near = FINE if between else BRACKET
    wide = [(low, high) for low, high in gaps if high > max(low + 1, near * low)]
    if not wide:
        return None
    low, high = max(wide, key=lambda gap: gap[1] / gap[0])
    return (low + high) // 2


def boundary_of(uses: Sequence[MemoryUse]) -> MemoryBoundary:
    return MemoryBoundary.of(
        (use.micro_batch_size for use in uses if use.fits), (use.micro_batch_size for use in uses if not use.fits)
    )


NOISE_SECONDS = 30.0  # default limit of the measurement, however wide its interval


def noise(
    spec: StudySpec,
    launch: Launch,
    *,
    seconds: Annotated[float, Option("Maximum seconds of measurement near the target.", min=0.1)] = NOISE_SECONDS,
) -> ProbeReport:
    """Measure the gradient noise scale of the best configuration near the target."""
    with opened(spec, launch) as study:
        found = probe_noise(study, seconds)
    row = {"study": spec.name, **asdict(found)}
    row |= {f"noise_{name}": value for name, value in row.pop("noise").items()}
    return ProbeReport(document=row, rows=[row], sentences=list(noise_sentences(found, spec)))


def noise_sentences(found: NoiseMeasurement, spec: StudySpec) -> Iterator[str]:
    noise, unit = found.noise, spec.training.batch_unit
    if noise.low is None:
        yield (
            f"The measurement could not separate the gradient from the noise in {plural(noise.passes or 0, 'pass')}; "
            "raise --seconds."
        )
    else:
        scale = noise_scale(noise.scale, noise.low, noise.high)
        yield f"Gradient noise scale: {scale} {unit} ({noise.passes} passes)"
    if noise.adam_low is not None:
        yield f"Gradient noise scale for Adam: {noise_scale(noise.adam_scale, noise.adam_low, noise.adam_high)} {unit}"
    yield f"Measured at batch {found.batch_size}, step {found.step}, with {spec.target.metric} {found.metric:.4g}"
    if found.reason is not None:
        yield f"note: this step is far from the target ({found.reason})"


def probe_noise(
    study: OpenStudy, seconds_limit: float = NOISE_SECONDS, *, train_seconds_limit: float = math.inf
) -> NoiseMeasurement:
    """Measure and store the gradient noise scale of the best known configuration near the target."""
    spec = study.spec
    configuration, eval_every_steps = _best_known(study)
    measurement = study.executor.measure_noise(
        NoiseRequest(
            configuration=configuration,
            seed=trial_seed(spec.seed, Phase.PROBE, 0),
            target=spec.record_target,
            train_seconds_limit=min(train_seconds_limit, spec.budget.trial_train_seconds),
            noise_seconds_limit=seconds_limit,
            eval_every_steps=eval_every_steps,
            threads=spec.executor.threads,
        )
    )
    study.store.probes.save_noise(spec.name, study.environment, measurement)
    return measurement


def _best_known(study: OpenStudy) -> tuple[Configuration, int]:
    spec, store, environment = study.spec, study.store, study.environment
    trial = least_of(store.trials.of(spec.name))
    configuration = spec.default_configuration if trial is None else trial.configuration
    size = configuration.batch_size
    probe = store.probes.by_batch_size(spec.name, environment).get(size)
    if trial is not None:
        micro = configuration.micro_batch_size if probe is None else probe.micro_batch_size
        return configuration.in_micro_batches(micro), trial.eval_every_steps
    if probe is None:
        probe = step_time_of_default(spec, study.executor, size, store.probes.memory_boundary(spec.name, environment))
    assert probe.eval_every_steps is not None, "the default was timed"
    return spec.default_configuration.in_micro_batches(probe.micro_batch_size), probe.eval_every_steps
