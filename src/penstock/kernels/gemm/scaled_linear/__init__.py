"""scaled_linear: y = x W^T + b with a weight that stays in block-scaled fp8. Contract, implementations.

    T tokens of the step   O outputs   I inputs
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from penstock.kernels.c import device
from penstock.kernels.gemm.scaled_linear import reference
from penstock.kernels.op import DEVICES, Implementation, Op, Unusable
from penstock.kernels.platform import KernelError, Platform
from penstock.kernels.triton.lazy import lazy
from penstock.kernels.triton.lazy import probe as lazy_probe
from penstock.kernels.types.packed import Packed

Linear: TypeAlias = Callable[[Tensor], Tensor]
Pack: TypeAlias = Callable[[Packed, Tensor | None], Linear]

_LEAST = 89                     # the first architecture that converts e4m3


def _probe(platform: Platform) -> str:
    found = lazy_probe(platform)
    if not any(f.startswith("sm_") and int(f[3:]) >= _LEAST for f in platform.features):
        raise Unusable(f"{platform.gpu} has no fp8 (sm_{_LEAST})")
    return found


OP: Op[Pack] = Op("scaled_linear", (
    lazy("cuda", "penstock.kernels.gemm.scaled_linear.triton_scaled:pack", device.probe),
    lazy("triton", "penstock.kernels.gemm.scaled_linear.triton_scaled:pack_in_triton", _probe),
    Implementation("reference", reference.pack, reference.probe, DEVICES),
))


def takes(cols: int) -> bool:
    """Whether kernels read blocks of so many columns: products are made of tiles that each have one scale."""
    return cols % 16 == 0


def pack(weight: Packed, bias_O: Tensor | None = None, *, backend: str) -> Linear:
    """Prepare a weight for `y_TO = linear(x_TI)`, for any number of rows T >= 1.

    weight      its blocks have columns that are a multiple of 16
    bias_O      dtype of x, or None
    Returns     linear(x_TI) -> y_TO, dtype of x, dense; x_TI is f32|bf16, with a dense last dimension.
                Elements are exact in bf16; products are summed in f32, and scaled there or, of many
                rows, before, rounded to x's dtype: in another order of up to 16, up to 64 and more.
    Keeps       elements and scales as they are: no other copy of the weight.
    Raises      KernelError for another shape, or a backend that does not exist.
    """
    if not takes(weight.cols) or (bias_O is not None and bias_O.shape != weight.shape[:1]):
        raise KernelError("scaled_linear takes blocks of 16 columns or a multiple, and a bias of a number "
                          f"for each row: not {tuple(weight.shape)} in {weight.rows} x {weight.cols}"
                          + ("" if bias_O is None else f" with a bias {tuple(bias_O.shape)}"))
    return OP.use(backend)(weight, bias_O)
