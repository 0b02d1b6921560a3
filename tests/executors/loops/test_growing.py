"""Users' loops whose batch grows: rows, rates, cadence, pauses and refusals."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bssearch
from bssearch import Part, Trial, UsageError
from bssearch.executors.loops.assignment import Alone
from bssearch.executors.loops.measuring import DescribedLoop, TimedLoop
from bssearch.executors.loops.ranks import FollowerWork
from bssearch.executors.loops.trial_run import TrialRun
from bssearch.records import (
    BatchSchedule,
    Configuration,
    LearningRateRule,
    Stage,
    TrialRequest,
    TrialState,
    with_batch_schedule,
)
from bssearch.training.batches import Growth, micro_batches
from tests.documents import OWN_TRAINING
from tests.executors.loops.loops import ROWS, FakeLine, Started, asked, assign, cycled, step_time_request
from tests.executors.loops.test_own_loop import BRANCH
from tests.executors.loops.test_ranks import FakeRanks, Group
from tests.executors.loops.test_trial_run import timeless
from tests.factories import changed
from tests.records.test_batch_schedule import milestones
from tests.training.toys import configuration, on_cpu

STAGES = (0, 10), (20, 20, 10), (80, 40, 20)
"""Two steps of 10, three of 20 in two micro-batches, then 40 in two larger ones."""

FORMS = ["plain", "made", "while"]


def grows(*stages: tuple[int, ...], rule: LearningRateRule = LearningRateRule.SQRT, **changes: Any) -> Configuration:
    return with_batch_schedule(configuration(**changes), milestones(*(stages or STAGES), rule=rule))


def grown(folder: Path | None = None, *stages: tuple[int, ...], **changes: Any) -> TrialRequest:
    """Return a request whose batch grows."""
    return asked(folder, configuration=changes.pop("configuration", None) or grows(*stages), **changes)


class Growing:
    """A small network with dropout, trained in one of the forms of a loop; keeps the rows of each step, and its rate.

    ``follows``: fields that the loop reads again for each step; it reads other fields once.
    """

    def __init__(
        self,
        started: Started,
        form: str,
        order: str = "sampler",
        follows: tuple[str, ...] = ("batch_size", "micro_batch_size", "accumulation_steps", "learning_rate"),
        until: int = 8,
        keeps_state: bool = True,
    ) -> None:
        self.started, self.trial, self.form, self.order, self.until = started, started.trial, form, order, until
        self._follows, self._read = follows, dict[str, Any]()
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.value("learning_rate"), momentum=0.9)
        if keeps_state:
            self.trial.state(model=self.model, optimizer=self.optimizer)
        inputs = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
        self.data = TensorDataset(torch.arange(ROWS), inputs, inputs.sum(1, keepdim=True))
        has_own = order == "own_generator" or form == "while"  # which begins its passes by itself
        self.generator = torch.Generator().manual_seed(self.trial.seed) if has_own else None
        self.rows: list[list[list[int]]] = [[]]
        self.rates: list[float] = []
        self.schedule = 1.0
        self.made: list[int] = []

    def value(self, name: str) -> Any:
        if name in self._follows or name not in self._read:
            self._read[name] = getattr(self.trial, name)
        return self._read[name]

    def loader(self, size: int) -> DataLoader[Any]:
        self.made.append(size)
        order: dict[str, Any] = {"sampler": self.trial.sampler(self.data)} if self.order == "sampler" else {}
        if self.order == "new_generator":
            self.generator = torch.Generator().manual_seed(size)
        return DataLoader(
            self.data, size, shuffle=self.order != "sampler" or None, drop_last=True, generator=self.generator, **order
        )

    def micro_batch(self, batch: list[torch.Tensor]) -> None:
        rows, inputs, targets = batch
        loss = nn.functional.mse_loss(self.model(inputs), targets) / self.value("accumulation_steps")
        loss.backward()
        self.started.time.pass_by(1.0)
        self.rows[-1].append(rows.tolist())
        if len(self.rows[-1]) == self.value("accumulation_steps"):
            self.update()

    def update(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule * self.value("learning_rate")
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.rows.append([])

    def evaluate(self) -> dict[str, Any]:
        torch.randn(5)
        return {"accuracy": self.trial.steps / 1000 if self.trial.steps < self.until else 3.0}

    def go(self) -> list[torch.Tensor]:
        trial = self.trial
        if self.form == "while":
            self._ask()
        else:
            given: Any = self.loader if self.form == "made" else self.loader(trial.micro_batch_size)
            for batch in trial.batches(given, self.evaluate):
                self.micro_batch(batch)
        self.started.run.finish()
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def _ask(self) -> None:
        size = self.value("micro_batch_size")
        batches = cycled(self.loader(size))
        while not self.trial.should_stop:
            if self.trial.evaluation_due:
                self.trial.report(**self.evaluate())
                continue
            if size != self.value("micro_batch_size"):
                size = self.value("micro_batch_size")
                batches = cycled(self.loader(size))
            for batch in itertools.islice(batches, self.value("accumulation_steps")):
                self.micro_batch(batch)
            self.trial.step()

    @property
    def flat(self) -> list[list[int]]:
        return [list(itertools.chain(*step)) for step in self.rows if step]


def own_rows(one: Configuration, steps: int, seed: int) -> list[list[list[int]]]:
    """Return the rows of each micro-batch in bssearch's own loop."""
    growth = Growth(one, ROWS)
    batches = micro_batches(Part(torch.arange(ROWS).float(), torch.zeros(ROWS)), on_cpu(), seed, growth)
    found = []
    for _ in range(steps):
        found.append(
            [inputs.int().tolist() for inputs, _ in itertools.islice(batches, growth.stage.accumulation_steps)]
        )
        growth.stepped()
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stages", [STAGES, ((0, 5), (15, 10), (45, 20, 10), (300, 50, 25)), ((0, 10), (30, 30, 10))])
def test_a_loop_has_the_rows_of_bssearchs_own(form: str, stages: tuple[tuple[int, ...], ...]) -> None:
    started = Started(grown(None, *stages, eval_every_steps=1))
    training = Growing(started, form, until=20)
    training.go()
    expected = own_rows(started.request.plan.configuration, started.trial.steps, started.trial.seed)
    assert len(expected) == 20
    assert training.flat == [list(itertools.chain(*step)) for step in expected]
    if form != "plain":
        assert training.rows[:-1] == expected
    else:
        assert {len(rows) for step in training.rows for rows in step} == {stages[0][1]}
        assert started.trial.micro_batch_size == stages[0][1]


