"""Paged attention of decodes in C (`decode.c`), of prefill chunks through torch, or in C on AMX (`tiled`).

The fused kernel of torch takes 15 us before it reads anything and needs a row's pages gathered; this
one takes 4 us and reads a slot once, where it is. A step's decode rows are one call.

    T tokens of the part   N query heads   K KV heads   P pages   G page size   H head dim
"""
from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.attention.paged_attention import reference, sdpa, tiled
from penstock.kernels.attention.paged_attention.calls import Step
from penstock.kernels.attention.paged_attention.decoded import of_floats, sound_of
from penstock.kernels.attention.paged_attention.spec import (
    AttentionSpec,
    Part,
    Prepared,
    Row,
    compose,
    rows_of,
)
from penstock.kernels.c.build import library
from penstock.kernels.op import WrongResult
from penstock.kernels.platform import Platform
from penstock.kernels.types import fp8
from penstock.kernels.types.ragged import Ragged

_CHUNK, _LANES = 128, 16            # as in decode.c
# A chunk of so few queries is cheaper as that many decodes.
_QUERIES_MAX = 8
_SOURCE = Path(__file__).with_name("decode.c")


def probe(platform: Platform) -> str:
    """Builds the kernels and compares one small step, two decodes and a chunk, with the reference."""
    _, compiler = library(_SOURCE, platform.cache)
    tiles = tiled.build(platform)
    generator = torch.Generator().manual_seed(0)
    tables = torch.tensor([[9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [10] + 9 * [-1]], dtype=torch.int32)
    where = torch.arange(110, 150)
    layout = Ragged((0, 1, 2, 42), (150, 3, 150), (0, 1, 0), tables, torch.cat([
        torch.tensor([0, 10]), tables[0][where // 16]]), torch.cat([torch.tensor([5, 2]), where % 16]), 16)
    q, kv = (torch.randn(shape, generator=generator) for shape in ((42, 6, 32), (11, 2, 2, 16, 32)))
    for dtype, tolerance, coded in ((torch.float32, 1e-5, False), (torch.bfloat16, 0.02, False),
                                    (torch.float32, 1e-5, True)):
        spec = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=32, dtype=dtype, scale=0.2, coded=coded)
        pools = (fp8.encode_heads(kv) if coded else kv.to(dtype)).unbind(2)
        out, want = (made(layout, spec)(q.to(dtype), *pools).float() for made in (prepare, reference.prepare))
        if not (gap := (out - want).abs().max()) <= tolerance:
            raise WrongResult(f"{compiler}: {dtype}{' of codes' * coded} differs by {gap:.2g} on a small case")
    return f"{'amx_bf16, ' if tiles else ''}{platform.best('avx512_f', 'avx2', 'sve')}, {compiler}"


def prepare(layout: Ragged, spec: AttentionSpec) -> Prepared:
    rows = rows_of(layout)
    if spec.head_dim % _LANES:          # no model that is served has such heads
        return sdpa.prepare(layout, spec)
    few = [row for row in rows if row.count <= _QUERIES_MAX]
    parts: list[Part] = [(few, NativeDecodes(few, spec, layout))] if few else []
    for row in rows:
        if row.count > _QUERIES_MAX:
            chunk = tiled.TiledChunk if tiled.takes(row, spec) else sdpa.SdpaChunk
            parts.append(([row], of_floats(sound_of(chunk), [row], spec, layout)))
    return compose(parts, layout)


@dataclass(frozen=True, slots=True)
class Paged:
    """A step of which every token decodes, for a kernel that writes and attends itself, in all layers.

    pools               of each layer the addresses of k and v, [P, K, G, H], all with the strides of one
    page_T, offset_T    int64: where the step's tokens are written
    """

    decodes: NativeDecodes
    pools: ctypes.Array[ctypes.c_void_p]
    page_T: Tensor
    offset_T: Tensor


class NativeDecodes:
    """All queries that are handled one by one, in the order of their tokens. `step` is the argument of
    `kernel` but for `q`, `k`, `v`, `out` and strides."""

    def __init__(self, rows: list[Row], spec: AttentionSpec, layout: Ragged) -> None:
        queries: list[tuple[int, int, int]] = []
        chunks = 0
        for row in rows:
            for context in range(row.context - row.count + 1, row.context + 1):
                queries.append((row.index, context, chunks))
                chunks += -(-context // _CHUNK) - spec.first_seen(context - 1) // _CHUNK
        queries_T3 = torch.tensor(queries)
        partial = torch.empty(chunks * spec.num_heads * (spec.head_dim + 2))
        self._held = layout.pages_RM, queries_T3, partial      # the step has only their addresses
        self.step = Step(
            table=layout.pages_RM.data_ptr(), table_stride=layout.pages_RM.stride(0),
            queries=queries_T3.data_ptr(), partial=partial.data_ptr(), num_queries=len(queries),
            num_chunks=chunks, heads=spec.num_heads, kv_heads=spec.num_kv_heads,
            page_size=layout.page_size, scale=spec.scale, softcap=spec.softcap, window=spec.window,
            first=spec.first, codes=int(spec.coded))
        self._constants = (spec.head_dim, int(spec.dtype == torch.bfloat16),
                           torch.get_num_threads())

    @staticmethod
    @functools.cache
    def kernel() -> Callable[..., None]:
        """`penstock_decode` of decode.c: (step, head dim, whether queries are bf16, threads)."""
        function = library(_SOURCE)[0].penstock_decode
        function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int)
        function.restype = None
        return function

    def paged(self, pools: ctypes.Array[ctypes.c_void_p], k_PKGH: Tensor, page_T: Tensor,
              offset_T: Tensor) -> Paged:
        """`k_PKGH`: one of the pools, for its strides."""
        self._strides(k_PKGH)
        return Paged(self, pools, page_T, offset_T)

    def _strides(self, k_PKGH: Tensor) -> None:
        step = self.step
        step.page_stride, step.head_stride, step.token_stride, dense = k_PKGH.stride()
        assert dense == 1, "strides of the pools"

    def __call__(self, q_TNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor,
                 sinks_N: Tensor | None = None) -> Tensor:
        assert k_PKGH.stride() == v_PKGH.stride(), "strides of the pools"
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        step = self.step
        step.q, step.k, step.v = q_TNH.data_ptr(), k_PKGH.data_ptr(), v_PKGH.data_ptr()
        self._strides(k_PKGH)
        step.out, step.q_stride = out_TNH.data_ptr(), q_TNH.stride(0)
        step.sinks = None if sinks_N is None else sinks_N.data_ptr()
        self.kernel()(ctypes.byref(step), *self._constants)
        return out_TNH
