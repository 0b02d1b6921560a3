"""Counts of a user's loop: steps at its optimizer, samples in its batches."""

from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from bssearch.commands.opening import program_of
from bssearch.errors import UsageError
from bssearch.executors.loops.measuring import TimedLoop
from bssearch.executors.loops.own_loop import MOST_SKIPPED, Trial
from bssearch.records import TrialState
from tests.executors.loops.loops import (
    ROWS,
    FakeLine,
    Started,
    asked,
    assign,
    clock_of,
    optimizer_of,
    step_time_request,
)
from tests.factories import changed, make_spec, not_none
from tests.training.toys import FakeTime, configuration

FOURFOLD = configuration(20, micro_batch_size=5, accumulation_steps=4)
Collate = Callable[[list[int]], Any]


def until(steps: int, **changes: Any) -> Started:
    """Return a trial that has read its batch size, and that the search stops after ``steps``."""
    started = Started(asked(**changes)).stop_at(steps, TrialState.PRUNED)
    assert started.trial.batch_size == 20
    return started


def counted(started: Started) -> list[tuple[int, int]]:
    """Return the steps and samples of each evaluation, and of the end."""
    started.run.finish()
    outcome = started.line.outcome
    seen = [(one.step, one.samples) for one in started.line.observations]
    return seen if seen[-1] == (outcome.steps, outcome.samples) else [*seen, (outcome.steps, outcome.samples)]


def evaluate() -> dict[str, float]:
    return {"accuracy": 0.5}


def rows(trial: Trial, collate: Collate | None = None, *, drop_last: bool = False) -> DataLoader[Any]:
    return DataLoader(range(ROWS), trial.micro_batch_size, collate_fn=collate, drop_last=drop_last)  # type: ignore[arg-type]


SHAPES: list[Collate] = [
    lambda rows: torch.zeros(len(rows), 3),
    lambda rows: torch.zeros(7, len(rows), 3),
    lambda rows: (torch.zeros(len(rows), 3), torch.zeros(len(rows))),
    lambda rows: [torch.zeros(3, 2), {"y": torch.zeros(len(rows))}],
    lambda rows: {"scale": torch.tensor(2.0), "ids": torch.zeros(len(rows), 7)},
    lambda rows: UserDict(ids=torch.zeros(len(rows), 7)),
    lambda rows: torch.zeros(len(rows), 3).numpy(),
    list,
    lambda rows: [(torch.zeros(3, 3), row) for row in rows],
    lambda rows: ([f"text {row}" for row in rows], rows),
]
"""Tensor, time first, tuple, an own tensor beside, dict, mapping as of a tokeniser, array, indices, samples, texts."""


@pytest.mark.parametrize("collate", SHAPES)
@pytest.mark.parametrize("has_optimizer", [True, False])
def test_a_smaller_last_batch_counts_its_own_samples(collate: Collate, has_optimizer: bool) -> None:
    started = until(7)
    optimizer = optimizer_of()
    if has_optimizer:
        started.trial.state(optimizer=optimizer)
    for _ in started.trial.batches(rows(started.trial, collate), evaluate):
        optimizer.step()
    # Fifty rows in batches of 20: 20, 20 and 10 a pass.
    assert counted(started) == [(0, 0), (2, 40), (4, 70), (6, 100), (7, 120)]
    assert not [one for one in started.line.outcome.warnings if "counted" in one]


@pytest.mark.parametrize(
    "batches",
    [range(10), [torch.zeros(20 * 7)] * 10, [{"input_ids": torch.zeros(1, 20 * 7)}] * 10],
    ids=["numbers", "tokens in a row", "packed tokens"],
)
def test_a_batch_that_cannot_be_counted_is_warned_of_and_refused_if_the_study_is_about_samples(batches: Any) -> None:
    started = until(2)
    for _ in started.trial.batches(batches, evaluate):
        pass
    assert counted(started) == [(0, 0), (2, 40)]
    assert len([one for one in started.line.outcome.warnings if "bssearch cannot count" in one]) == 1
    started = until(2)
    started.run.needs_samples = True
    trial = Trial(started.run)
    assert trial.batch_size == 20
    with pytest.raises(UsageError, match="objective is samples_to_target"):
        next(iter(trial.batches(batches, evaluate)))


