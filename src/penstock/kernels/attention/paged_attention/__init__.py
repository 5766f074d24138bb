"""paged_attention: attention over a paged KV pool. The contract and its implementations.

Preparing and running are apart, as in FlashInfer (its word is plan): `prepare` looks at the step's layout
once, what it returns runs for every layer with no host work that depends on the rows.

    T tokens of the step   P pages   G page size   N query heads   K KV heads   H head dim

Pools are page-major: of one layer, k and v are [P, K, G, H] with strides of their own for pages,
heads and tokens. Only H is dense, so that pages of several layers and groups lie in one memory.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from penstock.kernels.attention.paged_attention import cuda, native, reference, sdpa
from penstock.kernels.attention.paged_attention.spec import AttentionSpec, Prepared
from penstock.kernels.op import DEVICES, Implementation, Op
from penstock.kernels.types.ragged import Ragged

__all__ = ["OP", "AttentionSpec", "Prepare", "Prepared", "prepare", "write_kv"]

Prepare: TypeAlias = Callable[[Ragged, AttentionSpec], Prepared]

OP: Op[Prepare] = Op("paged_attention", (
    Implementation("fa4", cuda.prepare, cuda.probe_flash, ("cuda",)),
    Implementation("triton", cuda.prepare_in_triton, cuda.probe_triton, ("cuda",)),
    Implementation("c", native.prepare, native.probe),
    Implementation("sdpa", sdpa.prepare, sdpa.probe),
    Implementation("reference", reference.prepare, "one query at a time in float32", DEVICES),
))


def prepare(layout: Ragged, spec: AttentionSpec, *, backend: str) -> Prepared:
    """Prepare the attention of one step; the result runs once per layer.

    layout      prefill chunks, decodes and any mix; every context >= its number of queries >= 1
    Returns     attend(q_TNH, k_PKGH, v_PKGH, sinks_N=None) -> out_TNH: causal attention of each row's queries
                over the first `context` slots of the row's pages, or with `spec.window` as many of the last
                of them, scaled by `spec.scale` and capped by `spec.softcap`.
    q_TNH       f32|bf16, dense in N and H, any stride in T    out_TNH   dtype of q, dense
    k, v_PKGH   dtype of q, or with `spec.coded` uint8 [P, K, G, W] of `types.fp8.encode_heads`; dense in H or W, the
                same strides: one layer's pools
    sinks_N     f32, dense; given where the spec has `sinks`
    Reads       only slots that hold tokens of the row, of pages that a query of it sees some of: a NaN
                anywhere else stays there, and entries of the table before that are not looked at.
                A query's result depends on what it sees alone, be the rest NaN or infinite; on a CUDA device
                values that are not finite are never in a page, see `write_kv`.
                Writes nothing. The new tokens' k and v are written before (`write_kv`).
    Exact       rows do not influence each other, up to rounding.
    Raises      KernelError for a backend that does not exist.
    Source      PagedAttention, arXiv:2309.06180; plan and run as in FlashInfer, arXiv:2501.01005; sinks as in
                gpt-oss, arXiv:2508.10925.
    """
    return OP.use(backend)(layout, spec)


def write_kv(k_TKH: Tensor, v_TKH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor, page_T: Tensor,
             offset_T: Tensor) -> None:
    """Write each new token's k and v into its slot of one layer's pools. On a CUDA device a value that is not
    finite becomes zeros, and its key NaN.

    k_TKH, v_TKH        dtype of the pools, be it uint8, any strides; on a CUDA device the same ones, dense in H
    page_T, offset_T    `Ragged.page_T`, `Ragged.offset_T`; no slot twice
    """
    if k_PKGH.is_cuda:
        from penstock.kernels.attention.paged_attention import triton_decode  # needs Triton
        triton_decode.write_kv(k_TKH, v_TKH, k_PKGH, v_PKGH, page_T[:, None], None, offset_T)
        return
    k_PKGH[page_T, :, offset_T] = k_TKH
    v_PKGH[page_T, :, offset_T] = v_TKH
