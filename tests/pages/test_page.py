"""The page of a study holds all it needs, runs nothing, and shows what users wrote as text and nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from typing import Any

import pytest
import yaml

from bssearch.analysis.generalisation import FinalMetrics, Generalisation
from bssearch.analysis.headline import headline
from bssearch.analysis.law.quick import Promise
from bssearch.analysis.report import build_answer
from bssearch.analysis.shape import Interval, Notice
from bssearch.analysis.trade_offs import about_columns, trade_off_rows
from bssearch.pages.page import StudyPicture, promised_and_found, render
from bssearch.pages.trial_plots import curve_trials
from bssearch.records import TrialState
from bssearch.spec import StudySpec
from tests.factories import make_curve, make_probe, make_spec, make_trial
from tests.pages.test_plots import SIZES, answer_of, law_trials, study_of

EVIL = "</script><script>alert(1)</script>"
IMAGE = '"><img src=x onerror=alert(2)>'
AUDIT = {
    "study": "toy",
    "rules": [
        {
            "rule": f"linear_learning_rate {EVIL}",
            "batch_size": 128,
            "configuration": {"learning_rate": 0.4, "batch_size": 128},
            "regret": {"value": 1.234, "low": 1.15, "high": 1.33, "at_least": False},
            "verdict": "broke",
            "reason": f"three runs {IMAGE}",
            "trial_numbers": [7, 8, 9],
        },
        {
            "rule": "dropout",
            "batch_size": None,
            "configuration": None,
            "regret": None,
            "verdict": "not_run",
            "reason": "no dropout",
            "trial_numbers": [],
        },
    ],
    "learning_rate_slope": {"estimate": 0.52, "low": 0.31, "high": 0.73, "excludes": [0, 1]},
}


def picture(spec: StudySpec | None = None, audit: Any = None, **environment: Any) -> StudyPicture:
    spec = spec or make_spec()
    trials = law_trials(peak_memory_bytes=2**30)
    trials.append(make_trial(len(trials), batch_size=8, state=TrialState.DIVERGED))
    study = study_of(spec, **environment)
    probes = {size: make_probe(size, step_seconds=0.01 + 0.0002 * size) for size in SIZES}
    answer = build_answer(study, spec, trials, probes)
    chosen = curve_trials(answer, trials)
    curve = make_curve((0.0, 0.1), (0.5, 0.8), (1.0, 0.95))
    return StudyPicture(
        study=study, spec=spec, answer=answer, trials=trials, curves=dict.fromkeys(chosen, curve), audit=audit
    )


def evil_picture() -> StudyPicture:
    """Return a study in which everything that users name is an attack."""
    spec = make_spec(
        workload=f"evil.py:{EVIL}",
        workload_settings={EVIL: IMAGE},
        target={"metric": EVIL, "value": 0.9},
    )
    found = picture(spec, AUDIT, device_name=EVIL, host=IMAGE, git_revision=EVIL, workload_revision=IMAGE)
    optimal = found.answer.optimal.model_copy(update={"parameters": {EVIL: IMAGE, "learning_rate": 0.1}})
    rows = [row.model_copy(update={"untuned": True, "untuned_because": [EVIL]}) for row in found.answer.batches]
    largest = found.answer.largest_that_fits.model_copy(update={"reason": IMAGE})
    warnings = [one.model_copy(update={"message": EVIL}) for one in found.answer.warnings]
    update = {"optimal": optimal, "batches": rows, "largest_that_fits": largest, "warnings": warnings}
    return replace(found, answer=found.answer.model_copy(update=update), study=replace(found.study, name=EVIL))


class Elements(HTMLParser):
    """The elements of a page and its texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data.strip())

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


@pytest.fixture(scope="module")
def whole() -> StudyPicture:
    return picture()


@pytest.fixture(scope="module")
def html(whole: StudyPicture) -> str:
    return render(whole)


@pytest.fixture(scope="module")
def evil() -> str:
    return render(evil_picture())


def figures_of(html: str) -> set[str]:
    return set(re.findall(r'<div class="figure" id="figure-([\w-]+)">', html))


