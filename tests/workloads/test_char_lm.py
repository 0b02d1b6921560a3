import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module, functional

from bssearch import MetricInfo, Part, WorkloadError
from bssearch.workloads.char_lm import CharLM

CPU = torch.device("cpu")
ALPHABET = "abcdefghij"


def decoded(workload: CharLM, part: Part) -> list[str]:
    """Return each window of a part as text: its inputs and the last target."""
    characters = [*workload.vocabulary, "?"]
    windows = torch.cat([part.inputs, part.targets[:, -1:]], dim=1)
    return ["".join(characters[token] for token in window) for window in windows.tolist()]


def text_file(folder: Path, text: str = ALPHABET * 40) -> str:
    (folder / "text.txt").write_text(text)
    return str(folder / "text.txt")


def mean_loss(workload: CharLM, model: Module, inputs: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
    found = workload.loss(model, inputs, targets, label_smoothing=label_smoothing)
    assert isinstance(found, Tensor)
    return found


def loaded(folder: Path, **settings: Any) -> tuple[CharLM, Part]:
    workload = CharLM(text_file(folder), context=8, heads=2, width=16, **settings)
    return workload, workload.load(CPU).train


def test_the_text_is_split_by_position_and_cut_into_windows_without_overlap(tmp_path: Path) -> None:
    text = ALPHABET * 36 + "abcxyzabcdefgxyxabcd" + "zyxabcabcabcdefghyyy"
    workload = CharLM(text_file(tmp_path, text), context=8)
    data = workload.load(CPU)
    assert decoded(workload, data.train) == [text[start : start + 9] for start in range(0, 360, 9)]
    assert decoded(workload, data.validation) == ["abc???abc", "defg???ab"]
    assert decoded(workload, data.test) == ["???abcabc", "abcdefgh?"]
    assert data.train.inputs.shape == data.train.targets.shape == (40, 8)
    assert data.train.inputs.dtype == data.train.targets.dtype == torch.int64
    assert torch.equal(data.train.inputs[:, 1:], data.train.targets[:, :-1])


def test_the_vocabulary_is_that_of_the_training_part_and_chance_follows_it(tmp_path: Path) -> None:
    workload = CharLM(text_file(tmp_path, "ba" * 180 + "é" * 40), context=8)
    assert workload.metrics == {"loss": MetricInfo(low=0.0)}
    data = workload.load(CPU)
    assert workload.vocabulary == "ab"
    assert set(data.train.inputs.flatten().tolist()) == {0, 1} and set(data.test.inputs.flatten().tolist()) == {2}
    assert workload.metrics == {"loss": MetricInfo(low=0.0, chance=math.log(3))}
    assert workload.tokens_per_sample == 8


def test_at_most_the_given_number_of_windows_validate_spread_over_the_part(tmp_path: Path) -> None:
    text = "".join(chr(ord("a") + index % 26) for index in range(1800))
    whole = CharLM(text_file(tmp_path, text), context=8)
    some = CharLM(text_file(tmp_path, text), context=8, validation_sequences=4)
    every = decoded(whole, whole.load(CPU).validation)
    assert len(every) == 10
    data = some.load(CPU)
    assert decoded(some, data.validation) == [every[index] for index in (0, 2, 5, 7)]
    assert (len(data.train), len(data.test)) == (180, 10)


def test_a_later_character_does_not_change_earlier_scores(tmp_path: Path) -> None:
    workload, train = loaded(tmp_path)
    model = workload.build_model(dropout=0.0).eval()
    inputs = train.inputs[:1]
    changed = inputs.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 10
    with torch.no_grad():
        before, after = model(inputs), model(changed)
    assert before.shape == (1, 8, 11)
    assert torch.equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] - after[:, 5:]).abs().amax(-1).min() > 1e-4


def test_scores_depend_on_the_order_of_earlier_characters(tmp_path: Path) -> None:
    workload, _ = loaded(tmp_path)
    model = workload.build_model(dropout=0.0).eval()
    with torch.no_grad():
        one, other = (model(torch.tensor([tokens]))[0, -1] for tokens in ([1, 2, 3, 4], [2, 1, 3, 4]))
    assert (one - other).abs().max() > 1e-4


@pytest.mark.parametrize("settings", [{}, {"layers": 4, "width": 64}])
def test_a_new_model_is_at_chance(tmp_path: Path, settings: dict[str, Any]) -> None:
    workload = CharLM(text_file(tmp_path), **{"context": 8, "heads": 2, "width": 16, **settings})
    data = workload.load(CPU)
    torch.manual_seed(0)
    with torch.no_grad():
        found = workload.evaluate(workload.build_model(dropout=0.1).eval(), data.test)
    assert found == {"loss": pytest.approx(math.log(11), abs=0.3)}


