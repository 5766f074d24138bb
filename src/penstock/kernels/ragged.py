"""The one ragged layout of a step: prefill chunks, decodes and any mix; decode is one query.

    B rows   T tokens of the step   P pages of a row   G page size
"""
from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ragged:
    """Where the step's tokens come from and which slots they may read. Built once, used per layer.

    query_start   host, B+1 ints: tokens [query_start[i], query_start[i+1]) belong to row i
    context       host, B ints: KV tokens visible to the row's last query, itself included; query j
                  of a row with c queries sees positions 0 .. context - c + j
    pages         host, per row the indices into the pool (already less the pool's base)
    slot_T        int64, device: page index * G + offset where each new token's KV is stored
    page_size     G, tokens
    """

    query_start: tuple[int, ...]
    context: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]
    slot_T: Tensor
    page_size: int
