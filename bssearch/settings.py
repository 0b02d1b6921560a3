"""What comes from outside the spec: environment variables and packaged data."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT_DATABASE_URL = "sqlite:///bssearch.db"
DATABASE_URL_VARIABLE = "BSSEARCH_DB_URL"


def database_url(given: str | None = None) -> str:
    """Return the database URL: the one given, else ``BSSEARCH_DB_URL``, else a file in this folder."""
    return given or os.environ.get(DATABASE_URL_VARIABLE) or DEFAULT_DATABASE_URL


def packaged_folder(name: str) -> Path:
    """Return the folder ``migrations`` or ``studies``, in a wheel as in a checkout.

    A wheel carries them inside the package as ``_migrations`` and ``_studies``; a checkout has them beside it.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / f"_{name}", package.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"the installation of bssearch lacks its folder {name!r}")


def shipped_studies() -> dict[str, Path]:
    """Return the specs that come with bssearch, by name."""
    return {path.stem: path for path in sorted(packaged_folder("studies").glob("*.yaml"))}
