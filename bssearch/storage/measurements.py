"""What a device and a model can do, as the store keeps it: step times, memory, gradient noise scales."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, delete

from bssearch.records import Environment, MemoryUse, NoiseMeasurement, ProbeRecord
from bssearch.storage import leases
from bssearch.storage.database import Database, patiently
from bssearch.storage.models import EnvironmentRow, ProbeKind, ProbeRow
from bssearch.storage.rows import from_columns, to_columns
from bssearch.storage.statements import MEMORY, NOISE, PROBES, insert_if_absent


class Measurements(Database):
    """The part of the store that keeps probes."""

    def save_probe(self, study: str, environment: Environment, probe: ProbeRecord) -> None:
        """Store the step time of a batch size, unless the same environment has one: its cadence must never change."""
        self._save_measurement(study, environment, ProbeKind.STEP_TIME, to_columns(probe))

    @patiently
    def probes(self, study: str) -> dict[int, ProbeRecord]:
        """Return the step times of a study by batch size; of several environments the first measurement."""
        with self._reading() as connection:
            query = PROBES.where(ProbeRow.study_id == self._study_id(connection, study))
            return {row["batch_size"]: from_columns(ProbeRecord, row) for row in connection.execute(query).mappings()}

    def save_memory(self, study: str, environment: Environment, memory: MemoryUse) -> None:
        """Store whether a micro-batch size fits; what the same environment had of it is replaced."""
        columns = {
            "batch_size": memory.micro_batch_size,
            "micro_batch_size": memory.micro_batch_size,
            "steps_timed": 0,
            "out_of_memory": not memory.fits,
            "peak_memory_bytes": memory.peak_memory_bytes,
            "reason": memory.reason,
        }
        self._save_measurement(study, environment, ProbeKind.MEMORY, columns, replace=True)

    @patiently
    def memory(self, study: str, environment: Environment) -> list[MemoryUse]:
        """Return what is known of micro-batch sizes on devices of this kind and memory, ascending.

        Several hosts may have measured one size; it is in the list once for each.
        """
        with self._reading() as connection:
            query = MEMORY.where(
                ProbeRow.study_id == self._study_id(connection, study),
                EnvironmentRow.device_name == environment.device_name,
                EnvironmentRow.device_memory_bytes == environment.device_memory_bytes,
                EnvironmentRow.precision == environment.precision,
                EnvironmentRow.compile_mode == environment.compile_mode,
            )
            return [
                MemoryUse(
                    micro_batch_size=row.micro_batch_size,
                    fits=not row.out_of_memory,
                    peak_memory_bytes=row.peak_memory_bytes,
                    reason=row.reason,
                )
                for row in connection.execute(query)
            ]

    def save_noise(self, study: str, environment: Environment, noise: NoiseMeasurement) -> None:
        """Store a gradient noise scale; what the same environment had at the batch size is replaced."""
        columns = {"steps_timed": 0, "out_of_memory": False, **to_columns(noise)}
        self._save_measurement(study, environment, ProbeKind.NOISE_SCALE, columns, replace=True)

    @patiently
    def noise(self, study: str) -> list[NoiseMeasurement]:
        """Return the noise scales that were probed for a study, the newest first."""
        with self._reading() as connection:
            query = NOISE.where(ProbeRow.study_id == self._study_id(connection, study))
            return [from_columns(NoiseMeasurement, row) for row in connection.execute(query).mappings()]

    def _save_measurement(
        self,
        study: str,
        environment: Environment,
        kind: ProbeKind,
        columns: Mapping[str, object],
        *,
        replace: bool = False,
    ) -> None:
        def save(connection: Connection, study_id: int) -> None:
            place = {
                "study_id": study_id,
                "environment_id": self._environment_id(connection, environment),
                "kind": kind,
                "batch_size": columns["batch_size"],
                "micro_batch_size": columns["micro_batch_size"],
            }
            if replace:
                connection.execute(delete(ProbeRow).filter_by(**place))
            insert_if_absent(connection, ProbeRow, {**columns, **place, "measured_at": leases.now(connection)})

        self._on_study(study, save)
