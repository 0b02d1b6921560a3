"""What `check` finds before a study: suspicious settings, parameters that change nothing, and a target."""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from bssearch import Launch, LaunchError, SpecError, StudySpec, UsageError, load_spec
from bssearch.cli.run import print_check
from bssearch.commands.check import (
    LEAST,
    LONGEST_S,
    STEPS,
    Advice,
    Check,
    DefaultRun,
    WalkStep,
    advise_target,
    check,
    summarise,
    towards_easier,
)
from bssearch.commands.pitfalls import pitfalls
from bssearch.executors.base import Event
from bssearch.planning.requests import notes_on_spec
from bssearch.records import (
    Goal,
    MetricInfo,
    Observation,
    StepTime,
    Target,
    TrialEnded,
    TrialObserved,
    TrialOutcome,
    TrialRequest,
    TrialState,
    WorkloadDescription,
)
from bssearch.settings import shipped_studies
from tests.documents import OWN_TRAINING
from tests.factories import SPEC, make_spec, not_none
from tests.search.law import LawExecutor

HEALTHY = {"trials": 20, "trial_train_seconds": 10.0}


def codes(law: LawExecutor, **changes: Any) -> set[str]:
    return {finding.code for finding in look(law, **changes).findings}


def look(law: LawExecutor, **changes: Any) -> Check:
    return check(make_spec(**{"budget": HEALTHY, **changes}), Launch(make_executor=lambda *_: law))


def test_a_healthy_study_has_nothing_suspicious_and_says_how_long_it_can_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    executor = LawExecutor()
    found = look(executor)
    assert found.findings == []
    print_check(found)
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith("no findings")
    trainings = not_none(found.likely_study_s) / not_none(found.trial.time_to_target_s)
    assert f"({trainings:,.0f} × the default's time to the target)" in printed
    assert [one.batch_size for one in found.batches] == [8, 32, 128]
    # Most looks are taken at batch 8: one in 6 steps of 0.0018 s, and one before the first, of 0.001 s each.
    assert found.longest_trial_s == pytest.approx(10 + 0.001 * (1 + math.ceil(10 / (6 * 0.0018))))
    assert found.longest_study_s == pytest.approx(found.longest_trial_s * (20 + 9 * 30))
    assert found.trial.time_to_target_s is not None
    assert not_none(found.likely_study_s) < found.longest_study_s
    request, *others = executor.requests
    assert request.plan.train_seconds_limit == 5.0
    assert [one.plan.eval_every_steps for one in others] == [STEPS], (
        "the first steps of the default, without a loss by the law"
    )


def test_the_share_left_out_of_an_epoch_of_tokens_is_said_to_be_approximate(capsys: pytest.CaptureFixture[str]) -> None:
    space = {**SPEC["space"], "batch_size": [8, 400]}
    for unit, said in (("samples", ("20.0 %", "leaves 200 of")), ("tokens", ("about 20.0 %", "leaves about 200 of"))):
        print_check(look(LawExecutor(), space=space, training={"batch_unit": unit}))
        printed = " ".join(capsys.readouterr().out.split())
        assert f"1,000 training {unit}; " in printed and all(part in printed for part in said)
        assert ("about 20.0 %" in printed) == (unit == "tokens")


def walked(law: LawExecutor, **changes: Any) -> list[WalkStep]:
    spec = make_spec(**{"budget": HEALTHY, **changes})
    return not_none(check(spec, Launch(make_executor=lambda *_: law), walk=True).walk)


def test_a_walk_goes_from_the_memory_budget_to_the_priority_with_measured_figures() -> None:
    memory = {"device_memory_bytes": 2 * 10**6}
    budget, sample, largest, converges, soonest, priority = walked(LawExecutor(place=memory))
    assert budget.figures == {"memory_gib": 2e6 / 2**30, "usable_gib": 1.6e6 / 2**30}
    assert sample.figures == pytest.approx({"fixed_gib": 1e6 / 2**30, "sample_mib": 1000 / 2**20})
    assert largest.figures == {"safe_micro_batch": 600}, "(1.6e6 - 1e6) / 1000"
    assert not_none(converges.figures["drop"]) <= 0.02
    assert {"step_s_at_8", "time_to_target_s_at_32", "time_to_target_s_at_128"} <= set(soonest.figures)
    assert priority.decision.startswith("objective time_to_target")


