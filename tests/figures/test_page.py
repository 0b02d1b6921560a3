"""The page of a study is complete, runs no script, and shows users' texts only as text."""

import base64
import hashlib
import re
import shlex
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from typing import Any

import pytest
import yaml

from bssearch.analysis.build_answer import build_answer
from bssearch.analysis.headline import headline
from bssearch.figures.html import html_page
from bssearch.figures.page import SHORT_SPEC, StudyPicture, page_of, reproduction_of
from bssearch.figures.plots import curve_trials
from bssearch.records import TrialState
from bssearch.records.text import in_words
from bssearch.spec import StudySpec
from tests.factories import make_curve, make_probe, make_spec, make_trial
from tests.figures.test_plots import SIZES, law_trials, study_of

FIGURE = r'<div class="figure" id="figure-([\w-]+)">'
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
    """Study in which each name from a user is an attack."""
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


def render(picture: StudyPicture) -> str:
    return html_page(page_of(picture))


class Elements(HTMLParser):
    """Elements and texts of a page."""

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


def test_the_page_shows_the_answer(whole: StudyPicture, html: str) -> None:
    text = Elements(html).text
    assert headline(whole.answer) in text
    assert [warning for warning in whole.answer.warnings if warning.message[1:] not in text] == []
    figures = {"objective", "steps", "samples", "curves", "front", "rates", "throughput", "memory"}
    assert set(re.findall(FIGURE, html)) == figures
    best, figure = whole.answer.optimal, whole.answer.optimal.objective_value
    assert figure is not None and figure.low is not None and figure.high is not None
    tiles = text[: text.index("Warnings")]
    assert f"\n{best.batch_size}\n" in tiles
    assert f"{figure.median:.3g} s" in tiles
    assert f"95 % interval [{figure.low:.3g}, {figure.high:.3g}], 3 runs" in tiles
    assert [row for row in whole.answer.batches if f"\n{row.batch_size}\n" not in text] == []


def test_the_page_needs_no_other_file_and_no_script(html: str) -> None:
    tags = {tag for tag, _ in Elements(html).tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "a", "image", "use"}
    (style,) = re.findall(r"<style>(.*?)</style>", html, flags=re.DOTALL)
    assert "url(" not in style and "@import" not in style


def test_the_policy_allows_only_the_pages_own_style(html: str) -> None:
    elements = Elements(html)
    policy = next(one["content"] or "" for tag, one in elements.tags if tag == "meta" and "http-equiv" in one)
    (style,) = re.findall(r"<style>(.*?)</style>", html, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert not any("style" in attributes for _, attributes in elements.tags), "the policy forbids them"


@pytest.mark.parametrize("words", [EVIL, IMAGE])
def test_no_text_of_a_user_becomes_an_element(html: str, evil: str, words: str) -> None:
    good, bad = Elements(html), Elements(evil)
    assert {tag for tag, _ in bad.tags} - {tag for tag, _ in good.tags} == set()
    assert not any(name.startswith("on") for _, attributes in bad.tags for name in attributes)
    assert words in bad.text and "&lt;" not in bad.text
    assert words not in evil


def test_a_section_without_data_says_why() -> None:
    found = picture()
    rows = [
        row.model_copy(
            update=dict.fromkeys(("steps_to_target", "samples_to_target", "samples_per_s", "peak_memory_bytes"))
        )
        for row in found.answer.batches
    ]
    bare = replace(found, answer=found.answer.model_copy(update={"batches": rows, "front": [], "fit": None}), curves={})
    html = render(bare)
    assert set(re.findall(FIGURE, html)) == {"objective", "rates"}
    assert len(re.findall("The charts? (?:is|are) missing, because ", Elements(html).text)) == 4


def test_the_spec_on_the_page_asks_the_same_question(whole: StudyPicture, html: str) -> None:
    spec = re.findall(r"<pre[^>]*>(.*?)</pre>", html, flags=re.DOTALL)[-1]
    assert StudySpec.model_validate(yaml.safe_load(unescape(spec))) == whole.spec
    commands = re.findall(r"<pre[^>]*>(.*?)</pre>", html, flags=re.DOTALL)[0]
    assert commands.splitlines() == ["bssearch run ./toy.yaml", "bssearch report toy --html report.html"]


def test_a_note_says_that_curves_and_times_count_other_seconds() -> None:
    found = picture()
    said = "curves show measured seconds, with delays"
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
    assert said in Elements(render(replace(found, answer=found.answer.model_copy(update={"batches": rows})))).text


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (9_999, "9999"), (10_000, "10,000"), (0.000123456, "0.0001235"), (True, "True"), ("sgd", "sgd")],
)
def test_values_of_every_kind_are_shown(value: object, shown: str) -> None:
    assert in_words(value) == shown


def test_a_study_whose_name_the_shell_would_split_is_quoted(whole: StudyPicture) -> None:
    name = "two words; rm -r x"
    found = reproduction_of(replace(whole.study, name=name), whole.spec)
    run, report = (shlex.split(line) for line in found["commands"].splitlines())
    assert (run, report[:3]) == (["bssearch", "run", f"./{name}.yaml"], ["bssearch", "report", name])
    assert found["spec_is_short"] is (found["spec"].count("\n") <= SHORT_SPEC)
