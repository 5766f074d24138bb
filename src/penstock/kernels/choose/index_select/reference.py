"""The definition of `index_select`: one query at a time."""
from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.types import fp8


def scores(q_IJ: Tensor, weight_I: Tensor, key_PJ: Tensor) -> Tensor:
    """score_P of the tokens whose keys these are, float32."""
    return weight_I @ (q_IJ.float() @ fp8.floats(key_PJ, q_IJ.shape[1]).T).relu()


def index_select(q_BIJ: Tensor, weight_BI: Tensor, key_PGJ: Tensor, table_RP: Tensor, row_B: Tensor,
                 position_B: Tensor, *, topk: int) -> Tensor:
    size = key_PGJ.shape[1]
    chosen_BS = torch.full((len(row_B), topk), -1, dtype=torch.int32, device=q_BIJ.device)
    for b, (row, position) in enumerate(zip(row_B.tolist(), position_B.tolist(), strict=True)):
        seen = torch.arange(position + 1, device=q_BIJ.device)
        if len(seen) > topk:
            key_PJ = key_PGJ[table_RP[row, seen // size].long(), seen % size]
            order = scores(q_BIJ[b], weight_BI[b], key_PJ).sort(descending=True, stable=True).indices
            seen = order[:topk].sort().values
        chosen_BS[b, :len(seen)] = seen
    return chosen_BS
