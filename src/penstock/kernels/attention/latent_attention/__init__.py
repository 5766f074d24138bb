"""latent_attention: one query over the MLA KV entries chosen for it, wherever they are, or over all of a row's.
Its contract.

A row is one token's key for all heads, and its first dims are its value (MLA, absorbed).

    B queries   N query heads   H row dim   R value dim   P pages   G page size   S chosen rows
"""
from __future__ import annotations

import contextlib
from typing import Protocol

from torch import Tensor

from penstock.kernels.attention.latent_attention import native, reference
from penstock.kernels.attention.latent_attention.context import PagedContext
from penstock.kernels.c import device
from penstock.kernels.op import DEVICES, Implementation, Op, Unusable
from penstock.kernels.platform import Platform
from penstock.kernels.triton.lazy import lazy, probe

__all__ = ["OP", "LatentAttention", "PagedContext"]


class LatentAttention(Protocol):
    def __call__(self, q_BNH: Tensor, pool_PGH: Tensor, slot_BS: Tensor | PagedContext, *, value_dim: int,
                 scale: float) -> tuple[Tensor, Tensor]:
        """Attend to the rows that the slots name.

        q_BNH      f32|bf16, dense
        pool_PGH   dtype of q, or bf16, or uint8 of `types.fp8`, `value_dim` of a row coded: one layer of the
                   device pool; dense in G and H
        slot_BS    int32: token n % G of page n // G, in the order of positions; -1 after the last;
                   or a context, of which a GPU walks as much as there is, however wide its table
        Returns    out_BNR, R = value_dim <= H, dtype of q, dense; lse_BN f32, log of the sum of e^score,
                   natural. A query without rows has 0 and -inf.
        Reads      only what slots name, of codes in a dense pool maybe the others too. Writes nothing.
        Exact      does not depend on the numbers of the slots beyond what lies there, in f32 nor on the batch
        Source     DeepSeek-V2, arXiv:2405.04434 section 2.1.2
        """


def _probe(platform: Platform) -> str:
    found = f"Gluon of {probe(platform)}"
    if "sm_90" not in platform.features:
        raise Unusable("written for sm_90 only")
    with contextlib.suppress(Unusable):
        found += f", for prompts NVRTC {device.version()}"
    return f"{found}, for 64 heads of 512 values or a multiple, and Triton for other shapes"


OP: Op[LatentAttention] = Op("latent_attention", (
    lazy("gluon", "penstock.kernels.attention.latent_attention.triton_latent:latent_attention", _probe),
    lazy("triton", "penstock.kernels.attention.latent_attention.triton_latent:latent_attention_in_triton"),
    Implementation("c", native.latent_attention, native.probe),
    Implementation("reference", reference.latent_attention, "one query at a time", DEVICES),
))
