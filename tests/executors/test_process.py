from __future__ import annotations

from bssearch.executors.process import worker_environment


def test_a_worker_has_what_repeatable_sums_on_a_gpu_need_unless_the_user_chose_otherwise() -> None:
    assert worker_environment({}, threads=1)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert worker_environment({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, threads=1)["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_worker_has_its_number_of_threads_and_no_secret() -> None:
    environment = worker_environment({"OMP_NUM_THREADS": "7", "PGPASSWORD": "secret", "HOME": "/home"}, threads=2)
    assert environment["OMP_NUM_THREADS"] == "2"
    assert "PGPASSWORD" not in environment and environment["HOME"] == "/home"
