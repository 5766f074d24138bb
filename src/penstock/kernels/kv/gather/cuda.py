"""gather on a CUDA device, in Triton: imported with the first call, not before."""
from __future__ import annotations

from torch import Tensor

from penstock.kernels.c.build import triton_version
from penstock.kernels.platform import Platform


def probe(platform: Platform) -> str:
    return f"Triton {triton_version()}"


def gather(host_PKCGH: Tensor, pool_PKCGH: Tensor, miss_E3: Tensor, num_1: Tensor, *, unit: int) -> None:
    from penstock.kernels.kv.gather import triton_copy
    triton_copy.gather(host_PKCGH, pool_PKCGH, miss_E3, num_1, unit=unit)
