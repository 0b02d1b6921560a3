"""``price``: a stored study's answer at the step times of another device."""

from __future__ import annotations

from pathlib import Path

from bssearch.analysis.answer import Answer
from bssearch.analysis.predict_for_device import predict_for_device
from bssearch.importers.step_times import read_step_times
from bssearch.spec.stored import spec_of
from bssearch.storage.repository import Store


def predict(store: Store, study: str, step_times: Path, device_name: str | None = None) -> Answer:
    """Return the answer of a stored study with the step times of a file; see `predict_for_device`.

    The device's name is by default the file's. Raises the errors of `read_step_times` and `predict_for_device`, and
    `NotFoundError`.
    """
    record = store.study(study)
    times = read_step_times(step_times)
    return predict_for_device(record, spec_of(record), store.trials(study), times, device_name or step_times.stem)
