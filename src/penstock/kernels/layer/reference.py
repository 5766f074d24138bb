"""The definition of a layer's small operations, in torch's own."""
from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.platform import Platform


def probe(_: Platform) -> str:
    return "torch"


class Reference:
    def norm(self, h_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
        if delta_TD is not None:
            h_TD.add_(delta_TD)
        return F.rms_norm(h_TD, (h_TD.shape[-1],), weight_D, eps)

    def rotate(self, x_TMH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> None:
        swapped = x_TMH.roll(x_TMH.shape[-1] // 2, -1)
        x_TMH.mul_(cos_T1H).addcmul_(swapped, sin_T1H)

    def gate(self, gate_up_TJ: Tensor) -> Tensor:
        gate_TI, up_TI = gate_up_TJ.chunk(2, -1)
        return F.silu(gate_TI).mul_(up_TI)
