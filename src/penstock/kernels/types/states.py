"""Where the states of one layer are that a step reads and writes.

    B rows of the step   T tokens of the step   P pages   E elements of a state
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

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
    again     whoever scans adds what does it once more; None: nobody will ask
    """

    pool_PE: Tensor
    starts: tuple[int, ...]
    from_B: Tensor
    to_T: Tensor
    again: list[Again] | None = None
