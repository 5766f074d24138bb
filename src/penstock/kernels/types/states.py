"""Where the states of one layer are that a step reads and writes.

    B rows of the step   T tokens of the step   P pages   E elements of a state   M blocks   R rows that have any
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.kernels.types.ragged import on_device

# Scans these tokens of a step, int64 into T, once more, with other states.
Again: TypeAlias = Callable[[Tensor, "States"], object]
BLOCK = 64              # positions of a block; those of a row are counted from its first


@dataclass(frozen=True, slots=True)
class Blocks:
    """Whole blocks of positions that a step computes of prompts. A row's blocks are its first tokens of the step; it
    leaves the state behind its last token, and no state inside a block.

    row_R     int64: rows that have blocks
    block_R   int64 [R+1]: blocks [block_R[i], block_R[i+1]) are of row_R[i]
    token_M   int64: the first token of each block
    rest_B    int64: each row's first token that is in no block; its end, if all are
    """

    row_R: Tensor
    block_R: Tensor
    token_M: Tensor
    rest_B: Tensor

    @classmethod
    def of(cls, starts: Sequence[int], at: Sequence[int], device: torch.device) -> Blocks | None:
        """at: the position of each row's first token, -1 for a row that is no prompt. Of a row that does not begin
        with a block it takes none. None: no row has any."""
        counts = [(end - first) // BLOCK if position >= 0 and position % BLOCK == 0 else 0
                  for (first, end), position in zip(pairwise(starts), at, strict=True)]
        rows = [row for row, count in enumerate(counts) if count]
        if not rows:
            return None
        lines = (rows, [*accumulate((counts[row] for row in rows), initial=0)],
                 [starts[row] + BLOCK * i for row in rows for i in range(counts[row])],
                 [first + BLOCK * count for first, count in zip(starts, counts, strict=False)])
        all_of = on_device([value for line in lines for value in line], device, torch.int64)
        return cls(*torch.split(all_of, [*map(len, lines)]))


@dataclass(frozen=True, slots=True)
class States:
    """One layer's. A row's state is read before any is written: the page that it was in may be the page that
    it goes to.

    pool_PE   float32, dense in E: one layer of the device pool
    starts    host, B+1 ints: tokens [starts[i], starts[i+1]) belong to row i
    from_B    int64: the page with the state behind the token before the row's first; -1: there is none, and
              the row begins with zeros
    to_T      int64: the page that gets the state behind this token; -1: none
    start_B   int64 [B+1]: `starts`
    row_T     int64: which row each token is of
    again     the scan appends a callback that does it once more; None: no caller needs that
    blocks    what of the step may be computed in blocks; None: nothing
    """

    pool_PE: Tensor
    starts: tuple[int, ...]
    from_B: Tensor
    to_T: Tensor
    start_B: Tensor
    row_T: Tensor
    again: list[Again] | None = None
    blocks: Blocks | None = None

    @classmethod
    def of(cls, pool_PE: Tensor, starts: tuple[int, ...], from_B: Tensor, to_T: Tensor,
           at: Sequence[int] | None = None) -> States:
        """With `starts` on the device too. at: as `Blocks.of`."""
        blocks = None if at is None else Blocks.of(starts, at, from_B.device)
        return cls(pool_PE, starts, from_B, to_T, *starts_of(starts, from_B.device), blocks=blocks)


def starts_of(starts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """`States.start_B` and `States.row_T`. Does not wait for the device."""
    start_B = on_device(starts, device, torch.int64)
    rows_B = torch.arange(len(starts) - 1, device=device)
    return start_B, rows_B.repeat_interleave(start_B.diff(), output_size=starts[-1])
