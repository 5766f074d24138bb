"""store on a CUDA device, in Triton: imported with the first call, not before."""
from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from penstock.kernels.c.build import triton_version
from penstock.kernels.kv.store.spec import StoreAt
from penstock.kernels.platform import Platform
from penstock.kernels.types.hot import HotLayer


def probe(platform: Platform) -> str:
    return f"Triton {triton_version()}"


def store(values: Sequence[Tensor], at: StoreAt, device_PKCGH: Tensor, host_PKCGH: Tensor | None = None,
          hot: HotLayer | None = None, bounds_PK2SH: Tensor | None = None) -> None:
    from penstock.kernels.kv.store import triton_places
    triton_places.store(values, at, device_PKCGH, host_PKCGH, hot, bounds_PK2SH)
