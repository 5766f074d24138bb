"""The definition of a layer's small operations, in torch's own."""
from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.fused.layer.latent import ByParts


class LayerReference(ByParts):
    def norm(self, h_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
        if delta_TD is not None:
            h_TD.add_(delta_TD)
        return F.rms_norm(h_TD, (h_TD.shape[-1],), weight_D, eps)

    def rotate(self, x_TMH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> None:
        swapped = x_TMH.roll(x_TMH.shape[-1] // 2, -1)
        x_TMH.mul_(cos_T1H).addcmul_(swapped, sin_T1H)

    def norm_rotate(self, x_TMH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor, q_weight_H: Tensor,
                    k_weight_H: Tensor, num_heads: int, eps: float) -> None:
        norm_heads(x_TMH, q_weight_H, k_weight_H, num_heads, eps)
        self.rotate(x_TMH, cos_T1H, sin_T1H)

    def gate(self, gate_up_TJ: Tensor) -> Tensor:
        gate_TI, up_TI = gate_up_TJ.chunk(2, -1)
        return F.silu(gate_TI).mul_(up_TI)


def norm_heads(x_TMH: Tensor, q_weight_H: Tensor, k_weight_H: Tensor, num_heads: int, eps: float) -> None:
    """In place. One norm for all heads; the weights differ between q and k, so they come afterwards."""
    x_TMH.copy_(F.rms_norm(x_TMH, (x_TMH.shape[-1],), None, eps))
    x_TMH[:, :num_heads].mul_(q_weight_H)
    x_TMH[:, num_heads:].mul_(k_weight_H)
