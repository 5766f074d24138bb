"""The definition of scaled_linear: torch's own linear, in float32, of what the weight means."""
from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.platform import Platform
from penstock.kernels.types.packed import Packed


def probe(platform: Platform) -> str:
    return ("such weights are dequantised when they are loaded"
            if platform.device == "cpu" else "F.linear of the dequantised weight, each time")


def pack(weight: Packed, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    def linear(x_TI: Tensor) -> Tensor:
        bias = None if bias_O is None else bias_O.float()
        return F.linear(x_TI.float(), weight.floats(), bias).to(x_TI.dtype)
    return linear
