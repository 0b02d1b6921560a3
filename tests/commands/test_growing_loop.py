"""The training loop that ``best --export python --schedule`` writes trains as the trials of the schedule did."""

import math
from typing import Any

import pytest
import torch

from bssearch.analysis.answer import BatchScheduleAnswer, StageAnswer
from bssearch.commands.best import ScheduledTraining, schedule_values, training_loop
from bssearch.records import Configuration, LearningRateRule, batch_schedule_of
from bssearch.training.batches import Growth
from bssearch.training.schedule import schedule_of

SAMPLES = 100
STAGES = ((0, 10, 10), (55, 20, 5), (200, 40, 40))


def schedule(*stages: tuple[int, int, int], **parameters: Any) -> BatchScheduleAnswer:
    return BatchScheduleAnswer(
        name="milestones",
        stages=[
            StageAnswer(
                start_samples=start,
                batch_size=size,
                micro_batch_size=micro,
                learning_rate=0.1 * size / 10,
                steps=None,
                seconds=None,
            )
            for start, size, micro in stages
        ],
        rate_rule=LearningRateRule.LINEAR,
        noise_share=None,
        parameters={"learning_rate": 0.1, "warmup_epochs": 0.0, "schedule": "constant", **parameters},
        time_to_target=1.0,
        low=None,
        high=None,
        runs=1,
        reached=1,
        ratio=None,
        saves_time="not_run",
        reason="as the test has it",
        trials=1,
        trial_numbers=[1],
    )