def worse_at_128(request: TrialRequest, outcome: TrialOutcome) -> TrialOutcome:
    missed: dict[str, Any] = {"state": TrialState.CAPPED, "time_to_target_s": None, "best_metric": 0.8}
    return replace(outcome, **missed) if request.plan.configuration.batch_size == 128 else outcome


def test_a_walk_says_that_the_maximum_is_worse_or_does_not_fit() -> None:
    _, _, largest, converges, soonest, _ = walked(
        LawExecutor(ended_as=worse_at_128, place={"device_memory_bytes": 1_350_000})
    )
    assert largest.figures == {"safe_micro_batch": 80} and "space.max_micro_batch_size: 80" in largest.decision
    assert not_none(converges.figures["drop"]) > 0.02
    assert soonest.figures["time_to_target_s_at_128"] is None and "batch 32" in soonest.decision


def test_a_walk_compares_no_batch_size_with_itself() -> None:
    _, _, _, converges, soonest, _ = walked(LawExecutor(), default={**SPEC["default"], "batch_size": 128})
    assert "not compared" in converges.decision and "only batch 128" in soonest.decision


def test_a_walk_proposes_no_micro_batch_where_no_sample_fits_safely() -> None:
    _, _, largest, *_ = walked(LawExecutor(place={"device_memory_bytes": 1_200_000}))
    assert largest.figures == {"safe_micro_batch": 0} and "not even one sample fits" in largest.decision


def slow(found: StepTime) -> StepTime:
    """Have evaluations take five seconds, and the largest batch size slow steps."""
    return replace(found, evaluation_seconds=5.0, step_seconds=0.5 if found.batch_size == 128 else found.step_seconds)


def test_where_evaluation_is_dear_the_longest_trial_and_study_count_it() -> None:
    found = look(LawExecutor(timed=slow))
    looks = 1 + 20  # as many as there are at least, and one before the first step
    assert found.longest_trial_s == pytest.approx(10 + looks * 5)
    assert found.longest_study_s == pytest.approx(found.longest_trial_s * (20 + 9 * 30))
    assert not_none(found.likely_study_s) > 11 * (20 * not_none(found.trial.time_to_target_s))
    names = [finding.code for finding in found.findings]
    assert names.count("evaluation_dear") == 1 and "few_steps" in names


@pytest.mark.parametrize(
    ("code", "executor", "changes"),
    [
        ("out_of_memory", LawExecutor(fits_up_to=64), {}),
        ("batch_norm_small_batch", LawExecutor(batch_norm_layers=3), {}),
        (
            "batch_norm_accumulation",
            LawExecutor(batch_norm_layers=3),
            {"space": {**SPEC["space"], "max_micro_batch_size": 64}},
        ),
        ("chance_differs", LawExecutor(untrained=0.3), {}),
        ("few_steps", LawExecutor(), {"budget": {"trials": 20, "trial_train_seconds": 0.5}}),
        ("evaluation_dear", LawExecutor(), {"budget": {"trials": 20, "trial_train_seconds": 0.05}}),
        ("default_outside_space", LawExecutor(), {"default": {**SPEC["default"], "learning_rate": 7.0}}),
        ("incomplete_batch_dropped", LawExecutor(), {"space": {**SPEC["space"], "batch_size": [8, 400]}}),
        ("warmup_outlasts_limit", LawExecutor(), {"default": {**SPEC["default"], "warmup_epochs": 50.0}}),
        ("more_threads_than_cores", LawExecutor(), {"executor": {"slots": 4096}}),
        ("target_is_the_bound", LawExecutor(), {"target": {"metric": "accuracy", "value": 1.0}}),
        (
            "learning_rate_fixed",
            LawExecutor(),
            {"space": {**SPEC["space"], "batch_size": [8, 256], "learning_rate": 0.1}},
        ),
        ("no_warmup", LawExecutor(), {"space": {**SPEC["space"], "batch_size": [8, 256]}}),
        (
            "beta2_fixed",
            LawExecutor(),
            {"space": {**SPEC["space"], "batch_size": [8, 64], "optimizer": {"name": "adamw"}}},
        ),
        ("one_batch_size", LawExecutor(), {"space": {**SPEC["space"], "batch_size": [32]}}),
        (
            "learning_rate_ignores_accumulation",
            LawExecutor(),
            {"space": {**SPEC["space"], "learning_rate": 0.1, "max_micro_batch_size": 64}},
        ),
        ("many_accumulation_steps", LawExecutor(), {"space": {**SPEC["space"], "max_micro_batch_size": 4}}),
        ("not_for_fine_tuning", LawExecutor(untrained=0.6), {}),
        ("target_far", LawExecutor(reachable=False), {"budget": {"trials": 20, "trial_train_seconds": 0.2}}),
    ],
)
def test_what_is_suspicious_is_named(code: str, executor: LawExecutor, changes: dict[str, Any]) -> None:
    assert code in codes(executor, **changes)


