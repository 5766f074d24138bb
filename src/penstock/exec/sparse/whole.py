"""Chunks of prompts that select, over all of a layer's entries before them and their own, in one place.

A chunk of a hosted row would bring most units many times: all that is before it comes once, a layer at a time, into a
workspace where a unit's slot is its number. So does, on a GPU, one of a row on the device whose MLA KV entries are
codes: attention decodes what lies together once. The sums are the same, term by term, wherever entries lie.

    T tokens of the chunk   C planes   K KV heads   N query heads   H head dim   Y chosen units
    P pages of the longest row   G page size   L pages of the row   E entries of `gather`'s list
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.exec.sparse.layers import UnitAttention
from penstock.exec.sparse.prompts import PromptChunk, misses
from penstock.exec.sparse.rows import HotRows
from penstock.exec.step.tables import GroupTable
from penstock.kernels.kv import gather
from penstock.memory.pool import PageLayout


@dataclass(frozen=True, slots=True)
class WholeChunk(PromptChunk):
    """What it reads, by page of the row:

    held_2L        int64: page of the device pool, and of the row
    miss_E3, num_1 what `gather` copies from the host, in units of a page
    brought        pages of that
    resident       all of the row is on the device: `held_2L` has the chunk's pages too
    position_T     int64
    """

    held_2L: Tensor
    miss_E3: Tensor
    num_1: Tensor
    brought: int
    resident: bool
    position_T: Tensor


class Whole:
    """Chunks over the layers of one cache group.

    kv             the group's tables
    device, host   one view [P, K, C, G, H] a layer of the pools; `host` is empty without that tier
    attend         to chosen units
    tokens         that a query chooses, at most
    """

    def __init__(self, kv: GroupTable, rows: HotRows, layout: PageLayout, device: Sequence[Tensor],
                 host: Sequence[Tensor], attend: UnitAttention, tokens: int, backends: Mapping[str, str]) -> None:
        self._kv, self._rows, self._device, self._host, self._attend = kv, rows, device, host, attend
        self._gather = gather.OP.use(backends["gather"])
        shape = layout.num_kv_heads, layout.planes, layout.page_size, layout.head_dim
        pages, on = kv.device_RM.shape[1] if host else 0, kv.device_RM.device
        self._whole_PKCGH = torch.empty(pages, *shape, dtype=layout.dtype, device=on)
        # Where they choose more than there are. A CPU decodes as it reads, and a copy is 45 % of 17 tokens of 16 heads.
        self._decodes_at = tokens if layout.planes == 1 and layout.dtype == torch.uint8 and on.type == "cuda" else 0

    def together(self, r: int, end: int, count: int) -> bool:
        """Whether so many tokens of row r of the tables, the last of `end`, read what is before them from one place."""
        return count > 1 and (not self._kv.is_resident(r) or count * self._decodes_at > end)

    def chunk(self, r: int, at: int, start: int, end: int) -> WholeChunk:
        """Tokens [start, end) of row r, as `PromptChunk` has them, and what they read."""
        table, resident = self._kv, self._kv.is_resident(r)
        pages = slice(0, -(-(end if resident else start) // table.size))
        device_P, host_P = (x[r, pages] for x in (table.device_RM, self._rows.host_RM))
        held_L = torch.arange(len(device_P), device=device_P.device)
        lacks_L = held_L[:0]
        if not resident:            # on a GPU the host waits for how many there are
            lacks_L, held_L = ((device_P < 0).nonzero().flatten(), (device_P >= 0).nonzero().flatten())
        heads = self._whole_PKCGH.shape[1]
        return WholeChunk(r, at, start, end, torch.stack((device_P[held_L].long(), held_L)),
                          *misses(host_P[lacks_L], lacks_L, heads), len(lacks_L), resident,
                          torch.arange(start, end, device=device_P.device))

    def attend(self, layer: int, chunk: WholeChunk, q_TNH: Tensor, kept_TCKH: Tensor, chosen_TKY: Tensor,
               sinks_N: Tensor | None) -> Tensor:
        """out_TNH of the chunk's tokens. kept: their entries, as pages have them."""
        page_L, at_L = chunk.held_2L
        held_LKCGH = self._device[layer][page_L]
        if chunk.resident:
            whole_PKCGH = held_LKCGH
        else:
            size = self._kv.size
            whole_PKCGH = self._whole_PKCGH[:-(-chunk.end // size)]
            self._gather(self._host[layer], whole_PKCGH, chunk.miss_E3, chunk.num_1, unit=size)
            self._rows.window(layer, chunk.row, chunk.brought)
            whole_PKCGH[at_L] = held_LKCGH
            whole_PKCGH[chunk.position_T // size, :, :, chunk.position_T % size] = kept_TCKH.transpose(1, 2)
        return self._attend(q_TNH, whole_PKCGH, chosen_TKY, chosen_TKY, chunk.position_T.int(), sinks_N)
