"""``bssearch probe``: what this device and this model can do, before or beside a search."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bssearch.cli.output import (
    AllowBusyOption,
    DatabaseOption,
    DataDirOption,
    Format,
    FormatOption,
    cell,
    console,
    print_json,
    print_rows,
    print_table,
)
from bssearch.cli.run import SetOption, SpecArgument, workload_folder

if TYPE_CHECKING:
    from bssearch.analysis.law.affine_step_time import StepTimeFit
    from bssearch.analysis.memory import MemoryFit
    from bssearch.commands.memory_probe import MemoryProbe
    from bssearch.commands.run import OpenStudy
    from bssearch.records import MemoryUse, NoiseMeasurement, ProbeRecord
    from bssearch.spec import StudySpec

GIB = 2**30
MEMORY_COLUMNS = ("micro_batch", "fits", "peak_gib", "reason")
STEP_TIME_COLUMNS = ("batch", "ms/step", "ms_low", "ms_high", "steps", "samples/s", "remark")

app = typer.Typer(
    help="Measure memory, step time or gradient noise; searches reuse what is stored.", no_args_is_help=True
)


@app.command()
def memory(
    spec: SpecArgument,
    limit_gib: Annotated[
        float | None,
        typer.Option(
            "--limit-gib",
            min=0.001,
            metavar="GIB",
            help="Pretend a device with so much memory; on the CPU a limit on the process's data segment.",
        ),
    ] = None,
    db: DatabaseOption = None,
    data_dir: DataDirOption = None,
    overrides: SetOption = None,
    allow_busy: AllowBusyOption = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Find the largest micro-batch that survives three optimizer steps and an evaluation, in fresh processes."""
    from bssearch.commands.memory_probe import probe_memory

    with _opened(spec, overrides, db, data_dir, allow_busy, limit_gib) as (study, place):

        def tell(use: MemoryUse) -> None:
            place.listener.note(f"micro-batch {use.micro_batch_size}: {'fits' if use.fits else use.reason}")

        found = probe_memory(study, place.executor, place.store, place.environment, tell)
    rows = [asdict(use) for use in found.uses]
    if form is Format.JSON:
        print_json({"study": study.name, "limit_gib": limit_gib, **asdict(found)})
    elif form is not Format.TABLE:
        print_rows(rows, (), form)
    else:
        print_memory(found, is_cpu=place.environment.device_type == "cpu")


def print_memory(found: MemoryProbe, *, is_cpu: bool) -> None:
    """Print the sizes that were run, the boundary between them, and the line through their peaks."""
    print_table(
        [
            {
                "micro_batch": use.micro_batch_size,
                "fits": "yes" if use.fits else "marginal" if use in found.marginal else "no",
                "peak_gib": None if use.peak_memory_bytes is None else use.peak_memory_bytes / GIB,
                "reason": use.reason,
            }
            for use in sorted([*found.uses, *found.marginal], key=lambda use: use.micro_batch_size)
        ],
        MEMORY_COLUMNS,
    )
    out = console()
    if found.whole_training_part_fits:
        out.print(f"The whole training part fits at once: {found.ceiling} samples.")
    else:
        above = found.smallest_that_does_not
        out.print(
            f"The largest micro-batch that fits is {found.largest_that_fits}; "
            + ("none is known not to." if above is None else f"{above} does not.")
        )
    if found.marginal:
        out.print(
            "A marginal size ran, but only without a reserve for what a longer training needs: it does not count."
        )
    if found.fit is not None:
        out.print(memory_line(found.fit))
    if is_cpu:
        out.print("The peak is the process's resident memory with all libraries; a limit is on its data segment.")


def memory_line(fit: MemoryFit) -> str:
    """Return the fit of the peaks as a sentence."""
    return (
        f"Peak memory = {fit.fixed_bytes / GIB:.3g} GiB + {fit.bytes_per_sample / 2**20:.3g} MiB a sample "
        f"(no size is further than {fit.largest_residual:.1%} from it)."
    )