def windows(started: Started, *, at_end: bool, drop_last: bool, state: bool = True) -> list[int]:
    """Train with accumulation; return the samples of each optimizer step. ``at_end``: an epoch ends with a step."""
    trial, optimizer = started.trial, optimizer_of()
    if state:
        trial.state(optimizer=optimizer)
    loader, micro_batches, sizes, size = rows(trial, drop_last=drop_last), 0, list[int](), 0
    for number, batch in enumerate(trial.batches(loader, evaluate), start=1):
        micro_batches += 1
        size += len(batch)
        if micro_batches == trial.accumulation_steps or (at_end and number % len(loader) == 0):
            optimizer.step()
            sizes.append(size)
            micro_batches = size = 0
    return sizes


@pytest.mark.parametrize(
    ("micro", "at_end", "drop_last", "sizes"),
    [
        (5, True, False, [20, 20, 10, 20, 20, 10]),
        (5, False, False, [20, 20, 20, 20, 20, 20]),
        (4, True, False, [20, 20, 10, 20, 20, 10]),
        (4, True, True, [20, 20, 8, 20, 20, 8]),
        (4, False, False, [20, 20, 18, 20, 20, 18]),
        (4, False, True, [20, 20, 20, 20, 20, 20]),
    ],
)
def test_each_step_of_the_optimizer_counts_with_the_samples_of_its_window(
    micro: int, at_end: bool, drop_last: bool, sizes: list[int]
) -> None:
    at = configuration(20, micro_batch_size=micro, accumulation_steps=20 // micro)
    started = until(6, configuration=at)
    assert windows(started, at_end=at_end, drop_last=drop_last) == sizes
    assert counted(started) == [(step, sum(sizes[:step])) for step in (0, 2, 4, 6)]


@pytest.mark.parametrize(("at_end", "drop_last", "warns"), [(True, True, True), (False, True, False)])
def test_without_an_optimizer_a_step_is_assumed_after_each_whole_window_and_others_are_warned_of(
    at_end: bool, drop_last: bool, warns: bool
) -> None:
    at = FOURFOLD if at_end else configuration(20, micro_batch_size=4, accumulation_steps=5)
    started = until(6, configuration=at)
    sizes = windows(started, at_end=at_end, drop_last=drop_last, state=False)
    assert (len(sizes) > 6) is at_end
    assert counted(started) == [(0, 0), (2, 40), (4, 80), (6, 120)]
    assert any("trial.state(optimizer=...)" in one for one in started.line.outcome.warnings) is warns


class Sam(torch.optim.Optimizer):
    """Two passes a step, the second with an inner optimizer (Foret et al. 2021, arXiv 2010.01412)."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.base_optimizer = inner

    def second_step(self) -> None:
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        self.second_step()


@pytest.mark.parametrize("has_closure", [True, False])
def test_an_optimizer_that_takes_two_passes_a_step_counts_once(has_closure: bool) -> None:
    started = until(4)
    optimizer = Sam(optimizer_of())
    started.trial.state(optimizer=optimizer)
    for _ in started.trial.batches(rows(started.trial), evaluate):
        if has_closure:
            optimizer.step(lambda: 0.0)
        else:
            optimizer.second_step()
    assert counted(started) == [(0, 0), (2, 40), (4, 70)]


@pytest.mark.parametrize("settings", [{}, {"kind": torch.optim.Adam, "fused": True}])
def test_a_step_that_a_gradient_scaler_skips_is_none(settings: dict[str, Any]) -> None:
    started = until(6)
    trial, optimizer = started.trial, optimizer_of(**settings)
    (parameter,) = optimizer.param_groups[0]["params"]
    trial.state(optimizer=optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for number, _ in enumerate(trial.batches(rows(trial), evaluate), start=1):
        optimizer.zero_grad()
        scaler.scale(parameter.sum() * (torch.inf if number in {1, 2, 5} else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    # Batches of 20, 20, 10: steps 1 to 6 are at batches 3, 4, 6, 7, 8 and 9.
    assert number == 9
    assert counted(started) == [(0, 0), (2, 70), (4, 120), (6, 150)]


def test_of_several_optimizers_the_one_with_the_most_steps_counts() -> None:
    started = until(8, eval_every_steps=3)
    one, other, unused = optimizer_of(), optimizer_of(), optimizer_of()
    started.trial.state(unused=unused, generator=one, discriminator=other)
    for number, _ in enumerate(started.trial.batches(rows(started.trial), evaluate), start=1):
        other.step()
        if number % 3 == 0:
            one.step()
    assert [step for step, _ in counted(started)] == [0, 3, 6, 8]


def rounds(trial: Trial, form: str) -> Iterator[object]:
    """Go round a loop over batches, or a loop of steps of 20 samples that asks when to evaluate."""
    if form == "batches":
        yield from trial.batches(rows(trial), evaluate)
    while not trial.should_stop:
        if trial.evaluation_due:
            trial.report(**evaluate())
            continue
        yield None
        trial.step(samples=20)


@pytest.mark.parametrize(("form", "samples"), [("batches", (40, 70)), ("while", (40, 80))])
def test_evaluations_follow_the_step_count_of_a_loop_with_several_steps_a_batch(
    form: str, samples: tuple[int, int]
) -> None:
    started = until(12, eval_every_steps=5)
    optimizer = optimizer_of()
    started.trial.state(optimizer=optimizer)
    for _ in rounds(started.trial, form):
        for _ in range(3):
            optimizer.step()
    # Due after steps 5 and 10, met after 6 and 12.
    assert counted(started) == [(0, 0), (6, samples[0]), (12, samples[1])]


def test_several_steps_a_batch_are_timed_each() -> None:
    time, line = FakeTime(), FakeLine()
    timed = TimedLoop(
        step_time_request(seconds_limit=5.0),
        assign(step_time_request()),
        line,
        clock=clock_of(time),
    )
    trial, optimizer = Trial(timed, now=lambda: time.seconds), optimizer_of()
    trial.state(optimizer=optimizer)
    for _ in trial.batches(rows(trial), evaluate):
        time.pass_by(1.0)
        optimizer.step()
        optimizer.step()
    (reply,) = line.replies
    assert reply.step_seconds == pytest.approx(0.5)  # type: ignore[union-attr]


def test_the_steps_of_a_wrapped_optimizer_are_those_of_the_inner_one() -> None:
    accelerate = pytest.importorskip("accelerate")
    started = until(4, configuration=FOURFOLD)
    trial, accelerator = started.trial, accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = nn.Linear(1, 1)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.02))
    trial.state(model=model, optimizer=optimizer)
    assert trial.accumulation_steps == 4
    for batch in trial.batches(rows(trial), evaluate):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch.float()[:, None]).sum())
            optimizer.step()
            optimizer.zero_grad()
    assert counted(started) == [(0, 0), (2, 40), (4, 80)]


def test_a_step_with_a_closure_is_one_step() -> None:
    started = until(4)
    optimizer = optimizer_of(kind=torch.optim.LBFGS, max_iter=5)
    (parameter,) = optimizer.param_groups[0]["params"]
    started.trial.state(optimizer=optimizer)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return float(loss.detach())

    for _ in started.trial.batches(rows(started.trial), evaluate):
        optimizer.step(closure)
    assert counted(started) == [(0, 0), (2, 40), (4, 70)]


@pytest.mark.parametrize("form", ["batches", "while"])
def test_an_optimizer_that_never_steps_is_refused_by_its_name(form: str) -> None:
    trial = until(4).trial
    trial.state(adam=optimizer_of())
    with pytest.raises(UsageError, match=rf"'adam' took no step in {MOST_SKIPPED} batches"):
        if form == "batches":
            list(trial.batches(rows(trial), evaluate))
        while True:
            trial.step(samples=20)


@pytest.mark.parametrize(("rows", "warns"), [(20, True), (4, False)])
def test_a_loader_of_as_many_samples_as_the_study_has_tokens_is_warned_of(rows: int, warns: bool) -> None:
    started = until(2)
    started.run.counts_tokens = True
    for _ in started.trial.batches([(torch.zeros(rows, 5, dtype=torch.long), torch.zeros(rows))] * 2, evaluate):
        pass
    assert counted(started)[-1] == (2, 40)
    assert (
        any("20 samples, but the study's batch sizes count tokens" in one for one in started.line.outcome.warnings)
        is warns
    )
    with pytest.raises(UsageError, match=r"trial\.sampler\(\): the study's batch sizes count tokens"):
        started.trial.sampler(range(ROWS))


def test_a_resumed_loop_knows_the_tokens_of_its_batches_after_skipped_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    started = until(9)
    started.run.counts_tokens = True
    steps, samples = 3, 4 * 20  # a gradient scaler skipped one of four batches before the pause
    monkeypatch.setattr(started.run, "keep", lambda objects: (steps, samples))
    started.trial.state(optimizer=optimizer_of())
    lengths = list(range(1, 11))
    for rows in started.trial.token_batches(lengths):
        assert started.trial.batch_tokens() == sum(lengths[row] for row in rows)
        break
    with pytest.raises(UsageError, match=r"before sampler\(\), token_batches\(\)"):
        started.trial.state()


@pytest.mark.parametrize(("form", "samples"), [("batches", 70), ("while", 80)])
def test_a_trial_whose_steps_are_all_skipped_from_some_step_on_has_diverged(form: str, samples: int) -> None:
    started = until(9)
    trial, optimizer = started.trial, optimizer_of()
    trial.state(optimizer=optimizer)
    for _ in rounds(trial, form):
        if trial.steps < 4:
            optimizer.step()
    started.run.finish()
    outcome = started.line.outcome
    assert (outcome.state, outcome.steps, outcome.last_miss_step) == (TrialState.DIVERGED, 4, 4)
    assert outcome.samples == samples


def looped(trial: Trial, *, samples: int | None, steps: int = 3) -> None:
    optimizer = optimizer_of()
    with trial:
        for _ in range(steps):
            optimizer.step()
            trial.step(samples)
            if trial.evaluation_due:
                trial.report(**evaluate())


def test_a_loop_of_steps_says_its_samples_or_is_warned_or_has_the_order_of_the_sampler() -> None:
    def warnings(started: Started) -> list[str]:
        return [one for one in started.line.outcome.warnings if "trial.st" in one]

    told = until(99, eval_every_steps=1)
    looped(told.trial, samples=13)
    assert counted(told) == [(1, 13), (2, 26), (3, 39)] and not warnings(told)
    ordered = until(99, eval_every_steps=1)
    ordered.trial.sampler(range(ROWS))
    looped(ordered.trial, samples=None)
    assert counted(ordered) == [(1, 20), (2, 40), (3, 60)] and not warnings(ordered)
    untold = until(99, eval_every_steps=1)
    looped(untold.trial, samples=None)
    assert counted(untold) == [(1, 20), (2, 40), (3, 60)] and len(warnings(untold)) == 1


def test_a_loop_of_steps_must_say_its_samples_if_the_study_is_about_samples() -> None:
    for objective, needs in (("samples_to_target", True), ("time_to_target", False)):
        assert not_none(program_of(make_spec(objective=objective, workload="train.py"))).needs_samples is needs
    trial = until(9).trial
    trial._assignment.needs_samples = True
    assert trial.batch_size == 20
    with pytest.raises(UsageError, match=r"trial\.step\(\) got no number of samples") as caught:
        trial.step()
    assert "samples=len(x)" in str(caught.value.hint)
    trial = until(9).trial
    trial._assignment.needs_samples = True
    assert trial.batch_size == 20
    trial.step(samples=7)
    with pytest.raises(UsageError, match=r"step\(\): samples = 0 must be >= 1"):
        trial.step(samples=0)


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_counts_go_on_where_a_trial_was_paused(stop: int, tmp_path: Path) -> None:
    request = asked(tmp_path, configuration=configuration(20, micro_batch_size=4, accumulation_steps=5))
    parts = []
    for part in (1, 2):
        end = (stop,) if part == 1 else (7, TrialState.PRUNED)
        started = Started(changed(request, resumes=part == 2)).stop_at(*end)
        windows(started, at_end=False, drop_last=False)
        parts.append(counted(started))
    # The third step of a pass continues in the next pass, with 2 + 4 × 4 samples.
    assert parts[0][-1] == (stop, [0, 20, 40, 58, 78][stop])
    assert parts[1][-1] == (7, 136)


def test_a_skipped_batch_is_behind_a_trial_that_goes_on_in_the_order_of_the_sampler(tmp_path: Path) -> None:
    def train(resumes: bool, stop: int | None, skips: int | None) -> list[list[int]]:
        end = (9, TrialState.PRUNED) if stop is None else (stop,)
        started = Started(changed(asked(tmp_path), resumes=resumes)).stop_at(*end)
        optimizer = optimizer_of()
        started.trial.state(optimizer=optimizer)
        loader: DataLoader[Any] = DataLoader(range(ROWS), 20, sampler=started.trial.sampler(range(ROWS)))  # type: ignore[arg-type]
        found = []
        for batch in started.trial.batches(loader, evaluate):
            found.append(batch.tolist())
            if len(found) != skips:
                optimizer.step()
        started.run.finish()
        return found

    whole = train(resumes=False, stop=None, skips=2)
    begun = train(resumes=False, stop=4, skips=2)
    assert [*begun, *train(resumes=True, stop=None, skips=None)] == whole
    assert len(begun) == 5 and len(whole) == 10


def test_the_samples_of_several_ranks_are_those_of_all() -> None:
    started = until(4, configuration=configuration(20).on_devices(2, 10))
    trial = Trial(started.run)
    sizes = [10, 10, 5]
    assert trial.micro_batch_size == 10
    for _ in trial.batches([torch.zeros(size, 3) for size in sizes], evaluate):
        pass
    assert counted(started) == [(0, 0), (2, 40), (4, 70)]
