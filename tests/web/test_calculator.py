"""The calculator has the numbers of the command line and of Python, and explains errors in its own words."""

import json
import random
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import reduce
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import QueryParams

import bssearch as api
from bssearch.errors import BSSearchError
from bssearch.planning.learning_rate import LearningRateRequest
from bssearch.planning.memory import MemoryPlanRequest
from bssearch.planning.requests import Request, read
from bssearch.planning.scale import AccumulationRequest, ScaleRequest, plan_trade_off
from bssearch.records.text import visible
from bssearch.web.calculator.page import FIELDS, LONGEST_ECHO, PRESETS, Field, ResultSection, calculated
from tests.cli.task import bssearch
from tests.factories import not_none
from tests.web.serving import rendered

CASES = 200

DEFAULTS = {name: field.default for name, field in FIELDS.items() if field.kind != "flag"}

FUNCTIONS: Mapping[str, tuple[type[Request], Callable[..., Any]]] = {
    "memory": (MemoryPlanRequest, api.plan_memory),
    "accumulation": (AccumulationRequest, api.plan_accumulation),
    "lr": (LearningRateRequest, api.plan_learning_rate),
    "scale": (ScaleRequest, api.plan_scale),
}

WRONG = [
    "0",
    "-1",
    "x",
    "1.5",
    "nan",
    "inf",
    "1e400",
    "10" * 30,
    "1_0",
    "１２",
    " 7 ",
    "",
    "1e9",
    "-",
    "0x10",
    "--help",
]

LIKELY: Mapping[str, Callable[[random.Random], str]] = {
    "parameters": lambda rng: rng.choice([str(rng.randint(10**4, 10**10)), "1.1e8", "7B", "330k"]),
    "memory_gib": lambda rng: repr(rng.uniform(1, 200)),
    "layers": lambda rng: str(rng.randint(1, 90)),
    "hidden": lambda rng: str(64 * rng.randint(1, 90)),
    "heads": lambda rng: str(2 ** rng.randint(0, 6)),
    "kv_heads": lambda rng: str(2 ** rng.randint(0, 4)),
    "devices": lambda rng: str(2 ** rng.randint(0, 5)),
    "batch": lambda rng: str(2 ** rng.randint(0, 14)),
    "overlap": lambda rng: repr(rng.random()),
    "lr_dropout": lambda rng: repr(rng.random()),
    "label_smoothing": lambda rng: repr(rng.random()),
    "beta1": lambda rng: repr(rng.uniform(0.5, 0.999)),
    "beta2": lambda rng: repr(rng.uniform(0.5, 0.9999)),
    "ema_decay": lambda rng: repr(rng.uniform(0.9, 0.9999)),
    "b_crit_low": lambda rng: repr(rng.uniform(10, 800)),
    "b_crit_high": lambda rng: repr(rng.uniform(800, 9000)),
}


def likely(field: Field, rng: random.Random) -> str:
    if field.name in LIKELY:
        return LIKELY[field.name](rng)
    if field.choices:
        return rng.choice(field.choices)
    if field.kind == "flag":
        return "on"
    return str(rng.randint(1, 4096)) if field.kind == "whole" else repr(10 ** rng.uniform(-4, 2))


def random_query(rng: random.Random) -> dict[str, str]:
    """Query with some changed fields, of which a third are probably wrong."""
    query = dict(DEFAULTS)
    for name in rng.sample(sorted(FIELDS), k=rng.randint(1, 8)):
        query[name] = rng.choice(WRONG) if rng.random() < 0.3 else likely(FIELDS[name], rng)
    return query


class Elements(HTMLParser):
    """Numbers of a page by part and key, and its tags' attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.part = ""
        self.numbers: dict[str, dict[str, Any]] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.tags.append((tag, given))
        self.part = given.get("data-part") or self.part
        if "data-key" in given:
            self.numbers.setdefault(self.part, {})[given["data-key"] or ""] = json.loads(given["data-value"] or "")

    def named(self, name: str) -> dict[str, str | None]:
        """Attributes of a field's input."""
        return next(given for tag, given in self.tags if tag in ("input", "select") and given.get("name") == name)


