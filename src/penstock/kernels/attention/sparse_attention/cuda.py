"""sparse_attention on a CUDA device, in Triton: imported with the first call, not before."""
from __future__ import annotations

from torch import Tensor

from penstock.kernels.c.build import triton_version
from penstock.kernels.platform import Platform


def probe(platform: Platform) -> str:
    return f"Triton {triton_version()}"


def sparse_attention(q_BNH: Tensor, pool_PK2GH: Tensor, chosen_BKC: Tensor, slot_BKC: Tensor,
                     position_B: Tensor, *, unit: int, scale: float) -> tuple[Tensor, Tensor]:
    from penstock.kernels.attention.sparse_attention import triton_units
    return triton_units.sparse_attention(q_BNH, pool_PK2GH, chosen_BKC, slot_BKC, position_B, unit=unit,
                                         scale=scale)