def test_a_fine_tuning_begins_with_small_batches() -> None:
    changes = {"batch_size": [64, 128], "learning_rate": {"low": 1e-6, "high": 1e-3}, "optimizer": {"name": "adamw"}}
    spec = make_spec(space={**SPEC["space"], **changes}, default={**SPEC["default"], "batch_size": 64})
    assert "fine_tuning_batch_size" in dict(pitfalls(spec.from_preset("fine_tuning"), LawExecutor().describe()))


@pytest.mark.parametrize(
    ("devices", "said"),
    [([1], "17 micro-batches of 6, so"), ([1, 2], "17 micro-batches of 3 on each of 2 devices, so")],
)
def test_a_pitfall_counts_the_micro_batches_that_run_on_a_device(devices: list[int], said: str) -> None:
    most = 7 // devices[-1]
    space = {**SPEC["space"], "batch_size": [34, 102], "learning_rate": 0.1, "max_micro_batch_size": most}
    spec = make_spec(space=space, executor={"devices": devices})
    found = dict(pitfalls(spec, LawExecutor().describe()))
    assert said in found["many_accumulation_steps"]
    assert f"micro-batches of {6 // devices[-1]}, but" in found["learning_rate_ignores_accumulation"]


@pytest.mark.parametrize("starts_at_peak", [True, False, None])
def test_a_script_that_does_not_warm_up_is_told_so(starts_at_peak: bool | None) -> None:
    space = {"batch_size": [8, 256], "learning_rate": {"low": 0.01, "high": 1.0}}
    spec = make_spec(workload="train.py", workload_settings={}, space=space)
    found = dict(pitfalls(spec, replace(LawExecutor().describe(), starts_at_peak=starts_at_peak)))
    assert ("no_warmup" in found) == bool(starts_at_peak)


@pytest.mark.parametrize("is_program", [False, True])
@pytest.mark.parametrize(
    ("code", "wrong", "right"),
    [
        ("one_batch_size", {"batch_size": [32]}, {"batch_size": [128]}),
        ("learning_rate_fixed", {"batch_size": [8, 256], "learning_rate": 0.1}, {"batch_size": [8, 256]}),
        ("no_warmup", {"batch_size": [8, 256]}, {"batch_size": [8, 255]}),
        (
            "learning_rate_ignores_accumulation",
            {"learning_rate": 0.1, "max_micro_batch_size": 64},
            {"max_micro_batch_size": 64},
        ),
        ("accuracy_not_fixed", {"batch_size": [8, 256], "weight_decay": 0.0}, {"batch_size": [8, 255]}),
        ("batch_norm_small_batch", {"batch_size": [8, 128]}, {"batch_size": [16, 128]}),
        ("many_accumulation_steps", {"max_micro_batch_size": 7}, {"max_micro_batch_size": 8}),
    ],
)
def test_a_pitfall_is_found_in_the_spec_of_a_workload_and_of_a_script(
    code: str, wrong: dict[str, Any], right: dict[str, Any], is_program: bool
) -> None:
    described = replace(LawExecutor(batch_norm_layers=1).describe(), starts_at_peak=True)

    def found(space: dict[str, Any]) -> set[str]:
        rate = SPEC["space"]["learning_rate"]
        own: dict[str, Any] = {"workload": "train.py", "workload_settings": {}} if is_program else {}
        spec = make_spec(**own, space={"batch_size": [8, 128], "learning_rate": rate, **space})
        return {*dict(pitfalls(spec, described)), *(note.code for note in notes_on_spec(spec))}

    assert code in found(wrong)
    assert code not in found(right)


