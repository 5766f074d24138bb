"""Sparse attention of one layer: find the selected units, fetch the missing ones from the host, attend.

Rows whose pages are all on the device, all on the host, or on both are one code path. So are blocks of KV heads and
MLA KV entries, whichever selector chose them. Owns the order of these operations and the rounds of a step; memory and
tables belong to others.

    B queries of the step   R rows of the tables   P pages of a row   N query heads   H head dim
    K KV heads   C chosen units   G page size
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.exec.graphs.halves import Copies
from penstock.exec.step.attend import ANY
from penstock.kernels.attention import sparse_attention
from penstock.kernels.attention.latent_attention import LatentAttention
from penstock.kernels.attention.paged_attention.spec import beside_sinks
from penstock.kernels.choose import resolve
from penstock.kernels.kv import gather, write_kv
from penstock.kernels.kv.write_kv import WriteAt
from penstock.kernels.types.ragged import on_device
from penstock.memory.hot import HotBuffers

# attend(q_BNH, pool [P, K, planes, G, H], chosen_BKC, slot_BKC, position_B, sinks_N) -> out_BNH: over units
# that have been chosen and found.
UnitAttention: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class SparseStep:
    """The queries of a step that select, made once and used for every layer.

    row, position   int32 [B], device: as `select` takes them
    rounds          queries of each round, as an index of B: no round has more queries of a row than its hot
                    buffer holds what they choose of
    now_R1          by reader of a layer's entries, int32, device: stamp of each round
    turn_B          as `resolve` takes it, of each round by itself
    brings          whether a row may lack something
    copies          of a half of a step: other kernels run beside its copies
    budget_B        int32, units, where requests say how many they choose
    most            of them
    """

    row_B: Tensor
    position_B: Tensor
    rounds: tuple[slice | Tensor, ...]
    now_R1: tuple[Tensor, ...]
    turn_B: Tensor | None = None
    brings: bool = True
    copies: Copies | None = None
    budget_B: Tensor | None = None
    most: int = 0


DEVICE, HOST = "device", "host"         # kinds of captured steps: whether all pages of all rows are there


class SparseLayers:
    """Attention of one cache group to chosen units, through whatever tier they are in.

    device, host   one view [P, K, planes, G, H] a layer of the pools; `host` is empty without that tier
    bounds         one view [P, K, 2, S, H] a layer of the pool of summaries; empty where nobody reads any
    device_RP, host_RP   int32 tables of the rows: pool indices, -1 for none. Read anew in every call:
                   whoever owns them changes them between steps
    unit           tokens that are chosen together
    backends       op -> name of its implementation: of write_kv, resolve and gather
    """

    def __init__(self, attend: UnitAttention, *, unit: int, device: Sequence[Tensor],
                 host: Sequence[Tensor], bounds: Sequence[Tensor] = (), device_RP: Tensor, host_RP: Tensor,
                 hot: HotBuffers, backends: Mapping[str, str]) -> None:
        self._attend, self._unit, self._hot = attend, unit, hot
        self._device, self._host, self._bounds = tuple(device), tuple(host), tuple(bounds)
        self._device_RP, self._host_RP = device_RP, host_RP
        # A stage whose layers all read everything has none that select.
        self._page_units = device[0].shape[3] // unit if device else 1
        self._write_kv = write_kv.OP.use(backends["write_kv"])
        self._resolve = resolve.OP.use(backends["resolve"])
        self._gather = gather.OP.use(backends["gather"])

    def step(self, rows: Sequence[int], positions: Sequence[int], at_once: Sequence[int],
             budgets: Sequence[int] = ()) -> SparseStep:
        """The selecting queries of a step, in the order of their tokens.

        at_once   queries of the row that a round may have: `HotRows.at_once`
        budgets   units, where requests say how many they choose
        """
        device = self._device_RP.device
        found, turns = _rounds(rows, at_once)
        given = on_device([*rows, *positions, *(turns or ())], device, torch.int32)
        parts = torch.split(given, len(rows))
        rounds = tuple(_index(queries, device) for queries in found)
        return SparseStep(parts[0], parts[1], rounds, self._hot.tick(len(rounds)), parts[2] if turns else None,
                          budget_B=on_device(budgets, device, torch.int32) if budgets else None,
                          most=max(budgets, default=0))

    def write_kv(self, layer: int, values: Sequence[Tensor], at: WriteAt) -> None:
        """Write a step's new rows, of all its tokens, to every copy; before any `attend` of the layer."""
        self._write_kv(values, at, self._device[layer], self._host[layer] if self._host else None,
                       self._hot.layers[layer] if self._hot.hot_pages else None,
                       self._bounds[layer] if self._bounds else None)

    def attend(self, layer: int, q_BNH: Tensor, chosen_BKC: Tensor, step: SparseStep,
               sinks_N: Tensor | None = None, reader: int = 0) -> Tensor:
        """out_BNH: each query over what was chosen for it. Brings what it misses into the rows' hot
        buffers. reader: how many layers have read these entries in this step."""
        device, hot = self._device[layer], self._hot.layers[layer]
        outs = []
        for at, now_1 in zip(step.rounds, step.now_R1[reader], strict=True):
            chosen, row, position = chosen_BKC[at], step.row_B[at], step.position_B[at]
            slot, miss, num = self._resolve(
                chosen, row, self._device_RP, self._host_RP, hot, now_1, page_units=self._page_units,
                turn_B=None if step.turn_B is None else step.turn_B[at])
            if self._host and step.brings:
                with nullcontext() if step.copies is None else step.copies.of(layer):
                    self._gather(self._host[layer], device, miss, num, unit=self._unit,
                                 beside=step.copies is not None)
            outs.append(self._attend(q_BNH[at], device, chosen, slot, position, sinks_N))
        if len(outs) == 1:
            return outs[0]
        out_BNH = outs[0].new_empty(len(q_BNH), *outs[0].shape[1:])
        for at, out in zip(step.rounds, outs, strict=True):
            out_BNH[at] = out
        return out_BNH


