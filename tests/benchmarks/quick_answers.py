"""Quick answers against what is true: the batch size of ``bssearch quick`` over the best, and what its range holds.

Run as ``python tests/benchmarks/quick_answers.py [--studies NAME …] [--seeds 5] [--truth FILE]``, on a core that
nothing else uses: an hour and a half for all five studies, most of it for the truth, which ``--truth`` keeps in a file
and reads again where a study is in it. The studies are those of ``studies/`` with their defaults as they stand.

The truth of a study, of every batch size on its ladder:

- *by rule*: the default with the learning rate carried by the space's rule, the median of ``RULE_SEEDS`` runs.
- *tuned*: ``DRAWS`` configurations from a Sobol' sequence over the space, and the default's by rule, run once; the best
  ``FINALISTS`` run with ``FINAL_SEEDS`` fresh seeds, whose median counts. A run ends at ``CAP`` × the fewest steps
  known at its batch size.

Of either, batch sizes are tried from the default's outwards, and a run ends at ``FAR`` × the least seconds known of any
of them: what takes longer counts as missed, and none that matters is cut.

A time is the steps to the target, which are the same on a busy machine, times the median step time of the batch size
over all databases of the study's quick answers. A run that is not at the target in ``budget.trial_train_seconds`` takes
longer than all others.

A quick answer's ratios: by rule, the time at its batch size over the least; tuned, the same of the tuned times; as it
stands, its batch size by rule over the least tuned time. Its range holds where it meets the tuned batch sizes within
5 % of the best. Bars: medians over all studies and seeds of at most 1.3 by rule and 1.6 tuned; 80 % of the ranges hold;
the median of their widths is at most 8 (and the widest is told); each takes at most 60 s. Exits 1 where one is missed.
"""

from __future__ import annotations

if not __package__:
    __import__("from_clone")

import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from scipy.stats import qmc

from bssearch.commands.enqueue import configuration_of
from bssearch.commands.opening import Launch, OpenStudy, opened
from bssearch.commands.quick import quick
from bssearch.intervals import FLAT_RATIO
from bssearch.records import Configuration, Phase, ProbeRecord, TrialRequest, TrialState
from bssearch.search.listener import Listener
from bssearch.spec import StudySpec, load_spec
from bssearch.storage.repository import open_store
from tests.benchmarks.five_ways import outcome_of
from tests.benchmarks.harness import one_of, script, verdict

STUDIES = ("digits", "fashion_mnist_cpu", "char_lm_cpu", "finetune", "vit_tiny")
FOLDER = Path(__file__).parents[2] / "studies"
RULE_SEEDS, DRAWS, FINALISTS, FINAL_SEEDS, CAP, FAR = 5, 15, 3, 3, 3.0, 4.0
BY_RULE_BAR, TUNED_BAR, HOLDS_BAR, WIDTH_BAR, SECONDS_BAR = 1.3, 1.6, 0.8, 8.0, 60.0
FIRST_SEED = 90_000
"""Seeds of the truth: no study's own."""

Steps = Mapping[int, float]
"""Median steps to the target by batch size, ∞ where it is missed."""


@dataclass(frozen=True)
class Truth:
    """Steps to the target of each batch size of a study, with learning rates by rule and tuned."""

    by_rule: Steps
    tuned: Steps


@dataclass(frozen=True)
class Found:
    """A quick answer: its batch size, its range, what it took, and the seconds of a step by batch size."""

    batch_size: int
    interval: tuple[int, int]
    seconds: float
    step_seconds: Mapping[int, float]


class Runner:
    """Runs configurations of a study to the target, without storing them."""

    def __init__(self, study: OpenStudy, probes: Mapping[int, ProbeRecord]) -> None:
        self._study = study
        self._probes = probes
        self._runs = 0
        self._least = {True: math.inf, False: math.inf}
        """The least seconds to the target of any run that follows the rule, and that does not."""

    def steps(self, configuration: Configuration, seed: int, most: float = math.inf, *, by_rule: bool = False) -> float:
        """Return the steps to the target, ∞ where it is not reached within ``most`` steps or takes `FAR` too long."""
        self._runs += 1
        spec, probe = self._study.spec, self._probes[configuration.batch_size]
        assert probe.step_seconds is not None and probe.eval_every_steps is not None, "it fits into memory"
        outcome = outcome_of(
            self._study.executor,
            TrialRequest(
                number=self._runs,
                configuration=configuration.in_micro_batches(probe.micro_batch_size),
                seed=FIRST_SEED + seed,
                target=spec.record_target,
                train_seconds_limit=min(
                    spec.budget.trial_train_seconds, most * probe.step_seconds, FAR * self._least[by_rule]
                ),
                limit_state=TrialState.EXHAUSTED,
                eval_every_steps=probe.eval_every_steps,
                threads=spec.executor.threads,
            ),
        )
        if outcome.steps_to_target is None:
            return math.inf
        self._least[by_rule] = min(self._least[by_rule], outcome.steps_to_target * probe.step_seconds)
        return outcome.steps_to_target


