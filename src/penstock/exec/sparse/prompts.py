"""Prompts that read all, of rows whose pages are not all on the device: what is earlier comes a window at a time.
Pages that the host alone has come through the row's hot buffer, as many at once as that has; those that the
device has do not, and more of them are read at once.

    S tokens of a window   W pages of a window   L pages before the chunk   E entries of `gather`'s list
    T tokens of the step   R rows of the tables   P pages of a row   K KV heads   G page size   H head dim
"""
from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.exec.sparse.rows import HotRows
from penstock.exec.step.tables import GroupTable
from penstock.kernels.attention import chunk_attention, merge
from penstock.kernels.attention.paged_attention.spec import beside_sinks
from penstock.kernels.kv import gather
from penstock.kernels.types import fp8
from penstock.kernels.types.ragged import on_device

# Tokens that are read at once of pages on a GPU: a copy of them is made, of one layer, and what is read of
# each window is merged. In windows of 2,112 a chunk took 3.6 times as long, behind 60,000 tokens. A CPU keeps
# what a small window has in its cache.
GPU_WINDOW = 16_384


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens [at, at + end - start) of the step are positions [start, end) of a row."""

    row: int
    at: int
    start: int
    end: int

    @property
    def tokens(self) -> slice:
        return slice(self.at, self.at + self.end - self.start)


@dataclass(frozen=True, slots=True)
class Window:
    """Pages of a row that are read at once.

    page_W     int64: where they are in the device pool, once those of the host are in hot pages
    keys       tokens in them      brought   how many of them come from the host: all or none
    miss_E3, num_1   what `gather` copies for that, in units of a page
    """

    page_W: Tensor
    keys: int
    brought: int
    miss_E3: Tensor
    num_1: Tensor


def misses(from_L: Tensor, to_L: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """For `gather`: every head of pages of one tier that come into these of another; 0: none."""
    head_K, at_L = (torch.arange(n, device=to_L.device) for n in (heads, len(to_L)))
    miss_E3 = torch.cartesian_prod(head_K, at_L)[:, [0, 1, 1]]
    miss_E3[:, 1], miss_E3[:, 2] = from_L[miss_E3[:, 1]], to_L[miss_E3[:, 2]]
    return miss_E3.int(), on_device([len(miss_E3)], to_L.device, torch.int32)


class HostedPrompts:
    """Of the layers of one cache group, of KV heads.

    kv             the group's tables
    device, host   one view [P, K, planes, G, H] a layer of the pools; `host` is empty without that tier
    backends       op -> name of its implementation: of chunk_attention, merge and gather
    window         tokens of device pages that are read at once, at least those of the row's hot buffer
    """

    def __init__(self, kv: GroupTable, rows: HotRows, device: Sequence[Tensor], host: Sequence[Tensor], *,
                 num_kv_heads: int, scale: float, backends: Mapping[str, str], window: int) -> None:
        self._window = window
        self._kv, self._rows, self._device, self._host = kv, rows, device, host
        self._num_kv_heads, self._scale = num_kv_heads, scale
        self._chunk_attention = chunk_attention.OP.use(backends["chunk_attention"])
        self._merge = merge.OP.use(backends["merge"])
        self._gather = gather.OP.use(backends["gather"])

    def windows(self, chunk: PromptChunk) -> list[Window]:
        """The pages before a chunk, each in one window. Of the row's hot buffer nothing is hot yet: its bind
        has said so, pages are kept only of a row behind its prompt, and so are positions that bring units."""
        host_RM, row = self._kv.host_RM, self._rows[chunk.row]
        assert row.hot_pages, f"row {chunk.row} has pages on the host and no hot buffer"
        assert host_RM is not None
        size = self._kv.size
        earlier = slice(0, -(-chunk.start // size))
        device_L, host_L = self._kv.device_RM[chunk.row, earlier].long(), host_RM[chunk.row, earlier]
        lacks_L = device_L < 0
        hot_W, made = self._rows.hot.pages(chunk.row).long(), []
        parts = ((device_L[~lacks_L], max(row.hot_pages, self._window // size), False),
                 (host_L[lacks_L], row.hot_pages, True))
        on_host = bool(lacks_L[-1:].any())
        for page_P, most, brought in parts:
            for first in range(0, len(page_P), most):
                from_W = page_P[first:first + most]
                page_W = hot_W[:len(from_W)] if brought else from_W
                ends = first + most >= len(page_P) and brought == on_host      # the last may not be full
                keys = len(page_W) * size - ends * (earlier.stop * size - chunk.start)
                made.append(Window(page_W, keys, brought * len(page_W),
                                   *misses(from_W, page_W, self._num_kv_heads * brought)))
        return made

    def attend(self, layer: int, chunk: PromptChunk, windows: Sequence[Window], q_TNH: Tensor, k_TKH: Tensor,
               v_TKH: Tensor, sinks_N: Tensor | None = None) -> Tensor:
        """Attention of prompt positions to all before them: their own chunk as it was computed, and what is
        earlier a window of pages at a time. k, v: as pages have them, floats or codes."""
        k_TKH, v_TKH = (fp8.heads_of(x, q_TNH.dtype) for x in (k_TKH, v_TKH))
        out_TNH, lse_TN = self._chunk_attention(q_TNH, k_TKH, v_TKH, causal=True, scale=self._scale)
        for window in windows:
            k_SKH, v_SKH = self._bring(layer, chunk.row, window, q_TNH.dtype)
            self._merge(out_TNH, lse_TN, *self._chunk_attention(q_TNH, k_SKH, v_SKH, causal=False,
                                                                scale=self._scale))
        return out_TNH if sinks_N is None else beside_sinks(out_TNH, lse_TN, sinks_N)

    def _bring(self, layer: int, row: int, window: Window, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """k and v of a window, [S, K, H], in `dtype`; what has no device page comes into the row's hot pages."""
        pool_PK2GH = self._device[layer]
        if window.brought:
            self._gather(self._host[layer], pool_PK2GH, window.miss_E3, window.num_1, unit=self._kv.size)
            self._rows.window(layer, row, window.brought)
        heads, planes, size, dim = pool_PK2GH.shape[1:]
        kv_2KPGH = pool_PK2GH.new_empty(planes, heads, len(window.page_W), size, dim)
        for plane, head in itertools.product(range(planes), range(heads)):      # a head's tokens side by side
            torch.index_select(pool_PK2GH[:, head, plane], 0, window.page_W, out=kv_2KPGH[plane, head])
        k_SKH, v_SKH = fp8.heads_of(kv_2KPGH, dtype).flatten(2, 3)[:, :, :window.keys].transpose(1, 2)
        return k_SKH, v_SKH
