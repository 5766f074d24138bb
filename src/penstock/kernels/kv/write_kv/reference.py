"""The definition of `write_kv`: one token at a time, then one unit at a time."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kernels.kv.write_kv.spec import WriteAt
from penstock.kernels.types import fp8
from penstock.kernels.types.hot import HotLayer


def write_kv(values: Sequence[Tensor], at: WriteAt, device_PKCGH: Tensor,
             host_PKCGH: Tensor | None = None, hot: HotLayer | None = None,
             bounds_PK2SH: Tensor | None = None) -> None:
    tokens = list(zip(at.device_T.tolist(), at.host_T.tolist(), at.bounds_T.tolist(),
                      at.row_T.tolist(), at.position_T.tolist(), strict=True))
    size, unit = device_PKCGH.shape[3], at.unit
    x_TKCH = torch.stack(tuple(values), 2)
    for x_KCH, (device, host, _, row, position) in zip(x_TKCH, tokens, strict=True):
        for slot, pool in ((device, device_PKCGH), (host, host_PKCGH)):
            if slot >= 0:
                assert pool is not None, "a token has a slot in a tier that is not given"
                pool[slot // size, :, :, slot % size] = x_KCH
        if hot is None or row < 0:
            continue
        for k, hot_slot in enumerate(hot.slot_RKM[row, :, position // unit].tolist()):
            if hot_slot >= 0:
                page = int(hot.page_RW[row, hot_slot * unit // size])
                assert page >= 0, "a unit is hot in a page that the row does not have"
                offset = hot_slot * unit % size + position % unit
                device_PKCGH[page, k, :, offset] = x_KCH[k]
    for device, host, summary, _, position in tokens:
        if bounds_PK2SH is None or summary < 0 or (position + 1) % unit:
            continue
        slot, pool = (device, device_PKCGH) if device >= 0 else (host, host_PKCGH)
        assert pool is not None and slot >= 0, "a unit with a summary and without keys"
        first = slot % size - unit + 1
        keys_KuH = pool[slot // size, :, 0, first:first + unit]
        if keys_KuH.dtype == torch.uint8:
            keys_KuH = fp8.decode_heads(keys_KuH)
        of_page = bounds_PK2SH.shape[3]
        bounds_PK2SH[summary // of_page, :, :, summary % of_page] = torch.stack(
            (fp8.outward(keys_KuH.amin(1), bounds_PK2SH.dtype, up=False),
             fp8.outward(keys_KuH.amax(1), bounds_PK2SH.dtype, up=True)), 1)
