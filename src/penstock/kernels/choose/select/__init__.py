"""select: the units of KV that a query attends to, by bounds of their keys. Contract, implementations.

The selector of models that have none of their own. A unit is a few tokens of one KV head; its summary
is the elementwise minimum and maximum of its keys, and q.k of no key in it can be outside of what the
bounds allow. A score is three quarters of the way from the least to the most that they allow.

    B queries   N query heads   K KV heads   H head dim   P pages of summaries   S units a page
    R rows of the table   C units chosen at most
"""
from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.kernels.c import device
from penstock.kernels.choose.select import native, reference
from penstock.kernels.choose.select.spec import SelectRule
from penstock.kernels.op import DEVICES, Implementation, Op
from penstock.kernels.triton.lazy import lazy

__all__ = ["OP", "Select", "SelectRule"]


class Select(Protocol):
    def __call__(self, q_BNH: Tensor, bounds_PK2SH: Tensor, table_RP: Tensor, row_B: Tensor,
                 position_B: Tensor, budget_B: Tensor, *, rule: SelectRule, chosen: int) -> Tensor:
        """Choose units for each query and KV head, from what its own position may see.

        q_BNH          f32|bf16, dense in N and H, any stride in B; after RoPE, not scaled
        bounds_PK2SH   lower and upper bounds of one layer, as `types.fp8.outward` makes them of bf16,
                       uint8 or the dtype of q; dense in S and H
        table_RP       int32: a row's pages of summaries, unit u in page u // S
        row_B          int32: each query's row; any number of queries may have the same
        position_B     int32: each query's position, itself visible; -1 for no query
        budget_B       int32: units, >= rule.least_units, <= chosen
        Returns        chosen_BKC int32, C = chosen: ascending units, -1 after the last. All units
                       that `rule` keeps, then those of the largest scores up to the budget; all
                       visible units if they are no more than that. Of equal scores the lower unit.
        score          max over the KV head's query heads of MOST * sum over H of max(q lower, q upper)
                       + LEAST * sum over H of min(q lower, q upper), factors of `spec`, in f32 and an
                       order that is the same for every unit, batch and chunk
        Reads          only summaries of scored units (`SelectRule.scored`). Writes nothing.
        Source         Quest, arXiv:2406.10774, where the most is the score; sinks and window as in
                       arXiv:2309.17453.
        """


OP: Op[Select] = Op("select", (
    lazy("cuda", "penstock.kernels.choose.select.triton_bounds:select", device.probe),
    lazy("triton", "penstock.kernels.choose.select.triton_bounds:select_in_triton"),
    Implementation("c", native.select, native.probe),
    Implementation("reference", reference.select, "one query and head at a time", DEVICES),
))
