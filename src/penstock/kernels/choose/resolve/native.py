"""`resolve` in C (`resolve.c`): a row and KV head is one task."""
from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.c.build import entry, library, packed
from penstock.kernels.op import WrongResult
from penstock.kernels.platform import Platform
from penstock.kernels.types.hot import HotLayer

_SOURCE = Path(__file__).with_name("resolve.c")
_ERRORS = ("", "a row's hot units are too few for what it chose",
           "a chosen unit is neither on the device nor on the host",
           "a unit is hot in a page that the row does not have")


def probe(platform: Platform) -> str:
    """Builds the kernel and finds one unit in each place."""
    _, compiler = library(_SOURCE, platform.cache)
    row, now, pages, device, host = (torch.tensor(x, dtype=torch.int32) for x in (
        [0], [6], [[7, 9]], [[5, -1, -1, -1]], [[-1, 6, 8, 4]]))
    slots, units, stamps, chosen = (torch.tensor([[x]], dtype=torch.int32) for x in (
        [-1, -1, 1, 0], [3, 2], [4, 5], [0, 1, 2, -1]))
    hot = HotLayer(slots, units, stamps, pages, torch.zeros(1, 1, 4, dtype=torch.int64))
    slot, miss, num = resolve(chosen, row, device, host, hot, now, page_units=1)
    if (slot.tolist() != [[[5, 7, 9, -1]]] or miss[:int(num)].tolist() != [[0, 6, 7]]
            or hot.count_RKE.tolist() != [[[1, 1, 1, 1]]]):
        raise WrongResult(f"{compiler}: units are not where they should be")
    return compiler


def resolve(chosen_BKC: Tensor, row_B: Tensor, device_RP: Tensor, host_RP: Tensor, hot: HotLayer,
            now_1: Tensor, *, page_units: int,
            turn_B: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    slot_BKC = torch.empty_like(chosen_BKC)
    miss_E3 = torch.empty(chosen_BKC.numel(), 3, dtype=torch.int32)
    num_1 = torch.empty(1, dtype=torch.int32)
    args = packed((
        chosen_BKC, row_B, device_RP, host_RP, hot.page_RW, now_1, hot.slot_RKM, hot.unit_RKS, hot.stamp_RKS,
        hot.count_RKE, slot_BKC, miss_E3, num_1, turn_B), (
        *chosen_BKC.shape, device_RP.shape[1], hot.page_RW.shape[1], hot.slot_RKM.shape[2],
        hot.unit_RKS.shape[2], page_units))
    error = entry(_SOURCE, "penstock_resolve")(args, torch.get_num_threads())
    assert not error, _ERRORS[error]
    return slot_BKC, miss_E3, num_1
