"""The definition of `index_pair`, and what runs on a CPU: torch's own operations."""
from __future__ import annotations

from torch import Tensor

from penstock.kernels.types import fp8


def index_pair(q_TIJ: Tensor, weight_TI: Tensor, key_TJ: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    code_TIJ, scale_TI = fp8.by_power(fp8.mixed(q_TIJ))
    return code_TIJ, weight_TI * scale_TI, fp8.encode(fp8.mixed(key_TJ), key_TJ.shape[1])