def test_shipped_studies_and_those_of_the_guide_have_no_pitfall() -> None:
    for path in (*shipped_studies().values(), *OWN_TRAINING.glob("*.yaml")):
        assert list(pitfalls(load_spec(path), LawExecutor().describe())) == [], path.name


@pytest.mark.parametrize(
    "space",
    [
        {"batch_size": [8, 255], "learning_rate": 0.1},
        {"batch_size": [8, 256], "learning_rate": [0.1, 0.2], "warmup_epochs": [0, 1]},
        {"batch_size": [1, 32], "learning_rate": 0.1},
    ],
)
def test_a_fixed_learning_rate_without_warmup_is_none_below_eight_times_the_default(space: dict[str, Any]) -> None:
    found = codes(LawExecutor(), space={**SPEC["space"], **space}, default={**SPEC["default"], "warmup_epochs": 0.0})
    assert not found & {"learning_rate_fixed", "no_warmup"}


RELATIVE = {"reference_batch": 8, "low": 0.01, "high": 1.0}


@pytest.mark.parametrize(
    ("space", "named"),
    [
        ({"batch_size": [8, 64], "ema_decay": 0.998}, {"ema_decay_fixed"}),
        ({"batch_size": [8, 32], "ema_decay": 0.998}, set()),
        ({"batch_size": [8, 64], "ema_decay": {"low": 0.9, "high": 0.999}}, set()),
        ({"batch_size": [8, 64], "ema_decay": 0.998, "batch_rules": {"ema_decay": "half_life"}}, set()),
        ({"batch_size": [8, 64], "model": {"averaging_decay": 0.99, "weight_decay_of_head": 0.9}}, {"ema_decay_fixed"}),
        ({"batch_size": [8, 64], "model": {"momentum_teacher": 0.996}}, {"ema_decay_fixed"}),
        ({"batch_size": [8, 64], "model": {"num_warmup_steps": 500}}, {"steps_fixed"}),
        ({"batch_size": [8, 32], "model": {"num_warmup_steps": 500}}, set()),
        ({"batch_size": [8, 64], "model": {"warmup_steps": {"low": 10, "high": 500}}}, set()),
        ({"batch_size": [8, 64], "optimizer": {"name": "adam", "beta2": {"low": 0.9, "high": 0.99}}}, set()),
        ({"batch_size": [8, 64], "optimizer": {"name": "adam"}, "batch_rules": {"betas": "sde"}}, set()),
    ],
)
def test_a_decay_or_a_length_in_steps_is_named_if_it_is_the_same_at_batch_sizes_eight_times_apart(
    space: dict[str, Any], named: set[str]
) -> None:
    rate = {"learning_rate": RELATIVE} if "batch_rules" in space else {}
    default = {**SPEC["default"], "ema_decay": 0.99} if isinstance(space.get("ema_decay"), dict) else SPEC["default"]
    if isinstance(space.get("model", {}).get("warmup_steps"), dict):
        default = {**default, "model": {"warmup_steps": 100}}
    if "beta2" in space.get("optimizer", {}):
        default = {**default, "optimizer": {"name": "adam", "beta2": 0.95}}
    found = codes(LawExecutor(), space={**SPEC["space"], **rate, **space}, default=default)
    assert {code for code in found if code in {"ema_decay_fixed", "beta2_fixed", "steps_fixed"}} == named


FINE_TUNED = {"batch_size": 32, "learning_rate": 5e-5, "weight_decay": 0.0, "dropout": 0.1}


