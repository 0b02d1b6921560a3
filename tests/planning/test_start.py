"""Plans: a first spec, learning rates by rule, exact splits of a batch, scale, common claims."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies as st

from bssearch import Launch, LaunchError, UsageError, check, plan_memory
from bssearch.planning.learning_rate import RULES_OF_THUMB, LearningRateRequest, RuledConfiguration, plan_rules
from bssearch.planning.requests import CLAIMS, Claim, notes_on_spec
from bssearch.planning.scale import ScalePlan, ScaleRequest, plan_accumulation, plan_devices
from bssearch.planning.start import QUESTIONS, StartPlan, StartRequest, plan_start
from bssearch.spec import SCRATCH_RATES, load_spec
from tests.documents import DOCUMENTS
from tests.factories import SPEC, make_spec, not_none
from tests.search.law import LawExecutor

FINE_TUNING: dict[str, Any] = {"memory_gib": 24, "start": "fine_tuning", "parameters": 110_000_000}
SCRATCH: dict[str, Any] = {
    "memory_gib": 80,
    "devices": 8,
    "parameters": 1_300_000_000,
    "sample_mib": 300.0,
    "workload": "mine.py:Mine",
    "train_samples": 50_000,
}
BOUND: dict[str, Any] = {"memory_gib": 8, "parameters": 350_000_000, "sample_mib": 150.0, "priority": "memory"}


def codes(found: StartPlan) -> set[str]:
    """Findings of `bssearch check` about a plan's spec, with a simulated workload."""
    return {
        one.code
        for one in check(found.spec, Launch(make_executor=lambda *_: LawExecutor(train_samples=50_000))).findings
    }


def test_fine_tuning_takes_small_batches_and_a_tenth_of_the_rates_from_scratch() -> None:
    found = plan_start(**FINE_TUNING)
    assert (found.spec.preset, found.spec.space.rungs) == ("fine_tuning", (8, 16, 32, 64))
    assert [found.spec.default.batch_size, found.spec.default.learning_rate] == pytest.approx([16, 1e-4])
    assert found.spec.space.max_micro_batch_size is None
    assert "fine_tuning_learning_rate" not in codes(found)


def test_from_scratch_on_eight_devices_searches_their_total_batch() -> None:
    found = plan_start(**SCRATCH)
    assert found.spec.space.rungs == (256, 512, 1024, 2048)
    assert found.safe_micro_batch == math.floor((0.8 * 80 * 2**30 - 16 * 1.3e9) / (300 * 2**20))
    assert found.spec.space.max_micro_batch_size == 64, "32 to 64 a device"
    assert found.spec.default.learning_rate == pytest.approx(1e-3)
    assert not codes(found) & {"learning_rate_fixed", "no_warmup", "default_outside_space"}


def test_bound_by_memory_on_8_gib_accumulates_the_micro_batches_that_fit() -> None:
    found = plan_start(**BOUND)
    assert (found.fixed_bytes, found.safe_micro_batch) == (16 * 350_000_000, 8)
    assert found.spec.space.max_micro_batch_size == 8
    assert found.spec.space.rungs[-1] > 8
    assert "activation_checkpointing" in found.yaml
    assert "default_outside_space" not in codes(found)


@pytest.mark.slow
@pytest.mark.parametrize("answers", [FINE_TUNING, {**SCRATCH, "workload": "digits", "train_samples": None}, BOUND])
def test_every_plan_of_the_stand_in_passes_a_real_check(answers: dict[str, Any]) -> None:
    spec = plan_start(**answers).spec
    found = check(spec.model_copy(update={"executor": spec.executor.model_copy(update={"name": "inline"})}))
    assert found.trial.steps > 0
    assert not {one.code for one in found.findings} & {"default_diverges", "metric_never_moves", "out_of_memory"}


