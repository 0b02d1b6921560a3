"""Environment variables, the user's name, and packaged data."""

import getpass
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bssearch.errors import UsageError, require

DEFAULT_DATABASE_URL = "sqlite:///bssearch.db"
DATABASE_URL_VARIABLE = "BSSEARCH_DB_URL"
DATABASE_URL_FILE_VARIABLE = "BSSEARCH_DB_URL_FILE"
DATA_DIR_VARIABLE = "BSSEARCH_DATA_DIR"
CHECKPOINT_DIR_VARIABLE = "BSSEARCH_CHECKPOINT_DIR"
STATE_DIR_VARIABLE = "BSSEARCH_STATE_DIR"
NETWORK_FILE_VARIABLE = "BSSEARCH_ALLOW_NETWORK_FILE"
LOG_VARIABLE = "BSSEARCH_LOG"
TENSORBOARD_DIR_VARIABLE = "BSSEARCH_TENSORBOARD_DIR"

BOARD_PROCESS = "bssearch-board"  # name in process lists; Linux shows 15 characters


@contextmanager
def environment_with(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that start inside this block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


def database_url(given: str | None = None) -> str:
    return given or os.environ.get(DATABASE_URL_VARIABLE) or _url_from_file() or DEFAULT_DATABASE_URL


def in_parent_folder(url: str) -> str:
    """Return a hint if ``url`` is the default but a parent folder has the database, else ""."""
    name = DEFAULT_DATABASE_URL.removeprefix("sqlite:///")
    files = (folder / name for folder in Path.cwd().parents if os.access(folder / name, os.R_OK))
    found = next(files, None) if url == DEFAULT_DATABASE_URL else None
    return "" if found is None else f"a parent folder has a database; add --db sqlite:///{found} to use this database"


def _url_from_file() -> str | None:
    if not (name := os.environ.get(DATABASE_URL_FILE_VARIABLE)):
        return None
    try:
        with Path(name).open(encoding="utf-8") as file:
            url = file.readline().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the file is not UTF-8 text"
        raise UsageError(
            f"{DATABASE_URL_FILE_VARIABLE} names {name}, which cannot be read: {reason}",
            hint=f"name a readable text file whose first line is a database URL, or set {DATABASE_URL_VARIABLE}",
        ) from None
    require(
        url,
        f"{DATABASE_URL_FILE_VARIABLE} names {name}, whose first line is empty",
        hint="write a database URL in the file's first line",
    )
    return url


def checkpoint_folder() -> Path:
    """Return the local folder for checkpoints, even if ``BSSEARCH_CHECKPOINT_DIR`` is a URL."""
    if not (given := os.environ.get(CHECKPOINT_DIR_VARIABLE)):
        return cache_folder() / "checkpoints"
    return cache_folder() / "checkpoints-on-their-way" if is_url(given) else Path(given)


def checkpoint_url() -> str | None:
    given = os.environ.get(CHECKPOINT_DIR_VARIABLE)
    return given if given and is_url(given) else None


def is_url(text: str) -> bool:
    return "://" in text


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "bssearch"


def state_folder() -> Path:
    if given := os.environ.get(STATE_DIR_VARIABLE):
        return Path(given)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "bssearch"


def tensorboard_folder() -> Path:
    return Path(os.environ.get(TENSORBOARD_DIR_VARIABLE) or "runs")


def user_name() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return str(os.getuid())


def packaged_folder(name: str) -> Path:
    """Return the folder ``migrations`` or ``studies``. In a wheel, the folder is ``_NAME`` inside the package."""
    package = Path(__file__).resolve().parent
    for folder in (package / f"_{name}", package.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"the installation of bssearch lacks the folder {name!r}; reinstall bssearch")


def presets() -> dict[str, Path]:
    return {path.stem: path for path in sorted((packaged_folder("studies") / "presets").glob("*.yaml"))}


def shipped_studies() -> dict[str, Path]:
    return {path.stem: path for path in sorted(packaged_folder("studies").glob("*.yaml"))}
