"""Paged attention on a CUDA device: decodes in Triton over pages, chunks in torch's own over gathered KV.

A chunk attends to what came before it and to itself in two calls, whose halves are merged: torch's fast
kernels are causal only where queries and keys begin at the same position.

    T tokens of the step   B decode rows   C queries of a chunk   S keys   N query heads   K KV heads
    P pages   G page size   H head dim
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.native import triton_version
from penstock.kernels.paged_attention.spec import AttentionSpec, Row, pages_of, rows_of
from penstock.kernels.platform import Platform
from penstock.kernels.ragged import Ragged

Part = Callable[[Tensor, Tensor, Tensor], Tensor]


def probe(platform: Platform) -> str:
    return f"cuDNN for chunks, Triton {triton_version()} for decodes"


def plan(layout: Ragged, spec: AttentionSpec) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    rows = rows_of(layout)
    device = layout.pages_RM.device
    parts: list[tuple[slice | Tensor, Part]] = [
        (slice(row.first, row.first + row.count), _Chunk(row, layout, spec)) for row in rows if row.count > 1]
    singles = [row for row in rows if row.count == 1]
    if singles:
        first = singles[0].first
        together = singles[-1].first - first + 1 == len(singles)
        at = (slice(first, first + len(singles)) if together
              else on_device([row.first for row in singles], device, torch.int64))
        parts.append((at, _Decodes(singles, layout, spec)))

    def attend(q_TNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor) -> Tensor:
        if len(parts) == 1:
            return parts[0][1](q_TNH, k_PKGH, v_PKGH)
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        for at, part in parts:
            out_TNH[at] = part(q_TNH[at], k_PKGH, v_PKGH)
        return out_TNH
    return attend


def on_device(values: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """A copy that the host does not wait for; torch keeps the pinned source until it is done."""
    host = torch.tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class _Decodes:
    def __init__(self, rows: list[Row], layout: Ragged, spec: AttentionSpec) -> None:
        from penstock.kernels.paged_attention import triton_decode
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


class _Chunk:
    """The queries of one prefill chunk."""

    def __init__(self, row: Row, layout: Ragged, spec: AttentionSpec) -> None:
        self._pages = pages_of(row, layout)
        self._count, self._context, self._spec = row.count, row.context, spec
        self._fast = (spec.dtype in (torch.bfloat16, torch.float16) and spec.head_dim % 8 == 0
                      and spec.head_dim <= 128)

    def __call__(self, q_CNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor) -> Tensor:
        k_KSH, v_KSH = (pool.index_select(0, self._pages).transpose(0, 1).flatten(1, 2)[:, :self._context]
                        for pool in (k_PKGH, v_PKGH))
        q_NCH = q_CNH.transpose(0, 1)
        if not self._fast:
            return self._masked(q_NCH, k_KSH, v_KSH)
        before = self._context - self._count
        out_NCH, log_NC = self._sdpa(q_NCH, k_KSH[:, before:], v_KSH[:, before:], causal=True)
        if not before:
            return out_NCH.transpose(0, 1).contiguous()
        from penstock.kernels.paged_attention import triton_decode
        past_NCH, past_log_NC = self._sdpa(q_NCH, k_KSH[:, :before], v_KSH[:, :before], causal=False)
        return triton_decode.merge(out_NCH, log_NC, past_NCH, past_log_NC)

    def _sdpa(self, q_NCH: Tensor, k_KSH: Tensor, v_KSH: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
        """(out_NCH, log_NC): causal where queries and keys begin together, else over all keys."""
        run: Any = torch.ops.aten._scaled_dot_product_cudnn_attention
        out, log = run(q_NCH[None], k_KSH[None], v_KSH[None], None, True, 0.0, causal, False,
                       scale=self._spec.scale)[:2]
        return out[0], log[0].squeeze(-1)

    def _masked(self, q_NCH: Tensor, k_KSH: Tensor, v_KSH: Tensor) -> Tensor:
        """For types that the fast kernels do not take: every score in memory."""
        before = self._context - self._count
        seen_CS = torch.ones(self._count, self._context, dtype=torch.bool,
                             device=q_NCH.device).tril_(before)
        out = F.scaled_dot_product_attention(q_NCH[None], k_KSH[None], v_KSH[None], attn_mask=seen_CS,
                                             scale=self._spec.scale, enable_gqa=True)
        return out[0].transpose(0, 1).contiguous()
