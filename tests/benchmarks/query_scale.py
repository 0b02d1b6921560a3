"""How ``bssearch best`` scales: its time at 4,000 trials and 290,000 observations over its time at 40 trials.

Whole processes, interleaved, ratio of medians. Bar: at most 1.5. Run: python tests/benchmarks/query_scale.py
"""

if not __package__:
    __import__("from_clone")

import random
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from bssearch.records import Configuration, Lease, Observation, Phase, TrialOutcome, TrialState
from bssearch.search.finding import save_finding
from bssearch.storage.repository import Store, open_store
from tests.benchmarks.harness import script, timed_in_turns
from tests.factories import make_environment, make_plan, make_probe, make_spec, not_none, store_study

BAR = 1.5
RUNS = 15
SIZES = {"40 trials": (40, 72), "4,000 trials": (4000, 72)}
LADDER = (8, 16, 32, 64, 128)


def fill(url: str, trials: int, observations: int) -> int:
    """Store a study of search trials, and confirmation runs for every tenth; return the number of observations."""
    spec, environment, rng = make_spec(), make_environment(), random.Random(0)
    with open_store(url) as store:
        store_study(store, spec, environment)
        for size in LADDER:
            store.probes.add_step_time(spec.name, environment, make_probe(size), 1)
        for index in range(trials):
            confirms = index % 10 == 9
            size = 32 if confirms else rng.choice(LADDER)
            rate = 0.1 if confirms else rng.uniform(0.01, 1.0)
            add_trial(store, spec.name, size, rate, Phase.CONFIRM if confirms else Phase.SEARCH, observations, rng)
        save_finding(store, spec.name)  # as a driver does when a trial ends
        return store.trials.observation_count(spec.name)


def add_trial(
    store: Store, study: str, size: int, rate: float, phase: Phase, observations: int, rng: random.Random
) -> None:
    """Store one trial from its start to its end."""
    seconds = rng.lognormvariate(0.0, 0.2) * (1 + abs(size - 32) / 32)
    plan = make_plan(
        configuration=Configuration(batch_size=size, micro_batch_size=size, learning_rate=rate),
        sampled={"reference_learning_rate": rate, "weight_decay": 0.0, "dropout": 0.1},
        phase=phase,
        seed=rng.randrange(2**31),
    )
    lease = Lease(owner="benchmark/1/1.00/x", seconds=60.0)
    number = not_none(store.trials.start(study, plan, environment=make_environment(), lease=lease)).number
    curve = [
        Observation(
            step=5 * n,
            samples=5 * n * size,
            train_seconds=seconds * n / observations,
            metric=0.9 * n / observations,
            loss=1.0,
            learning_rate=rate,
        )
        for n in range(observations)
    ]
    store.trials.append_observations(study, [(number, observation) for observation in curve])
    outcome = TrialOutcome(
        state=TrialState.REACHED,
        reason="accuracy = 0.9",
        steps=5 * observations,
        train_seconds=seconds,
        wall_seconds=seconds,
        time_to_target_s=seconds,
        steps_to_target=5 * observations,
        final_metric=0.9,
        best_metric=0.9,
    )
    store.trials.finish(study, number, outcome, steps_x_step_time_s=seconds)


def best(url: str) -> None:
    """Run ``bssearch best`` as a whole process."""
    command = [sys.executable, "-m", "bssearch", "best", "toy", "--db", url, "--format", "json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main() -> bool:
    """Measure and print; return False above the bar."""
    with tempfile.TemporaryDirectory() as folder:
        urls = {}
        for index, (name, size) in enumerate(SIZES.items()):
            urls[name] = f"sqlite:///{Path(folder) / f'{index}.db'}"
            print(f"{name}: {fill(urls[name], *size):,} observations")
        times = timed_in_turns({name: partial(best, url) for name, url in urls.items()}, RUNS)
    small, large = (statistics.median(times[name]) for name in SIZES)
    for name in SIZES:
        print(f"{name}: {statistics.median(times[name]) * 1e3:.0f} ms (median of {RUNS})")
    print(f"ratio {large / small:.2f}; bar {BAR:g}")
    return large / small <= BAR


if __name__ == "__main__":
    script(main, __doc__)
