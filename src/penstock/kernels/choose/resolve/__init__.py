"""resolve: where each chosen unit is, and what must be copied first. Contract and implementations.

    B queries   K KV heads   C chosen units   R rows of the tables   P pages of a row   E entries
    M, S, W as in `penstock.kernels.types.hot`
"""
from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.kernels.c import device
from penstock.kernels.choose.resolve import native, reference
from penstock.kernels.op import DEVICES, Implementation, Op
from penstock.kernels.triton.lazy import lazy
from penstock.kernels.types.hot import HotLayer

__all__ = ["OP", "Resolve"]


class Resolve(Protocol):
    def __call__(self, chosen_BKC: Tensor, row_B: Tensor, device_RP: Tensor, host_RP: Tensor,
                 hot: HotLayer, now_1: Tensor, *, page_units: int,
                 turn_B: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Find every chosen unit: its device page, else its hot unit, else make it one.

        chosen_BKC   int32: distinct units, -1 for none (`select`)
        row_B        int32: each query's row; twice only if all that it chose is on the device, or by turns
        turn_B       int32: queries of a row that follow one another have 0, 1, 2, ..., any other has 0: what
                     several of them miss is listed once, and stays for all. None: all have 0
        device, host_RP   int32: pages of a row, pool-relative, -1 where a tier has none. What the
                     host is asked for it must have
        hot          changed in place. A row's slots must be at least the units it chose, in all turns,
                     without a device page: no unit of this step is ever evicted by this step. Of W = 0 pages
                     (then M = S = 0) only the counts are touched: all that is chosen is on the device
        now_1        int32: this step, larger by one each time (wraps)
        page_units   units of a page; unit u of a row is in its page u // page_units
        Returns      slot_BKC int32: unit of the pool, page * page_units + place in the page; -1 for none.
                     miss_E3, num_1 int32, E = B * K * C: the first num entries, in any order, are
                     what `gather` has to copy: head, unit of the host pool, unit of the device pool.
        Victims      a row and head that misses m units takes the m slots that are free or else were
                     used longest ago, of equal ones the lower; the misses, in the order of
                     `chosen`, go into them in the order of slots. The same on every device.
        Counts       hot.count_RKE += device, hits, misses, evictions.
        """


OP: Op[Resolve] = Op("resolve", (
    lazy("cuda", "penstock.kernels.choose.resolve.triton_map:resolve", device.probe),
    lazy("triton", "penstock.kernels.choose.resolve.triton_map:resolve_in_triton"),
    Implementation("c", native.resolve, native.probe),
    Implementation("reference", reference.resolve, "one unit at a time", DEVICES),
))