@pytest.mark.parametrize(
    ("start", "priority", "devices", "workload"),
    [
        ("scratch", "speed", 1, "digits"),
        ("fine_tuning", "speed", 8, "train.py"),
        ("scratch", "accuracy", 3, "train.py"),
        ("fine_tuning", "accuracy", 1, "digits"),
        ("scratch", "cost", 8, "digits"),
        ("fine_tuning", "cost", 3, "train.py"),
        ("scratch", "memory", 1, "train.py"),
        ("fine_tuning", "memory", 8, "digits"),
    ],
)
def test_every_plan_is_a_spec_that_loads_from_its_file(
    start: str, priority: str, devices: int, workload: str, tmp_path: Path
) -> None:
    found = plan_start(start=start, priority=priority, devices=devices, workload=workload)
    path = tmp_path / "spec.yaml"
    path.write_text(found.yaml)
    assert load_spec(path) == found.spec
    assert found.spec.space.outside(found.spec.default_configuration) == []


@pytest.mark.parametrize("optimizer", SCRATCH_RATES)
def test_every_optimizer_has_its_usual_rate_and_rule(optimizer: str) -> None:
    spec = plan_start(optimizer=optimizer, seconds=1e-5, target=1e-7).spec
    assert (spec.default.learning_rate, spec.target.value) == (SCRATCH_RATES[optimizer], 1e-7)
    rate: Any = spec.space.learning_rate
    assert rate.rule == ("linear" if optimizer in ("sgd", "lars") else "sqrt")
    assert rate.low < spec.default.learning_rate < rate.high


def test_every_chosen_line_has_its_reason() -> None:
    found = plan_start(priority="accuracy", devices=4, train_samples=100_000)
    without = [
        line.strip().partition(":")[0] for line in found.yaml.splitlines() if "#" not in line and line.partition(":")[2]
    ]
    zeros = {"warmup_epochs", "weight_decay", "dropout", "label_smoothing"}
    assert set(without) <= {"schema_version", "name", "optimizer", "pruner", "batch_size", *zeros}
    assert {"batch_size", "learning_rate", "objective", "max_micro_batch_size", "confirm"} <= found.reasons.keys()


def test_todays_configuration_is_the_default_to_the_last_digit() -> None:
    spec = plan_start(batch=48, learning_rate=0.00123456789).spec
    assert (spec.default.batch_size, spec.default.learning_rate) == (48, 0.00123456789)


def test_names_are_quoted_in_the_yaml() -> None:
    found = plan_start(metric='a "b": {c}', workload="x y.py:Z", train_samples=5000)
    assert yaml.safe_load(found.yaml)["target"]["metric"] == 'a "b": {c}'
    assert found.spec.workload == "x y.py:Z"


@pytest.mark.parametrize(("optimizer", "kept"), [("adamw", "adamw"), ("sgd", "momentum")])
def test_fixed_bytes_equal_plan_memory(optimizer: str, kept: str) -> None:
    found = plan_start(parameters=1000, optimizer=optimizer)
    assert found.fixed_bytes == plan_memory(parameters=1000, precision="bf16", optimizer=kept).fixed_bytes > 0


