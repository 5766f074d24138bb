"""The definition of paged attention: one row and one query at a time, float32, plain softmax."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.kernels.paged_attention.spec import AttentionSpec, rows_of
from penstock.kernels.platform import Platform
from penstock.kernels.ragged import Ragged


def probe(_: Platform) -> str:
    return "one query at a time in float32"


def plan(layout: Ragged, spec: AttentionSpec) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    rows = rows_of(layout)

    def attend(q_TNH: Tensor, k_PGKH: Tensor, v_PGKH: Tensor) -> Tensor:
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        for row in rows:
            pages = torch.tensor(row.pages)
            k_SNH, v_SNH = (
                pool[pages].flatten(0, 1).float().repeat_interleave(spec.group, 1)
                for pool in (k_PGKH, v_PGKH))
            for j in range(row.count):
                visible = row.context - row.count + j + 1
                q_NH = q_TNH[row.first + j].float()
                scores_SN = (k_SNH[:visible] * q_NH).sum(-1) * spec.scale
                weights_SN = torch.softmax(scores_SN, 0)
                out_TNH[row.first + j] = (weights_SN[..., None] * v_SNH[:visible]).sum(0)
        return out_TNH
    return attend
