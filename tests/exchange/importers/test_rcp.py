"""Reference convergence points as runs. The excerpts are from mlcommons/logging, Apache-2.0."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bssearch.errors import UsageError
from bssearch.exchange.importers.imported_run import RunTable
from bssearch.exchange.importers.rcp import UNKNOWN_TARGET, read_rcp
from bssearch.records import Target

RESNET: dict[str, Any] = {
    "Benchmark": "resnet",
    "Creator": "NVIDIA",
    "BS": 1632,
    "Hyperparams": {
        "optimizer": "lars",
        "opt_base_learning_rate": 7.4,
        "opt_learning_rate_warmup_epochs": 2,
        "opt_weight_decay": 5.0e-5,
    },
    "Epochs to converge": [34, 37],
}
FLUX: dict[str, Any] = {
    "Benchmark": "flux1",
    "Precision": "BF16",
    "BS": 512,
    "Hyperparams": {"opt_base_learning_rate": 2.0e-4, "opt_adamw_beta_2": 0.95},
    "samples to converge": [8388608, 8126464],
}
BERT: dict[str, Any] = {"Benchmark": "bert", "BS": 256, "Hyperparams": {}, "Epochs to converge": [2834944]}


def read(folder: Path, *entries: dict[str, Any], **options: Any) -> tuple[RunTable, Target]:
    path = folder / "rcps.json"
    path.write_text(json.dumps({f"entry_{number}": entry for number, entry in enumerate(entries)}))
    return read_rcp(path, **options)


def refuse(folder: Path, *entries: dict[str, Any], said: str) -> UsageError:
    with pytest.raises(UsageError, match=re.escape(said)) as caught:
        read(folder, *entries)
    assert "rcps.json" in caught.value.message
    return caught.value


def test_epochs_of_a_known_data_set_become_steps(tmp_path: Path) -> None:
    found = read(tmp_path, RESNET)
    assert [run.steps for run in found[0].runs] == [round(34 * 1_281_167 / 1632), round(37 * 1_281_167 / 1632)]
    assert (found[1].metric, found[1].value) == ("accuracy", 0.759)
    run = found[0].runs[0]
    assert (run.reached, run.seed, run.train_seconds, run.final_metric, run.device) == (True, None, None, None, None)
    configuration = run.configuration
    assert (configuration.batch_size, configuration.learning_rate, configuration.optimizer) == (1632, 7.4, "lars")
    assert configuration.parameters["opt_weight_decay"] == 5e-5
    assert configuration.parameters["weight_decay"] is None
    assert "reading 'epochs to converge' as epochs of 1,281,167 samples" in found[0].notes


def test_whole_epochs_were_evaluated_after_each_and_of_other_figures_that_is_not_known(tmp_path: Path) -> None:
    epochs = read(tmp_path, {**RESNET, "Epochs to converge": [1, 34, 3.5]})[0].runs
    assert [run.last_miss_step for run in epochs] == [0, 33 * 1_281_167 // 1632, None]
    samples = [*read(tmp_path, FLUX)[0].runs, *read(tmp_path, BERT)[0].runs]
    assert {run.last_miss_step for run in samples} == {None}


def test_samples_become_steps_and_an_unknown_target_is_noted(tmp_path: Path) -> None:
    found = read(tmp_path, FLUX)
    assert [(run.steps, run.precision) for run in found[0].runs] == [(16384, "bf16"), (15872, "bf16")]
    assert found[1] is UNKNOWN_TARGET
    assert any("quality_target 1 means" in note for note in found[0].notes)


def test_the_epochs_of_bert_are_samples(tmp_path: Path) -> None:
    found = read(tmp_path, BERT)
    assert (found[0].runs[0].steps, found[1].metric) == (round(2834944 / 256), "masked_lm_accuracy")


def test_epochs_of_another_data_set_need_its_size(tmp_path: Path) -> None:
    other = {**RESNET, "Benchmark": "unet3d"}
    error = refuse(tmp_path, other, said="does not give the samples per epoch of unet3d")
    assert "--samples-per-epoch" in str(error.hint)
    assert read(tmp_path, other, samples_per_epoch=1000)[0].runs[0].steps == round(34_000 / 1632)


def test_names_in_other_cases_and_numbers_in_quotes(tmp_path: Path) -> None:
    entry = {
        "benchmark": "resnet",
        "bs": "4096",
        "HYPERPARAMS": {"opt_base_learning_rate": "10", "boundaries": [40, 50], "clip": None},
        "epochs_to_converge": ["39", 42.5],
    }
    runs = read(tmp_path, entry)[0].runs
    assert [run.steps for run in runs] == [round(39 * 1_281_167 / 4096), round(42.5 * 1_281_167 / 4096)]
    assert runs[0].configuration.learning_rate == 10.0
    assert runs[0].configuration.parameters["boundaries"] == "[40, 50]"
    assert runs[0].configuration.parameters["clip"] is None


def test_runs_without_a_value_are_left_out_and_noted(tmp_path: Path) -> None:
    without = {**RESNET, "BS": 64, "Epochs to converge": None}
    found = read(tmp_path, {**RESNET, "Epochs to converge": [34, None, 35]}, without)
    assert len(found[0].runs) == 2
    said = ["skipped 1 of 3 runs, because the value is null", "skipped a point without runs"]
    assert [note.partition(" (")[0] for note in found[0].notes[:2]] == said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"BS": None}, "bs = None: must be a valid integer"),
        ({"BS": 0}, "bs = 0: must be >= 1"),
        ({"BS": "big"}, "bs = 'big': must be"),
        ({"BS": [1]}, "bs = [1]: must be"),
        ({"Epochs to converge": ["x"]}, "epochs to converge.0 = 'x': must be a valid number"),
        ({"Epochs to converge": [34, 0]}, "epochs to converge.1 = 0: must be > 0"),
        ({"Epochs to converge": [-1]}, "epochs to converge.0 = -1: must be"),
        ({"Epochs to converge": [[1]]}, "epochs to converge.0 = [1]: must be"),
        ({"Epochs to converge": [float("nan")]}, "epochs to converge.0 = nan: must be"),
        ({"Epochs to converge": {"a": 1}}, "epochs to converge = {'a': 1}: must be a valid list"),
        ({"Epochs to converge": [10**300]}, "must be 1 to 2147483647 steps"),
        ({"samples to converge": [5]}, "samples to converge[0] = 5 is 5 samples, which at BS = 1632 must be 1 to"),
        ({"Epochs to converge": []}, "no runs"),
        ({"Hyperparams": "many"}, "hyperparams = 'many': must be a mapping"),
        ({"Hyperparams": {"opt_base_learning_rate": "x"}}, "opt_base_learning_rate = 'x' must be a number and > 0"),
        ({"Hyperparams": {"opt_base_learning_rate": -1}}, "opt_base_learning_rate = -1 must be > 0"),
        ({"Hyperparams": {"opt_epsilon": float("inf")}}, "opt_epsilon = 'Infinity' must be finite"),
    ],
)
def test_a_wrong_entry_is_named_with_its_field_value_and_bound(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    assert "entry_0" in refuse(tmp_path, {**RESNET, **changes}, said=said).message or "no runs" in said


def test_benchmarks_are_never_pooled(tmp_path: Path) -> None:
    refuse(tmp_path, RESNET, BERT, said="several benchmarks, whose runs are not comparable: bert, resnet")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "rcps.json:1 is not valid JSON"),
        ('{\n"a": {"BS" 8}}', "rcps.json:2 is not valid JSON"),
        ('{"a": {"epochs to converge": [3]}}', "bs is missing"),
        ('{"a": 1}', "is not a mapping of reference convergence points"),
        ("[]", "is not a mapping of reference convergence points"),
        ("{}", "no runs"),
        ('{"a": {"BS": 1}, "a": {"BS": 2}}', "has 'a' twice"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "is not valid JSON"),
    ],
)
def test_a_file_without_reference_points_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "rcps.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(said)):
        read_rcp(path)
