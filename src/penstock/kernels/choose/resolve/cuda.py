"""resolve on a CUDA device, in Triton: imported with the first call, not before."""
from __future__ import annotations

from torch import Tensor

from penstock.kernels.c.build import triton_version
from penstock.kernels.platform import Platform
from penstock.kernels.types.hot import HotLayer


def probe(platform: Platform) -> str:
    return f"Triton {triton_version()}"


def resolve(chosen_BKC: Tensor, row_B: Tensor, device_RP: Tensor, host_RP: Tensor, hot: HotLayer,
            now_1: Tensor, *, page_units: int) -> tuple[Tensor, Tensor, Tensor]:
    from penstock.kernels.choose.resolve import triton_map
    return triton_map.resolve(chosen_BKC, row_B, device_RP, host_RP, hot, now_1, page_units=page_units)
