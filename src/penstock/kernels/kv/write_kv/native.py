"""`write_kv` in C (`write_kv.c`): one call for all copies and planes."""
from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.c.build import entry, library, packed
from penstock.kernels.kv.write_kv.spec import WriteAt
from penstock.kernels.op import WrongResult
from penstock.kernels.platform import Platform
from penstock.kernels.types import fp8
from penstock.kernels.types.hot import HotLayer

_PLANES = 4                             # as in write_kv.c
_SOURCE = Path(__file__).with_name("write_kv.c")


def probe(platform: Platform) -> str:
    """Builds the kernel and completes one unit of two tokens on the host."""
    _, compiler = library(_SOURCE, platform.cache)
    device, host, bounds = torch.zeros(1, 1, 2, 2, 3), torch.ones(1, 1, 2, 2, 3), torch.ones(1, 1, 2, 1, 3)
    k, v = torch.tensor([[[-1.0, 0.5, 2.0]]]), torch.full((1, 1, 3), 7.0)
    none, last = torch.tensor([-1]), torch.tensor([1])
    write_kv((k, v), WriteAt(none, last, torch.tensor([0]), torch.tensor([0], dtype=torch.int32),
                             torch.tensor([5], dtype=torch.int32), 2), device, host, None, bounds)
    want = torch.tensor([[-1.0, 0.5, 1.0], [1.0, 1.0, 2.0]])
    if not (torch.equal(bounds[0, 0, :, 0], want) and torch.equal(host[0, 0, :, 1], torch.cat((k, v))[:, 0])
            and device.count_nonzero() == 0):
        raise WrongResult(f"{compiler}: a token is not where it should be")
    return compiler


def _strides(pages: Tensor | None) -> list[int]:
    if pages is None:
        return [0, 0, 0]
    return [stride * pages.element_size() for stride in pages.stride()[:3]]


def write_kv(values: Sequence[Tensor], at: WriteAt, device_PKCGH: Tensor,
             host_PKCGH: Tensor | None = None, hot: HotLayer | None = None,
             bounds_PK2SH: Tensor | None = None) -> None:
    planes, itemsize = len(values), device_PKCGH.element_size()
    tokens, heads, width = values[0].shape
    more = (0,) * (_PLANES - planes)
    args = packed((
        *values, *(None,) * (_PLANES - planes), device_PKCGH, host_PKCGH, bounds_PK2SH, at.device_T,
        at.host_T, at.bounds_T, at.row_T, at.position_T,
        *((None, None) if hot is None else (hot.slot_RKM, hot.page_RW))), (
        *(x.stride(0) * itemsize for x in values), *more,
        *(x.stride(1) * itemsize for x in values), *more,
        *_strides(device_PKCGH), *_strides(host_PKCGH), *_strides(bounds_PK2SH),
        tokens, heads, planes, width, device_PKCGH.shape[3],
        *((1, at.unit, 0, 0, 0) if bounds_PK2SH is None else
          (bounds_PK2SH.shape[3], at.unit, bounds_PK2SH.shape[4] * bounds_PK2SH.element_size(),
           fp8.format_of_bounds(bounds_PK2SH, device_PKCGH),
           fp8.head_dim_of(width) if device_PKCGH.dtype == torch.uint8 else 0)),
        *((0, 0) if hot is None else (hot.slot_RKM.shape[2], hot.page_RW.shape[1]))))
    error = entry(_SOURCE, "penstock_write_kv", ctypes.c_int64)(
        args, itemsize, torch.get_num_threads())
    assert not error, "a unit is hot in a page that the row does not have"
