"""Every kind of figure that is shipped, by name, made from small studies, and the pages they stand on."""

from __future__ import annotations

from collections.abc import Iterator

from bssearch import registry
from bssearch.pages.axes import Figure, framed, value_axis
from bssearch.pages.page import StudyPicture, page_of
from bssearch.records import TrialState
from tests.factories import make_spec, make_trial
from tests.pages import test_growing as growing
from tests.pages import test_page as page
from tests.pages.test_plots import all_figures, answer_of, law_trials, trained_to_its_limit

OBJECTIVES = tuple(one for one in registry.names("objectives") if one != "energy_to_target")


def with_every_end() -> StudyPicture:
    """Return a study with trials that ended in every way, and a default."""
    found = page.picture()
    states = (TrialState.DIVERGED, TrialState.OOM, TrialState.EXHAUSTED, TrialState.PRUNED)
    first = len(found.trials)
    ended = [make_trial(first + index, batch_size=8, state=state) for index, state in enumerate(states)]
    ended.append(make_trial(first + 4, batch_size=256, state=TrialState.EXHAUSTED, seconds=7.2, last_miss_step=300))
    ended.append(make_trial(first + 5, batch_size=512, seconds=4.0, steps=200))
    return StudyPicture(
        study=found.study,
        spec=found.spec,
        answer=answer_of([*found.trials, *ended], found.spec),
        trials=[*found.trials, *ended],
        curves=found.curves,
    )


def with_many_sizes() -> StudyPicture:
    """Return a study of batch sizes whose names do not fit beside each other on a phone."""
    found = page.picture()
    trials = law_trials([2**power for power in range(3, 18)], peak_memory_bytes=2**30)
    return StudyPicture(
        study=found.study, spec=found.spec, answer=answer_of(trials, found.spec), trials=trials, curves={}
    )


def shipped() -> Iterator[tuple[str, Figure]]:
    """Yield every shipped figure with a name of its own."""
    for objective in OBJECTIVES:
        spec = make_spec(objective=objective, price_per_device_hour=2.0)
        trials = law_trials(peak_memory_bytes=6 * 2**30)
        if objective == "metric_in_budget":
            trials = [trained_to_its_limit(trial) for trial in trials]
        for index, figure in enumerate(all_figures(answer_of(trials, spec), trials, spec)):
            if figure is not None:
                yield f"{objective}-{index}", figure
    for kind, found in (("every-end", with_every_end()), ("growing", growing.picture()), ("many", with_many_sizes())):
        for section in page_of(found).sections:
            yield from ((f"{kind}-{name}", figure) for name, figure in section.figures.items())


def points(x: list[float], y: list[float], **more: object) -> Figure:
    """Return a figure of one trace of markers on axes from 0 to 10."""
    trace = {
        "type": "scatter",
        "mode": "markers",
        "name": "these",
        "x": x,
        "y": y,
        "marker": {"color": "var(--accent)"},
    }
    axis = {**value_axis("amount", [0.0, 10.0], log=False), "range": [0.0, 10.0]}
    return framed([trace | more], axis, {**axis, "title": {"text": "height"}})
