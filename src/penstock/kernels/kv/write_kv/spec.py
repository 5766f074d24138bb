"""Where a step's tokens are written: made once a step, used for every layer."""
from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class WriteAt:
    """Destinations of each new token, -1 for none. `T` tokens of the step.

    device_T     int64: page * G + offset in the device pool
    host_T       int64: the same in the host pool, whose pages have as many tokens
    bounds_T     int64: page * S + place of the token's unit in the pool of summaries, which a query
                 may read once the unit is full
    row_T        int32: the token's row in the tables of the hot buffers; -1 for none
    position_T   int32: its position
    unit         tokens of a unit, divides G
    """

    device_T: Tensor
    host_T: Tensor
    bounds_T: Tensor
    row_T: Tensor
    position_T: Tensor
    unit: int
