"""Paged attention on a CUDA device: decodes in Triton, what prompts attend to in one call a layer.

Rows of several tokens go, all of a step together, to flash-attn-4, which reads pages where they lie; where
it is not to be had to torch's flash attention over their KV, gathered; in types that neither takes every
score is in memory, a row at a time.

    T tokens of the step   B rows of the call   C queries of a row   S keys   N query heads   K KV heads
    P pages   G page size   M pages a row   H head dim
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.attention.paged_attention import flash
from penstock.kernels.attention.paged_attention.spec import AttentionSpec, Row, pages_of, rows_of
from penstock.kernels.c.build import triton_version
from penstock.kernels.op import Unusable
from penstock.kernels.platform import Platform
from penstock.kernels.types.ragged import Ragged, on_device

Part = Callable[[Tensor, Tensor, Tensor], Tensor]


def probe(platform: Platform) -> str:
    try:
        prompts = flash.check(platform)
    except Unusable as why:
        prompts = f"torch's flash attention for prompts ({why})"
    else:
        prompts += " for prompts in bf16 and f16"
    return f"{prompts}, Triton {triton_version()} for decodes"


def prepare(layout: Ragged, spec: AttentionSpec) -> Part:
    parts: list[tuple[slice | Tensor, Part]] = []
    rows = rows_of(layout)
    for found, make in (([r for r in rows if r.count > 1], prompts),
                        ([r for r in rows if r.count == 1], _Decodes)):
        if found:
            parts.append((_tokens(found, layout.pages_RM.device), make(found, layout, spec)))

    def attend(q_TNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor) -> Tensor:
        if len(parts) == 1:
            return parts[0][1](q_TNH, k_PKGH, v_PKGH)
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        for at, part in parts:
            out_TNH[at] = part(q_TNH[at], k_PKGH, v_PKGH)
        return out_TNH
    return attend


def prompts(rows: Sequence[Row], layout: Ragged, spec: AttentionSpec) -> Part:
    """Attention of rows of several tokens: their queries, one behind the other."""
    if flash.ready(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.dtype, layout.page_size,
                   len(layout.pages_RM)):
        return _Paged(rows, layout, spec)
    fused = spec.dtype in flash.TYPES and spec.head_dim % 8 == 0 and spec.head_dim <= flash.DIM_MAX
    return _Gathered(rows, layout, spec) if fused else _Masked(rows, layout, spec)


def _tokens(rows: Sequence[Row], device: torch.device) -> slice | Tensor:
    """Where the queries of these rows are in the step."""
    first, last = rows[0].first, rows[-1].first + rows[-1].count
    if last - first == sum(row.count for row in rows):
        return slice(first, last)
    return on_device([row.first + i for row in rows for i in range(row.count)], device, torch.int64)


class _Decodes:
    def __init__(self, rows: Sequence[Row], layout: Ragged, spec: AttentionSpec) -> None:
        from penstock.kernels.attention.paged_attention import triton_decode
        device = layout.pages_RM.device
        self._decode, self._table, self._scale = triton_decode.decode, layout.pages_RM, spec.scale
        indices = on_device([row.index for row in rows] + [row.context for row in rows], device,
                            torch.int32)
        self._row_B, self._context_B = indices[:len(rows)], indices[len(rows):]
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._cut = triton_decode.tuning(len(rows), spec.num_kv_heads,
                                         max(row.context for row in rows), processors)

    def __call__(self, q_BNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor) -> Tensor:
        return self._decode(q_BNH, k_PKGH, v_PKGH, self._table, self._row_B, self._context_B,
                            scale=self._scale, cut=self._cut)


class _Lengths:
    """Of some rows, on the device and on the host."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        self.queries, self.contexts = [row.count for row in rows], [row.context for row in rows]
        starts = list(accumulate(self.queries, initial=0)), list(accumulate(self.contexts, initial=0))
        together = on_device([row.index for row in rows] + self.contexts + starts[0] + starts[1], device,
                             torch.int32)
        index_B, self.context_B, self.start_B1, self.key_start_B1 = torch.split(
            together, [len(rows), len(rows), len(rows) + 1, len(rows) + 1])
        self.index_B = index_B.long()


class _Paged:
    def __init__(self, rows: Sequence[Row], layout: Ragged, spec: AttentionSpec) -> None:
        self._of, self._scale = _Lengths(rows, layout.pages_RM.device), spec.scale
        most = -(-max(self._of.contexts) // layout.page_size)
        # An entry without a page is not read, and may be looked at.
        self._table_BM = layout.pages_RM[:, :most][self._of.index_B].clamp_min(0)

    def __call__(self, q_TNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor) -> Tensor:
        of = self._of
        return flash.attend(
            q_TNH, k_PKGH.transpose(1, 2), v_PKGH.transpose(1, 2), scale=self._scale,
            max_query=max(of.queries), max_key=max(of.contexts), start_B1=of.start_B1, context_B=of.context_B,
            table_BM=self._table_BM)


class _Gathered:
    def __init__(self, rows: Sequence[Row], layout: Ragged, spec: AttentionSpec) -> None:
        self._of, self._scale = _Lengths(rows, layout.pages_RM.device), spec.scale
        of, size, total = self._of, layout.page_size, sum(self._of.contexts)
        row_S = of.index_B.repeat_interleave(of.context_B, output_size=total)
        first_S = of.key_start_B1[:-1].repeat_interleave(of.context_B, output_size=total)
        position_S = torch.arange(total, device=row_S.device) - first_S
        self._page_S = layout.pages_RM[row_S, position_S // size].long()
        self._offset_S = position_S % size

    def __call__(self, q_TNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor) -> Tensor:
        of = self._of
        k_SKH, v_SKH = (pool[self._page_S, :, self._offset_S] for pool in (k_PKGH, v_PKGH))
        return rows_by_torch(q_TNH, k_SKH, v_SKH, of.start_B1, of.key_start_B1, max(of.queries),
                             max(of.contexts), self._scale)


def rows_by_torch(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, start_B1: Tensor, key_start_B1: Tensor,
                  max_query: int, max_key: int, scale: float) -> Tensor:
    """out_TNH: causal from each row's last query, as `flash.attend`, over keys that lie together."""
    aten: Any = torch.ops.aten
    out_TNH: Tensor = aten._flash_attention_forward(q_TNH, k_SKH, v_SKH, start_B1, key_start_B1, max_query,
                                                    max_key, 0.0, True, False, scale=scale)[0]
    return out_TNH


class _Masked:
    """For types that the fused kernels do not take."""

    def __init__(self, rows: Sequence[Row], layout: Ragged, spec: AttentionSpec) -> None:
        self._rows = [(row, pages_of(row, layout).long()) for row in rows]
        self._scale = spec.scale

    def __call__(self, q_TNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor) -> Tensor:
        outs, first = [], 0
        for row, pages_p in self._rows:
            q_NCH = q_TNH[first:first + row.count].transpose(0, 1)
            k_KSH, v_KSH = (pool[pages_p].transpose(0, 1).flatten(1, 2)[:, :row.context]
                            for pool in (k_PKGH, v_PKGH))
            seen_CS = torch.ones(row.count, row.context, dtype=torch.bool,
                                 device=q_TNH.device).tril_(row.context - row.count)
            out = F.scaled_dot_product_attention(q_NCH[None], k_KSH[None], v_KSH[None], attn_mask=seen_CS,
                                                 scale=self._scale, enable_gqa=True)
            outs.append(out[0].transpose(0, 1))
            first += row.count
        return torch.cat(outs)