def truth_of(spec: StudySpec) -> Truth:
    """Return the truth of a study, of all batch sizes that fit into memory."""
    with _unstored(spec) as study:
        _only_times_steps(study)
        probes = {size: study.history().probes[size] for size in study.history().feasible}
        runner = Runner(study, probes)
        by_rule, tuned = {}, {}
        for size in sorted(probes, key=lambda size: abs(math.log(size / spec.default.batch_size))):
            default = configuration_of(spec, {"batch_size": size})
            runs = [runner.steps(default, seed, by_rule=True) for seed in range(RULE_SEEDS)]
            by_rule[size] = statistics.median(runs)
            tuned[size] = min(_tuned(spec, runner, default, runs[0]), by_rule[size])
            print(f"{spec.name} batch {size}: {by_rule[size]:g} steps by rule, {tuned[size]:g} tuned", flush=True)
        return Truth(dict(sorted(by_rule.items())), dict(sorted(tuned.items())))


def _tuned(spec: StudySpec, runner: Runner, default: Configuration, least: float) -> float:
    """Return the median steps of the best of some configurations at the batch size of ``default``."""
    dimensions = spec.space.dimensions()
    shares = qmc.Sobol(len(dimensions), seed=0).random(DRAWS + 1)[1:]
    drawn = [
        spec.space.decode(
            default.batch_size,
            {
                one.name: one.choices[int(share * len(one.choices))] if one.choices else one.at_share(share)
                for one, share in zip(dimensions, row, strict=True)
            },
        )
        for row in shares.tolist()
    ]
    steps = {-1: least}
    for number, configuration in enumerate(drawn):
        steps[number] = runner.steps(configuration, RULE_SEEDS, CAP * min(steps.values()))
    best = sorted((number for number in steps if math.isfinite(steps[number])), key=steps.__getitem__)[:FINALISTS]
    medians = [
        statistics.median(
            runner.steps(default if number < 0 else drawn[number], RULE_SEEDS + 1 + seed) for seed in range(FINAL_SEEDS)
        )
        for number in best
    ]
    return min(medians, default=math.inf)


@contextmanager
def _unstored(spec: StudySpec) -> Iterator[OpenStudy]:
    with tempfile.TemporaryDirectory() as made, opened(spec, Launch(db=f"sqlite:///{made}/s.db", folder=FOLDER)) as one:
        yield one


def _only_times_steps(study: OpenStudy) -> None:
    """Time the steps of every batch size, and run nothing."""
    study.driver().run_planned(lambda history: None, Phase.SEARCH)


def asked(spec: StudySpec, seed: int, folder: Path) -> Found:
    """Return a quick answer of a study in a database of its own."""
    db = f"sqlite:///{folder / f'{spec.name}-{seed}.db'}"
    began = time.monotonic()
    found = quick(spec.model_copy(update={"seed": seed}), db=db, folder=FOLDER, listener=Listener())
    seconds = time.monotonic() - began
    with open_store(db, write=False) as store:
        probes = store.probes(spec.name)
    steps = {size: probe.step_seconds for size, probe in probes.items() if probe.step_seconds is not None}
    return Found(found.optimal.batch_size, (found.interval[0], found.interval[1]), seconds, steps)


@dataclass(frozen=True)
class Judged:
    """A quick answer against the truth: ratios of times, and whether its range meets the best batch sizes."""

    by_rule: float
    tuned: float
    as_it_stands: float
    holds: bool
    width: float
    seconds: float


def judged(found: Found, truth: Truth, step_seconds: Mapping[int, float]) -> Judged:
    """Judge a quick answer; ``step_seconds`` are the medians over all of its study."""
    by_rule = _times(truth.by_rule, step_seconds)
    tuned = _times(truth.tuned, step_seconds)
    low, high = found.interval
    size = found.batch_size
    return Judged(
        by_rule=by_rule[size] / min(by_rule.values()),
        tuned=tuned[size] / min(tuned.values()),
        as_it_stands=by_rule[size] / min(tuned.values()),
        holds=low <= max(flat_range(tuned)) and min(flat_range(tuned)) <= high,
        width=high / low,
        seconds=found.seconds,
    )


