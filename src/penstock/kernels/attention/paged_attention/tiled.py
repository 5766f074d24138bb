"""Paged attention of a prefill chunk of bf16 on AMX, in C (`chunk.c`), out of the pages.

    T queries   N query heads   K KV heads   P pages   G page size   H head dim
"""
from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.attention.paged_attention.calls import Step
from penstock.kernels.attention.paged_attention.spec import AttentionSpec, Row, begin_of, pages_of
from penstock.kernels.c.build import entry, library
from penstock.kernels.op import Unusable
from penstock.kernels.platform import KernelError, Platform, has_tiles
from penstock.kernels.types.ragged import Ragged

_QUERIES, _DIM, _DIM_MAX = 32, 32, 1024         # as in chunk.c
_SOURCE = Path(__file__).with_name("chunk.c")
_runs = False


class _Args(ctypes.Structure):
    """`TiledChunk` of chunk.c."""

    _fields_ = (("step", Step), ("context", ctypes.c_int64), ("head_dim", ctypes.c_int64),
                ("begin", ctypes.c_int64))


def build(platform: Platform) -> bool:
    """Builds it where there is AMX; whether it runs here. Before `takes` is asked."""
    global _runs
    try:
        _runs = has_tiles() and bool(library(_SOURCE, platform.cache) and entry(
            _SOURCE, "penstock_chunk_runs")(None, 1))
    except Unusable:
        _runs = False
    return _runs


def takes(row: Row, spec: AttentionSpec) -> bool:
    """Whether `TiledChunk` has the row's queries: enough of them, of a type and size that tiles take."""
    return (_runs and spec.dtype is torch.bfloat16 and not spec.first and row.count >= _QUERIES
            and spec.head_dim % _DIM == 0 and spec.head_dim <= _DIM_MAX)


class TiledChunk:
    """All queries of one prefill chunk. A query's result does not depend on the chunk that it is in."""

    def __init__(self, row: Row, spec: AttentionSpec, layout: Ragged) -> None:
        begin = begin_of(row, spec, layout)
        pages_n = pages_of(row, layout, begin)
        self._held = pages_n                        # `_args` has only its address
        self._args = _Args(Step(
            table=pages_n.data_ptr(), num_queries=row.count, heads=spec.num_heads, kv_heads=spec.num_kv_heads,
            page_size=layout.page_size, scale=spec.scale, softcap=spec.softcap, window=spec.window),
            row.context, spec.head_dim, begin)
        self._threads = torch.get_num_threads()

    def __call__(self, q_TNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor,
                 sinks_N: Tensor | None = None) -> Tensor:
        """Raises KernelError: no memory, or a page of the context that is not there."""
        assert k_PKGH.stride() == v_PKGH.stride() and k_PKGH.stride(3) == 1, "strides of the pools"
        assert q_TNH.stride(2) == 1 and q_TNH.stride(1) == q_TNH.shape[2], "heads of a query lie together"
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        step = self._args.step
        step.q, step.k, step.v = q_TNH.data_ptr(), k_PKGH.data_ptr(), v_PKGH.data_ptr()
        step.page_stride, step.head_stride, step.token_stride, _ = k_PKGH.stride()
        step.q_stride, step.out = q_TNH.stride(0), out_TNH.data_ptr()
        step.sinks = None if sinks_N is None else sinks_N.data_ptr()
        if why := entry(_SOURCE, "penstock_chunk")(ctypes.byref(self._args), self._threads):
            raise KernelError(f"{'no memory' if why == 1 else 'no page'} for {len(q_TNH)} queries of "
                              f"{self._args.context} keys")
        return out_TNH
