"""A study's spec with the search space, and the templates of submissions."""

from bssearch.spec.admission import admitted, problem_with
from bssearch.spec.model import GIVEN_IN_PYTHON, IMPORTED, OBJECTIVE, StudySpec
from bssearch.spec.parts import BudgetSpec, ConfirmSpec, ExecutorSpec, PrunerSpec, SamplerSpec, TrainingSpec
from bssearch.spec.reader import changed_fields, check_study_name, checked, find_spec, load_spec, parse_value, spec_of
from bssearch.spec.space import (
    DECAY_SHARE,
    OPTIMIZER_SETTINGS,
    OPTIMIZERS,
    RETUNED,
    TRAINING_PARAMETERS,
    WORKLOAD_PARAMETERS,
    BatchGrowth,
    BatchRules,
    Dimension,
    Domain,
    MemoryBoundary,
    SearchSpace,
    are_coordinates,
    bounds,
    choose_micro_batch,
    in_force,
    split_batch,
)
from bssearch.spec.space.domains import RelativeLearningRate, is_number
from bssearch.spec.space.micro_batches import GROUP_NORM, REMEDY, TINY_BATCH, batch_norm_caveats
from bssearch.spec.space.optimizers import FINE_TUNING, FINE_TUNING_FACTOR, SCRATCH_RATES
from bssearch.spec.space.search_space import REFERENCE_LEARNING_RATE

__all__ = [
    "DECAY_SHARE",
    "FINE_TUNING",
    "FINE_TUNING_FACTOR",
    "GIVEN_IN_PYTHON",
    "GROUP_NORM",
    "IMPORTED",
    "OBJECTIVE",
    "OPTIMIZERS",
    "OPTIMIZER_SETTINGS",
    "REFERENCE_LEARNING_RATE",
    "REMEDY",
    "RETUNED",
    "SCRATCH_RATES",
    "TINY_BATCH",
    "TRAINING_PARAMETERS",
    "WORKLOAD_PARAMETERS",
    "BatchGrowth",
    "BatchRules",
    "BudgetSpec",
    "ConfirmSpec",
    "Dimension",
    "Domain",
    "ExecutorSpec",
    "MemoryBoundary",
    "PrunerSpec",
    "RelativeLearningRate",
    "SamplerSpec",
    "SearchSpace",
    "StudySpec",
    "TrainingSpec",
    "admitted",
    "are_coordinates",
    "batch_norm_caveats",
    "bounds",
    "changed_fields",
    "check_study_name",
    "checked",
    "choose_micro_batch",
    "find_spec",
    "in_force",
    "is_number",
    "load_spec",
    "parse_value",
    "problem_with",
    "spec_of",
    "split_batch",
]
