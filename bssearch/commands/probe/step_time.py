"""Time every batch size alone on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

from bssearch.analysis.law.affine_step_time import StepTimeFit, fit_step_time, throughput_knee
from bssearch.commands.launch import Launch
from bssearch.commands.opening import OpenStudy, opened
from bssearch.commands.probe.report import ProbeReport
from bssearch.records import MemoryUse, ProbeRecord
from bssearch.registry import Option
from bssearch.search.calibration import measure_step_time_at
from bssearch.spec import StudySpec

SECONDS_LIMIT = 5.0  # default limit per batch size

COLUMNS = ("batch", "ms/step", "ms_low", "ms_high", "steps", "samples/s")


def step_time(
    spec: StudySpec,
    launch: Launch,
    *,
    seconds: Annotated[float, Option("The longest to time one batch size.", min=0.1)] = SECONDS_LIMIT,
) -> ProbeReport:
    """Time optimizer steps at every batch size, alone on the device.

    The line t = α + β·B is fitted to the step times.
    """
    with opened(spec, launch) as study:
        probes = probe_step_times(study, seconds)
    fit, knee = fit_step_time(probes), throughput_knee(probes)
    rows = [asdict(probe) for probe in probes]
    tells_of_the_host = any(probe.host_bound_share is not None for probe in probes)
    return ProbeReport(
        document={
            "study": spec.name,
            "probes": rows,
            "fit": None if fit is None else asdict(fit),
            "throughput_knee": knee,
        },
        rows=rows,
        table=[_row(probe, fit) for probe in probes],
        columns=[*COLUMNS, *(["host-bound"] if tells_of_the_host else []), "remark"],
        sentences=_sentences(fit, knee),
    )


def _sentences(fit: StepTimeFit | None, knee: int | None) -> Sequence[str]:
    smallest = f"Batch {knee} is the smallest with 90 % of the highest throughput measured."
    if fit is None:
        return [smallest]
    line = (
        f"A step takes {1e3 * fit.alpha_seconds:.3g} ms + {1e3 * fit.beta_seconds:.3g} ms a sample (no size is "
        f"further than {fit.max_residual:.1%} from it); half of the full throughput at batch "
        f"{fit.half_saturation_batch:.3g}."
    )
    return [line, smallest]


def _row(probe: ProbeRecord, fit: StepTimeFit | None) -> dict[str, Any]:
    def ms(seconds: float | None) -> float | None:
        return None if seconds is None else 1000 * seconds

    remarks = [] if probe.settled else ["not within 2 % in the time given"]
    if probe.micro_batch_size < probe.batch_size:
        remarks.append(f"in micro-batches of {probe.micro_batch_size}")
        if fit is not None:
            predicted = fit.predict(probe.batch_size, probe.micro_batch_size, probe.update_seconds or 0.0)
            remarks.append(f"{1000 * predicted:.4g} ms by those of the micro-batch")
    if probe.contended:
        remarks.append(f"contended: {probe.reason}")
    return {
        "batch": probe.batch_size,
        "ms/step": ms(probe.step_seconds),
        "ms_low": ms(probe.step_seconds_low),
        "ms_high": ms(probe.step_seconds_high),
        "steps": probe.steps_timed,
        "samples/s": None if probe.step_seconds is None else probe.batch_size / probe.step_seconds,
        "host-bound": None if probe.host_bound_share is None else f"{probe.host_bound_share:.0%}",
        "remark": "; ".join(remarks) or None,
    }


def probe_step_times(study: OpenStudy, seconds_limit: float = SECONDS_LIMIT) -> list[ProbeRecord]:
    """Time the default at every batch size; return the measurements, ascending.

    Each until its median is known within 2 %, or for ``seconds_limit``. Times pool all visits; trials keep the first
    visit's evaluation cadence. Raises `LaunchError`, `WorkloadError`.
    """
    spec, store, environment = study.spec, study.store, study.environment

    def on_too_large(memory: MemoryUse) -> None:
        store.save_memory(spec.name, environment, memory)

    visit: int | None = None
    for size in spec.batch_sizes:
        memory = store.memory_boundary(spec.name, environment)
        probe = measure_step_time_at(spec, study.executor, size, memory, on_too_large, seconds_limit)
        if probe is not None:
            visit = store.save_probe(spec.name, environment, probe, visit)
            study.listener.note(f"batch {probe.batch_size}: {probe.steps_timed} steps timed")
    return list(store.probes(spec.name, environment).values())
