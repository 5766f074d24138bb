"""The small operations of latent attention by those of a layer, part by part: their definition.

    T tokens   D model dim   X all parts of a token   Q, R, H, J parts of it   N query heads   I index heads
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LatentNorms:
    """Weights of the norms within latent attention. index, bias: of the key's layer norm; None: no key."""

    q_Q: Tensor
    row_R: Tensor
    index_J: Tensor | None
    bias_J: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class Weighs:
    """What the heads of an indexer count for: x weight^T * scale, f32 throughout whatever x is.

    x_TD   dense; the layer's input    weight_ID   f32, dense
    """

    x_TD: Tensor
    weight_ID: Tensor
    scale: float

    def __call__(self) -> Tensor:
        """y_TI."""
        y_TI: Tensor = F.linear(self.x_TD.float(), self.weight_ID) * self.scale
        return y_TI


def by_head(x_TNH: Tensor, weight_NOH: Tensor, out_TNO: Tensor) -> None:
    """Implement `LayerOps.by_head`."""
    torch.bmm(x_TNH.transpose(0, 1), weight_NOH.transpose(1, 2), out=out_TNO.transpose(0, 1))


class ByParts(ABC):
    """The part of `LayerOps` for back-ends that can rotate."""

    @abstractmethod
    def rotate(self, x_TMH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> None:
        """Implement `LayerOps.rotate`."""

    def latent_rows(self, x_TX: Tensor, norms: LatentNorms, cos_T1H: Tensor, sin_T1H: Tensor,
                    weighs: Weighs | None) -> tuple[Tensor, Tensor, Tensor]:
        turned, (q_rank,), (rank,) = cos_T1H.shape[2], norms.q_Q.shape, norms.row_R.shape
        residual_TQ = F.rms_norm(x_TX[:, :q_rank], (q_rank,), norms.q_Q, norms.eps)
        row_TH = x_TX[:, q_rank:q_rank + rank + turned]
        row_TH[:, :rank] = F.rms_norm(row_TH[:, :rank], (rank,), norms.row_R, norms.eps)
        self.rotate(row_TH[:, None, rank:], cos_T1H, sin_T1H)
        key_TJ = x_TX[:, q_rank + rank + turned:]
        if norms.index_J is not None:
            key_TJ = F.layer_norm(key_TJ, norms.index_J.shape, norms.index_J, norms.bias_J, norms.eps)
            self.rotate(key_TJ[:, None, :turned], cos_T1H, sin_T1H)
        weight_TI = x_TX.new_empty(len(x_TX), 0) if weighs is None else weighs()
        return residual_TQ, key_TJ, weight_TI

    def latent_queries(self, x_TX: Tensor, q_TNH: Tensor, index_heads: int, index_dim: int, cos_T1H: Tensor,
                       sin_T1H: Tensor) -> Tensor:
        tokens, heads, _ = q_TNH.shape
        turned = cos_T1H.shape[2]
        index_at = x_TX.shape[1] - index_heads * index_dim
        q_rope = x_TX[:, index_at - heads * turned:index_at].view(tokens, heads, turned)
        self.rotate(q_rope, cos_T1H, sin_T1H)
        q_TNH[..., -turned:] = q_rope
        if not index_heads:
            return x_TX.new_empty(tokens, 0, index_dim)
        index_rope = x_TX[:, index_at:index_at + index_heads * turned].view(tokens, index_heads, turned)
        self.rotate(index_rope, cos_T1H, sin_T1H)
        rest = x_TX[:, index_at + index_heads * turned:].view(tokens, index_heads, index_dim - turned)
        return torch.cat((index_rope, rest), -1)

    def by_head(self, x_TNH: Tensor, weight_NOH: Tensor, out_TNO: Tensor) -> None:
        by_head(x_TNH, weight_NOH, out_TNO)
