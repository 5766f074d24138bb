"""The small operations of latent attention by those of a layer, part by part: their definition.

    T tokens   X all parts of a token   Q, R, H, J parts of it   N query heads   I index heads
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


def weigh(x_TD: Tensor, weight_ID: Tensor, scale: float) -> Tensor:
    """As `LayerOps.weigh`."""
    y_TI: Tensor = F.linear(x_TD.float(), weight_ID) * scale
    return y_TI


class ByParts(ABC):
    """Half of `LayerOps`, of whoever can rotate."""

    @abstractmethod
    def rotate(self, x_TMH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> None:
        """As `LayerOps.rotate`."""

    def latent_rows(self, x_TX: Tensor, norms: LatentNorms, cos_T1H: Tensor,
                    sin_T1H: Tensor) -> tuple[Tensor, Tensor]:
        turned, (q_rank,), (rank,) = cos_T1H.shape[2], norms.q_Q.shape, norms.row_R.shape
        residual_TQ = F.rms_norm(x_TX[:, :q_rank], (q_rank,), norms.q_Q, norms.eps)
        row_TH = x_TX[:, q_rank:q_rank + rank + turned]
        row_TH[:, :rank] = F.rms_norm(row_TH[:, :rank], (rank,), norms.row_R, norms.eps)
        self.rotate(row_TH[:, None, rank:], cos_T1H, sin_T1H)
        key_TJ = x_TX[:, q_rank + rank + turned:]
        if norms.index_J is not None:
            key_TJ = F.layer_norm(key_TJ, norms.index_J.shape, norms.index_J, norms.bias_J, norms.eps)
            self.rotate(key_TJ[:, None, :turned], cos_T1H, sin_T1H)
        return residual_TQ, key_TJ

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

    def weigh(self, x_TD: Tensor, weight_ID: Tensor, scale: float) -> Tensor:
        return weigh(x_TD, weight_ID, scale)
