"""The definition of paged attention: one row and one query at a time, float32, plain softmax."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.kernels.attention.paged_attention.spec import AttentionSpec, pages_of, rows_of
from penstock.kernels.platform import Platform
from penstock.kernels.types.ragged import Ragged


def probe(_: Platform) -> str:
    return "one query at a time in float32"


def prepare(layout: Ragged, spec: AttentionSpec) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    rows = rows_of(layout)

    def attend(q_TNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor) -> Tensor:
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        for row in rows:
            k_NSH, v_NSH = (
                pool[pages_of(row, layout).long()].transpose(0, 1).flatten(1, 2).float()
                .repeat_interleave(spec.group, 0) for pool in (k_PKGH, v_PKGH))
            for j in range(row.count):
                visible = row.context - row.count + j + 1
                q_N1H = q_TNH[row.first + j].float().unsqueeze(1)
                scores_NS = (k_NSH[:, :visible] * q_N1H).sum(-1) * spec.scale
                weights_NS = torch.softmax(scores_NS, 1)
                out_TNH[row.first + j] = (weights_NS[..., None] * v_NSH[:, :visible]).sum(1)
        return out_TNH
    return attend
