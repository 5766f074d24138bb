"""The definition of `gather`: one unit at a time."""
from __future__ import annotations

from torch import Tensor


def gather(host_PKCGH: Tensor, pool_PKCGH: Tensor, miss_E3: Tensor, num_1: Tensor, *,
           unit: int, beside: bool = False) -> None:
    of_host, of_pool = (pages.shape[3] // unit for pages in (host_PKCGH, pool_PKCGH))
    for head, source, target in miss_E3[:int(num_1)].tolist():
        a, b = source % of_host * unit, target % of_pool * unit
        pool_PKCGH[target // of_pool, head, :, b:b + unit] = (
            host_PKCGH[source // of_host, head, :, a:a + unit])
