"""Every part of a study's page, for studies that know, bound or lack each figure.

After an intended change: ``BSSEARCH_WRITE_SNAPSHOTS=1 pytest tests/figures/test_snapshots.py``, and read the diff.
"""

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from pprint import pformat
from typing import Any

import pytest

from bssearch.analysis.answer import Figure, Ratio
from bssearch.analysis.generalisation import FinalMetrics, Generalisation
from bssearch.analysis.law.quick import Promise
from bssearch.analysis.measured import MemoryAnswer, NoiseAnswer, StepTimeAnswer
from bssearch.analysis.rules.rule_book import Rule
from bssearch.analysis.shape import CriticalBatch, Fit, Interval, Law, Notice, Predicted
from bssearch.figures.page import StudyPicture, page_of
from bssearch.records import TrialState
from tests.factories import make_spec, make_trial, not_none
from tests.figures import test_growing as growing, test_page as page
from tests.figures.charts import with_every_end
from tests.figures.test_plots import answer_of

FOLDER = Path(__file__).parents[1] / "data" / "pages"
NESTED = ("optimal", "speedup", "measured", "largest_that_fits", "device", "recommendation")
FIT = Fit(
    s_min=50.0,
    b_crit=CriticalBatch(estimate=321.0, low=222.0, high=444.0),
    max_residual=0.0123,
    verdict="fits",
    residuals={8: 0.01, 128: -0.0123},
    alpha_s=0.01,
    beta_s=0.0002,
    b_star=64.0,
    predicted=Predicted(batch_size=96, micro_batch_size=96, time_to_target_s=1.5, flat_range=[64, 128]),
    including_untuned=Law(
        s_min=60.0,
        b_crit=CriticalBatch(estimate=555.0, low=None, high=None),
        max_residual=0.1,
        verdict="poor",
        residuals={},
    ),
    noise_scale_ratio=0.789,
)
NOISE = NoiseAnswer(
    batch_size=32, scale=777.0, low=666.0, high=888.0, adam_scale=None, adam_low=None, adam_high=None, passes=9
)
STEP = StepTimeAnswer(alpha_s=0.0123, beta_s=0.000456, max_residual=0.01, throughput_knee=176)
MEMORY = MemoryAnswer(largest_that_fits=1536, smallest_that_does_not=1792, fixed_bytes=None, bytes_per_sample=None)
FIGURE = Figure(median=1.234, low=1.111, high=1.333, runs=3)
TIMES = Ratio(value=2.34, at_least=False, low=2.11, high=2.55)
AT_LEAST = Ratio(value=1.23, at_least=True)
FINAL = FinalMetrics(
    batch_size=128,
    parameters={},
    runs=3,
    ended_early=1,
    contended=0,
    final_metric=0.91,
    test_metric=0.9,
    gap=Interval(value=0.04, low=0.01, high=0.07),
    trial_numbers=[4, 5, 6],
)
REGRET = {"value": 1.234, "low": 1.15, "high": 1.33, "at_least": False}
SLOPE = {"estimate": 0.52, "low": 0.31, "high": 0.73, "excludes": []}
NO_FIGURE = dict.fromkeys(
    ("objective_value", "objective_lower_bound", "steps_to_target", "samples_to_target", "step_time_s", "best", "slope")
)


def changed(rows: Callable[[int], dict[str, Any]] = lambda place: {}, **update: Any) -> StudyPicture:
    """Study with changed fields of the answer, of its parts and batch sizes."""
    found = page.picture()
    answer = found.answer
    parts = {name: getattr(answer, name).model_copy(update=update.pop(name, {})) for name in NESTED}
    batches = [row.model_copy(update=rows(place)) for place, row in enumerate(answer.batches)]
    return replace(found, answer=answer.model_copy(update={"batches": batches, **parts, **update}))


def known() -> StudyPicture:
    """Study in which every figure is known, with its interval."""
    return changed(
        lambda place: {
            "untuned": place == 0,
            "untuned_because": ["first reason", "second reason"],
            "host_bound_share": 0.256,
            "regime": "perfect",
            "slope": Interval(value=-0.987, low=-1.234, high=-0.765),
        },
        fit=FIT,
        flat_range=[64, 2048],
        measured={"noise_scale": NOISE, "step_time": STEP, "memory": MEMORY},
        optimal={
            "batch_size": 4096,
            "accumulation_steps": 2,
            "micro_batch_size": 2048,
            "objective_value": FIGURE,
            "test_metric": 0.8765,
            "peak_memory_bytes": 3 * 2**30,
            "further_metrics": {"forgetting": Figure(median=0.031, low=0.028, high=0.036, runs=3)},
            "parameters": {"learning_rate": 0.123456, "optimizer": "sgd", "nesterov": True, "dropout": None},
        },
        speedup={"over_default": TIMES, "over_largest": TIMES},
        largest_that_fits={"reason": "256 ran out", "batch_size": 1024},
        generalisation=Generalisation(
            train_seconds=10.0,
            best_batch_size=16,
            notable_gap=0.02,
            batches=[FINAL.model_copy(update={"batch_size": 16, "gap": None, "final_metric": 0.95}), FINAL],
            more_regularised=FINAL,
            closed=False,
        ),
        quick=Promise(
            batch_size=16,
            interval=[8, 2048],
            gain=1.36,
            found_batch_size=64,
            found_flat_range=[32, 64],
            holds=True,
            time_ratio=1.25,
        ),
        warnings=[Notice(code="one", message="from one trial"), Notice(code="two", message="5 trials failed")],
    )