@app.command("step-time")
def step_time(
    spec: SpecArgument,
    seconds: Annotated[float, typer.Option(min=0.1, help="The longest to time one batch size.")] = 5.0,
    db: DatabaseOption = None,
    data_dir: DataDirOption = None,
    overrides: SetOption = None,
    allow_busy: AllowBusyOption = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Time optimizer steps at every batch size, alone on the device, and fit t = α + β·B."""
    from bssearch.analysis.law.affine_step_time import fit_step_time, throughput_knee
    from bssearch.commands.step_time_probe import probe_step_times

    with _opened(spec, overrides, db, data_dir, allow_busy) as (study, place):

        def tell(probe: ProbeRecord) -> None:
            place.listener.note(f"batch {probe.batch_size}: {probe.steps_timed} steps timed")

        probes = probe_step_times(study, place.executor, place.store, place.environment, seconds, tell)
    fit, knee = fit_step_time(probes), throughput_knee(probes)
    if form is Format.JSON:
        print_json(
            {
                "study": study.name,
                "probes": [asdict(probe) for probe in probes],
                "fit": None if fit is None else asdict(fit),
                "throughput_knee": knee,
            }
        )
        return
    if form is not Format.TABLE:
        print_rows([asdict(probe) for probe in probes], (), form)
        return
    print_table([_step_time_row(probe, fit) for probe in probes], STEP_TIME_COLUMNS)
    out = console()
    if fit is not None:
        out.print(
            f"A step takes {1e3 * fit.alpha_seconds:.3g} ms + {1e3 * fit.beta_seconds:.3g} ms a sample (no size is "
            f"further than {fit.max_residual:.1%} from it); half of the full throughput at batch "
            f"{fit.half_saturation_batch:.3g}."
        )
    out.print(f"Batch {knee} is the smallest with 90 % of the highest throughput measured.")


def _step_time_row(probe: ProbeRecord, fit: StepTimeFit | None) -> dict[str, Any]:
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
        "remark": "; ".join(remarks) or None,
    }


@app.command()
def noise(
    spec: SpecArgument,
    seconds: Annotated[float, typer.Option(min=0.1, help="The longest to measure, once near the target.")] = 30.0,
    db: DatabaseOption = None,
    data_dir: DataDirOption = None,
    overrides: SetOption = None,
    allow_busy: AllowBusyOption = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Measure the gradient noise scale of the best configuration known, near the target."""
    from bssearch.commands.noise_probe import probe_noise

    with _opened(spec, overrides, db, data_dir, allow_busy) as (study, place):
        found = probe_noise(study, place.executor, place.store, place.environment, seconds)
    row = {"study": study.name, **asdict(found)}
    noise = row.pop("noise")
    row |= {f"noise_{name}": value for name, value in noise.items()}
    if form is Format.JSON:
        print_json(row)
    elif form is not Format.TABLE:
        print_rows([row], (), form)
    else:
        print_noise(found, study.target.metric)


def print_noise(found: NoiseMeasurement, metric: str) -> None:
    """Print a noise scale, and where in the training it was measured."""
    out = console()
    noise = found.noise
    if noise.low is None:
        out.print(f"The gradient could not be told from its noise in {noise.passes or 'so few'} passes.")
    else:
        scale = interval(noise.scale, noise.low, noise.high)
        out.print(f"Gradient noise scale: {scale} samples ({noise.passes} passes)")
    if noise.adam_low is not None:
        out.print(f"as Adam sees it: {interval(noise.adam_scale, noise.adam_low, noise.adam_high)} samples")
    out.print(f"at batch {found.batch_size}, step {found.step}, where {metric} is {cell(found.metric)}")
    if found.reason is not None:
        out.print(f"note: that is not near the target: {found.reason}")


def interval(scale: float | None, low: float, high: float | None) -> str:
    """Return a noise scale with its interval for people; it has a lower end."""
    return f"≥ {low:.3g}" if scale is None else f"{scale:.3g} [{low:.3g}, {high:.3g}]"


@contextmanager
def _opened(
    spec: str,
    overrides: list[str] | None,
    db: str | None,
    data_dir: Path | None,
    allow_busy: bool,
    pretended_gib: float | None = None,
) -> Iterator[tuple[StudySpec, OpenStudy]]:
    """Give a spec and its study in the store, made where it is new; progress goes to stderr."""
    from bssearch.cli.live import Lines
    from bssearch.commands.run import opened
    from bssearch.spec import find_spec, load_spec

    path = find_spec(spec)
    study = load_spec(path, overrides or [])
    with opened(
        study,
        db=db,
        folder=workload_folder(path),
        data_dir=data_dir,
        allow_busy=allow_busy,
        pretended_gib=pretended_gib,
        listener=Lines(console(stderr=True), study),
    ) as place:
        yield study, place
