import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import bssearch
from bssearch import errors
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
        "{'Study', 'TimeToTargetSampler', 'current_trial'}]",
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
