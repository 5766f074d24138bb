"""Where the states of one layer are that a step reads and writes.

    B rows of the step   T tokens of the step   P pages   E elements of a state
"""
from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class States:
    """One layer's. A row's state is read before any is written: the page that it was in may be the page that
    it goes to.

    pool_PE   float32, dense in E: one layer of the device pool
    starts    host, B+1 ints: tokens [starts[i], starts[i+1]) belong to row i
    from_B    int64: the page with the state behind the token before the row's first; -1: there is none, and
              the row begins with zeros
    to_T      int64: the page that gets the state behind this token; -1: none
    """

    pool_PE: Tensor
    starts: tuple[int, ...]
    from_B: Tensor
    to_T: Tensor
