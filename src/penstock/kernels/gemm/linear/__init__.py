"""linear: y = x W^T + b with a weight that is packed once. The contract and its implementations.

    T tokens of the step   O outputs   I inputs
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.kernels.gemm.linear import onednn, reference
from penstock.kernels.gemm.linear.panels import NATIVE
from penstock.kernels.op import DEVICES, Implementation, Op
from penstock.kernels.platform import KernelError
from penstock.kernels.triton.lazy import lazy
from penstock.kernels.types.packed import Packed

Linear: TypeAlias = Callable[[Tensor], Tensor]
Pack: TypeAlias = Callable[[Tensor, Tensor | None], Linear]

DTYPES = (torch.float32, torch.bfloat16)

OP: Op[Pack] = Op("linear", (
    Implementation("c", NATIVE, NATIVE.probe),
    Implementation("onednn", onednn.pack, onednn.probe),
    lazy("triton", "penstock.kernels.gemm.linear.triton_rows:pack"),
    Implementation("reference", reference.pack, "F.linear", DEVICES),
))


def pack(weight_OI: Tensor | Packed, bias_O: Tensor | None = None, *, backend: str) -> Linear:
    """Prepare a weight for `y_TO = linear(x_TI)`, for any number of rows T >= 1.

    weight_OI   f32|bf16, any strides; or packed codes of u8, for float32 rows: they stay in four bits if all
                are below 16, else in eight, their factors as f16, so that weights are off by up to 1e-3 of the
                largest of their block, whose columns are even. It needs what `c` needs, whatever `backend` is
    bias_O      same dtype, or None
    Returns     linear(x_TI) -> y_TO, dtype of the weight, dense; x_TI has the weight's dtype and a
                dense last dimension. Rows are independent of each other up to rounding.
    Keeps       one copy of the weight: a reference to `weight_OI` (reference) or the packed copy
                alone (others), so drop the original.
    Raises      KernelError for another dtype or shape, or a backend that does not exist.
    """
    if isinstance(weight_OI, Packed):
        return NATIVE.codes(weight_OI, bias_O)
    if weight_OI.dim() != 2 or weight_OI.dtype not in DTYPES:
        raise KernelError(f"linear packs two-dimensional weights of float32 or bfloat16, not "
                          f"{tuple(weight_OI.shape)} of {weight_OI.dtype}")
    if bias_O is not None and (bias_O.shape != weight_OI.shape[:1]
                               or bias_O.dtype != weight_OI.dtype):
        raise KernelError(f"the bias of a {tuple(weight_OI.shape)} {weight_OI.dtype} weight is "
                          f"{tuple(bias_O.shape)} {bias_O.dtype}")
    return OP.use(backend)(weight_OI, bias_O)