@pytest.mark.parametrize(
    ("optimizer", "low", "high", "default", "said"),
    [
        ("adamw", 1e-6, 1e-3, 5e-5, 0),
        ("adamw", 1e-6, 1e-3, 1e-3, 1),
        ("adamw", 1e-4, 1e-2, 5e-5, 1),
        ("adamw", 1e-4, 1e-2, 3e-3, 2),
        ("sgd", 1e-3, 1e-2, 5e-3, 0),
        ("sgd", 1e-2, 1.0, 0.1, 2),
    ],
)
def test_the_learning_rates_of_a_fine_tuning_are_held_against_those_from_scratch(
    optimizer: str, low: float, high: float, default: float, said: int
) -> None:
    rate = {"reference_batch": 32, "low": low, "high": high, "rule": "sqrt"}
    spec = make_spec(
        budget=HEALTHY,
        space={**SPEC["space"], "learning_rate": rate, "optimizer": {"name": optimizer}},
        default={**FINE_TUNED, "learning_rate": default},
    )
    assert counted(spec) == 0, "no preset says that it is one"
    assert counted(spec.from_preset("fine_tuning")) == said
    assert counted(spec.from_preset("large_model")) == 0


def counted(spec: StudySpec) -> int:
    found = check(spec, Launch(make_executor=lambda *_: LawExecutor()))
    return [finding.code for finding in found.findings].count("fine_tuning_learning_rate")


def test_a_spec_from_a_file_knows_its_preset(tmp_path: Path) -> None:
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump({**SPEC, "preset": "fine_tuning", "default": {**FINE_TUNED, "warmup_epochs": 0}}))
    assert load_spec(path).preset == "fine_tuning"
    path.write_text(yaml.safe_dump(SPEC))
    assert load_spec(path).preset is None


@dataclass
class Ended(LawExecutor):
    """Ends each trial as a test has it, after so many evaluations of one metric."""

    outcome: TrialOutcome = field(kw_only=True)
    evaluations: int = 0

    def events(self, timeout: float) -> list[Event]:
        number = self.running.pop(0).number
        seen = (
            Observation(step=step, samples=step, train_seconds=step, metric=0.1, loss=1.0, learning_rate=0.1)
            for step in range(self.evaluations)
        )
        return [*(TrialObserved(number, one) for one in seen), TrialEnded(number, self.outcome)]


def test_a_metric_that_never_moves_is_named() -> None:
    outcome = TrialOutcome(state=TrialState.CAPPED, reason="limit", steps=3, best_metric=0.1)
    assert "metric_never_moves" in codes(Ended(outcome=outcome, evaluations=4))


def test_a_default_that_fails_is_an_error_with_its_reason() -> None:
    with pytest.raises(LaunchError, match=r"the default configuration at batch 32 fails: broken"):
        look(LawExecutor(fails=frozenset({32})))
    with pytest.raises(LaunchError, match=r"batch size 8 does not fit .* 1, 2, 4, 8 samples ran out of memory"):
        look(LawExecutor(fits_up_to=0))


def test_what_does_not_fit_at_once_is_tried_in_micro_batches() -> None:
    executor = LawExecutor(fits_up_to=16)
    found = look(executor)
    assert [(one.batch_size, one.micro_batch_size) for one in found.batches] == [(8, 8), (32, 16), (128, 16)]
    assert executor.requests[0].plan.configuration.micro_batch_size == 16
    assert [finding.code for finding in found.findings] == ["out_of_memory"] * 2


def test_a_loss_that_is_nan_before_the_first_update_is_no_fault_of_the_learning_rate() -> None:
    nan = Ended(outcome=TrialOutcome(state=TrialState.DIVERGED, reason="the loss is nan", steps=1))
    (found,) = (one.message for one in look(nan).findings if one.code == "default_diverges")
    assert "NaN in the inputs" in found


def test_a_target_in_percent_is_named_with_its_share() -> None:
    class Shares(LawExecutor):
        def describe(self) -> WorkloadDescription:
            return replace(super().describe(), metrics={"accuracy": MetricInfo()})

    target, budget = {"metric": "accuracy", "value": 90}, {"trials": 20, "trial_train_seconds": 0.2}
    found = {one.code: one.message for one in look(Shares(reachable=False), target=target, budget=budget).findings}
    assert "set target.value = 0.9" in found["target_in_other_unit"]
    assert "target_far" not in found


def test_a_target_that_an_untrained_model_meets_is_refused_before_anything_runs() -> None:
    executor = LawExecutor(untrained=0.95)
    with pytest.raises(
        SpecError, match=r"target\.value = 0\.9 \(goal: maximize\) is met before the first step: an untrained .* 0\.95"
    ):
        look(executor)
    assert executor.requests == []