def from_python(words: list[str]) -> Any:
    """Document of the public function of a command, called with the command's options."""
    name, *options = words
    request, function = FUNCTIONS[name]
    texts: dict[str, str] = {}
    while options:
        option, sign, text = options.pop(0).removeprefix("--").partition("=")
        key = {"input": "input_shape"}.get(option, option.replace("-", "_"))
        if key.startswith("no_"):
            texts[key.removeprefix("no_")] = "no"
        elif "bool" in str(request.model_fields[key].annotation):
            texts[key] = "yes"
        else:
            texts[key] = text if sign else options.pop(0)
    given = read(request, texts, are_texts=True).model_dump(exclude_unset=True)
    return json.loads(json.dumps(function(**given).document()))


def check_against_others(part: ResultSection, numbers: Mapping[str, Any], folder: Path) -> bool:
    """Compare a part with its command and with Python; return True if it has results."""
    words = shlex.split(part.command)[2:]
    done = bssearch("plan", *words, "--format", "json", cwd=folder)
    if part.absent:
        assert done.returncode in (2, 6), f"{part.command}: {part.absent}"
        with pytest.raises((BSSearchError, KeyError)):
            from_python(words)
        return False
    assert done.returncode == 0, f"{part.command}: {done.stderr}"
    document = json.loads(done.stdout)
    assert from_python(words) == document
    assert len(numbers) > 2
    for key, value in numbers.items():
        printed = reduce(lambda inner, step: inner[int(step) if step.isdigit() else step], key.split("."), document)
        assert value == printed, f"{part.command}: {key}"
    return True


@pytest.mark.slow
def test_page_command_line_and_python_have_the_same_numbers_and_refuse_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    counts = Counter[bool]()
    for _ in range(CASES):
        query = random_query(rng)
        found, page = calculated(query), Elements(rendered(query))
        assert set(page.numbers) >= {one.name for one in found.parts if not one.absent}
        counts.update(
            check_against_others(part, page.numbers.get(part.name, {}), tmp_path)
            for part in found.parts
            if part.command
        )
    assert counts[True] > CASES and counts[False] > CASES / 2, counts


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_the_first_page_and_each_named_model_have_results_as_the_command_prints_them(
    preset: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    query = {} if preset is None else PRESETS[preset]
    found, page = calculated(query), Elements(rendered(query))
    assert not found.errors and not found.notes
    for part in found.parts:
        assert check_against_others(part, page.numbers[part.name], tmp_path), part.absent
    fits = next(iter(found.parts[0].shown.tiles)).value.text
    assert fits == "35" if preset is None else int(fits) > 0


def test_every_input_has_a_label_a_help_and_a_place_for_its_error() -> None:
    page = Elements(rendered({"layers": "x"}))
    ids = [given["id"] for _, given in page.tags if "id" in given]
    assert len(ids) == len(set(ids))
    labels = {given.get("for") for tag, given in page.tags if tag == "label"}
    for name in FIELDS:
        given = page.named(name)
        assert given["id"] in labels
        assert (given["aria-describedby"] or "").split() == [f"help-{name}", f"error-{name}"]
        assert {f"help-{name}", f"error-{name}"} <= set(ids)
        assert FIELDS[name].label and FIELDS[name].help
    assert page.named("layers")["aria-invalid"] == "true" and page.named("layers")["value"] == "x"
    assert "aria-invalid" not in page.named("hidden")


@pytest.mark.parametrize(
    ("changes", "field", "others"),
    [
        ({"heads": "7"}, "heads", ["hidden"]),
        ({"hidden": ""}, "layers", []),
        ({"parameters": "lots"}, "parameters", []),
        ({"parameters": "-5"}, "parameters", []),
        ({"stage": "2", "devices": ""}, "stage", []),
        ({"mixed": "pure", "precision": "fp32"}, "mixed", ["precision"]),
        ({"device": "rtx-4070", "memory_gib": "80"}, "memory_gib", ["device"]),
        ({"device": "abacus"}, "device", []),
        ({"memory_gib": "nan"}, "memory_gib", []),
        ({"batch": "100", "micro": "48"}, "batch", []),
        ({"micro": "4", "max_micro": "8"}, "micro", ["max_micro"]),
        ({"learning_rate": "0"}, "learning_rate", []),
        ({"lr_optimizer": "sgd", "beta2": "0.9"}, "beta2", ["lr_optimizer"]),
        ({"lr_dropout": "1"}, "lr_dropout", []),
        ({"b_crit_low": "900"}, "b_crit_low", ["b_crit"]),
        ({"price_per_device_hour": "2"}, "price_per_device_hour", ["samples_to_target"]),
        ({"most_devices": "5000"}, "most_devices", []),
        ({"beta_s": "two"}, "beta_s", []),
        ({"dropout": "maybe"}, "dropout", []),
        ({"learning_rate": "1" * 65}, "learning_rate", []),
        ({"device": "a\x00b"}, "device", []),
    ],
)
def test_an_error_is_shown_beside_its_field_in_the_words_of_the_page(
    changes: dict[str, str], field: str, others: list[str]
) -> None:
    found = calculated({**DEFAULTS, **changes})
    assert list(found.wrong) == [field]
    assert [name for name in others if f"“{FIELDS[name].label}”" not in found.wrong[field]] == []
    assert found.texts[field] == visible(changes.get(field, DEFAULTS[field]))
    for error in found.errors:
        assert not re.search(r"--\w|\b\w+_\w+\b", error.message.replace(repr(changes.get(field)), "")), error.message
    assert any(not part.absent for part in found.parts), "other parts are calculated"


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("b_crit", ["trade-off", "devices"]),
        ("learning_rate", ["rates"]),
        ("batch", ["accumulation", "rates"]),
        ("parameters", ["memory", "devices"]),
    ],
)
def test_a_field_that_a_part_needs_is_asked_for(name: str, absent: list[str]) -> None:
    found = calculated({**DEFAULTS, name: ""})
    parts = {part.name: part for part in found.parts if part.absent}
    assert list(parts) == absent and found.errors == []
    assert all(f"“{FIELDS[name].label}”" in part.absent for part in parts.values())


