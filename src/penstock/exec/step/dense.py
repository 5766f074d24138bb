"""The back-end of full attention: layers write k and v of their KV heads and read all of them, up to the query's own
position.

    T tokens of the step   B queries of a captured one   D of its rows that decode   N query heads   C planes
    K KV heads   H head dim   P pages   G page size   R rows of the tables   M pages a row
"""
from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.exec.graphs.halves import Copies
from penstock.exec.step.attend import Attending, KeepsStates, check_pools, places_of, spec_of
from penstock.exec.step.states import StatePools, StepStates
from penstock.exec.step.tables import GroupTable, Lowered
from penstock.kernels.attention.paged_attention import AttentionSpec, Prepare, Prepared, flash, write_kv
from penstock.kernels.attention.paged_attention.native import NativeDecodes, Paged
from penstock.kernels.fused.step import Queries
from penstock.kernels.types import fp8
from penstock.kernels.types.ragged import Ragged
from penstock.memory.pool import BlockPool
from penstock.model.base import CacheShape, LocalLayer, Reads


class Pages(Protocol):
    """The pages of one cache group in a step: a layer writes to its own, then reads them."""

    def write_kv(self, k_TKH: Tensor, v_TKH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor) -> None: ...

    def __call__(self, q_TNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor, sinks_N: Tensor | None = None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class RaggedPages(Pages):
    """Pages in an eager step."""

    ragged: Ragged
    prepared: Prepared

    def write_kv(self, k_TKH: Tensor, v_TKH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor) -> None:
        write_kv(k_TKH, v_TKH, k_PKGH, v_PKGH, self.ragged.page_T, self.ragged.offset_T)

    def __call__(self, q_TNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor, sinks_N: Tensor | None = None) -> Tensor:
        return self.prepared(q_TNH, k_PKGH, v_PKGH, sinks_N)


class PagedDecode(Pages):
    """Pages in a captured step: a row's one query reads up to its own position."""

    def __init__(self, spec: AttentionSpec, table_RM: Tensor, page_size: int, row_B: Tensor,
                 position_B: Tensor, context_B: Tensor) -> None:
        """context_B: position + 1."""
        from penstock.kernels.attention.paged_attention import triton_decode  # needs Triton
        processors = (1 if row_B.device.type == "cpu" else
                      torch.cuda.get_device_properties(row_B.device).multi_processor_count)
        self._row_B, self._position_B, self._context_B = row_B, position_B, context_B
        self._triton, self._spec, self._table_RM = triton_decode, spec, table_RM
        self._cut = triton_decode.tuning(len(row_B), spec.num_kv_heads, table_RM.shape[1] * page_size,
                                         processors, spec.window, spec.head_dim * spec.dtype.itemsize)

    def write_kv(self, k_TKH: Tensor, v_TKH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor) -> None:
        self._triton.write_kv(k_TKH, v_TKH, k_PKGH, v_PKGH, self._table_RM, self._row_B, self._position_B)

    def __call__(self, q_TNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor, sinks_N: Tensor | None = None) -> Tensor:
        return self._triton.decode(q_TNH, k_PKGH, v_PKGH, self._table_RM, self._row_B, self._context_B,
                                   spec=self._spec, cut=self._cut, sinks_N=sinks_N)


class PagedPrompts(Pages):
    """Pages in a captured step with prompts: its decodes are queries of prompts of one key, too, whose answers are
    thrown away. decode_T, decodes_T11, padding_T11: `StepBatch.mixed` as indices and masks."""

    def __init__(self, spec: AttentionSpec, table: GroupTable, given: Mapping[str, Tensor], decode_T: Tensor,
                 decodes_T11: Tensor, padding_T11: Tensor) -> None:
        from penstock.kernels.attention.paged_attention import triton_decode  # needs Triton
        self._write_kv, self._spec, self._given, self._table_RM = triton_decode.write_kv, spec, given, table.device_RM
        self._decodes = PagedDecode(spec, table.device_RM, table.size, given["row_D"], given["context_D"] - 1,
                                    given["context_D"])
        # Entries without a page are not read, and may be looked at.
        self._pages_BM = table.device_RM[given["row_B"].long()].clamp_min(0)
        self._decode_T, self._decodes_T11, self._padding_T11 = decode_T, decodes_T11, padding_T11

    def write_kv(self, k_TKH: Tensor, v_TKH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor) -> None:
        self._write_kv(k_TKH, v_TKH, k_PKGH, v_PKGH, self._table_RM, self._given["row_T"], self._given["position_T"])

    def __call__(self, q_TNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor, sinks_N: Tensor | None = None) -> Tensor:
        assert sinks_N is None, "only plain attention is in one call"
        decode_DNH = self._decodes(q_TNH[self._given["at_D"].long()], k_PKGH, v_PKGH)
        out_TNH = flash.attend(
            q_TNH, k_PKGH.transpose(1, 2), v_PKGH.transpose(1, 2), scale=self._spec.scale, max_query=len(q_TNH),
            max_key=self._pages_BM.shape[1] * k_PKGH.shape[2], start_B1=self._given["start_B1"],
            context_B=self._given["context_B"], table_BM=self._pages_BM)
        out_TNH = torch.where(self._decodes_T11, decode_DNH[self._decode_T], out_TNH)
        return out_TNH.masked_fill_(self._padding_T11, 0)


class Dense(Attending):
    """Full attention in one cache group or several, next to layers that keep a recurrent state."""

    def __init__(self, reads: Mapping[LocalLayer, Reads], groups: Sequence[CacheShape], prepare: Prepare,
                 device: Sequence[BlockPool], tables: Sequence[GroupTable], first: int = 0,
                 others: Collection[LocalLayer] = ()) -> None:
        """tables: of the groups; first: position of the first token that others than its own query see, 0 or 1;
        others: layers that do not read all, and are not asked for here."""
        check_pools(groups, device)
        self._prepare, self._tables = prepare, tables
        self.states = StatePools(groups, device)
        self.specs: dict[int, AttentionSpec] = {}       # by cache group
        # Of each layer: the group that attention reads, its k and v pools [P, K, G, H].
        self._places: dict[LocalLayer, tuple[int, Tensor, Tensor]] = {}
        for layer, (g, i) in places_of(reads, groups).items():
            if reads[layer].value_dim:
                assert layer in others, "a model of MLA KV entries and ops for KV heads"
                continue
            spec, pages = spec_of(reads[layer], groups[g], device[g], first), device[g].pages
            assert self.specs.setdefault(g, spec) == spec, f"layers read group {groups[g].name} in different ways"
            if layer not in others:
                self._places[layer] = g, pages[:, i, :, 0], pages[:, i, :, 1]
        self._groups = sorted({g for g, *_ in self._places.values()})
        addresses = [pool.data_ptr() for layer in sorted(self._places) for pool in self._places[layer][1:]]
        self._pools = (ctypes.c_void_p * len(addresses))(*addresses)

    def uncaptured(self) -> str:
        """What prompts attend to is captured where it is read out of pages in one call, whatever their lengths."""
        if any(spec.coded for spec in self.specs.values()):
            return "fp8"
        one_call = all(spec.plain and flash.ready(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.dtype,
                                                  self._tables[g].size, len(self._tables[g].device_RM))
                       for g, spec in self.specs.items())
        return "states" if self.states else "" if one_call else "backend"

    def step(self, lowered: Lowered) -> DenseStep:
        return self._step({g: RaggedPages(lowered.ragged[g], self._prepare(lowered.ragged[g], self.specs[g]))
                           for g in self._groups}, self.states.step(lowered))

    def decode(self, kind: str, queries: Queries, turn_NW: Tensor | None = None,
               copies: Copies | None = None) -> DenseStep:
        at = queries.row_B, queries.position_B
        return self._step({g: self.decodes(g, *at, queries.context_B) for g in self._groups},
                          self.states.decode(self._tables, *at, turn_NW))

    def decodes(self, group: int, row_B: Tensor, position_B: Tensor, context_B: Tensor) -> PagedDecode:
        table = self._tables[group]
        return PagedDecode(self.specs[group], table.device_RM, table.size, row_B, position_B, context_B)

    def prompts(self, given: Mapping[str, Tensor]) -> DenseStep:
        masks = (given["decode_T"].clamp(min=0).long(), (given["decode_T"] >= 0)[:, None, None],
                 (given["position_T"] < 0)[:, None, None])
        return self._step({g: PagedPrompts(self.specs[g], self._tables[g], given, *masks) for g in self._groups},
                          self.states.decode(self._tables, given["row_T"], given["position_T"]))

    def _step(self, pages: Mapping[int, Pages], state: StepStates) -> DenseStep:
        return DenseStep(self._places, pages, self._pools, state)


class DenseStep(KeepsStates):
    """`model.base.Attend` of one step, launched or captured."""

    def __init__(self, places: Mapping[LocalLayer, tuple[int, Tensor, Tensor]], pages: Mapping[int, Pages],
                 pools: ctypes.Array[ctypes.c_void_p], state: StepStates) -> None:
        self._places, self._pages, self._pools, self.state = places, pages, pools, state

    def __call__(self, layer: LocalLayer, q_TNH: Tensor, kv_TCKH: Tensor | None,
                 chosen_TKY: Tensor | None = None, sinks_N: Tensor | None = None) -> Tensor:
        assert chosen_TKY is None, "KV heads are attended to as a whole here"
        group, k_PKGH, v_PKGH = self._places[layer]
        pages = self._pages[group]
        if kv_TCKH is not None:
            kv_TCKH = fp8.kept_heads(kv_TCKH, k_PKGH.dtype)
            pages.write_kv(kv_TCKH[:, 0], kv_TCKH[:, 1], k_PKGH, v_PKGH)
        return pages(q_TNH, k_PKGH, v_PKGH, sinks_N)

    def paged(self) -> Paged | None:
        """See `model.base.AttendsPaged`."""
        if len(self._pages) != 1:
            return None
        [pages] = self._pages.values()
        if not isinstance(pages, RaggedPages) or not isinstance(pages.prepared, NativeDecodes):
            return None
        ragged, k_PKGH = pages.ragged, self._places[LocalLayer(0)][1]
        if k_PKGH.dtype == torch.uint8:             # that kernel writes floats
            return None
        return pages.prepared.paged(self._pools, k_PKGH, ragged.page_T, ragged.offset_T)