@pytest.mark.parametrize(
    ("answers", "cures"),
    [
        ({"parameters": "7B", "devices": 8}, ["--device h200", "--stage 3"]),
        ({"parameters": "1.3B"}, ["--optimizer"]),
        ({"sample_mib": 30.0 * 1024}, ["--device"]),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_cures(answers: dict[str, Any], cures: list[str]) -> None:
    with pytest.raises(LaunchError, match="memory_gib = 24") as caught:
        plan_start(**answers)
    assert [cure for cure in cures if cure not in (caught.value.hint or "")] == []


def test_questions_are_options_with_defaults() -> None:
    assert all(StartRequest.model_fields[name].default is not None for name in QUESTIONS)


Tuned = dict[str, Any]

SGD: Tuned = {"from_batch": 256, "learning_rate": 0.1, "weight_decay": 1e-4, "dropout": 0.1}
ADAMW: Tuned = {
    "from_batch": 64,
    "learning_rate": 1e-3,
    "optimizer": "adamw",
    "weight_decay": 0.01,
    "ema_decay": 0.999,
}


def ruled(tuned: Tuned, batch: int, rule: str, **options: Any) -> RuledConfiguration:
    return plan_rules(LearningRateRequest(**tuned, batch=batch, rule=[rule], **options)).rules[rule]


def test_the_rules_give_goyals_rates_at_32_times_the_batch() -> None:
    rates = {name: ruled(SGD, 8192, name).learning_rate for name in ("none", "linear", "sqrt")}
    assert rates == {"none": 0.1, "linear": pytest.approx(3.2), "sqrt": pytest.approx(0.1 * math.sqrt(32))}


def test_every_rule_but_none_warms_up_for_five_epochs_from_eight_times_the_batch_on() -> None:
    assert ruled(SGD, 2047, "linear").warmup_epochs == 0
    assert ruled(SGD, 2048, "linear").warmup_epochs == 5
    assert ruled(SGD, 2048, "none").warmup_epochs == 0
    assert ruled({"from_batch": 256, "learning_rate": 0.1, "warmup_epochs": 8.0}, 2048, "sqrt").warmup_epochs == 8


def test_the_betas_follow_malladi_and_marek() -> None:
    sde = ruled(ADAMW, 256, "sde")
    assert [sde.learning_rate, sde.beta1, sde.beta2, sde.epsilon] == pytest.approx([2e-3, 0.6, 0.996, 0.5e-8])
    marek = {"from_batch": 512, "learning_rate": 4.8e-3, "optimizer": "adamw", "beta2": 0.95}
    assert ruled(marek, 1, "half_life").beta2 == pytest.approx(0.99990, abs=5e-6), "their repository's value"
    assert ruled(ADAMW, 256, "ema_half_life").ema_decay == pytest.approx(0.999**4)


def test_weight_decay_keeps_the_timescale_under_each_rule_for_the_rate() -> None:
    kept = {rule: ruled(ADAMW, 256, "timescale", rate_rule=rule).weight_decay for rule in ("none", "sqrt", "linear")}
    assert kept == {"none": pytest.approx(0.04), "sqrt": pytest.approx(0.02), "linear": pytest.approx(0.01)}
    assert ruled(ADAMW, 256, "sqrt_weight_decay").weight_decay == pytest.approx(0.02)


def test_the_rate_of_other_rules_is_linear_with_sgd_and_by_the_root_with_adam() -> None:
    assert ruled(SGD, 1024, "sqrt_dropout").learning_rate == pytest.approx(0.4)
    assert ruled(SGD, 1024, "sqrt_dropout").dropout == pytest.approx(0.2)
    assert ruled(ADAMW, 256, "label_smoothing").learning_rate == pytest.approx(2e-3)
    assert ruled(ADAMW, 256, "label_smoothing").label_smoothing == 0.1


@pytest.mark.parametrize("name", RULES_OF_THUMB)
def test_a_rule_changes_no_parameter_at_the_tuned_batch_size(name: str) -> None:
    found, tuned = ruled(ADAMW, 64, name), LearningRateRequest(**ADAMW, batch=64)
    whole = {**tuned.tuned, "learning_rate": tuned.learning_rate, "warmup_epochs": tuned.warmup_epochs}
    assert {parameter: getattr(found, parameter) for parameter in whole} == pytest.approx(whole)
    assert found.holds and found.breaks and found.source


@pytest.mark.parametrize(
    ("tuned", "batch", "rule", "codes"),
    [
        ({"from_batch": 64, "learning_rate": 0.1}, 256, "sqrt", []),
        ({"from_batch": 64, "learning_rate": 0.1}, 8192, "linear", ["linear_rule", "layerwise_not_needed"]),
        (ADAMW, 128, "sqrt", ["sqrt_rule", "weight_decay_rule"]),
    ],
)
def test_only_relevant_claims_are_corrected(tuned: Tuned, batch: int, rule: str, codes: list[str]) -> None:
    plan = plan_rules(LearningRateRequest(**tuned, batch=batch, rule=[rule]))
    assert [one.code for one in plan.notes] == codes


@pytest.mark.parametrize(
    ("tuned", "batch", "rule", "said"),
    [
        (ADAMW, 576, "sde", None),
        (ADAMW, 640, "sde", "κ(1 − β) = 1"),
        (SGD, 1024, "sde", "sgd"),
        (ADAMW, 256, "linear", "adamw"),
        (SGD, 1024, "timescale", "sgd"),
        (SGD, 1024, "ema_half_life", "ema_decay"),
    ],
)
def test_contradictions_of_a_rule_are_caveats(tuned: Tuned, batch: int, rule: str, said: str | None) -> None:
    caveats = ruled(tuned, batch, rule).caveats
    assert said in caveats[0] if said else caveats == []


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 64))
def test_the_split_multiplies_to_the_batch_exactly(micro: int, steps: int, devices: int) -> None:
    batch = micro * steps * devices
    found = plan_accumulation(batch=batch, micro=micro, devices=devices)
    assert (found.micro_batch, found.accumulation_steps, found.devices, found.batch) == (micro, steps, devices, batch)