def module_of(*stages: tuple[int, int, int], comments: tuple[str, ...] = (), **parameters: Any) -> dict[str, Any]:
    """Return the names of the module that is written for a schedule."""
    found = schedule(*stages, **parameters)
    shown = [{**one.model_dump(), "accumulation_steps": one.batch_size // one.micro_batch_size} for one in found.stages]
    text = training_loop(ScheduledTraining(schedule_values(found), shown, ()), comments)
    names: dict[str, Any] = {}
    exec(compile(text, "loop.py", "exec"), names)
    return names


class Seen:
    """An optimizer that remembers the learning rate of each step, and the samples behind its gradient."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.optimizer = torch.optim.SGD(model.parameters(), lr=9.0)
        self.param_groups = self.optimizer.param_groups
        self.rates: list[float] = []
        self.norms: list[float] = []
        self.model = model

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.rates.append(self.param_groups[0]["lr"])
        self.norms.append(
            math.hypot(*(float(one.grad.norm()) for one in self.model.parameters() if one.grad is not None))
        )
        self.optimizer.step()


def trained(names: dict[str, Any], until: int, targets: float = 0.0) -> tuple[Seen, list[list[int]], torch.nn.Linear]:
    """Train a line until so many samples; return what was seen: rates, the rows of each step, and the line."""
    torch.manual_seed(1)
    model = torch.nn.Linear(1, 1, dtype=torch.float64)
    inputs = torch.arange(SAMPLES, dtype=torch.float64)[:, None] / SAMPLES
    steps: list[list[int]] = []
    rows: list[int] = []
    seen = Seen(model)

    def loss(outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        rows.extend(round(float(one) * SAMPLES) for one in wanted)
        return ((outputs - wanted - targets) ** 2).mean()

    def has_ended(_: torch.nn.Module, samples: int) -> bool:
        if rows:
            steps.append([*rows])
            rows.clear()
        return samples >= until

    names["train"](model, seen, inputs, inputs.clone(), loss, has_ended)
    return seen, steps, model


def grown(warmup_epochs: float = 0.0, **decay: Any) -> Configuration:
    """The configuration of the trials."""
    schedule = {"batch_schedule": "milestones", "batch_stages": "55:20/5 200:40", "batch_rate_rule": "linear"}
    return Configuration(
        batch_size=10,
        micro_batch_size=10,
        learning_rate=0.1,
        warmup_epochs=warmup_epochs,
        parameters={**decay, **schedule},
    )


def test_steps_have_the_sizes_of_the_trials_and_an_epoch_has_each_sample_once() -> None:
    _, steps, _ = trained(module_of(*STAGES), until=500)
    growth, place, epoch = Growth(grown(), SAMPLES), 0, list[int]()
    for rows in steps:
        assert len(rows) == growth.stage.batch_size
        if growth.epoch > place:
            place, epoch = growth.epoch, []
        epoch += rows
        assert len(set(epoch)) == len(epoch)
        growth.stepped()
    assert len(steps) == 6 + 7 + 8, "six of 10 to 60, seven of 20 to 200, eight of 40"


DECAYS: list[dict[str, Any]] = [
    {"schedule": "constant"},
    {"schedule": "linear", "horizon_samples": 430},
    {"schedule": "cosine", "horizon_samples": 430},
    {"schedule": "warmup_stable_decay", "horizon_samples": 430, "decay_share": 0.4},
    {"schedule": "one_cycle", "horizon_samples": 430},
]


@pytest.mark.parametrize("warmup_epochs", [0.0, 0.73])
@pytest.mark.parametrize("decay", DECAYS, ids=[str(one["schedule"]) for one in DECAYS])
def test_the_learning_rate_is_that_of_the_trials(decay: dict[str, Any], warmup_epochs: float) -> None:
    names = module_of(*STAGES, warmup_epochs=warmup_epochs, **decay)
    configuration = grown(warmup_epochs, **decay)
    growth, expected = Growth(configuration, SAMPLES), list[float]()
    factors = schedule_of(configuration, SAMPLES)
    while growth.samples < 600 and not factors.is_over(growth.position):
        expected.append(0.1 * growth.rate_factor * factors.factor(growth.position))
        growth.stepped()
    seen, _, _ = trained(names, until=600)
    assert seen.rates == pytest.approx(expected)
    assert ("math" in names) is (decay["schedule"] not in {"constant", "linear"})


def test_micro_batches_make_no_difference_but_for_memory() -> None:
    split = trained(module_of((0, 10, 2), (55, 20, 5)), until=300)[2]
    whole = trained(module_of((0, 10, 10), (55, 20, 20)), until=300)[2]
    for one, other in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_are_clipped_where_the_trials_clipped_them() -> None:
    free, _, _ = trained(module_of(*STAGES), until=60, targets=5.0)
    clipped, _, _ = trained(module_of(*STAGES, clip_norm=0.5), until=60, targets=5.0)
    assert max(free.norms) > 0.5
    assert max(clipped.norms) == pytest.approx(0.5, rel=1e-4)


def test_too_few_samples_for_the_largest_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="100 samples are fewer than the largest batch, 120"):
        trained(module_of((0, 10, 10), (55, 120, 120)), until=300)


def test_what_users_named_stays_a_value_and_a_comment() -> None:
    evil = "'@STAGES@\n}; raise SystemExit #"
    names = module_of(*STAGES, comments=("@CLIP@",), **{f"loss.{evil}": evil})
    assert names["CONFIGURATION"][f"loss.{evil}"] == evil
    assert names["STAGES"] == [(0, 10, 10, 0.1), (55, 20, 5, 0.2), (200, 40, 40, 0.4)]


def test_the_values_are_a_configuration_with_the_schedule() -> None:
    values = schedule_values(schedule((0, 10, 5), (55, 20, 5), (200, 40, 40)))
    assert values["batch_stages"] == "55:20/5 200:40"
    assert (values["micro_batch_size"], values["accumulation_steps"]) == (5, 2)
    names = ("batch_schedule", "batch_stages", "batch_rate_rule")
    found = batch_schedule_of(
        Configuration(
            batch_size=10, micro_batch_size=5, learning_rate=0.1, parameters={name: values[name] for name in names}
        )
    )
    assert found is not None
    assert [(one.start_samples, one.batch_size, one.micro_batch_size) for one in found.stages] == [
        (0, 10, 5),
        (55, 20, 5),
        (200, 40, 40),
    ]
