from __future__ import annotations

import subprocess
import sys

import pytest

import bssearch
from bssearch import errors


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
    assert errors.__doc__ is not None
    assert all(name in errors.__doc__ for name in found)


HEAVY = ("torch", "optuna", "pandas", "sqlalchemy", "scipy", "pydantic")


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("import bssearch; bssearch.BSSearchError", ()),
        ("import bssearch; bssearch.Workload; bssearch.StudySpec", ("pydantic",)),
        (
            "import bssearch; [getattr(bssearch, n) for n in bssearch.__all__ if n not in {'TimeToTargetSampler'}]",
            ("pydantic", "sqlalchemy"),  # the one that is left out is one of Optuna's samplers
        ),
        (
            "from bssearch.cli.app import app; app(['--help'], standalone_mode=False)",
            (),
        ),
        (
            "from bssearch.cli.app import app; "
            "[app(['import', *name, '--help'], standalone_mode=False) for name in ([], ['runs'], ['rcp'])]",
            ("pydantic",),
        ),
    ],
)
def test_heavy_libraries_wait_until_they_are_needed(code: str, allowed: tuple[str, ...]) -> None:
    watch = f"\nimport sys; print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules and m not in {allowed!r}])"
    done = subprocess.run([sys.executable, "-c", code + watch], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("HEAVY []"), done.stdout