def unit_attention(backend: str, *, unit: int, scale: float) -> UnitAttention:
    """Over units of KV heads."""
    run = sparse_attention.OP.use(backend)

    def attend(q_BNH: Tensor, pool_PK2GH: Tensor, chosen_BKC: Tensor, slot_BKC: Tensor,
               position_B: Tensor, sinks_N: Tensor | None) -> Tensor:
        out_BNH, lse_BN = run(q_BNH, pool_PK2GH, chosen_BKC, slot_BKC, position_B, unit=unit, scale=scale)
        return out_BNH if sinks_N is None else beside_sinks(out_BNH, lse_BN, sinks_N)
    return attend


def row_attention(run: LatentAttention, *, value_dim: int, scale: float) -> UnitAttention:
    """Over MLA KV entries, of which every one that was chosen may be seen."""
    def attend(q_BNH: Tensor, pool_P11GH: Tensor, chosen_B1C: Tensor, slot_B1C: Tensor,
               position_B: Tensor, sinks_N: Tensor | None) -> Tensor:
        assert sinks_N is None, "MLA KV entries beside sinks"
        return run(q_BNH, pool_P11GH[:, 0, 0], slot_B1C[:, 0], value_dim=value_dim, scale=scale)[0]
    return attend


def _rounds(rows: Sequence[int], at_once: Sequence[int]) -> tuple[Sequence[Sequence[int]], list[int] | None]:
    """Queries by round, as many of a row as it may have at once; and the turn of each, 0 where nothing that
    it chooses is missing; None: it is 0 of all."""
    if min(at_once) >= ANY:             # a prompt's chunk is thousands of queries
        return [range(len(rows))], None
    rounds: list[list[int]] = [[]]
    seen: dict[int, int] = {}
    turns = []
    for query, (row, most) in enumerate(zip(rows, at_once, strict=True)):
        n, turn = divmod(seen.get(row, 0), most)
        seen[row] = seen.get(row, 0) + 1
        turns.append(turn if most < ANY else 0)
        if n == len(rounds):
            rounds.append([])
        rounds[n].append(query)
    return rounds, turns if any(turns) else None


def _index(queries: Sequence[int], device: torch.device) -> slice | Tensor:
    """Neighbours need no copy."""
    first, end = queries[0], queries[-1] + 1
    return slice(first, end) if end - first == len(queries) else on_device(
        queries, device, torch.int64)
