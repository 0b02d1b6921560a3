from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bssearch.records import TrialState
from bssearch.spec import load_spec
from bssearch.training.trainer import Trainer
from bssearch.workloads.base import Data, Part
from bssearch.workloads.transformer import Block
from bssearch.workloads.vit_tiny import VisionTransformer, VitTiny
from tests.training.toys import Run, on_cpu, request

SMALL = {"patch": 14, "width": 16, "depth": 1, "heads": 2}


def build(dropout: float = 0.0, **settings: int) -> VisionTransformer:
    torch.manual_seed(0)
    model = VitTiny(**{**SMALL, **settings}).build_model(dropout=dropout)
    assert isinstance(model, VisionTransformer)
    return model


def bright(count: int, seed: int = 0) -> Part:
    """Return noise whose class is the tenth of its height at which it has a bright line."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(10, (count,), generator=generator)
    inputs = torch.randn(count, 1, 28, 28, generator=generator)
    inputs[torch.arange(count), 0, 2 * targets] += 5
    return Part(inputs, targets)


def test_without_positions_the_order_of_the_patches_says_nothing() -> None:
    model, images = build(), bright(4).inputs
    turned = torch.cat([images[..., 14:], images[..., :14]], dim=3)
    assert not torch.allclose(model(turned), model(images), atol=1e-4)
    with torch.no_grad():
        model.positions.zero_()
    torch.testing.assert_close(model(turned), model(images))


def test_dropout_is_after_the_embedding_and_every_dense_layer_but_that_of_queries_keys_and_values() -> None:
    model, seen = build(dropout=0.5, depth=2), []
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].shape[-1]))
    model(bright(2).inputs)
    assert seen == [16, 16, 64, 16, 16, 64, 16]


def test_every_other_image_of_a_batch_is_nothing_to_an_image() -> None:
    model, images = build(), bright(4).inputs
    torch.testing.assert_close(model(images)[:2], model(images[:2]))


def test_the_blocks_are_what_may_be_checkpointed() -> None:
    blocks = VitTiny().checkpointed_modules(build(depth=3))
    assert len(blocks) == 3 and all(isinstance(block, Block) for block in blocks)


def test_accumulation_makes_the_step_of_the_whole_batch() -> None:
    spec = load_spec("vit_tiny")
    known = replace(spec.default_configuration, batch_size=64, micro_batch_size=64, accumulation_steps=1)
    found = []
    for one in (known, replace(known, micro_batch_size=16, accumulation_steps=4)):
        trainer = Trainer(VitTiny(**SMALL), one, bright(256), on_cpu(), 0)
        for _ in range(3):
            trainer.step()
        found.append(torch.cat([parameter.flatten() for parameter in trainer.model.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_the_shipped_study_does_all_of_the_worked_example_and_a_trial_of_it_learns() -> None:
    spec = load_spec("vit_tiny")
    assert spec.space.max_micro_batch_size is not None and spec.space.max_micro_batch_size < spec.batch_sizes[-1]
    names = {one.name for one in spec.space.dimensions()}
    assert {"reference_learning_rate", "warmup_epochs", "schedule", "horizon_samples"} <= names
    default = spec.default_configuration
    assert (default.optimizer, default.parameters["clip_norm"]) == ("adamw", 1.0)
    assert default.weight_decay > 0 and default.warmup_epochs > 0
    data = Data(train=bright(1000), validation=bright(200, seed=1), test=bright(200, seed=2))
    cosine = {**default.parameters, "schedule": "cosine", "horizon_samples": 6400}
    one = replace(default, batch_size=32, micro_batch_size=16, accumulation_steps=2, parameters=cosine)
    run = Run(request(replace(one, learning_rate=0.01), target=1.0), VitTiny(**SMALL), data)
    assert (run.outcome.state, run.outcome.steps) == (TrialState.EXHAUSTED, 200)
    assert (run.outcome.best_metric or 0) > 0.5
    rates = [seen.learning_rate for seen in run.observations]
    assert rates[0] < max(rates) > 50 * rates[-1]