def test_the_page_says_what_the_answer_says(whole: StudyPicture, html: str) -> None:
    text = Elements(html).text
    assert headline(whole.answer) in text
    for warning in whole.answer.warnings:
        assert warning.message[1:] in text
    assert figures_of(html) == {
        "objective",
        "steps",
        "samples",
        "curves",
        "front",
        "rates",
        "throughput",
        "memory",
    }
    best, figure = whole.answer.optimal, whole.answer.optimal.objective_value
    assert figure is not None and figure.low is not None and figure.high is not None
    tiles = text[: text.index("What to know")]
    assert f"\n{best.batch_size}\n" in tiles
    assert f"{figure.median:.3g} s" in tiles
    assert f"95 % interval {figure.low:.3g} to {figure.high:.3g}, 3 runs" in tiles
    for row in whole.answer.batches:
        assert f"\n{row.batch_size}\n" in text


def test_warnings_are_sentences_and_keep_their_words(whole: StudyPicture) -> None:
    said = [Notice(code="one", message="from one trial"), Notice(code="two", message="5 trials failed")]
    shown = render(replace(whole, answer=whole.answer.model_copy(update={"warnings": said})))
    assert {"From one trial", "5 trials failed"} <= set(Elements(shown).texts)


def test_the_page_needs_no_other_file_and_no_script(html: str) -> None:
    tags = {tag for tag, _ in Elements(html).tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "a", "image", "use"}
    styles = re.findall(r"<style>(.*?)</style>", html, flags=re.DOTALL)
    assert len(styles) == 1
    assert "url(" not in styles[0] and "@import" not in styles[0]


