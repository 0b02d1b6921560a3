"""The guide's example of a tokenised text task runs as it stands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bssearch.spec.space import OPTIMIZERS
from bssearch.spec.space.optimizers import SCRATCH_RATES
from tests.cli.task import bssearch, printed, read
from tests.documents import DOCUMENTS, OWN_TRAINING, blocks

TEXT = DOCUMENTS["own-training"]
EXAMPLE, SPEC = ((OWN_TRAINING / name).read_text(encoding="utf-8") for name in ("my_text.py", "my_text.yaml"))
(STEP,) = (block for block in blocks(TEXT, "python") if "def training_step(self, step)" in block)


def run(folder: Path, code: str, *changes: str) -> Any:
    (folder / "my_text.py").write_text(code)
    (folder / "my_text.yaml").write_text(SPEC)
    few = ["budget.trials=3", "confirm.runs=0", "executor.name=inline", "space.batch_size.low=64", *changes]
    printed(folder, "run", "my_text.yaml", *(word for one in few for word in ("--set", one)))
    return read(folder, "best", "my-text")


@pytest.mark.slow
def test_ragged_texts_in_dicts_with_an_optimizer_of_their_own_are_searched(tmp_path: Path) -> None:
    answer = run(tmp_path, EXAMPLE)
    assert answer["optimal"]["batch_size"] in (32, 64, 128)
    assert answer["optimal"]["time_to_target_s"]["median"] > 0
    changes = ["--set", "executor.name=inline", "--set", "budget.trial_train_seconds=1"]
    checked = bssearch("check", "my_text.yaml", *changes, "--format", "json", cwd=tmp_path)
    assert json.loads(checked.stdout)["train_samples"] == 2000, checked.stderr


@pytest.mark.slow
def test_the_training_step_of_the_guide_takes_the_place_of_the_loss(tmp_path: Path) -> None:
    step = "".join(f"    {line}\n" if line else "\n" for line in STEP.splitlines())
    own = EXAMPLE.replace("    def loss(", step.replace("step.model(inputs)", "step.model(**inputs)") + "\n    def _(")
    assert "def _(" in own and run(tmp_path, own)["optimal"]["time_to_target_s"]["median"] > 0


def test_the_table_of_optimizers_has_their_options_their_defaults_and_their_usual_rates() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (`\w+` .*?) \| ([\d.]+) \|", TEXT, flags=re.MULTILINE)
    table = {name: (dict(re.findall(r"`(\w+)` ([^,]+)", options)), float(rate)) for name, options, rate in rows}

    def shown(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool | str) else f"{value:g}"

    assert table == {
        name: ({option: shown(value) for option, value in kind.option_defaults().items()}, SCRATCH_RATES[name])
        for name, kind in OPTIMIZERS.items()
    }
