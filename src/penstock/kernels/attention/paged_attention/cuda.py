"""Paged attention on a CUDA device: decodes in Triton, what prompts attend to in one call a layer.

Rows of several tokens go, all of a step together, to flash-attn-4, which reads pages where they lie; where
it is not to be had to torch's flash attention over their KV, gathered; in types that neither takes every
score is in memory, a row at a time.

    T tokens of the step   B rows of the call   C queries of a row   S keys   N query heads   K KV heads
    P pages   G page size   M pages a row   H head dim
"""
from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.attention.paged_attention import flash
from penstock.kernels.attention.paged_attention.decoded import of_floats
from penstock.kernels.attention.paged_attention.spec import (
    AttentionSpec,
    Prepared,
    Row,
    begin_of,
    beside_sinks,
    compose,
    pages_of,
    rows_of,
)
from penstock.kernels.c.build import triton_version
from penstock.kernels.platform import Platform
from penstock.kernels.triton.lazy import alone
from penstock.kernels.types.ragged import Ragged, on_device


def probe_flash(platform: Platform) -> str:
    return f"{flash.check(platform)} for prompts in bf16 and f16, Triton {triton_version()} for decodes"


def probe_triton(_: Platform) -> str:
    return f"Triton {triton_version()} for decodes, torch's flash attention for prompts"


def prepare(layout: Ragged, spec: AttentionSpec) -> Prepared:
    rows = rows_of(layout)
    several, single = [r for r in rows if r.count > 1], [r for r in rows if r.count == 1]
    return compose([(found, make(found, spec, layout))
                    for found, make in ((several, prompts), (single, _Decodes)) if found], layout)


prepare_in_triton = alone(prepare)


def prompts(rows: Sequence[Row], spec: AttentionSpec, layout: Ragged) -> Prepared:
    """Attention of rows of several tokens: their queries, one behind the other."""
    return of_floats(_prompts, rows, spec, layout)


def _prompts(rows: Sequence[Row], spec: AttentionSpec, layout: Ragged) -> Prepared:
    if spec.plain and flash.ready(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.dtype,
                                  layout.page_size, len(layout.pages_RM)):
        return _Paged(rows, spec, layout)
    wide = spec.head_dim > flash.DIM_MAX                # for which torch has a kernel without windows
    fused = spec.dtype in flash.TYPES and spec.head_dim % 8 == 0 and not (wide and (spec.window or spec.sinks))
    return (_Gathered if fused and not spec.softcap and not spec.first else _Masked)(rows, spec, layout)


class _Decodes:
    def __init__(self, rows: Sequence[Row], spec: AttentionSpec, layout: Ragged) -> None:
        from penstock.kernels.attention.paged_attention import triton_decode
        device = layout.pages_RM.device
        self._decode, self._table, self._spec = triton_decode.decode, layout.pages_RM, spec
        indices = on_device([row.index for row in rows] + [row.context for row in rows], device,
                            torch.int32)
        self._row_B, self._context_B = indices[:len(rows)], indices[len(rows):]
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._cut = triton_decode.tuning(len(rows), spec.num_kv_heads,
                                         max(row.context for row in rows), processors, spec.window,
                                         spec.head_dim * spec.dtype.itemsize)

    def __call__(self, q_TNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor,
                 sinks_N: Tensor | None = None) -> Tensor:
        return self._decode(q_TNH, k_PKGH, v_PKGH, self._table, self._row_B, self._context_B,
                            spec=self._spec, cut=self._cut, sinks_N=sinks_N)


class _Lengths:
    """Lengths of some rows, on the device and on the host. begins: positions that are not read of each."""

    def __init__(self, rows: Sequence[Row], device: torch.device, begins: Sequence[int] = ()) -> None:
        self.queries = [row.count for row in rows]
        self.contexts = [row.context - begin for row, begin in
                         zip(rows, begins or [0] * len(rows), strict=True)]
        starts = list(accumulate(self.queries, initial=0)), list(accumulate(self.contexts, initial=0))
        together = on_device([row.index for row in rows] + self.contexts + starts[0] + starts[1], device,
                             torch.int32)
        index_B, self.context_B, self.start_B1, self.key_start_B1 = torch.split(
            together, [len(rows), len(rows), len(rows) + 1, len(rows) + 1])
        self.index_B = index_B.long()