def test_a_target_beyond_its_metric_s_bounds_is_refused_with_the_command_that_proposes_one() -> None:
    with pytest.raises(SpecError) as refused:
        look(LawExecutor(), target={"metric": "accuracy", "value": 1.2})
    assert "--suggest-target" in str(refused.value.hint)
    at_bound = look(LawExecutor(), target={"metric": "accuracy", "value": 1.0}).findings
    assert any("--suggest-target" in one.message for one in at_bound if one.code == "target_is_the_bound")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target": {"metric": "f1", "value": 0.9}}, "target.metric = 'f1'"),
        ({"target": {"metric": "accuracy", "value": 93}}, "target.value = 93"),
        ({"target": {"metric": "accuracy", "value": -0.1, "goal": "minimize"}}, "target.value = -0.1"),
        ({"space": {**SPEC["space"], "batch_size": [8, 1001]}}, "space.batch_size = 1001"),
        ({"default": {**SPEC["default"], "batch_size": 1001}}, "default.batch_size = 1001"),
    ],
)
def test_what_the_workload_cannot_give_is_refused_before_anything_runs(changes: dict[str, Any], said: str) -> None:
    executor = LawExecutor()
    with pytest.raises(SpecError) as caught:
        look(executor, **changes)
    assert str(caught.value).startswith(said)
    assert not executor.requests and not executor.splits_timed


