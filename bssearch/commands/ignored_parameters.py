"""Searched parameters that the workload ignores: a few steps with another value come to the same loss, bit for bit.

Only `WORKLOAD_PARAMETERS` and the user's own are tried, which the workload is to use itself; the optimizer's parameters
act in bssearch's own code. On a GPU the same steps may differ in their last bits: there an ignored parameter may go
unnoticed, and none is named without cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bssearch.commands.unstored import run_request
from bssearch.executors.base import Executor
from bssearch.records import (
    Configuration,
    Observation,
    ParameterValue,
    Phase,
    ProbeRecord,
    TrialRequest,
    TrialState,
)
from bssearch.search.seeds import trial_seed
from bssearch.space import WORKLOAD_PARAMETERS, bounds
from bssearch.spec import StudySpec

STEPS = 3
"""Optimizer steps of each run: a choice; dropout and label smoothing change the loss of the first one."""

LONGEST_S = 10.0
"""Seconds that all runs together may be expected to take, else none is made: a choice, no longer than the rest of a
check."""


def ignored_parameters(spec: StudySpec, executor: Executor, probe: ProbeRecord) -> Iterator[tuple[str, str]]:
    """Yield the searched parameters that change nothing here, each as (code, sentence).

    ``probe`` is the step time of the default, with its split into micro-batches. Where the runs would take too long
    that is what is said instead. Raises `LaunchError` and `InterruptedRunError`.
    """
    configuration = spec.default_configuration.in_micro_batches(probe.micro_batch_size)
    others = _other_values(spec, configuration)
    if not others:
        return
    expected = (1 + len(others)) * _seconds(probe)
    if expected > LONGEST_S:
        yield (
            "parameters_not_tried",
            f"whether the workload uses {' and '.join(others)} was not tried: {1 + len(others)} runs of {STEPS} steps "
            f"would take {expected:.3g} s, more than {LONGEST_S:g}",
        )
        return
    runs = _Runs(spec, executor)
    before = runs.losses(configuration)
    for name, value in others.items():
        if before is not None and runs.losses(_with(configuration, name, value)) == before:
            takes = "build_model" if name == "dropout" or name.startswith("model.") else "loss"
            own = _shown(configuration.parameters.get(name, getattr(configuration, name, None)))
            yield (
                "parameter_ignored",
                f"{name} is searched but changes nothing here: with {name} = {own} and {_shown(value)} the loss of "
                f"{STEPS} steps is the same to the last bit; use what {takes}() is given, or fix space.{name}",
            )


def _other_values(spec: StudySpec, configuration: Configuration) -> dict[str, ParameterValue]:
    """Return of each searched parameter that the workload is to use the value farthest from its default."""
    known = {name: _other_value(spec, configuration, name) for name in WORKLOAD_PARAMETERS}
    searched = (one for one in spec.space.dimensions() if one.name in spec.space.own_domains)
    own = {one.name: one.other_than(configuration.parameters[one.name]) for one in searched}
    return {name: value for name, value in known.items() if value} | own


def _other_value(spec: StudySpec, configuration: Configuration, name: str) -> float | None:
    """Return the end of a parameter's searched range that is farther from its default; None where it is fixed."""
    low, high = bounds(getattr(spec.space, name))
    if low == high:
        return None
    default = getattr(configuration, name)
    return float(max(low, high, key=lambda end: abs(end - default)))


def _with(configuration: Configuration, name: str, value: ParameterValue) -> Configuration:
    """Return a configuration with another value of a parameter."""
    if name in configuration.parameters:
        return replace(configuration, parameters={**configuration.parameters, name: value})
    changed: dict[str, Any] = {name: value}
    return replace(configuration, **changed)


def _shown(value: ParameterValue) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _seconds(probe: ProbeRecord) -> float:
    """Return the seconds that a run takes: a warm-up of two steps, its own, one until it stops; three evaluations."""
    return (2 + STEPS + 1) * (probe.step_seconds or 0.0) + 3 * (probe.evaluation_seconds or 0.0)


class _Runs:
    """Runs of the same few steps, from the same seed."""

    def __init__(self, spec: StudySpec, executor: Executor) -> None:
        self._spec = spec
        self._executor = executor
        self._number = 1

    def losses(self, configuration: Configuration) -> list[tuple[int, float, float | None]] | None:
        """Return step, metric and loss of each evaluation; None of a run that came to no loss."""
        self._number += 1
        request = TrialRequest(
            number=self._number,
            configuration=configuration,
            seed=trial_seed(self._spec.seed, Phase.PROBE, 0),
            target=self._spec.record_target,
            train_seconds_limit=self._spec.budget.trial_train_seconds,
            limit_state=TrialState.CAPPED,
            eval_every_steps=STEPS,
            stop_at_target=False,
            threads=self._spec.executor.threads,
        )
        _, curve = run_request(self._executor, request, until_step=STEPS)
        seen: list[Observation] = [one for one in curve if one.step <= STEPS]
        if not any(one.loss is not None for one in seen):
            return None
        return [(one.step, one.metric, one.loss) for one in seen]