def test_parameters_that_do_not_fit_are_an_error_above_the_results() -> None:
    found = calculated({**DEFAULTS, "parameters": "70B"})
    (error,) = found.errors
    assert error.field is None and "70,000,000,000 parameters in bf16" in error.message
    assert error.hint is not None and "“ZeRO stage” 3 “Devices” 64" in error.hint and "--" not in error.hint
    assert [part.name for part in found.parts if part.absent] == ["memory"]


def test_a_group_has_its_defaults_unless_the_query_names_one_of_its_fields() -> None:
    texts = calculated({"parameters": "25.6M"}).texts
    assert texts["layers"] == texts["memory_gib"] == ""
    assert texts["batch"] == "1024"


def test_the_split_and_the_devices_use_the_micro_batch_that_fits() -> None:
    for query, limit in (({}, 35), ({**DEFAULTS, "max_micro": "8"}, 8)):
        parts = {part.name: part for part in calculated(query).parts}
        assert all(f"--max-micro {limit}" in parts[name].command for name in ("accumulation", "devices"))
    parts = {part.name: part for part in calculated({**DEFAULTS, "sequence": "200000"}).parts}
    assert "no sample fits" in parts["accumulation"].absent


def test_the_trade_off_follows_the_formula() -> None:
    asked = ScaleRequest(devices=1, batch=1, alpha_s=0.02, beta_s=0.005, b_crit=4096.0)
    found = plan_trade_off(asked)
    assert found.optimum == 128 == found.fastest.row.batch
    times = [(0.02 + 0.005 * batch) * (1 + 4096 / batch) for batch in (128, *(one.row.batch for one in found.points))]
    assert [one.relative_time for one in found.points] == pytest.approx([time / times[0] for time in times[1:]])
    limited = plan_trade_off(asked.model_copy(update={"max_micro": 20}))
    assert limited.fastest.row.batch == 16 and max(one.row.micro_batch for one in limited.points) == 16


