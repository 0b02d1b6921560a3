"""What is often said and is not so."""

from __future__ import annotations

from typing import Any

import pytest

from bssearch.planning.claims import CLAIMS, claims_of_spec
from tests.documents import DOCUMENTS
from tests.factories import SPEC, make_spec


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.code)
def test_every_claim_stands_in_the_guide_with_what_is_right_and_its_source(claim: Any) -> None:
    assert f"| {claim.said} | {claim.right} | {claim.source} |" in DOCUMENTS["planning"]


def test_the_figures_of_goyal_are_those_of_the_paper() -> None:
    (right,) = (claim.right for claim in CLAIMS if claim.code == "goyal_figures")
    assert "23.60 ± 0.12 % error at 256, 23.74 ± 0.09 % at 8k" in right


def test_the_memory_of_bert_base_follows_from_its_dimensions() -> None:
    (right,) = (claim.right for claim in CLAIMS if claim.code == "bert_base_memory")
    layers, hidden, heads, tokens = 12, 768, 12, 512
    narrow = layers * tokens * hidden * (34 + 5 * heads * tokens / hidden)  # Korthikanti et al. 2022, equation 2
    wide = layers * tokens * hidden * (66 + 9 * heads * tokens / hidden)  # the masks of dropout stay a byte
    assert f"{16 * 110e6 / 2**30:.2f} GiB" in right
    assert f"{narrow / 2**30:.2f} GiB in 16 bits and {wide / 2**30:.2f} in fp32" in right


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
    assert [claim.code for claim in claims_of_spec(spec)] == codes


def test_gradients_are_told_of_where_memory_is_saved() -> None:
    spec = make_spec(training={"activation_checkpointing": True}, executor={"memory_limit_gib": 8})
    assert [claim.code for claim in claims_of_spec(spec)] == ["eighty_percent_feasible", "gradients_not_of_batch"]