def test_one_batch_can_be_learned_by_heart(tmp_path: Path) -> None:
    torch.manual_seed(0)
    text = "".join(ALPHABET[index] for index in torch.randint(10, (400,)).tolist())
    workload = CharLM(text_file(tmp_path, text), context=8, heads=2, width=32)
    train = workload.load(CPU).train
    model = workload.build_model(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs, targets = train.inputs[:4], train.targets[:4]
    for _ in range(100):
        optimizer.zero_grad()
        loss = mean_loss(workload, model, inputs, targets, 0.0)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    # All but the first characters follow from earlier characters.
    assert loss.item() < 0.3
    assert workload.evaluate(model, Part(inputs, targets))["loss"] == pytest.approx(loss.item(), abs=0.05)


def test_the_evaluation_in_chunks_is_the_mean_over_all_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload, train = loaded(tmp_path)
    model = workload.build_model(dropout=0.0).eval()
    monkeypatch.setattr("bssearch.workloads.char_lm._EVALUATION_CHARACTERS", 7 * 8)
    with torch.no_grad():
        expected = functional.cross_entropy(model(train.inputs).transpose(1, 2), train.targets)
        assert len(train) % 7 and workload.evaluate(model, train)["loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_label_smoothing_and_dropout_reach_the_loss(tmp_path: Path) -> None:
    workload, train = loaded(tmp_path)

    def loss(dropout: float, label_smoothing: float) -> float:
        torch.manual_seed(0)
        model = workload.build_model(dropout=dropout)
        return mean_loss(workload, model, train.inputs, train.targets, label_smoothing).item()

    assert loss(0.0, 0.0) == loss(0.0, 0.0)
    assert len({loss(0.0, 0.0), loss(0.3, 0.0), loss(0.0, 0.3)}) == 3


def test_the_default_text_is_always_the_same_and_logged(capfd: pytest.CaptureFixture[str]) -> None:
    first, second = CharLM(max_characters=50_000), CharLM(max_characters=50_000)
    one, other = first.load(CPU), second.load(CPU)
    assert torch.equal(one.train.inputs, other.train.inputs) and torch.equal(one.test.inputs, other.test.inputs)
    assert "".join(decoded(first, one.train)).count("import ") > 5
    logged = capfd.readouterr().err.splitlines()
    assert logged[0] == logged[1] and logged[0].startswith("char_lm: 50000 characters, SHA-256 ")


def test_the_default_text_is_large_enough_for_every_batch_size_of_a_study() -> None:
    data = CharLM().load(CPU)
    assert len(data.train) == 900_000 // 65 and len(data.validation) == 128


@pytest.mark.parametrize("text", [".", "*.txt", "**/*[a-c].txt"])
def test_a_folder_or_glob_is_read_in_order_from_the_current_folder(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "cab":
        (tmp_path / f"{name}.txt").write_text(name * 100)
    (tmp_path / "folder").mkdir()
    (tmp_path / ".hidden").write_bytes(b"\xff")
    workload = CharLM(text, context=4)
    assert decoded(workload, workload.load(CPU).train) == ["aaaaa"] * 20 + ["bbbbb"] * 20 + ["ccccc"] * 14


def test_no_more_characters_are_read_than_asked(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 150)
    (tmp_path / "b.txt").write_text("b" * 150)
    (tmp_path / "c.txt").write_bytes(b"\xff")
    workload = CharLM(str(tmp_path), max_characters=200, context=4)
    assert decoded(workload, workload.load(CPU).train) == ["aaaaa"] * 30 + ["bbbbb"] * 6


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("none.txt", "text = 'none.txt' matches no file in /"),
        ("*.txt", r"text = '\*.txt' matches no file in /"),
        ("empty", "text = 'empty' matches no file in /"),
        ("latin", r"latin cannot be read as UTF-8: .* in position 3:"),
        ("/proc/self/mem", "text /proc/self/mem cannot be read as UTF-8: .* Input/output error"),
        ("short", r"has 179 characters .* needs 20 × \(context \+ 1\) = 180"),
    ],
)
def test_a_text_that_cannot_be_used_is_named(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin").write_bytes("abcé".encode("latin-1") * 100)
    (tmp_path / "short").write_text("a" * 179)
    with pytest.raises(WorkloadError, match=said):
        CharLM(text, context=8).load(CPU)


def test_the_shortest_text_has_a_window_in_every_part(tmp_path: Path) -> None:
    data = CharLM(text_file(tmp_path, "a" * 180), context=8).load(CPU)
    assert (len(data.train), len(data.validation), len(data.test)) == (18, 1, 1)