@pytest.mark.parametrize("form", FORMS)
def test_steps_samples_rates_and_the_cadence_are_counted_as_they_are(form: str) -> None:
    started = Started(grown(eval_every_steps=2))
    training = Growing(started, form)
    training.go()
    seen = [(one.step, one.samples) for one in started.line.observations]
    # Two steps of 10, three of 20 (to 80), then 40: evaluated wherever another 20 samples have been seen.
    assert seen == [(0, 0), (2, 20), (3, 40), (4, 60), (5, 80), (6, 120), (7, 160), (8, 200)]
    assert (started.line.outcome.steps, started.line.outcome.samples) == (8, 200)
    expected = [0.02] * 2 + [0.02 * 2**0.5] * 3 + [0.04] * 3
    assert training.rates == pytest.approx(expected)
    assert [one.learning_rate for one in started.line.observations] == pytest.approx(
        [0.02, *(expected[step - 1] for step, _ in seen[1:])]
    )
    assert not [one for one in started.line.outcome.warnings if "grown" in one]


def test_a_function_makes_a_loader_of_each_micro_batch_size_and_a_loader_itself_is_gone_through_on() -> None:
    stages = (0, 10), (20, 20, 10), (80, 40, 20), (400, 50, 10)
    made, plain = (Growing(Started(grown(None, *stages)), form, "shuffled", until=16) for form in ("made", "plain"))
    made.go()
    plain.go()
    assert made.made == [10, 20, 10]
    passes = list(itertools.chain(*plain.rows))
    for begin in range(0, len(passes) - 5, 5):
        assert sorted(itertools.chain(*passes[begin : begin + 5])) == list(range(ROWS)), "each pass is whole"


STOPS = [(1,), (2,), (3,), (5,), (6,), (1, 5, 6)]
"""In the first stage, at a change of the accumulation, after it, at one of the micro-batches, after it, and all."""