def _times(steps: Steps, step_seconds: Mapping[int, float]) -> dict[int, float]:
    return {size: count * step_seconds[size] for size, count in steps.items()}


def flat_range(times: Mapping[int, float]) -> list[int]:
    """Return the batch sizes whose time is within 5 % of the least."""
    return [size for size, seconds in times.items() if seconds <= FLAT_RATIO * min(times.values())]


def tell(spec: StudySpec, truth: Truth, answers: list[Found]) -> list[Judged]:
    """Print a study's truth and its quick answers; return how these are judged."""
    sizes = list(truth.by_rule)
    steps = {size: statistics.median(one.step_seconds[size] for one in answers) for size in sizes}
    by_rule, tuned = _times(truth.by_rule, steps), _times(truth.tuned, steps)
    print(f"\n{spec.name}: within 5 % of the tuned optimum {flat_range(tuned)}, by rule {flat_range(by_rule)}")
    print("batch size      " + "".join(f"{size:>8}" for size in sizes))
    for name, times in (("by rule, s", by_rule), ("tuned, s", tuned)):
        print(f"{name:16}" + "".join(f"{seconds:>8.3g}" for seconds in times.values()))
    found = [judged(one, truth, steps) for one in answers]
    print(f"{'quick':>6} {'range':>12} {'by rule':>8} {'tuned':>6} {'as it stands':>13} {'holds':>6} {'seconds':>8}")
    for one, result in zip(answers, found, strict=True):
        low, high = one.interval
        print(
            f"{one.batch_size:>6} {f'{low}–{high}':>12} {result.by_rule:>8.2f} {result.tuned:>6.2f} "
            f"{result.as_it_stands:>13.2f} {'yes' if result.holds else 'no':>6} {result.seconds:>8.1f}",
            flush=True,
        )
    return found


def meets_bars(found: list[Judged]) -> bool:
    """Print the figures of all studies beside their bars; return whether all are met."""
    by_rule, tuned = (statistics.median(getattr(one, name) for one in found) for name in ("by_rule", "tuned"))
    holds = statistics.fmean(one.holds for one in found)
    widths, seconds = [one.width for one in found], [one.seconds for one in found]
    print(
        f"\nall: by rule {by_rule:.2f} (bar {BY_RULE_BAR}), tuned {tuned:.2f} (bar {TUNED_BAR}), as they stand "
        f"{statistics.median(one.as_it_stands for one in found):.2f}; {holds:.0%} hold (bar {HOLDS_BAR:.0%}); width "
        f"{statistics.median(widths):.1f}, at most {max(widths):.1f} (bar {WIDTH_BAR:g}); "
        f"{statistics.median(seconds):.0f} s, at most {max(seconds):.0f} s (bar {SECONDS_BAR:g} s)"
    )
    return (
        by_rule <= BY_RULE_BAR
        and tuned <= TUNED_BAR
        and holds >= HOLDS_BAR
        and statistics.median(widths) <= WIDTH_BAR
        and max(seconds) <= SECONDS_BAR
    )


def kept_truth(spec: StudySpec, file: Path | None) -> Truth:
    """Return the truth of a study as it stands in a file, else measure it and add it there."""
    kept = json.loads(file.read_text()) if file is not None and file.exists() else {}
    if spec.name not in kept:
        truth = truth_of(spec)
        kept[spec.name] = {"by_rule": _written(truth.by_rule), "tuned": _written(truth.tuned)}
        if file is not None:
            file.write_text(json.dumps(kept, indent=1))
    return Truth(**{name: _read(steps) for name, steps in kept[spec.name].items()})


def _written(steps: Steps) -> dict[str, float | None]:
    return {str(size): count if math.isfinite(count) else None for size, count in steps.items()}


def _read(steps: Mapping[str, float | None]) -> dict[int, float]:
    return {int(size): math.inf if count is None else count for size, count in steps.items()}


def main(
    studies: Annotated[list[str] | None, one_of(STUDIES, "default: all")] = None,
    seeds: int = 5,
    truth: Annotated[Path | None, typer.Option(help="a file that keeps the truths")] = None,
) -> bool:
    """Find or read the truths, ask, print and judge."""
    found: list[Judged] = []
    with tempfile.TemporaryDirectory() as made:
        for name in studies or STUDIES:
            spec = load_spec(FOLDER / f"{name}.yaml")
            known = kept_truth(spec, truth)
            if seeds:
                found += tell(spec, known, [asked(spec, 1 + seed, Path(made)) for seed in range(seeds)])
    return not found or verdict(meets_bars(found))


if __name__ == "__main__":
    script(main, __doc__)
