"""Where the states of one layer are that a step reads and writes.

    B rows of the step   T tokens of the step   P pages   E elements of a state
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.kernels.types.ragged import on_device

# Scans these tokens of a step, int64 into T, once more, with other states.
Again: TypeAlias = Callable[[Tensor, "States"], object]


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
    """

    pool_PE: Tensor
    starts: tuple[int, ...]
    from_B: Tensor
    to_T: Tensor
    start_B: Tensor
    row_T: Tensor
    again: list[Again] | None = None

    @classmethod
    def of(cls, pool_PE: Tensor, starts: tuple[int, ...], from_B: Tensor, to_T: Tensor) -> States:
        """With `starts` on the device too."""
        return cls(pool_PE, starts, from_B, to_T, *starts_of(starts, from_B.device))


def starts_of(starts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """`States.start_B` and `States.row_T`. Does not wait for the device."""
    start_B = on_device(starts, device, torch.int64)
    rows_B = torch.arange(len(starts) - 1, device=device)
    return start_B, rows_B.repeat_interleave(start_B.diff(), output_size=starts[-1])
