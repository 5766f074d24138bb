"""scaled_linear on a CUDA device, in Triton: imported with the first call, not before."""
from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.c.build import triton_version
from penstock.kernels.platform import Platform, Unusable
from penstock.kernels.types.scaled import Scaled

_LEAST = 89                     # the first architecture that converts e4m3


def probe(platform: Platform) -> str:
    """Raises Unusable: no Triton, or a GPU without fp8."""
    told = f"Triton {triton_version()}"
    if not any(f.startswith("sm_") and int(f[3:]) >= _LEAST for f in platform.features):
        raise Unusable(f"{platform.gpu} has no fp8 (sm_{_LEAST})")
    return f"{told} for a few rows, cuBLAS behind a dequantised copy for more"


def pack(weight: Scaled, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    def linear(x_TI: Tensor) -> Tensor:
        from penstock.kernels.gemm.scaled_linear import triton_scaled
        if x_TI.shape[0] <= triton_scaled.FEW_MAX:
            return triton_scaled.run(x_TI, weight, bias_O)
        return F.linear(x_TI, triton_scaled.floats(weight, x_TI.dtype), bias_O)
    return linear
