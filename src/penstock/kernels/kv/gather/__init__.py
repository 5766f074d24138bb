"""gather: units that were missed, from host pages into the hot buffers. Contract and implementations.

One flat list for all rows: the work is its length, whatever the batch looks like.

    P pages   K KV heads   C planes   G page size   H row width   E entries of the list
"""
from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.kernels.kv.gather import native, reference
from penstock.kernels.op import DEVICES, Implementation, Op
from penstock.kernels.triton.lazy import lazy

__all__ = ["OP", "Gather"]


class Gather(Protocol):
    def __call__(self, host_PKCGH: Tensor, pool_PKCGH: Tensor, miss_E3: Tensor, num_1: Tensor, *,
                 unit: int, beside: bool = False) -> None:
        """Copy the units that the list names, in every plane, byte for byte.

        host, pool   one layer of both tiers; one dtype of any size, dense in G and H (rows of 1 to
                     4,096 bytes and runs of `unit` of them), any other stride, any alignment
        miss_E3      int32: head, source unit, destination unit; unit n is the tokens
                     [n % (G / unit) * unit, + unit) of page n // (G / unit) of that tier
        num_1        int32: entries that count; read where the list is, the host need not know
        unit         tokens, divides G
        beside       other kernels are to run meanwhile: it leaves them room
        Writes       the destinations and nothing else; no two entries have the same. All of every
                     row arrives: a copy that moves 8 bytes at a time owes the last 1 to 7.
        """


OP: Op[Gather] = Op("gather", (
    lazy("triton", "penstock.kernels.kv.gather.triton_copy:gather"),
    Implementation("c", native.gather, native.probe),
    Implementation("reference", reference.gather, "one unit at a time", DEVICES),
))