def test_the_policy_lets_the_pages_own_style_count_and_nothing_else(html: str) -> None:
    elements = Elements(html)
    policy = next(one["content"] or "" for tag, one in elements.tags if tag == "meta" and "http-equiv" in one)
    (style,) = re.findall(r"<style>(.*?)</style>", html, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert not any("style" in attributes for _, attributes in elements.tags), "the policy forbids them"


def test_nothing_that_users_wrote_becomes_an_element(html: str, evil: str) -> None:
    good, bad = Elements(html), Elements(evil)
    assert {tag for tag, _ in bad.tags} - {tag for tag, _ in good.tags} == set()
    assert not any(name.startswith("on") for _, attributes in bad.tags for name in attributes)
    for words in (EVIL, IMAGE):
        assert words in bad.text
        assert words not in evil


def test_figures_show_what_users_wrote_as_they_wrote_it(evil: str) -> None:
    names = [text for text in Elements(evil).texts if text.startswith("</script><script>alert(1)")]
    assert names and not any("&lt;" in name for name in names)


def test_a_section_without_data_says_why() -> None:
    found = picture()
    rows = [
        row.model_copy(
            update=dict.fromkeys(("steps_to_target", "samples_to_target", "samples_per_s", "peak_memory_bytes"))
        )
        for row in found.answer.batches
    ]
    bare = replace(found, answer=found.answer.model_copy(update={"batches": rows, "front": [], "fit": None}), curves={})
    text, figures = Elements(render(bare)).text, figures_of(render(bare))
    assert figures == {"objective", "rates"}
    for why in (
        "no batch size has a known number of steps",
        "the runs have no stored evaluations",
        "it takes both seconds and samples",
        "neither step times nor peak memory were measured",
    ):
        assert f"Not shown: {why}" in text


@pytest.mark.parametrize(
    ("objective", "price", "said"),
    [
        ("samples_to_target", None, "&gt; 2,400 samples"),
        ("cost_to_target", 500.0, "&gt; 1"),
        ("cost_to_target", None, "&gt; 0.002 device-hours"),
        ("time_to_target", None, "&gt; 7.2 s"),
    ],
)
def test_what_was_missed_is_bounded_in_the_unit_of_the_objective(
    objective: str, price: float | None, said: str
) -> None:
    spec = make_spec(objective=objective, price_per_device_hour=price)
    trials = [
        make_trial(0, batch_size=32),
        make_trial(1, batch_size=8, state=TrialState.EXHAUSTED, seconds=7.2, last_miss_step=300),
    ]
    found = render(replace(picture(spec), answer=answer_of(trials, spec), trials=trials))
    assert f"<td>{said}</td>" in found
    missed = Elements(found).text.count("Not drawn, for no run gives a figure or a bound: batch 16 (not run), 64")
    assert (missed, "batch 8" in found.split("Not drawn")[1].split("</p>")[0]) == (1, False)


def test_the_audit_is_shown_where_there_is_one(html: str) -> None:
    assert "Rules of thumb" not in html
    assert "Rules of thumb" not in render(picture(audit={"rules": []}))
    text = Elements(render(picture(audit=AUDIT))).text
    for said in ("BROKE", "1.23 [1.15, 1.33]", "learning_rate 0.4, batch_size 128", "NOT RUN", "no dropout"):
        assert said in text
    assert "to the power 0.52 [0.31, 0.73]; linear is 1, square root 0.5, and the interval excludes 0, 1." in text


def test_what_the_batch_sizes_come_to_in_the_same_time_is_shown_where_it_was_run(html: str) -> None:
    assert "Trained for the same time" not in html
    large = FinalMetrics(
        batch_size=128,
        parameters={},
        runs=3,
        ended_early=1,
        contended=0,
        final_metric=0.91,
        test_metric=0.9,
        gap=Interval(value=0.04, low=0.01, high=0.07),
        trial_numbers=[4, 5, 6],
    )
    small = large.model_copy(update={"batch_size": 16, "gap": None, "final_metric": 0.95})
    final = Generalisation(
        train_seconds=10.0,
        best_batch_size=16,
        notable_gap=0.02,
        batches=[small, large],
        more_regularised=large,
        closed=False,
    )
    found = picture()
    shown = render(replace(found, answer=found.answer.model_copy(update={"generalisation": final})))
    section = re.search(r'<section id="generalisation">(.*?)</section>', shown, flags=re.DOTALL)
    assert section is not None
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr.*?</tr>", section[1], flags=re.DOTALL)][1:]
    assert rows == [
        ["16 (best)", "0.95", "0.9", "–", "3 (1 ended early)"],
        ["128", "0.91", "0.9", "0.04 [0.01, 0.07]", "3 (1 ended early)"],
        ["128, more regularised", "0.91", "0.9", "0.04 [0.01, 0.07]", "3 (1 ended early)"],
    ]
    assert section[1].count('class="marked"') == 1


def test_the_spec_on_the_page_asks_the_same_question(whole: StudyPicture, html: str) -> None:
    spec = re.findall(r"<pre[^>]*>(.*?)</pre>", html, flags=re.DOTALL)[-1]
    assert StudySpec.model_validate(yaml.safe_load(unescape(spec))) == whole.spec
    commands = re.findall(r"<pre[^>]*>(.*?)</pre>", html, flags=re.DOTALL)[0]
    assert commands.splitlines() == ["bssearch run ./toy.yaml", "bssearch report toy --html report.html"]


def test_an_imported_study_is_not_said_to_run_again() -> None:
    text = Elements(render(picture(make_spec(workload="imported")))).text
    assert "Its runs were made elsewhere" in text
    assert "bssearch run" not in text
    assert "bssearch report toy --html report.html" in text
    assert "Your default" not in text


def test_the_trade_offs_stand_in_a_table_beside_the_front_with_what_they_are() -> None:
    found = picture()
    text = Elements(render(found)).text
    headings, rows = trade_off_rows(found.answer)
    assert "peak memory" in headings and all(cell in text for row in rows for cell in row)
    assert all(sentence in text for sentence in about_columns(found.answer))
    assert "is not on the line" not in text


def test_a_recommended_batch_size_that_is_off_the_front_is_explained() -> None:
    found = picture()
    front = [one.model_copy(update={"on_front": False}) for one in found.answer.front]
    recommendation = found.answer.recommendation.model_copy(update={"rule": "law"})
    off = found.answer.model_copy(update={"front": front, "recommendation": recommendation})
    assert f"Batch {off.optimal.batch_size} is not on the line" in Elements(render(replace(found, answer=off))).text


def test_curves_in_other_seconds_than_the_times_are_said_to_be() -> None:
    found = picture()
    said = "In seconds as they passed"
    assert said not in Elements(render(found)).text
    rows = [
        row.model_copy(
            update={
                "time_to_target_s": row.time_to_target_s
                and row.time_to_target_s.model_copy(update={"basis": "steps_x_step_time"})
            }
        )
        for row in found.answer.batches
    ]
    products = found.answer.model_copy(update={"batches": rows})
    assert said in Elements(render(replace(found, answer=products))).text


def test_what_a_quick_answer_promised_stands_beside_what_was_found(whole: StudyPicture) -> None:
    promise = Promise(
        batch_size=16,
        interval=[8, 2048],
        gain=1.36,
        found_batch_size=64,
        found_flat_range=[32, 64],
        holds=True,
        time_ratio=1.25,
    )
    told = whole.answer.model_copy(update={"quick": promise})
    section = promised_and_found(told)
    assert section is not None and section.table is not None
    assert [row.cells for row in section.table.rows] == [
        ["Promised", "16", "8 to 2,048", "1.25×"],
        ["Found", "64", "32 to 64", "1×"],
    ]
    assert "Promised and found" in render(replace(whole, answer=told))
    assert "Promised and found" not in render(whole)