@pytest.mark.parametrize("max_micro", ["", "24"])
def test_figures_show_their_marks_and_the_limit(max_micro: str) -> None:
    parts = {part.name: part for part in calculated({**DEFAULTS, "max_micro": max_micro}).parts}
    memory, trade_off = (not_none(parts[name].figures[0].charts[name]) for name in ("memory", "trade-off"))
    assert [rule.at for rule in memory.rules] == [24]
    marks = {series.name: series.points for series in memory.series}
    assert [point.x for point in marks["largest that fits: 44"]] == [44]
    peak = {point.x: point.y for point in marks["peak of a step"]}
    plan = api.plan_memory(parameters="110M", precision="bf16", layers=12, hidden=768, heads=12, sequence=512,
                           vocabulary=30522, micro_batch=32)  # fmt: skip
    assert plan.peak_bytes is not None and peak[32] == plan.peak_bytes / 2**30
    assert f"largest that fits at once: {16 if max_micro else 32}" in [series.name for series in trade_off.series]
    assert [rule.at for rule in trade_off.rules] == [800]


HOSTILE = [
    "1" + "0" * 400,
    "9" * 64,
    "1e400",
    "nan",
    "-inf",
    "inf",
    "-1",
    "",
    "   ",
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "١٢٣",
    "½",
    "\x00",
    "1\x00",
    "\ud800",
    "{{ 7 * 7 }}",
    "$(rm -rf /)",
    "'; drop table",
    "../../etc/passwd",
    "--help",
    "1e-999999999",
    "1e999999999",
    "x" * 10**6,
]


@pytest.mark.slow
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_are_shown_as_text(text: str) -> None:
    for query in (dict.fromkeys(FIELDS, text), *({**DEFAULTS, name: text} for name in FIELDS)):
        assert len(json.dumps([error.message for error in calculated(query).errors])) < 20_000
    page = rendered({**dict.fromkeys(FIELDS, text), text: text})
    assert len(page) < 300_000
    assert "<script>alert" not in page and "<img" not in page
    assert Elements(page).named("parameters")["value"] == visible(text[:LONGEST_ECHO])


def test_fields_that_import_code_or_read_files_are_refused_and_unknown_keys_named() -> None:
    found = calculated({"model": "os:system", "study": "digits", "<b>": "1", "parameters": "25M", "part": "results"})
    assert len(found.notes) == 3
    assert "ignored “model”" in found.notes[0] and "“study”" in found.notes[1]
    assert "'<b>'" in found.notes[2] and "part" not in found.notes[2]
    assert "&lt;b&gt;" in rendered({"<b>": "1"})
    assert all("os:system" not in part.command for part in found.parts)
    assert "and 995 more" in calculated({f"k{at}": "" for at in range(1000)}).notes[0]


def test_the_last_value_of_a_repeated_key_counts() -> None:
    assert calculated(QueryParams("batch=8&batch=16")).texts["batch"] == "16"


def test_commands_are_quoted_for_a_shell() -> None:
    part = calculated({**DEFAULTS, "device": "$(touch x); a'b"}).parts[0]
    assert shlex.split(part.command)[shlex.split(part.command).index("--device") + 1] == "$(touch x); a'b"
    assert "'$(touch x); a'\"'\"'b'" in part.command
    assert calculated({**DEFAULTS, "device": "a\nb"}).parts[0].command == ""


def test_a_preset_keeps_the_other_groups() -> None:
    query = QueryParams(calculated({"batch": "77", "parameters": "1M"}).presets["GPT-2"])
    assert query["batch"] == "77" and query["parameters"] == "124M"
    assert not calculated(query).errors


@pytest.mark.slow
def test_the_page_imports_no_torch_no_optuna_and_no_code_of_users(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')")
    script = (
        "import sys\n"
        "from bssearch.web.calculator.page import calculated\n"
        "calculated({}); calculated({'model': 'mine.py:make', 'parameters': '7B', 'device': 'h100', 'stage': '3'})\n"
        "heavy = ('torch', 'optuna', 'pandas', 'mine', 'transformers')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_the_fragment_is_the_results_of_the_page() -> None:
    query = {**DEFAULTS, "batch": "96"}
    fragment = rendered(query, "calculator_results.html")
    assert fragment.strip() in rendered(query)
    assert "<form" not in fragment and "<!doctype" not in fragment