def test_what_such_a_spec_may_rely_on_is_put_right_beside_what_is_suspicious(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = look(LawExecutor(), space={**SPEC["space"], "max_micro_batch_size": 4})
    assert [one.code for one in found.notes] == ["accumulation_not_stale", "eighty_percent_feasible"]
    print_check(found)
    assert "weights are constant during accumulation" in capsys.readouterr().out
    assert look(LawExecutor()).notes == []


# Searched parameters that change nothing ------------------------------------------------------------------------------


WORKLOAD = """
import torch
from torch import nn

import bssearch


class Task:
    metrics = {"accuracy": bssearch.MetricInfo(low=0, high=1, chance=0.5)}

    def __init__(self, uses):
        self.uses = uses

    def load(self, device):
        inputs = torch.randn(400, 10, generator=torch.Generator().manual_seed(0))
        targets = (inputs[:, :5].sum(1) > inputs[:, 5:].sum(1)).long()
        cut = lambda a, b: bssearch.Part(inputs[a:b], targets[a:b])
        return bssearch.Data(train=cut(0, 200), validation=cut(200, 300), test=cut(300, 400))

    def augment(self, inputs, *, scale=1.0):
        return inputs

    def build_model(self, *, dropout):
        layer = nn.Dropout(dropout if "dropout" in self.uses else 0.2)
        return nn.Sequential(nn.Linear(10, 8), nn.ReLU(), layer, nn.Linear(8, 2))

    def loss(self, model, inputs, targets, *, label_smoothing):
        smoothing = label_smoothing if "label_smoothing" in self.uses else 0.0
        return nn.functional.cross_entropy(model(inputs), targets, label_smoothing=smoothing)

    def evaluate(self, model, part):
        return {"accuracy": (model(part.inputs).argmax(1) == part.targets).float().mean().item()}
"""


DEFAULT = {"batch_size": 32, "learning_rate": 0.1, "dropout": 0.1, "label_smoothing": 0.0}


def findings(folder: Path, uses: list[str], space: dict[str, Any]) -> list[tuple[str, str]]:
    (folder / "task.py").write_text(WORKLOAD)
    return [
        (one.code, one.message)
        for one in check(
            StudySpec.model_validate(
                {
                    **SPEC,
                    "workload": "task.py:Task",
                    "workload_settings": {"uses": uses},
                    "space": {"batch_size": [32], "learning_rate": [0.05, 0.1], **space},
                    "default": DEFAULT | ({"augmentation": {"scale": 1.0}} if "augmentation" in space else {}),
                    "budget": {"trials": 5, "trial_train_seconds": 0.3},
                    "executor": {"name": "inline", "device": "cpu"},
                }
            ),
            Launch(folder=folder),
        ).findings
    ]


BOTH = {"dropout": {"low": 0.0, "high": 0.5}, "label_smoothing": [0.0, 0.1]}
TAKEN_BY = {"dropout": "build_model", "label_smoothing": "loss", "augmentation.scale": "augment"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("uses", "space", "ignored"),
    [
        (["dropout", "label_smoothing"], BOTH, []),
        (["dropout"], BOTH, ["label_smoothing"]),
        (["label_smoothing"], BOTH, ["dropout"]),
        ([], {"augmentation": {"scale": [1.0, 2.0]}}, ["augmentation.scale"]),
        ([], BOTH, ["dropout", "label_smoothing"]),
        ([], {"dropout": 0.1}, []),
    ],
)
def test_a_searched_parameter_that_the_workload_does_not_use_is_named_and_no_other(
    tmp_path: Path, uses: list[str], space: dict[str, Any], ignored: list[str]
) -> None:
    found = [message for code, message in findings(tmp_path, uses, space) if code == "parameter_ignored"]
    assert [message.split()[0] for message in found] == ignored
    assert all(
        f" {TAKEN_BY[name]}(), or give space.{name} one value" in message
        for name, message in zip(ignored, found, strict=True)
    )


def test_where_a_few_steps_take_long_they_are_not_made_and_that_is_said() -> None:
    executor = LawExecutor(timed=lambda found: replace(found, step_seconds=LONGEST_S / 10, evaluation_seconds=0.1))
    spec = StudySpec.model_validate({**SPEC, "budget": {"trials": 20, "trial_train_seconds": 1000.0}})
    codes = [one.code for one in check(spec, Launch(make_executor=lambda *_: executor)).findings]
    assert "parameters_not_tried" in codes
    assert len(executor.requests) == 1, "the short trial alone"


LIMIT = 10.0


def saturating(best: float, start: float = 0.1) -> list[Observation]:
    """Get from start to best in ten even steps over ten seconds, the last of them without progress."""
    return [
        Observation(step=index, samples=index, train_seconds=float(index), metric=metric, loss=None, learning_rate=0.1)
        for index, metric in enumerate([start + min(1.0, index / 9) * (best - start) for index in range(11)])
    ]


def advise(target: Target, bests: list[float], start: float = 0.1, margin: float | None = None) -> Advice:
    curves = [saturating(best, start) for best in bests]
    runs = [
        DefaultRun(seed_index=index, best_metric=best, best_at_s=9.0, train_seconds=LIMIT)
        for index, best in enumerate(bests)
    ]
    return summarise(target, LIMIT, runs, curves, margin)


def test_the_proposal_is_the_median_best_less_a_margin_that_every_run_reaches() -> None:
    advice = advise(Target(metric="accuracy", value=0.5), [0.93, 0.9, 0.91])
    assert advice.median_best == 0.91
    assert advice.margin == pytest.approx(0.02 * (0.91 - 0.1))
    assert advice.proposed == 0.89  # 0.8938, rounded towards the easier side at the margin's place
    row = next(row for row in advice.targets if row.target == advice.proposed)
    assert row.reached == 3
    wide = advise(Target(metric="accuracy", value=0.5), [0.95, 0.7, 0.9])
    assert wide.proposed == 0.7
    assert wide.margin == pytest.approx(0.2)


def test_the_table_shows_how_the_time_grows_with_the_target() -> None:
    advice = advise(Target(metric="accuracy", value=0.5), [0.9, 0.9, 0.9])
    times = [row.time_to_target_s or 0.0 for row in advice.targets]
    assert times == sorted(times)
    assert times[0] > 0
    half = advice.targets[0]
    assert half.target == pytest.approx(0.5)
    assert half.time_to_target_s == pytest.approx(4.5)
    assert half.share_of_limit == pytest.approx(0.45)


def test_for_a_loss_less_is_harder() -> None:
    advice = advise(Target(metric="loss", value=1.0, goal=Goal.MINIMIZE), [1.5, 1.52, 1.48], start=4.5, margin=0.05)
    assert advice.proposed == 1.55
    targets = [row.target for row in advice.targets]
    assert targets == sorted(targets, reverse=True)
    assert any("spec's target of 1 is harder" in note for note in advice.notes)


def test_a_default_that_learns_nothing_gets_no_advice() -> None:
    with pytest.raises(LaunchError, match=r"does not improve on the 0\.1"):
        advise(Target(metric="accuracy", value=0.5), [0.1, 0.1, 0.1])


@pytest.mark.parametrize(("goal", "bad"), [(Goal.MAXIMIZE, 0.14), (Goal.MAXIMIZE, 0.05), (Goal.MINIMIZE, 2.9)])
def test_one_bad_seed_does_not_drag_the_proposal_down_to_an_untrained_model(goal: Goal, bad: float) -> None:
    start, good = (0.1, 0.9) if goal is Goal.MAXIMIZE else (3.0, 0.7777)
    target = Target(metric="m", value=0.5, goal=goal)
    advice = advise(target, [good, bad, good, good, good], start=start)
    assert target.gain(start + LEAST * (good - start)) <= target.gain(advice.proposed) < target.gain(good)
    row = next(row for row in advice.targets if row.target == advice.proposed)
    assert row.reached == 4
    assert row.time_to_target_s is not None and row.time_to_target_s > 1
    assert any(note.startswith("1 of 5 runs of the default miss the proposal") for note in advice.notes)


def test_the_luckiest_untrained_model_does_not_meet_the_proposal() -> None:
    target = Target(metric="accuracy", value=0.5)
    curves = [saturating(0.9, start) for start in (0.1, 0.1, 0.6)]
    runs = [DefaultRun(seed_index=index, best_metric=0.9, best_at_s=9.0, train_seconds=LIMIT) for index in range(3)]
    advice = summarise(target, LIMIT, runs, curves, None)
    assert (advice.untrained, advice.proposed) == (0.6, 0.893)
    with pytest.raises(UsageError, match=r"margin = 0\.3 leads to target 0\.6, but an untrained model"):
        summarise(target, LIMIT, runs, curves, 0.3)


def test_a_spec_whose_own_target_nothing_can_reach_is_no_obstacle() -> None:
    executor = LawExecutor()
    advise_target(
        make_spec(target={"metric": "accuracy", "value": 97}), Launch(make_executor=lambda *_: executor), runs=2
    )
    # Only a trial at the study's own limit is judged by its way from chance to the target.
    assert [request.plan.limit_state for request in executor.requests] == [TrialState.CAPPED] * 2


@pytest.mark.parametrize("margin", [float("nan"), float("inf"), -0.1])
def test_a_margin_that_is_none_is_refused_before_anything_runs(margin: float) -> None:
    executor = LawExecutor()
    with pytest.raises(UsageError, match=r"margin = .* must be a finite number >= 0"):
        advise_target(make_spec(), Launch(make_executor=lambda *_: executor), runs=1, margin=margin)
    assert executor.requests == []


@pytest.mark.parametrize(
    ("goal", "best", "margin", "way", "expected"),
    [
        (Goal.MAXIMIZE, 0.9876, 0.0123, 0.9, 0.97),
        (Goal.MAXIMIZE, 0.5, 0.1, 0.4, 0.4),
        (Goal.MAXIMIZE, 0.3, 0.1, 0.3, 0.2),
        (Goal.MINIMIZE, 1.234, 0.02, 3.0, 1.26),
        (Goal.MAXIMIZE, 0.98764321, 0.0, 0.9, 0.9876),
        (Goal.MAXIMIZE, 1234567.8, 0.5, 1e6, 1234567.3),
        (Goal.MINIMIZE, 0.0, 0.0, 3.0, 0.0),
        (Goal.MAXIMIZE, 7e11, 123456.0, 6e11, 6.998e11),
        (Goal.MAXIMIZE, 1e-7, 2e-9, 1e-7, 9.8e-8),
        (Goal.MAXIMIZE, 0.9, 1e-30, 0.8, 0.9),
    ],
)
def test_rounding_never_makes_a_target_harder(
    goal: Goal, best: float, margin: float, way: float, expected: float
) -> None:
    target = Target(metric="m", value=0.0, goal=goal)
    proposed = towards_easier(target, best, margin, way)
    assert proposed == pytest.approx(expected, rel=1e-3)
    assert target.gain(proposed) <= target.gain(best) - margin + 1e-16
    assert target.gain(proposed) >= target.gain(best) - margin - 0.02 * way