ORDERS = [*itertools.product(("plain", "made"), ("sampler", "shuffled", "own_generator")), ("while", "sampler")]
"""Forms and orders; the place in the data of a loop that asks is its own, but for the sampler's."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "order", "stops", "every"),
    [
        (*order, stops, (2, 30)[(row + column) % 2])
        for row, order in enumerate(ORDERS)
        for column, stops in enumerate(STOPS)
    ],
)
def test_a_paused_trial_goes_on_as_if_it_had_never_stopped(
    form: str, order: str, stops: tuple[int, ...], every: int, tmp_path: Path
) -> None:
    check_pauses(grown(tmp_path, eval_every_steps=every), form, order, *stops)


@pytest.mark.parametrize("order", ["sampler", "shuffled", "own_generator", "new_generator"])
@pytest.mark.parametrize("stops", [(2,), (2, 3), (3,), (1, 2, 3, 4)])
def test_one_paused_between_two_loaders_and_again_in_the_pass_after_it_goes_on(
    order: str, stops: tuple[int, ...], tmp_path: Path
) -> None:
    """A pass of the second loader is two steps."""
    check_pauses(grown(tmp_path, (0, 10), (20, 20)), "made", order, *stops)


def check_pauses(whole: TrialRequest, form: str, order: str, *stops: int) -> None:
    reference = Growing(Started(whole), form, order, until=11)
    expected = reference.go()
    rows, seen = list[Any](), list[Any]()
    for part, at in enumerate((*stops, None)):
        started = Started(changed(whole, resumes=part > 0)).stop_at(at)
        training = Growing(started, form, order, until=11)
        weights = training.go()
        assert started.trial.steps == (at or reference.trial.steps)
        assert (started.line.outcome.state is TrialState.PAUSED) is (at is not None)
        rows += training.flat
        seen += started.line.observations
    assert reference.trial.steps > 8
    assert rows == reference.flat
    assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))
    assert timeless(seen) == timeless(reference.started.line.observations)
    assert started.line.outcome.samples == reference.started.line.outcome.samples


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_that_has_not_grown_yet_trains_as_one_that_stays_bit_for_bit(form: str) -> None:
    weights = [
        Growing(Started(asked(configuration=one)), form, order).go()
        for order in ("sampler", "shuffled")
        for one in (configuration(10), grows((0, 10), (10**6, 20)))
    ]
    for constant, growing in (weights[:2], weights[2:]):
        assert all(torch.equal(one, other) for one, other in zip(constant, growing, strict=True))


@pytest.fixture
def started() -> Started:
    return Started(grown())


@pytest.mark.parametrize(
    ("form", "forgets", "message"),
    [
        ("plain", "accumulation_steps", r"grown to 20, .* new trial\.accumulation_steps = 2 \(before: 1\)"),
        ("made", "accumulation_steps", r"grown to 20, .* new trial\.accumulation_steps = 2 \(before: 1\)"),
        ("while", "accumulation_steps", r"grown to 20, .* new trial\.accumulation_steps = 2 \(before: 1\)"),
        ("while", "micro_batch_size", r"grown to 40, .* new trial\.micro_batch_size = 20 \(before: 10\)"),
    ],
)
def test_a_loop_that_goes_on_at_the_old_size_is_refused(
    form: str, forgets: str, message: str, started: Started
) -> None:
    follows = {"micro_batch_size", "accumulation_steps", "learning_rate"} - {forgets}
    with pytest.raises(UsageError, match=message):
        Growing(started, form, "shuffled", tuple(follows), keeps_state=False).go()
    assert started.trial.steps == (2 if "accumulation" in forgets else 5)


def test_a_loop_that_goes_on_from_a_pause_at_the_first_size_is_refused(tmp_path: Path) -> None:
    started = Started(grown(tmp_path)).stop_at(3)
    Growing(started, "plain", "shuffled").go()
    started = Started(changed(started.request, resumes=True))
    once = started.trial.accumulation_steps
    training = Growing(started, "plain", "shuffled")
    loader, micro_batches = training.loader(started.trial.micro_batch_size), 0
    with pytest.raises(UsageError, match=r"grown to 20, .* new trial\.accumulation_steps = 2 \(before: 1\)"):
        for _ in started.trial.batches(loader, training.evaluate):
            assert once == 1
            micro_batches += 1
            if micro_batches % 2 == 0:
                training.optimizer.step()


def test_a_pass_of_the_sampler_ends_where_a_loop_must_make_another_loader() -> None:
    trial = Started(grown(None, (0, 10), (20, 20), (60, 25), eval_every_steps=100)).trial
    sizes = []
    while trial.steps < 7:
        for rows in DataLoader(range(ROWS), trial.micro_batch_size, sampler=trial.sampler(range(ROWS))):  # type: ignore[arg-type]
            sizes.append(len(rows))
            trial.step()
    # After two steps of 10 and one of 20 the epoch's last 10 are left out.
    assert sizes == [10, 10, 20, 20, 25, 25, 25]


def test_a_loop_without_accumulation_may_go_by_the_batch_size_alone() -> None:
    trial = Started(grown(None, (0, 10), (20, 20), eval_every_steps=100)).trial
    assert trial.batch_size == 10
    trial.step()
    trial.step()
    with pytest.raises(UsageError, match=r"new trial\.micro_batch_size = 20"):
        trial.step()
    trial = Started(grown(None, (0, 10), (20, 20), eval_every_steps=100)).trial
    for size in (10, 10, 20, 20):
        assert trial.batch_size == size
        trial.step()


def test_a_loader_whose_batches_did_not_grow_is_refused() -> None:
    started = Started(grown(None, (0, 10), (20, 20)))
    training = Growing(started, "made")
    with pytest.raises(UsageError, match="grown to 20, but the loader's micro-batches still have 10 samples"):
        for batch in started.trial.batches(lambda size: training.loader(10), training.evaluate):
            training.micro_batch(batch)
    assert started.trial.steps == 2


def test_a_loader_itself_must_make_up_each_batch_and_a_function_must_make_one() -> None:
    training = Growing(Started(grown(None, (0, 10), (20, 25))), "plain")
    with pytest.raises(UsageError, match="batch size 25 must be a multiple of 10"):
        training.go()
    training = Growing(Started(grown()), "made")
    with pytest.raises(UsageError, match="returned int; expected a loader"):
        next(training.trial.batches(lambda size: size, training.evaluate))  # type: ignore[arg-type, return-value]
    with pytest.raises(UsageError, match="batch_size = 60 must be <= 50"):
        Growing(Started(grown(None, (0, 10), (20, 60))), "plain").go()


def test_a_running_count_of_micro_batches_is_refused_once_it_takes_a_step_too_soon() -> None:
    started = Started(grown(None, (0, 10), (30, 20, 10)))
    training = Growing(started, "plain", "shuffled")
    with pytest.raises(UsageError, match="took a step before the batch's last micro-batch"):
        loader = training.loader(started.trial.micro_batch_size)
        for count, batch in enumerate(started.trial.batches(loader, training.evaluate), 1):
            training.model(batch[1]).sum().backward()
            if count % started.trial.accumulation_steps == 0:
                training.optimizer.step()
    assert started.trial.steps == 3


@pytest.mark.parametrize("form", FORMS)
def test_a_learning_rate_that_is_read_once_is_warned_of_once(form: str) -> None:
    def warnings(*follows: str, rule: LearningRateRule = LearningRateRule.SQRT) -> list[str]:
        started = Started(asked(configuration=grows(rule=rule)))
        Growing(started, form, "sampler", ("micro_batch_size", "accumulation_steps", *follows)).go()
        return [one for one in started.line.outcome.warnings if "grown" in one]

    (warning,) = warnings()
    assert warning == (
        "the batch has grown to 20, and no optimizer of trial.state has the new learning rate 0.02828 (found: 0.02); "
        "set the optimizer's learning rate to trial.learning_rate before each step"
    )
    assert warnings("learning_rate") == []
    assert warnings(rule=LearningRateRule.NONE) == []


@pytest.mark.parametrize("reads", [True, False])
def test_a_schedule_of_the_loops_own_may_multiply_the_rate(reads: bool, started: Started) -> None:
    sizes = ("micro_batch_size", "accumulation_steps")
    training = Growing(started, "while", follows=(*sizes, *["learning_rate"] * reads))
    training.schedule = 0.5
    training.go()
    assert any("grown to 20" in one for one in started.line.outcome.warnings) is not reads


def test_without_a_known_optimizer_it_is_told_where_the_rate_is_not_asked_for_again() -> None:
    def told(*, reads: bool) -> list[str]:
        started = Started(grown())
        trial = started.trial
        assert trial.learning_rate
        for _ in trial.batches(lambda size: [torch.zeros(size)] * 3, lambda: {"accuracy": 3.0 * (trial.steps > 7)}):
            assert trial.accumulation_steps and (not reads or trial.learning_rate)
        started.run.finish()
        return [one for one in started.line.outcome.warnings if "not read the new trial.learning_rate" in one]

    assert (len(told(reads=True)), len(told(reads=False))) == (0, 1)


def by_noise() -> Configuration:
    stages = Stage(0, 10, 10), Stage(0, 20, 20)
    schedule = BatchSchedule(name="noise_scale", stages=stages, rate_rule=LearningRateRule.SQRT, noise_share=1.0)
    return with_batch_schedule(configuration(), schedule)


@pytest.mark.parametrize("form", FORMS)
def test_a_schedule_by_the_noise_scale_is_refused_for_a_loop(form: str) -> None:
    training = Growing(Started(asked(configuration=by_noise())), form, "shuffled")
    with pytest.raises(UsageError, match="'noise_scale' follows the gradient noise scale, but batches of your own"):
        training.go()


def test_several_ranks_and_branches_are_refused() -> None:
    group = Group(1)
    group.said = "anything"
    follower = FollowerWork(assign("describe", at=grows().on_devices(2, 5)), FakeRanks(group, 1))
    with pytest.raises(UsageError, match="a training of 2 ranks cannot grow the batch"):
        Trial(follower, rank=1)
    started = Started(replace(grown(), branch=BRANCH))
    assert started.trial.batch_size == 10 and started.trial.checkpoint
    with pytest.raises(UsageError, match="'milestones': a branch of a longer run cannot grow the batch"):
        started.trial.step()


def test_what_cannot_grow_is_told_as_the_loop_is_described_and_steps_are_timed_at_the_first_size() -> None:
    trial = Trial(DescribedLoop(assign("describe", at=by_noise()), FakeLine()))
    assert trial.batch_size == 10
    with pytest.raises(UsageError, match="noise scale"):
        trial.step()
    timing = step_time_request(configuration=grows())
    timed = TimedLoop(timing, assign(timing), FakeLine())
    trial = Trial(timed)
    sizes = set()
    for _ in range(8):
        sizes.add(trial.batch_size)
        if trial.evaluation_due:
            trial.report(accuracy=0.1)
        trial.step()
        if trial.evaluation_due:
            trial.report(accuracy=0.1)
    assert sizes == {10} and timed.configuration.batch_size == 10 and not timed.configuration.grows


def test_memory_that_runs_out_names_the_micro_batch_of_its_stage() -> None:
    started = Started(grown(eval_every_steps=100))
    assert [started.run.stages.at(steps).micro_batch_size for steps in (0, 4, 5)] == [10, 10, 20]
    trial = started.trial
    for _ in range(5):
        assert trial.micro_batch_size and trial.accumulation_steps
        trial.step()
    assert started.run.ran_out_of_memory(MemoryError("no more"))
    assert "micro-batch 20, step 5" in started.line.outcome.reason


def test_the_loop_of_the_guide_grows_and_trains_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (OWN_TRAINING / "growing_loop.py").read_text(encoding="utf-8")
    wanted = grows((0, 20), (200, 100, 50), (600, 200, 50), learning_rate=0.2)
    started = Started(grown(None, configuration=wanted, eval_every_steps=5)).stop_at(20, TrialState.PRUNED)
    alone = Trial(Alone(configuration(), 0, {}))
    for trial in (started.trial, alone):
        monkeypatch.setattr(bssearch, "current_trial", lambda trial=trial, **given: trial)
        torch.manual_seed(0)
        exec(script, {"__name__": "loop"})
    outcome = started.line.outcome
    assert (outcome.steps, outcome.samples) == (20, 10 * 20 + 4 * 100 + 6 * 200)
    assert not [one for one in outcome.warnings if "batch" in one]
    best = outcome.best_metric
    assert best is not None and best > 0.8
    assert alone.steps == 5 * 50


def test_a_search_of_schedules_does_not_ask_for_their_parameters(started: Started) -> None:
    given = started.request.plan.configuration.parameters
    run = TrialRun(started.request, assign(started.request, given=given), started.line)
    run.searched = ("batch_schedule", "batch_stages")
    trial = Trial(run)
    for _ in trial.batches(lambda size: [torch.zeros(size)] * 3, lambda: {"accuracy": 3.0 * (trial.steps > 1)}):
        assert trial.accumulation_steps
    assert not [one for one in started.line.outcome.warnings if "searches" in one]
