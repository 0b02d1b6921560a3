"""What other tools find, by their own code and by their rules, and the race against it."""

from __future__ import annotations

from bssearch.records import Configuration
from tests.evidence.peers import MISSES, Race, TrialFailed, fresh_seeds, race_of

DEFAULT = Configuration(batch_size=100, micro_batch_size=100, learning_rate=0.1, parameters={"momentum": 0.9})
OURS = Configuration(batch_size=50, micro_batch_size=50, learning_rate=0.2)


def raced(seconds: dict[tuple[int, float], list[float | None]], seeds: int, left: float = 1e9) -> tuple[Race, int]:
    found = [{"tool": "tool", "found": 400, "seconds": 1.0}]
    race = race_of(found, OURS, DEFAULT, largest=200, samples=300, cap=10.0)
    order = fresh_seeds(seeds)

    def timed(configuration: Configuration, seed: int) -> float | None:
        if configuration.batch_size == 200:
            raise TrialFailed("oom: no memory")
        return seconds[configuration.batch_size, round(configuration.learning_rate, 4)][order.index(seed)]

    return race, race.run(order, timed, lambda: left, lambda: None)


ALL: dict[tuple[int, float], list[float | None]] = {
    (50, 0.2): [1.0, 2.0, 1.0, 2.0],
    (100, 0.1): [3.0, 6.0, 3.0, 6.0],
    (300, 0.1): [None] * 4,
    (300, 0.3): [None, 8.0, 4.0, 8.0],
    (300, 0.1732): [2.0, 4.0, 2.0, 4.0],
}


def test_candidates_run_with_the_same_seeds_and_are_compared_in_pairs() -> None:
    race, rounds = raced(ALL, 4)
    rows = {(row["tool"], row["rule"]): row for row in race.rows()}
    assert rounds == 4
    assert rows["bssearch", "searched"]["over_ours"]["median"] == 1.0
    assert rows["the default", "unchanged"]["over_ours"]["median"] == 3.0
    sqrt = rows["tool", "sqrt"]
    assert sqrt["batch_size"] == 300, "a batch larger than the training data is all of it"
    assert (sqrt["over_ours"]["median"], sqrt["over_ours"]["pairs"]) == (2.0, 4)


def test_what_always_misses_is_not_trained_again_and_what_fails_says_why() -> None:
    race, _ = raced(ALL, 4)
    rows = {(row["tool"], row["rule"]): row for row in race.rows()}
    lost = rows["tool", "unchanged"]
    assert lost["seconds_to_target"] == [None] * MISSES and lost["over_ours"]["at_least"]
    assert len(rows["tool", "linear"]["seconds_to_target"]) == 4, "it missed once and hit then"
    failed = rows["the largest of the study", "linear"]
    assert failed["failed"] == "oom: no memory" and failed["over_ours"] is None
    assert failed["seconds_to_target"] == []


def test_a_round_that_would_not_end_in_time_is_not_begun() -> None:
    assert raced(ALL, 4, left=-1.0)[1] == 0
