"""The definition of linear: torch's own, on the weight as it came; in float32, of what a packed one means."""
from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.types.packed import Packed


def pack(weight: Tensor | Packed, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    if isinstance(weight, Packed):
        return _packed(weight, bias_O)
    weight_OI = weight

    def linear(x_TI: Tensor) -> Tensor:
        return F.linear(x_TI, weight_OI, bias_O)
    return linear


def _packed(weight: Packed, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    def linear(x_TI: Tensor) -> Tensor:
        bias = None if bias_O is None else bias_O.float()
        return F.linear(x_TI.float(), weight.floats(), bias).to(x_TI.dtype)
    return linear
