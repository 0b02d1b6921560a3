"""Plans of a training step's memory, from numbers or, with torch, from a traced model."""

from bssearch.planning.memory.request import MemoryPlan, MemoryPlanRequest, plan_numbers
from bssearch.planning.requests import planned

__all__ = ["MemoryPlan", "MemoryPlanRequest", "plan_memory"]


@planned(MemoryPlanRequest)
def plan_memory(asked: MemoryPlanRequest) -> MemoryPlan:
    """Plan a training step's memory per device, and the micro-batches that fit.

    Give ``parameters``, a ``network`` with ``input_shape``, or a ``model`` to trace (see `models`). For
    activations, give a transformer's dimensions beside ``parameters``.

    Raises:
        UsageError: An argument is invalid, or two arguments contradict each other.
        LaunchError: The parameters do not fit. The hint names options that fit, if any.

    Example: ``bssearch.plan_memory(parameters="110M", precision="bf16", optimizer="adamw", memory_gib=24)``
    """
    if asked.model is None:
        return plan_numbers(asked)
    from bssearch.planning.memory.traced import plan_model

    return plan_model(asked)
