from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from bssearch.training.environment import describe_environment, workload_revision
from tests.training import toys
from tests.training.toys import CPU, Toy


def test_the_cpu_is_named_with_its_versions() -> None:
    environment = describe_environment(CPU)
    assert environment.device_type == "cpu"
    assert environment.device_name and environment.device_name != "cpu"
    assert (environment.device_memory_bytes or 0) > 2**28
    assert environment.torch_version == torch.__version__
    assert environment.driver_version is None
    assert environment.workload_revision is None
    assert environment.fingerprint.endswith("float32 · compile off")


def test_the_workloads_revision_is_the_digest_of_its_file() -> None:
    digest = hashlib.sha256(Path(toys.__file__).read_bytes()).hexdigest()[:12]
    assert describe_environment(CPU, Toy()).workload_revision == digest
    assert workload_revision(toys) == digest


def test_a_workload_without_a_file_has_no_revision() -> None:
    namespace: dict[str, type] = {}
    exec("class Typed: pass", namespace)
    assert workload_revision(namespace["Typed"]()) is None
    assert workload_revision(object()) is None
