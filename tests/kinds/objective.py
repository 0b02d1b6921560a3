"""An example of one objective, as a package of your own may have it."""

from bssearch.analysis.objectives import Objective
from bssearch.records import TrialRecord, TrialState


class EpochsToTarget(Objective):
    """Passes over 500 training samples until the target."""

    name = "epochs_to_target"
    own_unit = " epochs"
    comparative = ("fewer epochs", "more epochs")
    axis_title = "epochs to the target"

    def figure(self, trial: TrialRecord) -> float | None:
        if trial.outcome is None or trial.state is not TrialState.REACHED or trial.outcome.steps_to_target is None:
            return None
        return trial.outcome.steps_to_target * trial.configuration.batch_size / 500

    def bound(self, trial: TrialRecord) -> float | None:
        if trial.outcome is None or not trial.state.is_censored or trial.outcome.last_miss_step is None:
            return None
        return trial.outcome.last_miss_step * trial.configuration.batch_size / 500
