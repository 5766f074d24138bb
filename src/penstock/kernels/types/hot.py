"""What a device remembers of the hot buffers of all rows, for one layer: the state that ops share.

A row's hot buffer is a few pages of the offloaded group's own device pool. Per KV head its slots hold
units: runs of tokens of one head. A unit is where the map says, or not in the buffer.

    R rows of the table   K KV heads   M units that a row may have   S slots of a row and head
    W hot pages that a row may have
"""
from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

DEVICE, HITS, MISSES, EVICTIONS = range(4)      # columns of HotLayer.count_RKE


@dataclass(frozen=True, slots=True)
class HotLayer:
    """Tensors on the device, changed in place by `resolve`, read by `write_kv`.

    slot_RKM    int32: hot slot of each unit of the row, -1 if it has none
    unit_RKS    int32: the unit in each slot, -1 if it is free; the inverse of slot_RKM
    stamp_RKS   int32: step in which a slot was used last; wraps, only differences count
    page_RW     int32, shared by layers: pool pages of the row's hot buffer, those it has first, then
                -1. With `n` units a page, slot s is unit s % n of page page_RW[row, s // n]
    count_RKE   int64: selected units that were on the device, in the hot buffer, in neither; units
                that lost their slot. Only ever added to
    """

    slot_RKM: Tensor
    unit_RKS: Tensor
    stamp_RKS: Tensor
    page_RW: Tensor
    count_RKE: Tensor
