"""What two copies of one study make together: of each row that both have, the join.

A copy is a set of rows by key. The join of two copies has every row of both; where both have a row of one key, it has
the later of the two in an order that is total, or they must be equal, or the copies contradict each other. All that is
the least upper bound of a lattice (a contradiction is its top), field by field or row by row, and so it does not
matter in which order copies are joined, how they are grouped, or how often: join(a, b) = join(b, a),
join(a, join(b, c)) = join(join(a, b), c), join(a, a) = a. An earlier copy of a study adds nothing to a later one, but
for its spec: when that was changed is not kept.

* **Trials**, by number. What was asked of a trial (`ASKED`) never changes and must be equal. Then: none < queued <
  paused < ended. Of two that are queued, or paused, the one that was so later counts. Two that have ended must be
  equal in every field: else the study went on in both places, and these are two trials of one number. A trial that
  runs is none: its lease is one database's own, and the trial follows once it has ended.
* **Observations**, by trial and step, and **visits**, by environment and number: append-only; must be equal.
* **Logs**, by trial: the longer text, of two as long the one that sorts later.
* **Probes**: of step times the first that was measured, since its evaluation cadence stays; of memory and noise scales,
  which are replaced when they are measured anew, the last. **Branches**: the first.
* **Environments**, and the **specs** by which trials were started, by digest: must be equal.
* **The study**: its question must be equal. Of two specs of one question that count with the larger budget of trials,
  of two as large that whose JSON sorts later: which of them was set later nobody knows. So a join with an earlier copy
  may bring back its pruner, its slots or its larger budget. Of two environments of one kind of device the one whose
  digest sorts later; none before any. Its name is no part of it: each database has its own, as it has its own mind
  whether the study is put away.
* **What a search ended with, and a quick answer**: the end with more trials, the quick answer with more runs, else the
  one whose JSON sorts later; none before any. The moment of the finding is the later one.

Every "later" is by a moment or a number first and by the row's JSON last, so that the order is total.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bssearch.records import TrialState
from bssearch.storage.models import ProbeKind
from bssearch.storage.transfer.layout import Kind, Row

ASKED = frozenset(
    {
        *("number", "phase", "uncapped", "batch_size", "learning_rate", "warmup_epochs", "weight_decay", "dropout"),
        *("label_smoothing", "optimizer", "parameters", "sampled", "seed", "retry_of"),
    }
)
"""The fields of a trial that are the same from its planning to its end."""

QUESTION = ("created_at", "created_by", "spec_hash", "objective", "target_metric", "target_value", "target_goal")
"""The fields of a study that never change.

The first three say which study it is; of studies that one import made of runs, the kind of device does too.
"""


class Contradiction(Exception):  # noqa: N818 - it is told as an error by who knows the study
    """Two copies that cannot be of one study: a ``field`` of a row has two values."""

    def __init__(self, field: str, here: object, there: object) -> None:
        super().__init__(field, here, there)
        self.field = field
        self.here = here
        self.there = there


def joined(kind: Kind, here: Row, there: Row) -> Row:
    """Return the join of two rows of one key; raise `Contradiction` where they cannot be of one study."""
    return _RULES[kind](here, there)


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _equal(here: Row, there: Row) -> Row:
    check_equal(here, there, here.keys())
    return here


def check_equal(here: Row, there: Row, names: Iterable[str]) -> None:
    """Raise `Contradiction` at the first name under which two rows differ."""
    for name in sorted(names):
        if _canonical(here[name]) != _canonical(there[name]):
            raise Contradiction(name, here[name], there[name])


def _later(here: Row, there: Row, rank: Callable[[Row], Any]) -> Row:
    return max(here, there, key=lambda row: (rank(row), _canonical(row)))


def _earlier(here: Row, there: Row, rank: Callable[[Row], Any]) -> Row:
    return min(here, there, key=lambda row: (rank(row), _canonical(row)))


def _stage(trial: Row) -> int:
    state = TrialState(trial["state"])
    return 0 if state is TrialState.QUEUED else 1 if state is TrialState.PAUSED else 2


def _trial(here: Row, there: Row) -> Row:
    check_equal(here, there, ASKED)
    if _stage(here) == _stage(there) == 2:
        return _equal(here, there)
    return _later(here, there, lambda one: (_stage(one), one["ended_at"] or one["created_at"]))


def _log(here: Row, there: Row) -> Row:
    return _later(here, there, lambda one: len(one["text"]))


def _probe(here: Row, there: Row) -> Row:
    choose = _earlier if here["kind"] == ProbeKind.STEP_TIME else _later
    return choose(here, there, lambda one: one["measured_at"])


def _branch(here: Row, there: Row) -> Row:
    return _earlier(here, there, lambda one: one["measured_at"])


def _chosen(here: Any, there: Any, rank: Callable[[Any], Any]) -> Any:
    """Return the later of two values, none before any."""
    if here is None or there is None:
        return there if here is None else here
    return max(here, there, key=lambda one: (rank(one), _canonical(one)))


def _finding(here: Row, there: Row) -> Row:
    ranks: Mapping[str, Callable[[Any], Any]] = {"quick": _runs, "search_end": _spent}
    answers = here["answer"], there["answer"]
    return {
        "answer": {name: _chosen(answers[0][name], answers[1][name], rank) for name, rank in ranks.items()},
        "found_at": max(here["found_at"], there["found_at"]),
    }


def _runs(quick: Mapping[str, Any]) -> int:
    runs = quick.get("runs")
    return len(runs) if isinstance(runs, list) else 0


def _spent(end: Mapping[str, Any]) -> float:
    spent = end.get("spent")
    return spent if isinstance(spent, int | float) else 0


def _study(here: Row, there: Row) -> Row:
    check_equal(here, there, QUESTION)
    others = here.keys() - {*QUESTION, "name", "spec", "environment"}
    return {
        **{name: here[name] for name in ("name", *QUESTION)},
        **{name: _chosen(here[name], there[name], lambda _: 0) for name in others},
        "spec": joined_spec(here["spec"], there["spec"]),
        "environment": _chosen(here["environment"], there["environment"], lambda _: 0),
    }


def joined_spec(here: Mapping[str, Any], there: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the join of two specs of one question, under the name of the first."""
    named = {**there, "name": here.get("name")}
    found: Mapping[str, Any] = _chosen(here, named, _trials_of)
    return found


def _trials_of(spec: Mapping[str, Any]) -> float:
    budget = spec.get("budget")
    trials = budget.get("trials") if isinstance(budget, Mapping) else None
    return trials if isinstance(trials, int | float) else 0


_RULES: Mapping[Kind, Callable[[Row, Row], Row]] = {
    Kind.ENVIRONMENT: _equal,
    Kind.STUDY: _study,
    Kind.SPEC: _equal,
    Kind.TRIAL: _trial,
    Kind.OBSERVATION: _equal,
    Kind.LOG: _log,
    Kind.PROBE: _probe,
    Kind.VISIT: _equal,
    Kind.BRANCH: _branch,
    Kind.FINDING: _finding,
}
