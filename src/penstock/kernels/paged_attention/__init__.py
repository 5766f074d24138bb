"""paged_attention: attention over a paged KV pool. The contract and its implementations.

Planning and running are apart, as in FlashInfer: `plan` looks at the step's layout once, the plan
then runs for every layer with no host work that depends on the rows.

    T tokens of the step   P pages   G page size   N query heads   K KV heads   H head dim
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from penstock.kernels.paged_attention import native, reference, sdpa
from penstock.kernels.paged_attention.spec import AttentionSpec
from penstock.kernels.platform import DEVICES, Implementation, Op
from penstock.kernels.ragged import Ragged

__all__ = ["OP", "AttentionSpec", "Plan", "Planner", "plan", "store"]

# plan(q_TNH, k_PGKH, v_PGKH) -> out_TNH: one layer's attention for the step it was made for.
Plan: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
Planner: TypeAlias = Callable[[Ragged, AttentionSpec], Plan]

OP: Op[Planner] = Op("paged_attention", (
    Implementation("native", native.plan, native.probe),
    Implementation("sdpa", sdpa.plan, sdpa.probe),
    Implementation("reference", reference.plan, reference.probe, DEVICES),
))


def plan(layout: Ragged, spec: AttentionSpec, *, backend: str) -> Plan:
    """Prepare the attention of one step; the result runs once per layer.

    layout      prefill chunks, decodes and any mix; every context >= its number of queries >= 1
    Returns     attend(q_TNH, k_PGKH, v_PGKH) -> out_TNH: causal attention of each row's queries
                over the first `context` slots of the row's pages, scaled by `spec.scale`.
    q_TNH       f32|bf16, dense in N and H, any stride in T    out_TNH   dtype of q, dense
    k, v_PGKH   dtype of q, contiguous: one layer's pools
    Reads       only slots that hold tokens of the row: a NaN anywhere else stays there.
                Writes nothing. The new tokens' k and v are stored before (`store`).
    Exact       rows do not influence each other, up to rounding.
    Raises      KernelError for a backend that does not exist.
    Source      PagedAttention, arXiv:2309.06180; plan and run as in FlashInfer, arXiv:2501.01005.
    """
    return OP.get(backend).run(layout, spec)


def store(k_TKH: Tensor, v_TKH: Tensor, k_PGKH: Tensor, v_PGKH: Tensor, slot_T: Tensor) -> None:
    """Write each new token's k and v into its slot of one layer's pools.

    k_TKH, v_TKH   dtype of the pools, dense in K and H, any stride in T
    slot_T         int64: page index * G + offset, no duplicates; `Ragged.slot_T`
    """
    k_PGKH.flatten(0, 1).index_copy_(0, slot_T, k_TKH)
    v_PGKH.flatten(0, 1).index_copy_(0, slot_T, v_TKH)
