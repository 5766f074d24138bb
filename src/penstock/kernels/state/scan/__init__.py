"""scan: a short convolution, then a state a head that each token changes and asks. Its contract.

    T tokens of the step   X channels   N heads   V value dim   S key dim
"""
from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.kernels.op import DEVICES, Implementation, Op
from penstock.kernels.state.scan import native, reference
from penstock.kernels.state.scan.spec import ScanSpec, ScanWeights
from penstock.kernels.triton.lazy import lazy
from penstock.kernels.types.states import States

__all__ = ["OP", "Scan", "ScanSpec", "ScanWeights"]


class Scan(Protocol):
    def __call__(self, x_TX: Tensor, step_TN: Tensor, write_TN: Tensor | None, weights: ScanWeights,
                 states: States, spec: ScanSpec) -> Tensor:
        """Scan the tokens of each row in order. y = silu(conv(x) + bias) is query q and key k [S] of each key head
        and value v [V] of each head; with s = softplus(step + weights.step) the state Z [S, V] of a head
        becomes e^(decay s) Z + k d, and the output is q Z + skip v. By the delta rule d = sigmoid(write)
        (v - k Z), where Z has been decayed, and q and k have lengths S^-1/2 and 1; else d = v s, s within its
        bounds.

        x_TX       f32|bf16, dense in X
        step_TN, write_TN   dtype of x, dense in N; write: of the delta rule
        Returns    out_TNV, dtype of x, dense
        Reads      of the pool the pages that `states.from_B` names. Writes those of `states.to_T`.
        Exact      token by token in float32: what a token gets, and every state, depends on the tokens before
                   it, not on how they were cut into steps, nor on the batch; bit for bit. `blocks` computes
                   `states.blocks` by matrix products, TF32 for bf16: there this holds for cuts at ends of blocks
        Source     Gated DeltaNet, arXiv:2412.06464; Mamba-2, arXiv:2405.21060
        """


OP: Op[Scan] = Op("scan", (
    lazy("blocks", "penstock.kernels.state.scan.triton_blocks:scan"),
    lazy("triton", "penstock.kernels.state.scan.triton_scan:scan"),
    Implementation("c", native.scan, native.probe),
    Implementation("reference", reference.scan, "one token at a time", DEVICES),
))
