"""What is in use today: the configuration that the optimum is compared with."""

from __future__ import annotations

from collections.abc import Sequence

from bssearch.records import Configuration, TrialRecord
from bssearch.spec import StudySpec


def default_configuration(spec: StudySpec, trials: Sequence[TrialRecord]) -> Configuration:
    """Return the default as it was run: of imported runs the first at its batch size, which hold more than a spec."""
    if not spec.is_imported:
        return spec.default_configuration
    at_default = (trial.configuration for trial in trials if trial.configuration.batch_size == spec.default.batch_size)
    return next(at_default, spec.default_configuration)
