"""The values that every layer speaks: requests, observations, outcomes and what is stored of them.

Units are in the names: seconds are floats, memory is in bytes, ``steps`` are optimizer steps, ``samples`` are
training samples seen. All records are frozen.
"""

from __future__ import annotations

from bssearch.records.measured import (
    COULD_NOT_PAUSE,
    BranchMeasurement,
    DeviceUse,
    Environment,
    GradientNoise,
    MemoryBasis,
    MemoryUse,
    NoiseMeasurement,
    Observation,
    SecondsBasis,
    StepTime,
    StepTimeError,
    TrialOutcome,
    Visit,
    outcome_fields,
)
from bssearch.records.own_parameters import (
    OWN_GROUPS,
    ModelParameters,
    model_parameters,
    own_parameters,
    parameters_of_group,
)
from bssearch.records.plan import Lease, TrialPlan
from bssearch.records.question import (
    LARGEST_METRIC,
    MAKE_TRAINER,
    Configuration,
    Goal,
    ParameterValue,
    Phase,
    Target,
    TrainingSettings,
    TrialState,
    is_metric,
    to_json,
)
from bssearch.records.requests import (
    Branch,
    MemoryRequest,
    MetricInfo,
    ModelDescription,
    NoiseRequest,
    StepTimeRequest,
    TrialRequest,
    WorkloadDescription,
)
from bssearch.records.stored import PLANNED, NewStudy, ProbeRecord, StudyRecord, TrialRecord, spec_digest

__all__ = [
    "COULD_NOT_PAUSE",
    "LARGEST_METRIC",
    "MAKE_TRAINER",
    "OWN_GROUPS",
    "PLANNED",
    "Branch",
    "BranchMeasurement",
    "Configuration",
    "DeviceUse",
    "Environment",
    "Goal",
    "GradientNoise",
    "Lease",
    "MemoryBasis",
    "MemoryRequest",
    "MemoryUse",
    "MetricInfo",
    "ModelDescription",
    "ModelParameters",
    "NewStudy",
    "NoiseMeasurement",
    "NoiseRequest",
    "Observation",
    "ParameterValue",
    "Phase",
    "ProbeRecord",
    "SecondsBasis",
    "StepTime",
    "StepTimeError",
    "StepTimeRequest",
    "StudyRecord",
    "Target",
    "TrainingSettings",
    "TrialOutcome",
    "TrialPlan",
    "TrialRecord",
    "TrialRequest",
    "TrialState",
    "Visit",
    "WorkloadDescription",
    "is_metric",
    "model_parameters",
    "outcome_fields",
    "own_parameters",
    "parameters_of_group",
    "spec_digest",
    "to_json",
]
