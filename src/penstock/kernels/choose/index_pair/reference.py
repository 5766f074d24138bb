"""The definition of `index_pair`, and what runs on a CPU: torch's own operations."""
from __future__ import annotations

from torch import Tensor

from penstock.kernels.types import fp8


def index_pair(q_TIJ: Tensor, key_TJ: Tensor) -> tuple[Tensor, Tensor]:
    return fp8.mixed(q_TIJ), fp8.encode(fp8.mixed(key_TJ), key_TJ.shape[1])
