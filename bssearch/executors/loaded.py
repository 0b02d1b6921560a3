"""A workload and its data in this process."""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch

from bssearch.errors import WorkloadError, hint_of
from bssearch.executors.base import AskStop, Load, Measured, Measurement
from bssearch.executors.devices import device_of, memory_limit_of_slot
from bssearch.executors.process import check_unchanged, describe_exception
from bssearch.records import (
    MemoryRequest,
    NoiseRequest,
    Observation,
    StepTimeRequest,
    TrialOutcome,
    TrialRequest,
    WorkloadDescription,
    parameters_of_group,
    to_json,
)
from bssearch.training.batches import place
from bssearch.training.clock import clock_for
from bssearch.training.computation import Computation
from bssearch.training.environment import describe_environment, workload_revision
from bssearch.training.gradient_noise import NoiseBudget
from bssearch.training.loop import TrialLoop, describe_model, tokens_per_sample
from bssearch.training.memory import is_out_of_memory, limit_memory
from bssearch.training.optimizers import check_libraries
from bssearch.training.probes import bytes_within_reserve, measure_memory, measure_noise, measure_step_time
from bssearch.training.ranks import Follower
from bssearch.workloads.base import check_takes, made, resolve
from bssearch.workloads.data import check_data

if TYPE_CHECKING:
    from bssearch.executors.rank_workers import RankProcesses


class LoadedWorkload:
    """A workload and its data on a device.

    If ``on_lost`` is None, trials train on one device; see `RankProcesses`.
    """

    def __init__(self, load: Load, on_lost: Callable[[Exception], NoReturn] | None = None) -> None:
        settings, name = load.settings, load.settings.workload
        torch.set_num_threads(settings.threads)
        device, present = device_of(settings.device, load.slot, settings.allow_busy)
        self.devices = load.devices or present
        self.memory_limit_bytes = memory_limit_of_slot(
            device, load.slot, settings.least_slots, self.devices, settings.memory_limit_bytes
        )
        if self.memory_limit_bytes is not None:
            limit_memory(device, self.memory_limit_bytes)
        self._computation = Computation(device, settings.training)
        self._noise_budget = NoiseBudget()
        self._workload = (
            resolve(name, settings.workload_settings, settings.folder)
            if settings.given is None
            else made(name, settings.given, settings.workload_settings)
        )
        if self._computation.compiles or hasattr(self._workload, "build_optimizer"):
            # Otherwise the first step imports torch._dynamo after the collector's freeze.
            importlib.import_module("torch._dynamo")
        check_libraries(self._workload, settings.optimizers)
        self.revision = workload_revision(self._workload)
        check_unchanged(f"the file of workload {name!r}", load.revision, self.revision)
        try:
            data = check_data(
                self._workload.load(torch.device("cpu")),
                self._workload,
                counts_tokens=settings.training.counts_tokens,
            )
        except BaseException as error:
            if is_out_of_memory(error):
                raise
            raise WorkloadError(
                f"workload {name!r} does not load: {describe_exception(error)}", hint=hint_of(error)
            ) from error
        self._own_parameters = settings.own_parameters
        self._data, _ = place(data, self._computation, self.memory_limit_bytes)
        self._load, self._on_lost = replace(load, revision=self.revision), on_lost
        self._processes: RankProcesses | None = None

    @property
    def device(self) -> str:
        return str(self._computation.device)

    def describe(self) -> WorkloadDescription:
        workload, data = self._workload, self._data
        check_takes(workload, self._own_parameters)
        try:
            own = parameters_of_group(self._own_parameters, "model")
            model = describe_model(workload, data, self._computation, own=own)
        except WorkloadError:
            raise
        except Exception as error:
            raise WorkloadError(
                f"building or evaluating the model of workload {self._load.settings.workload!r} failed: "
                f"{describe_exception(error)}",
                hint=hint_of(error),
            ) from error
        description = WorkloadDescription(
            train_samples=len(data.train),
            validation_samples=len(data.validation),
            test_samples=len(data.test),
            metrics=dict(workload.metrics),
            environment=replace(
                describe_environment(self._computation, workload, memory_limit_bytes=self.memory_limit_bytes),
                workload_revision=self.revision,
            ),
            model=model,
            tokens_per_sample=tokens_per_sample(workload),
            notice=self._computation.given_up,
        )
        try:
            to_json(description)
        except (TypeError, ValueError) as error:
            raise WorkloadError(
                f"cannot store the metrics of workload {self._load.settings.workload!r}: {dict(workload.metrics)}; map "
                "names to MetricInfo with finite bounds or None"
            ) from error
        return description

    def measure(self, request: Measurement) -> Measured:
        torch.set_num_threads(request.threads)
        loaded = self._workload, self._data, self._computation
        with self._ranks(request.configuration.world_size):
            match request:
                case StepTimeRequest():
                    return measure_step_time(request, *loaded)
                case MemoryRequest():
                    limit = self.memory_limit_bytes
                    memory_bytes = bytes_within_reserve(self._computation.device, limit) if request.reserve else None
                    return measure_memory(request, *loaded, memory_bytes=memory_bytes)
                case NoiseRequest():
                    return measure_noise(request, *loaded)

    def run(
        self,
        request: TrialRequest,
        on_observation: Callable[[Observation], None],
        *,
        stop: AskStop,
        on_progress: Callable[[], None],
    ) -> TrialOutcome:
        with (
            self._ranks(request.plan.configuration.world_size, on_progress),
            closing(self.trial(request, stop=stop, on_progress=on_progress).observations()) as observations,
        ):
            while True:
                try:
                    observation = next(observations)
                except StopIteration as end:
                    return cast(TrialOutcome, end.value)
                on_observation(observation)

    def follower(self, rank: int, answer: Callable[[Any], None]) -> Follower:
        return Follower(
            self._workload,
            self._data,
            self._computation,
            rank=rank,
            seconds=self._load.settings.hang_seconds,
            answer=answer,
        )

    def _ranks(self, size: int, on_progress: Callable[[], None] = lambda: None) -> AbstractContextManager[object]:
        if size == 1 or self._on_lost is None:
            return nullcontext()
        if self._processes is None:
            from bssearch.executors.rank_workers import RankProcesses

            self._processes = RankProcesses(self._load, self._computation, self._on_lost)
        return self._processes.together(size, on_progress)

    def trial(
        self, request: TrialRequest, *, stop: AskStop, on_progress: Callable[[], None] = lambda: None
    ) -> TrialLoop:
        torch.set_num_threads(request.plan.threads)
        return TrialLoop(
            request,
            self._workload,
            self._data,
            self._computation,
            clock=clock_for(self._computation.device),
            stop=stop,
            on_progress=on_progress,
            noise_budget=self._noise_budget,
        )
