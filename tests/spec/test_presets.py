"""The shipped presets: what a spec must add to one is said with the preset's name."""

from pathlib import Path

import pytest

from bssearch import settings
from bssearch.errors import SpecError
from bssearch.spec import load_spec

SPEC = """\
schema_version: 1
name: toy
workload: digits
target: {metric: accuracy, value: 0.9}
space:
  batch_size: {low: 8, high: 64}
  learning_rate: {low: 1e-3, high: 5e-1}
default: {batch_size: 32, learning_rate: 1e-1}
budget: {trials: 20, trial_train_seconds: 5}
"""
LINE = 8
"""Of the default."""


def write(folder: Path, preset: str, spec: str = SPEC) -> Path:
    path = folder / "mine.yaml"
    path.write_text(f"{spec}preset: {preset}\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["large_model", "memory_bound"])
def test_checkpointing_is_switched_on_by_taking_a_mark_away(name: str) -> None:
    assert "\n  # activation_checkpointing: true\n" in settings.presets()[name].read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("preset", "parameter"), [("accuracy_first", "weight_decay"), ("fine_tuning", "warmup_epochs")]
)
def test_what_a_preset_searches_and_the_default_lacks_is_said_with_its_name(
    tmp_path: Path, preset: str, parameter: str
) -> None:
    path = write(tmp_path, preset)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    said = f"preset {preset} searches {parameter}: give default.{parameter} too ({path}:{LINE})"
    assert str(caught.value).splitlines()[0] == said