def bounded() -> StudyPicture:
    """Study whose figures have one end of an interval, and whose optimum is off the front."""
    return changed(
        lambda place: {
            **NO_FIGURE,
            "objective_lower_bound": None if place == 0 else 7.25,
            "slope": Interval(value=-0.9, low=None, high=-0.7),
        },
        fit=FIT.model_copy(update={"b_crit": CriticalBatch(estimate=321.0, low=222.0, high=None), "verdict": "poor"}),
        measured={
            "noise_scale": NOISE.model_copy(update={"scale": None, "high": None}),
            "step_time": None,
            "memory": MEMORY,
        },
        optimal={"objective_value": FIGURE.model_copy(update={"low": None, "runs": 1})},
        speedup={"over_default": AT_LEAST, "over_largest": AT_LEAST},
        front=[point.model_copy(update={"on_front": False}) for point in page.picture().answer.front],
        recommendation={"rule": "law"},
    )


def unknown() -> StudyPicture:
    """Study that lacks every figure that may be unknown."""
    found = changed(
        lambda place: {**NO_FIGURE, "ended": {}, "untuned": False, "regime": None, "peak_memory_bytes": None},
        fit=None,
        front=[],
        measured={"noise_scale": None, "step_time": None, "memory": None},
        optimal={"objective_value": FIGURE.model_copy(update={"high": None}), "peak_memory_bytes": None},
        speedup={"over_default": None, "over_largest": None},
        device={"precision": None},
    )
    return replace(found, curves={})


def rule(rule: str = Rule.LINEAR_RATE, verdict: str = "broke", **update: Any) -> dict[str, Any]:
    given = {"configuration": {"learning_rate": 0.4, "dropout": 0.1}, "regret": REGRET, "reason": "three runs"}
    return {"rule": str(rule), "batch_size": 128, "verdict": verdict, **given, **update}


def audited() -> StudyPicture:
    """Study whose rules have every kind of verdict, parameter and regret."""
    rules = [
        rule(verdict="not_run", configuration=None, reason=None, batch_size=None, regret=None),
        rule(Rule.DROPOUT, "held", regret={"value": 1.234, "at_least": True}),
        rule(Rule.WARMUP, "undecided", regret={**REGRET, "low": None}),
        rule("one_of_a_package", regret={**REGRET, "high": None}),
        rule(),
    ]
    found = page.picture(audit={"rules": rules, "learning_rate_slope": SLOPE})
    ends = [datetime(2026, 3, day, tzinfo=UTC) for day in (4, 9, 7)]
    trials = [replace(trial, ended_at=ends[place % 3]) for place, trial in enumerate(found.trials)]
    return replace(found, trials=[*trials, replace(make_trial(len(trials), state=TrialState.RUNNING), ended_at=None)])


def growing_missed() -> StudyPicture:
    """Study with a second schedule that missed the target, and a best schedule without a stored curve."""
    found = growing.picture()
    capped = growing.grown(growing.BY_NOISE, 90, runs=0, state=TrialState.CAPPED)
    return replace(found, trials=[*found.trials, *capped], grown=(not_none(found.grown)[0], []))


def missed(objective: str, price: float | None = None) -> StudyPicture:
    """Study in which one batch size reached the target, and another has only a bound."""
    spec = make_spec(objective=objective, price_per_device_hour=price)
    trials = [
        make_trial(0, batch_size=32),
        make_trial(1, batch_size=8, state=TrialState.EXHAUSTED, seconds=7.2, last_miss_step=300),
    ]
    return replace(page.picture(spec), answer=answer_of(trials, spec), trials=trials)


PICTURES: dict[str, Callable[[], StudyPicture]] = {
    "every_end": with_every_end,
    "growing": growing.picture,
    "growing_by_noise": lambda: growing.picture(growing.BY_NOISE),
    "growing_missed": growing_missed,
    "known": known,
    "bounded": bounded,
    "unknown": unknown,
    "too_few": lambda: changed(fit=FIT.model_copy(update={"verdict": "too_few_points"})),
    "upper_bound": lambda: changed(
        fit=FIT.model_copy(update={"b_crit": CriticalBatch(estimate=321.0, low=None, high=444.0)})
    ),
    "audited": audited,
    "excluding": lambda: page.picture(audit=page.AUDIT),
    "imported": lambda: page.picture(make_spec(workload="imported"), audit={"rules": []}),
    "missed_samples": lambda: missed("samples_to_target"),
    "missed_hours": lambda: missed("cost_to_target"),
    "missed_price": lambda: missed("cost_to_target", 500.0),
}

# Pages whose charts are compared by name only.
NAMES_ONLY = (
    "growing_by_noise",
    "unknown",
    "too_few",
    "upper_bound",
    "audited",
    "excluding",
    "imported",
    "missed_hours",
)


def rounded(value: Any) -> Any:
    """Value with numbers of three digits, without empty fields."""
    if isinstance(value, float):
        return float(f"{value:.3g}")
    if isinstance(value, dict):
        return {str(name): rounded(one) for name, one in value.items() if one not in (None, "")}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("name", PICTURES)
def test_the_page_equals_its_snapshot(name: str) -> None:
    shown = rounded(asdict(page_of(PICTURES[name]())))
    for section in shown["sections"] if name in NAMES_ONLY else []:
        section["charts"] = [*filter(section["charts"].get, section["charts"])]
    text = pformat(shown, width=120, compact=True, sort_dicts=False) + "\n"
    path = FOLDER / f"{name}.txt"
    if "BSSEARCH_WRITE_SNAPSHOTS" in os.environ:
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
