"""block_select: the blocks of KV that a query attends to, by the best key of an indexer in each.

The selector of MiniMax-M3: each index head selects for one KV head, all of them by the same indexer keys.

    B queries   I index heads   J index head dim   P pages of keys   G page size   R rows of the table
    C blocks selected at most
"""
from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.kernels.c import device
from penstock.kernels.choose.block_select import native, reference
from penstock.kernels.op import DEVICES, Implementation, Op
from penstock.kernels.triton.lazy import lazy

__all__ = ["OP", "BlockSelect"]


class BlockSelect(Protocol):
    def __call__(self, q_BIJ: Tensor, key_PGJ: Tensor, table_RP: Tensor, row_B: Tensor, position_B: Tensor, *,
                 block: int, topk: int, first: int, last: int) -> Tensor:
        """Select the blocks with the highest scores among those that each query sees.

        q_BIJ        f32|bf16, or e4m3 of keys that are coded; dense in I and J, any stride in B; after norm and RoPE
        key_PGJ      dtype of q, or bf16, or, under queries in e4m3, uint8 of `types.fp8`: one layer of the
                     selector's pages, one key a token; dense in G and J
        table_RP     int32: a row's pages of keys, position p in page p // G
        row_B        int32: each query's row; any number of queries may have the same
        position_B   int32: each query's position, itself visible; -1 for no query
        block        tokens of a block, any number; block n begins at position n * block
        topk         blocks of each query and index head, >= first + last
        first, last  blocks that are always selected, and counted in topk: `first` at the beginning of the row,
                     `last` up to and with the query's own, >= 1
        Returns      chosen_BIC int32, dense, C = topk: ascending blocks, -1 after the last. All visible ones if they
                     are no more than that. Of equal scores the lower block.
        score        max over the block's keys of q . key, in f32 and an order that is the same for every token,
                     batch and chunk; of bf16 and e4m3 queries in what a device sums those in
        Reads        only keys of visible positions. Writes nothing. Launches do not depend on values.
        Source       MiniMax-M3, its `sparse_attention_config`: score type "max"
        """


OP: Op[BlockSelect] = Op("block_select", (
    lazy("cuda", "penstock.kernels.choose.block_select.triton_blocks:block_select", device.probe),
    lazy("triton", "penstock.kernels.choose.block_select.triton_blocks:block_select_in_triton"),
    Implementation("c", native.block_select, native.probe),
    Implementation("reference", reference.block_select, "one query at a time", DEVICES),
))
