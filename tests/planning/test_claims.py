"""What is often said and is not so."""

from __future__ import annotations

from typing import Any

import pytest

from bssearch.planning.requests import CLAIMS, Claim, notes_on_spec
from tests.documents import DOCUMENTS
from tests.factories import SPEC, make_spec


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_every_claim_stands_in_the_guide_with_what_is_right_and_its_source(claim: Claim) -> None:
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
    ],
)
def test_a_spec_is_told_what_it_may_rely_on(space: dict[str, Any], codes: list[str]) -> None:
    spec = make_spec(space={**SPEC["space"], **space})
    assert [note.code for note in notes_on_spec(spec)] == codes


def test_gradients_are_told_of_if_memory_is_saved() -> None:
    spec = make_spec(training={"activation_checkpointing": True}, executor={"memory_limit_gib": 8})
    assert [note.code for note in notes_on_spec(spec)] == ["eighty_percent_feasible", "gradients_not_of_batch"]
