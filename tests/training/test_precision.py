from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from bssearch.errors import LaunchError
from bssearch.training.computation import allow_tf32, autocast, available_precisions, resolve_precision
from tests.training.toys import CPU

CUDA = torch.device("cuda:0")


@pytest.mark.parametrize(("wanted", "resolved"), [("auto", "fp32"), ("fp32", "fp32"), ("bf16", "bf16")])
def test_the_cpu_has_fp32_and_bf16(wanted: str, resolved: str) -> None:
    assert resolve_precision(wanted, CPU) == resolved


@pytest.mark.parametrize("wanted", ["tf32", "fp16"])
def test_what_the_cpu_lacks_is_refused_with_what_it_has(wanted: str) -> None:
    with pytest.raises(LaunchError, match=f"precision = '{wanted}' is not available on cpu; it has fp32, bf16") as info:
        resolve_precision(wanted, CPU)
    assert info.value.exit_code == 6
    assert "compute capability 8.0" in str(info.value.hint)


@pytest.mark.parametrize(
    ("capability", "available", "by_itself"),
    [
        ((7, 5), ("fp32", "fp16"), "fp32"),
        ((8, 0), ("fp32", "tf32", "bf16", "fp16"), "bf16"),
        ((12, 0), ("fp32", "tf32", "bf16", "fp16"), "bf16"),
    ],
)
def test_a_gpu_has_tf32_and_bf16_since_ampere_and_takes_bf16_by_itself(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], available: tuple[str, ...], by_itself: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    assert available_precisions(CUDA) == available
    assert resolve_precision("auto", CUDA) == by_itself
    for wanted in ("fp32", "tf32", "bf16", "fp16"):
        with nullcontext() if wanted in available else pytest.raises(LaunchError, match="compute capability 7"):
            assert resolve_precision(wanted, CUDA) == wanted


def test_tf32_is_switched_for_products_and_convolutions_alike() -> None:
    def switches() -> tuple[bool, bool, str]:
        matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        return matmul, cudnn, torch.get_float32_matmul_precision()

    allow_tf32(True)
    assert switches() == (True, True, "high")
    allow_tf32(False)
    assert switches() == (False, False, "highest")


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_only_the_half_precisions_are_under_autocast(precision: str, dtype: torch.dtype) -> None:
    with autocast(precision, CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
