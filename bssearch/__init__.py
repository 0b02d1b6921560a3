"""Find the batch size that reaches your target soonest, on your model, data and device.

Run a study and read the answer::

    import bssearch

    spec = bssearch.load_spec("studies/digits.yaml")
    bssearch.run_study(spec)
    answer = bssearch.best("digits")
    print(answer.optimal.batch_size)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bssearch.commands.across.answers import best_across
    from bssearch.commands.best import Answer, best
    from bssearch.commands.check import advise_target, check
    from bssearch.commands.launch import Launch
    from bssearch.commands.plan import plan_beyond, plan_larger, plan_learning_rate, plan_scale
    from bssearch.commands.queue.submissions import (
        cancel_study,
        pause_study,
        queued_studies,
        resume_study,
        submit_study,
    )
    from bssearch.commands.queue.worker import Serving, run_worker
    from bssearch.commands.rerun import rerun
    from bssearch.commands.run import audit_study, confirm_study, run_study
    from bssearch.commands.study import Study
    from bssearch.commands.trials import enqueue, trials_frame
    from bssearch.errors import (
        BSSearchError,
        CheckpointError,
        DatabaseError,
        InterruptedRunError,
        LaunchError,
        NotFoundError,
        OtherDeviceError,
        QuestionChangedError,
        SchemaError,
        SpecError,
        TargetNotReachedError,
        TrialStopped,
        UnknownFieldError,
        UsageError,
        WorkloadError,
    )
    from bssearch.exchange.optuna_study import load_optuna_study
    from bssearch.executors.loops.current import current_trial
    from bssearch.executors.loops.own_loop import Trial
    from bssearch.planning.memory import plan_memory
    from bssearch.planning.scale import plan_accumulation
    from bssearch.planning.start import plan_start
    from bssearch.records import Configuration, MetricInfo
    from bssearch.search.samplers.time_model.optuna_sampler import TimeToTargetSampler
    from bssearch.spec import StudySpec, load_spec
    from bssearch.storage.repository import Store, open_store
    from bssearch.training.advisor import BatchAdvisor
    from bssearch.workloads.base import TrainingStep, WeightedLoss, Workload
    from bssearch.workloads.data import Data, Part

_HOMES = {
    "Answer": "bssearch.commands.best",
    "BSSearchError": "bssearch.errors",
    "BatchAdvisor": "bssearch.training.advisor",
    "CheckpointError": "bssearch.errors",
    "Configuration": "bssearch.records",
    "Data": "bssearch.workloads.data",
    "DatabaseError": "bssearch.errors",
    "InterruptedRunError": "bssearch.errors",
    "Launch": "bssearch.commands.launch",
    "LaunchError": "bssearch.errors",
    "MetricInfo": "bssearch.records",
    "NotFoundError": "bssearch.errors",
    "OtherDeviceError": "bssearch.errors",
    "Part": "bssearch.workloads.data",
    "QuestionChangedError": "bssearch.errors",
    "SchemaError": "bssearch.errors",
    "SpecError": "bssearch.errors",
    "Serving": "bssearch.commands.queue.worker",
    "Store": "bssearch.storage.repository",
    "Study": "bssearch.commands.study",
    "StudySpec": "bssearch.spec",
    "TargetNotReachedError": "bssearch.errors",
    "Trial": "bssearch.executors.loops.own_loop",
    "TrialStopped": "bssearch.errors",
    "TimeToTargetSampler": "bssearch.search.samplers.time_model.optuna_sampler",
    "TrainingStep": "bssearch.workloads.base",
    "UnknownFieldError": "bssearch.errors",
    "UsageError": "bssearch.errors",
    "WeightedLoss": "bssearch.workloads.base",
    "Workload": "bssearch.workloads.base",
    "WorkloadError": "bssearch.errors",
    "advise_target": "bssearch.commands.check",
    "audit_study": "bssearch.commands.run",
    "best": "bssearch.commands.best",
    "best_across": "bssearch.commands.across.answers",
    "cancel_study": "bssearch.commands.queue.submissions",
    "check": "bssearch.commands.check",
    "current_trial": "bssearch.executors.loops.current",
    "confirm_study": "bssearch.commands.run",
    "enqueue": "bssearch.commands.trials",
    "load_optuna_study": "bssearch.exchange.optuna_study",
    "load_spec": "bssearch.spec",
    "open_store": "bssearch.storage.repository",
    "pause_study": "bssearch.commands.queue.submissions",
    "plan_accumulation": "bssearch.planning.scale",
    "plan_beyond": "bssearch.commands.plan",
    "plan_larger": "bssearch.commands.plan",
    "plan_learning_rate": "bssearch.commands.plan",
    "plan_memory": "bssearch.planning.memory",
    "plan_scale": "bssearch.commands.plan",
    "plan_start": "bssearch.planning.start",
    "queued_studies": "bssearch.commands.queue.submissions",
    "rerun": "bssearch.commands.rerun",
    "resume_study": "bssearch.commands.queue.submissions",
    "run_study": "bssearch.commands.run",
    "submit_study": "bssearch.commands.queue.submissions",
    "run_worker": "bssearch.commands.queue.worker",
    "trials_frame": "bssearch.commands.trials",
}

__all__ = [
    "Answer",
    "BSSearchError",
    "BatchAdvisor",
    "CheckpointError",
    "Configuration",
    "Data",
    "DatabaseError",
    "InterruptedRunError",
    "Launch",
    "LaunchError",
    "MetricInfo",
    "NotFoundError",
    "OtherDeviceError",
    "Part",
    "QuestionChangedError",
    "SchemaError",
    "Serving",
    "SpecError",
    "Store",
    "Study",
    "StudySpec",
    "TargetNotReachedError",
    "TimeToTargetSampler",
    "TrainingStep",
    "Trial",
    "TrialStopped",
    "UnknownFieldError",
    "UsageError",
    "WeightedLoss",
    "Workload",
    "WorkloadError",
    "advise_target",
    "audit_study",
    "best",
    "best_across",
    "cancel_study",
    "check",
    "confirm_study",
    "current_trial",
    "enqueue",
    "load_optuna_study",
    "load_spec",
    "open_store",
    "pause_study",
    "plan_accumulation",
    "plan_beyond",
    "plan_larger",
    "plan_learning_rate",
    "plan_memory",
    "plan_scale",
    "plan_start",
    "queued_studies",
    "rerun",
    "resume_study",
    "run_study",
    "run_worker",
    "submit_study",
    "trials_frame",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bssearch' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
