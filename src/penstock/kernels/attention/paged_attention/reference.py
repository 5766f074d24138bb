"""The definition of paged attention: one row and one query at a time, float32, plain softmax."""
from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.attention.paged_attention.spec import (
    AttentionSpec,
    Prepared,
    begin_of,
    pages_of,
    rows_of,
)
from penstock.kernels.types import fp8
from penstock.kernels.types.ragged import Ragged


def floats_of(page_nKGH: Tensor, spec: AttentionSpec) -> Tensor:
    """f32 [.., H] of pages."""
    return fp8.decode_heads(page_nKGH) if spec.coded else page_nKGH.float()


def prepare(layout: Ragged, spec: AttentionSpec) -> Prepared:
    rows = rows_of(layout)

    def attend(q_TNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor, sinks_N: Tensor | None = None) -> Tensor:
        assert (sinks_N is not None) == spec.sinks, "sinks are given to a layer that has them"
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        for row in rows:
            begin = begin_of(row, spec, layout)
            k_NSH, v_NSH = (
                floats_of(pool[pages_of(row, layout, begin).long()], spec).transpose(0, 1).flatten(1, 2)
                .repeat_interleave(spec.group, 0) for pool in (k_PKGH, v_PKGH))
            for j in range(row.count):
                position = row.context - row.count + j
                seen = slice(spec.first_seen(position) - begin, position + 1 - begin)
                q_N1H = q_TNH[row.first + j].float().unsqueeze(1)
                scores_NS = (k_NSH[:, seen] * q_N1H).sum(-1) * spec.scale
                if spec.softcap:
                    scores_NS = spec.softcap * torch.tanh(scores_NS / spec.softcap)
                if sinks_N is not None:
                    scores_NS = torch.cat((scores_NS, sinks_N.float()[:, None]), 1)
                weights_NS = torch.softmax(scores_NS, 1)[:, :seen.stop - seen.start]
                out_TNH[row.first + j] = (weights_NS[..., None] * v_NSH[:, seen]).sum(1)
        return out_TNH
    return attend
