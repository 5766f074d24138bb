"""The definition of linear: torch's own, on the weight as it came."""
from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def pack(weight_OI: Tensor, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    def linear(x_TI: Tensor) -> Tensor:
        return F.linear(x_TI, weight_OI, bias_O)
    return linear
