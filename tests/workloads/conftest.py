import os

import pytest

from bssearch.settings import DATA_DIR_VARIABLE
from bssearch.workloads.fashion_mnist import DEBIAN_FOLDER


@pytest.fixture(scope="session")
def real_images() -> None:
    """Without the files of Fashion-MNIST, fail in CI and skip on a developer's machine."""
    if not os.environ.get(DATA_DIR_VARIABLE) and not DEBIAN_FOLDER.is_dir():
        end = pytest.fail if os.environ.get("CI") else pytest.skip
        end(f"no {DEBIAN_FOLDER}: apt-get install dataset-fashion-mnist, or set {DATA_DIR_VARIABLE}")
