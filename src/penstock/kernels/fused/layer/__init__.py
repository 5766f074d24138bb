"""layer: the small operations between a decoder layer's linears. Contract and implementations.

Each is one pass over a few kilobytes per token, so calls cost more than arithmetic when decoding.

    T tokens of the step   D model dim   M heads   N query heads, the first of M   H head dim
    I MLP width, or index heads   X all parts of a token
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from penstock.kernels.fused.layer import native, reference
from penstock.kernels.fused.layer.latent import LatentNorms, Weighs
from penstock.kernels.fused.layer.stack import LayerWeights, Stack
from penstock.kernels.op import DEVICES, Implementation, Op
from penstock.kernels.triton.lazy import lazy

__all__ = ["OP", "LatentNorms", "LayerOps", "LayerWeights", "Stack", "Weighs", "stack"]


class LayerOps(Protocol):
    """f32|bf16 throughout, one dtype a call. Sums are in f32, results rounded once or twice."""

    def norm(self, h_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
        """h += delta in place (unless None), then RMS norm of h times weight. Returns x_TD.

        h, delta   dense
        """

    def rotate(self, x_TMH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> None:
        """x = x * cos + roll(x, H / 2) * sin in place: RoPE when sin's first half is negated.

        x_TMH   dense in M and H, any stride in T    cos, sin   dense    H   even
        """

    def norm_rotate(self, x_TMH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor, q_weight_H: Tensor,
                    k_weight_H: Tensor, num_heads: int, eps: float) -> None:
        """In place: RMS norm of each head times its weight, `q_weight` for the first `num_heads`, then
        `rotate`. The normed head is rounded, and its product with the weight again.

        x_TMH   as in `rotate`
        """

    def latent_rows(self, x_TX: Tensor, norms: LatentNorms, cos_T1H: Tensor, sin_T1H: Tensor,
                    weighs: Weighs | None) -> tuple[Tensor, Tensor, Tensor]:
        """Norm and rotate the latent parts of tokens, side by side in x: Q of the queries, R and H of the row, J of an
        indexer key (J = 0: none). Returns residual_TQ, the RMS norm of the first; key_TJ, the layer norm of
        the last, its first H rotated; and what `weighs` says, of which None is I = 0. In place: RMS norm of
        the R, `rotate` of the H behind them.

        x   any stride in T    J   at least H, or 0    Rounds each norm, and a rotated part again.
        """

    def latent_queries(self, x_TX: Tensor, q_TNH: Tensor, index_heads: int, index_dim: int, cos_T1H: Tensor,
                       sin_T1H: Tensor) -> Tensor:
        """Split queries, side by side in x: all N heads' plain parts, all heads' rotated parts, then of the index
        heads the rotated parts and the rest of J. `rotate`s both: the first into the last dims of q_TNH,
        whose others stay; returns q_TIJ, dense.

        x   any stride in T; is changed    q_TNH   dense
        """

    def by_head(self, x_TNH: Tensor, weight_NOH: Tensor, out_TNO: Tensor) -> None:
        """out = x weight^T, each head's rows by its own weight. O is its number of outputs.

        any strides, one of each of the weight's last two dims and of out's last dim is 1
        """

    def gate(self, gate_up_TJ: Tensor) -> Tensor:
        """silu(gate) * up for the first and second half of the last dimension, J = 2 I. -> [T, I]

        gate_up   dense in J, any stride in T
        """


OP: Op[LayerOps] = Op("layer", (
    Implementation("c", native.Native(), native.probe),
    lazy("triton", "penstock.kernels.fused.layer.triton_ops:OPS"),
    Implementation("reference", reference.LayerReference(), "torch", DEVICES),
))


def stack(ops: LayerOps, layers: Sequence[LayerWeights], *, heads: int, kv_heads: int, head_dim: int,
          eps: float) -> Stack | None:
    """These layers in one call, bit for bit what `ops`, the linears and paged attention make of them one by
    one. None: some of these do not run in C.

    eps     of all norms, those of heads too
    """
    if not isinstance(ops, native.Native) or any(len(layer.products) < 4 for layer in layers):
        return None
    return Stack(layers, native.functions(), heads=heads, kv_heads=kv_heads, head_dim=head_dim, eps=eps)