def test_a_largest_micro_batch_gives_way_to_one_that_divides() -> None:
    found = plan_accumulation(batch=1024, max_micro=24, devices=4)
    assert (found.micro_batch, found.accumulation_steps) == (16, 16)
    assert plan_accumulation(batch=24, devices=2).micro_batch == 12, "all at once"


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ({"batch": 1024, "micro": 24, "devices": 4}, ["960 (10 accumulation steps)", "1056 (11 accumulation steps)"]),
        ({"batch": 30, "micro": 32}, ["32 (1 accumulation step)"]),
        ({"batch": 1000, "devices": 3}, ["999", "1002"]),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused_with_the_nearest_that_can(
    asked: dict[str, Any], nearest: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        plan_accumulation(**asked)
    assert all(size in caught.value.message for size in nearest)
    assert (caught.value.hint is None) == (asked["batch"] % asked.get("devices", 1) != 0)


@pytest.mark.parametrize(
    ("asked", "codes"),
    [
        ({"micro": 64}, []),
        ({"micro": 32}, ["batch_norm", "token_weighted_loss", "accumulation_cost"]),
        ({"micro": 32, "batch_norm_layers": 0}, ["token_weighted_loss", "accumulation_cost"]),
        (
            {"micro": 8, "batch_norm_layers": 3},
            [
                "batch_norm_small_batch",
                "batch_norm_accumulation",
                "tiny_micro_batch",
                "token_weighted_loss",
                "accumulation_cost",
            ],
        ),
        (
            {"batch": 544, "micro": 32, "batch_norm_layers": 0},
            ["token_weighted_loss", "accumulation_not_stale", "accumulation_cost"],
        ),
        (
            {"micro": 16, "devices": 2, "batch_norm_layers": 0},
            ["token_weighted_loss", "no_sync", "accumulation_cost"],
        ),
    ],
)
def test_differences_from_a_whole_batch_are_noted(asked: dict[str, Any], codes: list[str]) -> None:
    assert [note.code for note in plan_accumulation(**{"batch": 64, **asked}).notes] == codes


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_every_claim_is_in_the_guide_with_its_correction_and_source(claim: Claim) -> None:
    assert f"| {claim.said} | {claim.right} | {claim.source} |" in DOCUMENTS["planning"]


ADAM = {"name": "adamw"}
RATE = SPEC["space"]["learning_rate"]


@pytest.mark.parametrize(
    ("space", "codes"),
    [
        ({}, []),
        ({"max_micro_batch_size": 8}, ["eighty_percent_feasible"]),
        ({"max_micro_batch_size": 4}, ["accumulation_not_stale", "eighty_percent_feasible"]),
        ({"optimizer": {"name": "lars"}}, ["layerwise_not_needed"]),
        ({"batch_size": [32, 8192]}, ["layerwise_not_needed"]),
        ({"optimizer": ADAM}, ["sqrt_rule"]),
        ({"optimizer": ADAM, "batch_rules": {"betas": "sde"}}, []),
        ({"optimizer": ADAM, "learning_rate": {**RATE, "rule": "linear"}}, ["linear_rule"]),
        ({"batch_size": [8, 64], "learning_rate": {**RATE, "rule": "linear"}}, []),
        ({"batch_rules": {"weight_decay": "sqrt"}}, ["weight_decay_rule"]),
        ({"batch_size": [8, 256], "weight_decay": 0.0, "dropout": 0.1}, ["accuracy_not_fixed"]),
        ({"batch_size": [8, 256], "weight_decay": 0.0}, []),
        ({"batch_size": [8, 128], "weight_decay": 0.0, "dropout": 0.1}, []),
    ],
)
def test_claims_behind_a_spec_are_noted(space: dict[str, Any], codes: list[str]) -> None:
    assert [note.code for note in notes_on_spec(make_spec(space={**SPEC["space"], **space}))] == codes


def test_gradients_are_noted_if_memory_is_saved() -> None:
    spec = make_spec(training={"activation_checkpointing": True}, executor={"memory_limit_gib": 8})
    assert [note.code for note in notes_on_spec(spec)] == ["eighty_percent_feasible", "gradients_not_of_batch"]


FREE: dict[str, Any] = {"alpha_s": 0.0, "beta_s": 0.001, "parameters": 1, "gradient_bytes": 1.0, "bandwidth_gb_s": 1e9}
"""Devices that exchange gradients in no time."""

LINKED: dict[str, Any] = {
    "alpha_s": 0.01,
    "beta_s": 0.001,
    "parameters": 10**8,
    "gradient_bytes": 1.0,
    "bandwidth_gb_s": 10.0,
    "latency_us": 5.0,
}
CRITICAL = {"b_crit": 1000.0, "b_crit_low": 500.0, "b_crit_high": 2000.0}


def plan(devices: int, hardware: dict[str, Any], **load: Any) -> ScalePlan:
    return plan_devices(ScaleRequest(**{"devices": devices, **hardware, **CRITICAL, **load}))


def linked(**changes: Any) -> ScaleRequest:
    return ScaleRequest(**{"devices": 4, "batch": 64, **LINKED, **changes})


def test_a_ring_all_reduce_takes_the_bytes_over_the_bandwidth_twice_and_its_messages() -> None:
    assert linked().all_reduce_seconds(1) == 0
    assert linked().all_reduce_seconds(4) == pytest.approx(2 * 3 / 4 * 1e8 / 1e10 + 2 * 3 * 5e-6)


def test_overlap_hides_communication_up_to_the_computing() -> None:
    whole = linked().all_reduce_seconds(4)
    assert linked(overlap=0.5).exposed_seconds(4, compute_s=1.0) == pytest.approx(whole / 2)
    assert linked(overlap=1.0).exposed_seconds(4, compute_s=0.001) == pytest.approx(whole - 0.001)


def test_with_a_batch_that_grows_the_law_alone_bends_the_time() -> None:
    found = plan(40, FREE, per_device_batch=50, samples_to_target=1e6, at_batch=50)
    for row in found.rows:
        samples = 1e6 * (1 + row.batch / 1000) / (1 + 50 / 1000)
        assert row.time_to_target_s == pytest.approx(samples * 0.001 / row.devices)
        assert row.speedup == pytest.approx(found.rows[0].time_to_target_s / row.time_to_target_s)  # type: ignore[operator]
        assert row.throughput_efficiency == pytest.approx(1)


def test_the_number_at_which_b_crit_is_passed_has_the_interval_of_b_crit() -> None:
    found = plan(64, FREE, per_device_batch=50).passes_b_crit
    assert (found.low, found.estimate, found.high) == (11, 21, 41)
    one_sided = plan(64, FREE, per_device_batch=50, b_crit_high=None).passes_b_crit
    assert (one_sided.low, one_sided.estimate, one_sided.high) == (11, 21, None)


def test_more_devices_pay_while_each_does_half_of_a_single_devices_work() -> None:
    # (1 + 50/1000) / (1 + 50 n/1000) >= 1/2 up to n = 22; with B_crit = 500 up to 12, with 2000 up to 42.
    found = plan(64, FREE, per_device_batch=50)
    assert (found.pays_up_to.low, found.pays_up_to.estimate, found.pays_up_to.high) == (12, 22, 42)
    assert found.rows[21].efficiency >= 0.5 > found.rows[22].efficiency
    assert found.fastest == 64


def test_a_fixed_batch_is_planned_on_the_numbers_that_divide_it_and_slows_down_by_communication() -> None:
    hardware = {**LINKED, "alpha_s": 0.05}
    found = plan(12, hardware, batch=96)
    assert [row.devices for row in found.rows] == [1, 2, 3, 4, 6, 8, 12]
    assert all(row.batch == 96 and row.relative_samples == found.rows[0].relative_samples for row in found.rows)
    assert [row.speedup for row in found.rows] == [
        pytest.approx(found.rows[0].step_s / row.step_s) for row in found.rows
    ]
    assert found.pays_up_to.estimate == 3, "the fixed cost of a step is not shared"
    assert found.passes_b_crit.estimate is None
    assert plan(2, hardware, batch=1200).passes_b_crit.estimate == 1


def test_accumulation_pays_the_fixed_cost_once_a_micro_batch() -> None:
    (row,) = plan(1, LINKED, batch=96, max_micro=40).rows
    assert (row.micro_batch, row.accumulation_steps) == (32, 3)
    assert row.step_s == pytest.approx(3 * (0.01 + 0.032))


def test_cost_is_device_hours_times_the_price_and_unknown_without_samples() -> None:
    priced = {"per_device_batch": 50, "samples_to_target": 3.6e6, "at_batch": 50, "price_per_device_hour": 2.0}
    single = plan(1, FREE, **priced).rows[0]
    assert [single.time_to_target_s, single.device_hours, single.cost] == pytest.approx([3600, 1, 2])
    bare = plan(2, FREE, per_device_batch=50).rows[1]
    assert (bare.time_to_target_s, bare.device_hours, bare.cost) == (None, None, None)
    assert bare.speedup > 1


def test_a_networks_parameters_and_memory_move_the_batch_range() -> None:
    asked: dict[str, Any] = {"model": "resnet50", "input_shape": (3, 224, 224), "precision": "bf16"}
    roomy, tight = (plan_start(**asked, memory_gib=memory_gib) for memory_gib in (24.0, 1.0))
    plan = plan_memory(
        network="resnet50", input_shape=(3, 224, 224), precision="bf16", memory_gib=24, optimizer="adamw"
    )
    assert roomy.fixed_bytes == plan.fixed_bytes and roomy.safe_micro_batch == plan.safe_micro_batch
    assert tight.spec.batch_sizes[-1] < roomy.spec.batch_sizes[-1]
    assert not_none(tight.spec.space.max_micro_batch_size) <= not_none(tight.safe_micro_batch)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"model": "resnet50", "input_shape": (3, 8, 8), "parameters": "3M"}, ["resnet50", "parameters"]),
        ({"model": "resnet50", "input_shape": (3, 8, 8), "sample_mib": 3.0}, ["resnet50", "sample_mib"]),
        ({"model": "resnet50"}, ["resnet50", "input_shape"]),
        ({"input_shape": (3, 8, 8)}, ["input_shape", "model"]),
    ],
)
def test_a_model_is_the_only_source_of_memory(given: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(UsageError) as refused:
        plan_start(**given)
    assert [name for name in named if name not in refused.value.message] == []
