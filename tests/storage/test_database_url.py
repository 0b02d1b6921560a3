from __future__ import annotations

from pathlib import Path

import pytest

from bssearch.errors import UsageError
from bssearch.settings import DEFAULT_DATABASE_URL, database_url


def test_the_url_is_the_one_given_else_the_variable_else_the_file_else_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "url"
    file.write_text("  sqlite:///from-file.db \nanother line\n")
    assert database_url() == DEFAULT_DATABASE_URL
    monkeypatch.setenv("BSSEARCH_DB_URL_FILE", str(file))
    assert database_url() == "sqlite:///from-file.db"
    monkeypatch.setenv("BSSEARCH_DB_URL", "sqlite:///from-variable.db")
    assert database_url() == "sqlite:///from-variable.db"
    assert database_url("sqlite:///given.db") == "sqlite:///given.db"


@pytest.mark.parametrize("content", [None, b"", b"\npostgresql://u:secret@h/d\n", b"postgresql://u:secret@h/\xff\n"])
def test_a_file_without_a_url_is_named_but_not_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    file = tmp_path / "url"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("BSSEARCH_DB_URL_FILE", str(file))
    with pytest.raises(UsageError, match="BSSEARCH_DB_URL_FILE") as caught:
        database_url()
    assert str(file) in str(caught.value)
    assert "secret" not in f"{caught.value} {caught.value.hint} {caught.value.__cause__}"