class _Paged:
    def __init__(self, rows: Sequence[Row], spec: AttentionSpec, layout: Ragged) -> None:
        self._of, self._scale = _Lengths(rows, layout.pages_RM.device), spec.scale
        most = -(-max(self._of.contexts) // layout.page_size)
        # An entry without a page is not read, and may be looked at.
        self._table_BM = layout.pages_RM[:, :most][self._of.index_B].clamp_min(0)

    def __call__(self, q_TNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor,
                 sinks_N: Tensor | None = None) -> Tensor:
        of = self._of
        return flash.attend(
            q_TNH, k_PKGH.transpose(1, 2), v_PKGH.transpose(1, 2), scale=self._scale,
            max_query=max(of.queries), max_key=max(of.contexts), start_B1=of.start_B1, context_B=of.context_B,
            table_BM=self._table_BM)


class _Gathered:
    def __init__(self, rows: Sequence[Row], spec: AttentionSpec, layout: Ragged) -> None:
        device, begins = layout.pages_RM.device, [begin_of(row, spec, layout) for row in rows]
        self._of, self._spec = _Lengths(rows, device, begins), spec
        of, size, total = self._of, layout.page_size, sum(self._of.contexts)
        first_B = of.key_start_B1[:-1]
        if spec.window:
            first_B = first_B - on_device(begins, device, torch.int32)
        row_S = of.index_B.repeat_interleave(of.context_B, output_size=total)
        first_S = first_B.repeat_interleave(of.context_B, output_size=total)
        position_S = torch.arange(total, device=row_S.device) - first_S
        self._page_S = layout.pages_RM[row_S, position_S // size].long()
        self._offset_S = position_S % size

    def __call__(self, q_TNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor,
                 sinks_N: Tensor | None = None) -> Tensor:
        of = self._of
        k_SKH, v_SKH = (pool[self._page_S, :, self._offset_S] for pool in (k_PKGH, v_PKGH))
        out_TNH, lse_NT = rows_by_torch(q_TNH, k_SKH, v_SKH, of.start_B1, of.key_start_B1, max(of.queries),
                                        max(of.contexts), self._spec.scale, self._spec.window)
        return out_TNH if sinks_N is None else beside_sinks(out_TNH, lse_NT.T, sinks_N)


def rows_by_torch(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, start_B1: Tensor, key_start_B1: Tensor,
                  max_query: int, max_key: int, scale: float, window: int = 0) -> tuple[Tensor, Tensor]:
    """(out_TNH, lse_NT f32): causal from each row's last query, as `flash.attend`, over keys that lie
    together. window: keys that a query sees, 0: all. Of heads wider than flash attention takes by torch's
    memory-efficient attention, a KV head at a time, whose lse is by row and not to be used."""
    aten: Any = torch.ops.aten
    if q_TNH.shape[2] > flash.DIM_MAX:
        assert not window, "wide heads have no window"
        each = [aten._efficient_attention_forward(
            q_TgH[None], *(x_SKH[None, :, k:k + 1].expand(-1, -1, q_TgH.shape[1], -1) for x_SKH in (k_SKH, v_SKH)),
            None, start_B1, key_start_B1, max_query, max_key, 0.0, 2, True, scale=scale)[:2]
            for k, q_TgH in enumerate(q_TNH.chunk(k_SKH.shape[1], 1))]
        outs, lses = zip(*each, strict=True)
        return torch.cat(outs, 2)[0], torch.cat(lses, 1)[0]
    out_TNH, lse_NT = aten._flash_attention_forward(
        q_TNH, k_SKH, v_SKH, start_B1, key_start_B1, max_query, max_key, 0.0, True, False, scale=scale,
        **({"window_size_left": window - 1, "window_size_right": 0} if window else {}))[:2]
    return out_TNH, lse_NT


class _Masked:
    """For types and scores that the fused kernels do not take, so many queries at once."""

    _QUERIES = 256

    def __init__(self, rows: Sequence[Row], spec: AttentionSpec, layout: Ragged) -> None:
        self._spec = spec
        self._parts: list[tuple[Row, int, Tensor]] = []         # with the position that its pages begin at
        for row in rows:
            for first in range(0, row.count, self._QUERIES):
                count = min(self._QUERIES, row.count - first)
                part = Row(row.first + first, count, row.context - row.count + first + count, row.index)
                begin = begin_of(part, spec, layout)
                self._parts.append((part, begin, pages_of(part, layout, begin).long()))

    def __call__(self, q_TNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor,
                 sinks_N: Tensor | None = None) -> Tensor:
        outs, first = [], 0
        for part, begin, pages_p in self._parts:
            k_KSH, v_KSH = (pool[pages_p].transpose(0, 1).flatten(1, 2)[:, :part.context - begin]
                            for pool in (k_PKGH, v_PKGH))
            alone = part.context == part.count      # the first token's query, to which it is all there is
            outs.append(self._part(q_TNH[first:first + part.count], k_KSH, v_KSH, sinks_N, int(alone)))
            first += part.count
        return torch.cat(outs)

    def _part(self, q_CNH: Tensor, k_KSH: Tensor, v_KSH: Tensor, sinks_N: Tensor | None,
              alone: int) -> Tensor:
        spec, count, keys = self._spec, len(q_CNH), k_KSH.shape[1]
        seen_CS = torch.ones(count, keys, dtype=torch.bool, device=q_CNH.device).tril_(keys - count)
        if spec.window:
            seen_CS.triu_(keys - count - spec.window + 1)
        if spec.first:
            seen_CS[alone:, 0] = False
        # Not by torch's fused attention, which adds a mask: NaN plus minus infinity is NaN.
        q_KgCH = q_CNH.view(count, spec.num_kv_heads, spec.group, -1).permute(1, 2, 0, 3)
        score_KgCS = torch.matmul(q_KgCH, k_KSH.transpose(1, 2)[:, None]).float() * spec.scale
        if spec.softcap:
            score_KgCS = score_KgCS.div_(spec.softcap).tanh_().mul_(spec.softcap)
        score_KgCS.masked_fill_(~seen_CS, float("-inf"))
        out_KgCH = torch.matmul(score_KgCS.softmax(-1).to(v_KSH.dtype), v_KSH[:, None])
        out_CNH = out_KgCH.permute(2, 0, 1, 3).flatten(1, 2)
        if sinks_N is None:
            return out_CNH
        return beside_sinks(out_CNH, score_KgCS.logsumexp(-1).permute(2, 0, 1).flatten(1), sinks_N)
