"""`gather` in C (`gather.c`): a memcpy a unit and plane."""
from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.c.build import entry, library
from penstock.kernels.op import WrongResult
from penstock.kernels.platform import Platform

_SOURCE = Path(__file__).with_name("gather.c")


class _Gather(ctypes.Structure):
    """`Gather` of gather.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("host", "pool", "miss", "num")),
        *((name, ctypes.c_int64) for name in (
            "host_page", "host_head", "host_plane", "pool_page", "pool_head", "pool_plane",
            "planes", "host_units", "pool_units", "run")),
    )


def probe(platform: Platform) -> str:
    """Builds the kernel and copies one odd row."""
    _, compiler = library(_SOURCE, platform.cache)
    host = torch.arange(2 * 3 * 13, dtype=torch.uint8).view(2, 1, 1, 3, 13)
    pool = torch.zeros_like(host)
    gather(host, pool, torch.tensor([[0, 4, 2]], dtype=torch.int32),
           torch.ones(1, dtype=torch.int32), unit=1)
    if pool.count_nonzero() != 13 or not torch.equal(pool[0, 0, 0, 2], host[1, 0, 0, 1]):
        raise WrongResult(f"{compiler}: a row of 13 bytes does not arrive")
    return compiler


def gather(host_PKCGH: Tensor, pool_PKCGH: Tensor, miss_E3: Tensor, num_1: Tensor, *,
           unit: int) -> None:
    size, width = host_PKCGH.element_size(), host_PKCGH.shape[4]
    args = _Gather(
        host_PKCGH.data_ptr(), pool_PKCGH.data_ptr(), miss_E3.data_ptr(), num_1.data_ptr(),
        *(stride * size for pages in (host_PKCGH, pool_PKCGH) for stride in pages.stride()[:3]),
        host_PKCGH.shape[2], host_PKCGH.shape[3] // unit, pool_PKCGH.shape[3] // unit,
        unit * width * size)
    entry(_SOURCE, "penstock_gather")(ctypes.byref(args), torch.get_num_threads())
