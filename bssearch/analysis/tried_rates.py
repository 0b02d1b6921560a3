"""Whether a batch size's best learning rate lies at an end of what was searched or tried: a better one may lie beyond.

Of an imported study there is no range that was searched, only the learning rates of its runs. They are compared under
one optimizer, whose scale they have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from bssearch.records import Configuration, TrialRecord
from bssearch.spec import StudySpec


def is_at_end(spec: StudySpec, trials: Sequence[TrialRecord], best: Configuration) -> bool:
    """Return whether the learning rate of the best configuration of a batch size lies at an end.

    Imported runs: it is the least or the greatest of those tried at its batch size; where that is one, of those tried
    at all batch sizes, but not where each batch size was only run at a rate chosen for it.
    """
    if not spec.is_imported:
        return spec.space.at_edge(best)
    if not _is_known(best):
        return False
    tried: defaultdict[int, set[float]] = defaultdict(set)
    for one in (trial.configuration for trial in trials):
        if one.optimizer == best.optimizer and _is_known(one):
            tried[one.batch_size].add(one.learning_rate)
    own = tried[best.batch_size]
    if len(own) > 1:
        return best.learning_rate in (min(own), max(own))
    everywhere = set().union(*tried.values())
    is_searched = any(len(rates) > 1 for rates in tried.values())
    return is_searched and best.learning_rate in (min(everywhere), max(everywhere))


def _is_known(configuration: Configuration) -> bool:
    """Return whether the learning rate is known; of an imported run that does not say it a placeholder is there."""
    return "learning_rate" not in configuration.parameters
