"""index_select: the tokens that a query attends to, by a lightning indexer. Contract and implementations.

The selector of models that bring their own. A token is chosen for all heads of a layer at once.

    B queries   I index heads   J index head dim   P pages of keys   G page size   R rows of the table
    S tokens chosen at most
"""
from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.kernels.c import device
from penstock.kernels.choose.index_select import native, reference
from penstock.kernels.op import DEVICES, Implementation, Op
from penstock.kernels.triton.lazy import lazy

__all__ = ["OP", "IndexSelect"]


class IndexSelect(Protocol):
    def __call__(self, q_BIJ: Tensor, weight_BI: Tensor, key_PGJ: Tensor, table_RP: Tensor, row_B: Tensor,
                 position_B: Tensor, *, topk: int) -> Tensor:
        """Choose the tokens with the highest scores among those that each query sees.

        q_BIJ        f32|bf16, or e4m3 of keys that are coded, dense; after RoPE
        weight_BI    f32, dense: what each index head counts, every factor in it, also what scales its codes
        key_PGJ      dtype of q, or bf16, or, under queries in e4m3, uint8 of `types.fp8`, all of a key
                     coded: one layer of the selector's pages; dense in G and J
        table_RP     int32: a row's pages of keys, position p in page p // G
        row_B        int32: each query's row; any number of queries may have the same
        position_B   int32: each query's position, itself visible; -1 for no query
        Returns      chosen_BS int32, S = topk: ascending positions, -1 after the last. All visible ones
                     if they are no more than that. Of equal scores the lower position.
        score        sum over I of weight * max(q . key, 0), in f32 and an order that is the same for
                     every token, batch and chunk; of bf16 and e4m3 queries in what a device sums those in
        Reads        only keys of visible positions. Writes nothing.
        Source       DeepSeek-V3.2-Exp technical report, section 1: lightning indexer
        """


OP: Op[IndexSelect] = Op("index_select", (
    lazy("cuda", "penstock.kernels.choose.index_select.triton_keys:index_select", device.probe),
    lazy("triton", "penstock.kernels.choose.index_select.triton_keys:index_select_in_triton"),
    Implementation("c", native.index_select, native.probe),
    Implementation("reference", reference.index_select, "one query at a time", DEVICES),
))
