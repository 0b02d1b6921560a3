import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest

import bssearch
from bssearch import errors
from tests.documents import ROOT
from tests.factories import not_none


def test_all_is_sorted_and_every_name_resolves() -> None:
    assert bssearch.__all__ == sorted(bssearch.__all__)
    assert dir(bssearch) == bssearch.__all__
    for name in bssearch.__all__:
        assert getattr(bssearch, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = bssearch.no_such_name


def test_every_error_is_public_and_in_the_map() -> None:
    found = {name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, Exception)}
    assert found <= set(bssearch.__all__)
    assert all(name in not_none(errors.__doc__) for name in found)


def test_a_trial_of_an_own_loop_lists_what_a_loop_needs() -> None:
    trial = bssearch.current_trial(batch_size=8, learning_rate=0.1)
    assert type(trial) is bssearch.Trial
    assert {"batch_size", "batches", "report", "should_stop", "state", "step"} <= set(dir(trial))
    assert not [name for name in dir(trial) if name.startswith(("_", "check_"))]
    assert all(hasattr(trial, name) for name in dir(trial))


FOUND = bssearch.Answer.model_validate_json((ROOT / "tests" / "data" / "digits.best.json").read_text(encoding="utf-8"))


def test_an_answer_lists_its_fields_and_shows_its_headline() -> None:
    for part in (FOUND, FOUND.optimal):
        assert set(type(part).model_fields) <= set(dir(part))
        assert not [name for name in dir(part) if name.startswith(("_", "model_", "copy", "dict", "json", "parse"))]
    assert {"plot", "frame", "is_predicted", "to_dict"} <= set(dir(FOUND))
    assert FOUND.to_dict() == FOUND.model_dump(mode="json")
    assert repr(FOUND) == str(FOUND) and f"atch {FOUND.optimal.batch_size}" in repr(FOUND)
    assert len(repr(FOUND)) < 500


def test_an_answer_has_a_chart_for_viewers_without_scripts_or_html() -> None:
    bundle = FOUND._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html", "image/svg+xml"}
    ElementTree.fromstring(bundle["image/svg+xml"])
    assert "<svg" in bundle["text/html"]
    assert not any(word in text for text in bundle.values() for word in ("<script", "javascript:", " onload="))


def test_a_frame_has_the_batch_size_the_time_and_what_differs_first() -> None:
    columns = list(FOUND.frame.columns)
    assert columns[:2] == ["batch_size", "time_to_target_s.median"]
    varied = [one for one in columns if one.startswith("best.parameters.") and FOUND.frame[one].nunique() > 1]
    assert varied and set(columns[2 : 2 + len(varied)]) == set(varied)


HEAVY = ("torch", "optuna", "pandas", "sqlalchemy", "scipy", "jinja2", "pydantic")
RUN = "app({}, standalone_mode=False)"
STAGES = [
    ("import bssearch; bssearch.BSSearchError", ()),
    ("from bssearch.cli.app import app; " + RUN.format(["--help"]), ()),
    *((RUN.format([*words, "--help"]), ("pydantic",)) for words in (["report"], ["study", "audit"])),
    ("bssearch.Workload; bssearch.StudySpec", ("pydantic",)),
    *((RUN.format(["import", *words, "--help"]), ("pydantic",)) for words in ([], ["runs"], ["rcp"], ["optuna"])),
    (
        "[getattr(bssearch, n) for n in bssearch.__all__ if n not in "
        "{'Study', 'TimeToTargetSampler', 'Trial', 'current_trial'}]",
        ("pydantic", "sqlalchemy"),  # those left out train, or are one of Optuna's samplers
    ),
]


@pytest.mark.slow
def test_heavy_libraries_wait_until_they_are_needed() -> None:
    watch = f"print('\\nLOADED', *(m for m in {HEAVY!r} if m in sys.modules))"
    code = "\n".join(["import sys", *(f"{code}\n{watch}" for code, _ in STAGES)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = [set(line.split()[1:]) for line in done.stdout.splitlines() if line.startswith("LOADED")]
    for (what, allowed), found in zip(STAGES, loaded, strict=True):
        assert found <= set(allowed), what


@pytest.mark.slow
def test_every_module_can_be_imported_first() -> None:
    code = """
import os, sys, numpy, pandas, psutil, pydantic, rich.table, scipy.stats, sqlalchemy.orm, torch, typer, yaml
for name in sys.argv[1:]:
    if (child := os.fork()) == 0:
        try:
            __import__(name)
        except ImportError as error:
            print(name, error, flush=True)
            os._exit(1)
        os._exit(0)
    os.waitpid(child, 0)
"""
    package = Path(bssearch.__file__).parent
    files = [file for file in package.rglob("*.py") if "templates" not in file.parts]
    names = [".".join(file.relative_to(package.parent).with_suffix("").parts) for file in files]
    extras = ("ray", "lightning", "transformers", "starlette", "loops.script_host")
    asked = [name for name in sorted(names) if not name.endswith("__main__") and not any(one in name for one in extras)]
    done = subprocess.run([sys.executable, "-c", code, *asked], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert len(asked) > 200


def test_python_m_is_the_command() -> None:
    words = [sys.executable, "-m", "bssearch"]
    done = subprocess.run([*words, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"bssearch {version('bssearch')}\n"
    refused = subprocess.run([*words, "run", "no-such-study"], capture_output=True, text=True, check=False)
    assert refused.returncode == 3
    assert refused.stderr.startswith("error: ")
