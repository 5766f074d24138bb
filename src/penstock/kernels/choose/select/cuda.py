"""select on a CUDA device, in Triton: imported with the first call, not before."""
from __future__ import annotations

from torch import Tensor

from penstock.kernels.c.build import triton_version
from penstock.kernels.choose.select.spec import SelectRule
from penstock.kernels.platform import Platform


def probe(platform: Platform) -> str:
    return f"Triton {triton_version()}"


def select(q_BNH: Tensor, bounds_PK2SH: Tensor, table_RP: Tensor, row_B: Tensor, position_B: Tensor,
           budget_B: Tensor, *, rule: SelectRule, chosen: int) -> Tensor:
    from penstock.kernels.choose.select import triton_bounds
    return triton_bounds.select(q_BNH, bounds_PK2SH, table_RP, row_B, position_B, budget_B, rule=rule,
                                chosen=chosen)
