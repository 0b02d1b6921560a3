"""Every shipped kind of chart by name, from small studies, and their pages."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bssearch import registry
from bssearch.figures.page import StudyPicture, page_of
from bssearch.figures.svg import Axis, Chart, Point, Series, linear_ticks
from bssearch.records import TrialState
from tests.factories import make_spec, make_trial
from tests.figures import test_page as page, test_plots as growing
from tests.figures.test_plots import all_charts, answer_of, law_trials, trained_to_its_limit

OBJECTIVES = tuple(one for one in registry.names("objectives") if one != "energy_to_target")


def with_every_end() -> StudyPicture:
    """Study with trials of every end, and a default."""
    found = page.picture()
    states = (TrialState.DIVERGED, TrialState.OOM, TrialState.EXHAUSTED, TrialState.PRUNED)
    first = len(found.trials)
    ended = [make_trial(first + index, batch_size=8, state=state) for index, state in enumerate(states)]
    ended.append(make_trial(first + 4, batch_size=256, state=TrialState.EXHAUSTED, seconds=7.2, last_miss_step=300))
    ended.append(make_trial(first + 5, batch_size=512, seconds=4.0, steps=200))
    trials = [*found.trials, *ended]
    return replace(found, answer=answer_of(trials, found.spec), trials=trials)


def with_many_sizes() -> StudyPicture:
    """Study whose batch sizes do not fit beside each other on a phone."""
    found = page.picture()
    trials = law_trials([2**power for power in range(3, 18)], peak_memory_bytes=2**30)
    return replace(found, answer=answer_of(trials, found.spec), trials=trials, curves={})


def shipped() -> Iterator[tuple[str, Chart]]:
    """Every shipped chart with a unique name."""
    for objective in OBJECTIVES:
        spec = make_spec(objective=objective, price_per_device_hour=2.0)
        trials = law_trials(peak_memory_bytes=6 * 2**30)
        if objective == "metric_in_budget":
            trials = [trained_to_its_limit(trial) for trial in trials]
        for index, chart in enumerate(all_charts(answer_of(trials, spec), trials, spec)):
            if chart is not None:
                yield f"{objective}-{index}", chart
    for kind, found in (("every-end", with_every_end()), ("growing", growing.picture()), ("many", with_many_sizes())):
        for section in page_of(found).sections:
            yield from ((f"{kind}-{name}", chart) for name, chart in section.drawn.items())


def points(*found: Point, **more: Any) -> Chart:
    """Chart of one series of circles on axes from 0 to 10."""
    axis = Axis("amount", 0.0, 10.0, linear_ticks(0.0, 10.0))
    series = Series(**{"points": found, "name": "these", "symbol": "circle", **more})
    return Chart(x=axis, y=replace(axis, title="height"), series=[series])
