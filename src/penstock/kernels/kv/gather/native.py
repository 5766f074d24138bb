"""`gather` in C (`gather.c`): a memcpy a unit and plane."""
from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.c.build import entry, library, packed
from penstock.kernels.op import WrongResult
from penstock.kernels.platform import Platform

_SOURCE = Path(__file__).with_name("gather.c")


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
           unit: int, beside: bool = False) -> None:
    size, width = host_PKCGH.element_size(), host_PKCGH.shape[4]
    args = packed((host_PKCGH, pool_PKCGH, miss_E3, num_1), (
        *(stride * size for pages in (host_PKCGH, pool_PKCGH) for stride in pages.stride()[:3]),
        host_PKCGH.shape[2], host_PKCGH.shape[3] // unit, pool_PKCGH.shape[3] // unit,
        unit * width * size))
    entry(_SOURCE, "penstock_gather")(args, torch.get_num_threads())
