"""What is taken from outside the spec: the user's name, the folder of paused trials, and what is packaged."""

import getpass
import os
from pathlib import Path
from typing import Any

import pytest

from bssearch.settings import (
    cache_folder,
    checkpoint_folder,
    checkpoint_url,
    packaged_folder,
    presets,
    shipped_studies,
    user_name,
)


@pytest.mark.parametrize("error", [OSError(), KeyError("uid not found"), ImportError("pwd")])
def test_a_user_is_called_by_name_and_by_number_where_the_machine_has_no_name(
    monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    assert user_name() == "ada"

    def nobody(error: Exception = error) -> str:
        raise error

    monkeypatch.setattr(getpass, "getuser", nobody)
    assert user_name() == str(os.getuid())


def test_paused_trials_are_kept_where_the_user_says_else_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BSSEARCH_CHECKPOINT_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/ada")
    assert checkpoint_folder() == Path("/home/ada/.cache/bssearch/checkpoints")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert checkpoint_folder() == Path("/scratch/bssearch/checkpoints")
    assert cache_folder() == Path("/scratch/bssearch")
    monkeypatch.setenv("XDG_CACHE_HOME", "~/elsewhere")
    assert cache_folder() == Path("/home/ada/elsewhere/bssearch")
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", "/here")
    assert (checkpoint_folder(), checkpoint_url()) == (Path("/here"), None)
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", "s3://bucket/here")
    assert (checkpoint_folder(), checkpoint_url()) == (
        cache_folder() / "checkpoints-on-their-way",
        "s3://bucket/here",
    )


def test_what_is_packaged_is_found_by_name_and_what_is_not_is_missed() -> None:
    assert packaged_folder("studies").is_dir()
    with pytest.raises(FileNotFoundError):
        packaged_folder("nowhere")
    for found in (presets(), shipped_studies()):
        assert found and all(path.stem == name and path.suffix == ".yaml" for name, path in found.items())
        assert list(found) == sorted(found)
    assert not presets().keys() & shipped_studies().keys()
