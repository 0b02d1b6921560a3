from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from bssearch import Launch, load_spec, open_store, run_study
from bssearch.web.app import Access, create_app
from bssearch.web.views import Databases
from tests.cli.task import write_task
from tests.search.law import LawExecutor

PORT = 8765
BASE = f"http://127.0.0.1:{PORT}"


def client_of(*urls: str, token: str | None = None, host: str = "127.0.0.1", names: tuple[str, ...] = ()) -> TestClient:
    """Client of the pages of databases, which keeps cookies as a browser does."""
    access = Access.of(host, PORT, token=token, names=names)
    return TestClient(create_app(Databases(urls), access), base_url=BASE, raise_server_exceptions=False)


def make_study(url: str, folder: Path, name: str, trials: int = 14) -> None:
    """Run a simulated study to its end."""
    spec = write_task(folder, name=name, budget={"trials": trials, "trial_train_seconds": 2.0})
    run_study(load_spec(spec), Launch(db=url, folder=folder, make_executor=lambda *_: LawExecutor()))


@pytest.fixture(scope="session")
def searched(tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of a database with the ended studies task and other."""
    folder = tmp_path_factory.mktemp("searched")
    url = f"sqlite:///{folder / 'team.db'}"
    for name in ("other", "task"):
        make_study(url, folder, name)
    return url


@pytest.fixture
def pages(searched: str) -> Iterator[TestClient]:
    with client_of(searched) as client:
        yield client


@pytest.fixture
def empty(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'empty.db'}"
    open_store(url).close()
    return url
