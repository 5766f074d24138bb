"""Linears on a CUDA device: cuBLAS, and for a few rows in bf16 a kernel that reads weights faster."""
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.c.build import triton_version
from penstock.kernels.platform import Platform


def probe(platform: Platform) -> str:
    return f"cuBLAS, and Triton {triton_version()} for a few rows"


def pack(weight_OI: Tensor, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    from penstock.kernels.gemm.linear import triton_rows
    weight_OI = weight_OI.contiguous()
    few = triton_rows.FEW_MAX if weight_OI.dtype == torch.bfloat16 else 0

    def linear(x_TI: Tensor) -> Tensor:
        if x_TI.shape[0] <= few:
            return triton_rows.run(x_TI, weight_OI, bias_O)
        return F.linear(x_TI, weight_OI, bias_O)
    return linear
