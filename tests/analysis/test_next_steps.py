"""What an answer proposes to do next."""

import pytest

from bssearch.analysis.answer import Largest
from bssearch.analysis.build_answer import MOST, next_steps
from bssearch.analysis.certainty import Certainty
from bssearch.analysis.optimum import Settles, Verdict, decide
from bssearch.records import Phase
from bssearch.spec import StudySpec
from tests.factories import make_spec, make_trial, not_none

LARGEST = Largest(batch_size=128, time_to_target_s=None, lower_bound_s=None, reason="")


def verdict(batch_size: int = 64, *, confirmed: bool = True) -> Verdict:
    phase = Phase.CONFIRM if confirmed else Phase.SEARCH
    return not_none(
        decide([make_trial(n, batch_size=batch_size, seconds=1.0 + n / 10, phase=phase, seed=n) for n in range(3)], 3)
    )


def commands(spec: StudySpec, found: Verdict, sure: Certainty | None = None, largest: Largest = LARGEST) -> list[str]:
    return [step.command for step in next_steps(spec, found, sure, largest, trials=60)]


def test_an_answer_that_nothing_is_wrong_with_is_used_and_looked_at() -> None:
    spec = make_spec(name="mine")
    told = commands(spec, verdict(), Certainty(0.95))
    assert told == ["bssearch best mine --export yaml", "bssearch report mine --html mine.html"]


@pytest.mark.parametrize(
    ("settles", "runs", "command"),
    [
        ("runs", 12, "bssearch study confirm mine --max-runs 12"),
        ("step_times", None, "bssearch probe step-time mine"),
        ("tuning", None, "bssearch run mine --set budget.trials=90"),
    ],
)
def test_a_provisional_answer_is_settled_first(settles: Settles, runs: int | None, command: str) -> None:
    told = commands(make_spec(name="mine"), verdict(), Certainty(0.6, settles, runs))
    assert told[0] == command and len(told) == MOST


def test_what_is_not_confirmed_is_confirmed() -> None:
    assert commands(make_spec(name="mine"), verdict(confirmed=False))[0] == "bssearch study confirm mine"


def test_an_optimum_at_an_end_asks_for_more_batch_sizes_but_for_none_beyond_memory() -> None:
    spec = make_spec(name="digits")
    sizes = spec.batch_sizes
    largest, smallest = commands(spec, verdict(max(sizes)))[0], commands(spec, verdict(min(sizes)))[0]
    assert largest.startswith("bssearch run digits --set name=digits-wider") and str(2 * max(sizes)) in largest
    assert str([min(sizes) // 2, *sizes]) in smallest
    bounded = LARGEST.model_copy(update={"bounded_by_memory": True})
    assert "wider" not in " ".join(commands(spec, verdict(max(sizes)), largest=bounded))
