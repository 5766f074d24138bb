"""Prompts of rows whose pages are not all on the device: what is earlier is read a window of pages at a time,
which come through the row's hot buffer.

    S tokens of a window   W hot pages   L pages that lack a device page   E entries of `gather`'s list
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
from penstock.kernels.kv import gather


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [at, at + end - start) of the step are positions [start, end) of a row, and read all."""

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

    page_P     int64: where they are in the device pool, once those that lack a device page are in hot pages
    keys       tokens in them      brought   how many of them come from the host
    miss_E3, num_1   what `gather` copies for that, in units of a page
    """

    page_P: Tensor
    keys: int
    brought: int
    miss_E3: Tensor
    num_1: Tensor


class HostedPrompts:
    """Of the layers of one cache group, of KV heads.

    kv             the group's tables
    device, host   one view [P, K, planes, G, H] a layer of the pools; `host` is empty without that tier
    backends       op -> name of its implementation: of chunk_attention, gather and merge
    """

    def __init__(self, kv: GroupTable, rows: HotRows, device: Sequence[Tensor], host: Sequence[Tensor], *,
                 num_kv_heads: int, scale: float, backends: Mapping[str, str]) -> None:
        self._kv, self._rows, self._device, self._host = kv, rows, device, host
        self._num_kv_heads, self._scale = num_kv_heads, scale
        self._chunk_attention = chunk_attention.OP.use(backends["chunk_attention"])
        self._gather = gather.OP.use(backends["gather"])
        self._merge = merge.OP.use(backends["merge"])

    def windows(self, chunk: Chunk) -> list[Window]:
        """The pages before a chunk, as many at a time as the row's hot buffer has, of which nothing is hot
        yet: its bind has said so, pages are kept only of a row behind its prompt, and so are positions that
        bring units."""
        host_RM, row = self._kv.host_RM, self._rows[chunk.row]
        assert row.hot_pages, f"row {chunk.row} has pages on the host and no hot buffer"
        assert host_RM is not None
        earlier = slice(0, -(-chunk.start // self._kv.size))
        device_P, host_P = self._kv.device_RM[chunk.row, earlier].long(), host_RM[chunk.row, earlier]
        hot_W, made = self._rows.hot.pages(chunk.row), []
        head_K = torch.arange(self._num_kv_heads, device=host_P.device)
        for first in range(0, earlier.stop, row.hot_pages):
            page_P = device_P[first:first + row.hot_pages].clone()
            lacks_L = (page_P < 0).nonzero().flatten()
            page_P[lacks_L] = hot_W[lacks_L].long()
            miss_E3 = torch.cartesian_prod(head_K, lacks_L)[:, [0, 1, 1]]
            miss_E3[:, 1], miss_E3[:, 2] = host_P[first + miss_E3[:, 1]], page_P[miss_E3[:, 2]]
            made.append(Window(page_P, min(len(page_P) * self._kv.size, chunk.start - first * self._kv.size),
                               len(lacks_L), miss_E3.int(),
                               torch.tensor([len(miss_E3)], dtype=torch.int32, device=host_P.device)))
        return made

    def attend(self, layer: int, chunk: Chunk, windows: Sequence[Window], q_TNH: Tensor, k_TKH: Tensor,
               v_TKH: Tensor) -> Tensor:
        """Attention of prompt positions to all before them: their own chunk as it was computed, what is
        earlier a window of pages at a time, which come through the row's hot buffer."""
        out_TNH, lse_TN = self._chunk_attention(q_TNH, k_TKH, v_TKH, causal=True, scale=self._scale)
        for window in windows:
            k_SKH, v_SKH = self._bring(layer, chunk.row, window)
            out, lse = self._chunk_attention(q_TNH, k_SKH, v_SKH, causal=False, scale=self._scale)
            out_TNH, lse_TN = self._merge(torch.stack((out_TNH, out)), torch.stack((lse_TN, lse)))
        return out_TNH

    def _bring(self, layer: int, row: int, window: Window) -> tuple[Tensor, Tensor]:
        """k and v of a window, [S, K, H]; what has no device page comes into the row's hot pages."""
        pool_PK2GH = self._device[layer]
        self._gather(self._host[layer], pool_PK2GH, window.miss_E3, window.num_1, unit=self._kv.size)
        self._rows.window(layer, row, window.brought)
        heads, planes, size, dim = pool_PK2GH.shape[1:]
        kv_2KPGH = pool_PK2GH.new_empty(planes, heads, len(window.page_P), size, dim)
        for plane, head in itertools.product(range(planes), range(heads)):      # a head's tokens side by side
            torch.index_select(pool_PK2GH[:, head, plane], 0, window.page_P, out=kv_2KPGH[plane, head])
        k_SKH, v_SKH = kv_2KPGH.flatten(2, 3)[:, :, :window.keys].transpose(1, 2)
        return k_SKH, v_SKH
