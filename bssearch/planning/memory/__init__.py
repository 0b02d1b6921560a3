"""The memory of a training step, from numbers or a traced model (needs torch)."""

from bssearch.planning.memory.request import MemoryPlan, MemoryPlanRequest, plan_numbers
from bssearch.planning.requests import planned

__all__ = ["MemoryPlan", "MemoryPlanRequest", "plan_memory"]


@planned(MemoryPlanRequest)
def plan_memory(asked: MemoryPlanRequest) -> MemoryPlan:
    """Training step's memory per device by term, and the micro-batches that fit.

    Takes ``parameters``, with a transformer's dimensions for activations, or a ``model`` to trace (see `models`) with
    ``model_settings`` and inputs of ``input_shape``. ``stage`` is ZeRO's.

    Raises:
        UsageError: Numbers, names or combinations are wrong.
        LaunchError: The parameters do not fit; the hint names options that would.

    Example: ``bssearch.plan_memory(parameters="110M", precision="bf16", optimizer="adamw", memory_gib=24)``
    """
    if asked.model is None:
        return plan_numbers(asked)
    from bssearch.planning.memory.traced import plan_model

    return plan_model(asked)
