"""linear: y = x W^T + b with a weight that is prepared once, of floats or packed. The contract, implementations.

    T tokens of the step   O outputs   I inputs
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.kernels.c import device
from penstock.kernels.gemm.linear import onednn, reference
from penstock.kernels.gemm.linear.panels import NATIVE
from penstock.kernels.op import DEVICES, Implementation, Op
from penstock.kernels.platform import KernelError, Platform
from penstock.kernels.triton.lazy import lazy
from penstock.kernels.triton.lazy import probe as lazy_probe
from penstock.kernels.types.packed import KINDS, Packed

Linear: TypeAlias = Callable[[Tensor], Tensor]
Pack: TypeAlias = Callable[[Tensor | Packed, Tensor | None], Linear]

DTYPES = (torch.float32, torch.bfloat16)
LEAST_FP8 = 89                  # the first architecture that converts e4m3



def probe_fp8(platform: Platform) -> str:
    """Raises Unusable. It is asked only where Triton is, and taken only by name: activations are quantised."""
    lazy_probe(platform)
    from penstock.kernels.gemm.linear.triton_fp8 import probe
    return probe(platform)


OP: Op[Pack] = Op("linear", (
    Implementation("c", NATIVE, NATIVE.probe, kinds=("u4", "u8")),
    Implementation("onednn", onednn.pack, onednn.probe),
    lazy("cuda", "penstock.kernels.gemm.linear.triton_packed:pack", device.probe, KINDS),
    lazy("triton", "penstock.kernels.gemm.linear.triton_packed:pack_in_triton", kinds=KINDS),
    lazy("fp8", "penstock.kernels.gemm.linear.triton_fp8:pack", probe_fp8, KINDS),
    Implementation("reference", reference.pack, "F.linear, of packed weights dequantised each time", DEVICES,
                   KINDS),
))


def kinds(platform: Platform, backend: str) -> tuple[str, ...]:
    """Return the kinds of packed weights that an implementation takes there."""
    old = platform.device == "cuda" and not any(
        f.startswith("sm_") and int(f[3:]) >= LEAST_FP8 for f in platform.features)
    return tuple(kind for kind in OP.get(backend).kinds if not (old and kind == "e4m3"))


def takes(cols: int, width: int) -> bool:
    """Whether a GPU's kernels read blocks of so many columns of a weight that has `width`."""
    return cols % 16 == 0 or cols >= width


def pack(weight: Tensor | Packed, bias_O: Tensor | None = None, *, backend: str) -> Linear:
    """Prepare a weight for `y_TO = linear(x_TI)`, for any number of rows T >= 1.

    weight      f32|bf16 [O, I], any strides; or packed, of a kind that `backend` takes. On a CPU integers, for
                float32 rows: they stay in four bits if all are below 16, else in eight, their factors as f16, so that
                weights are off by up to 1e-3 of the largest of their block, whose columns are even. On a GPU as they
                are, see `takes`, with x of f32 or bf16: products are summed in f32 and scaled there or, in blocks of
                few columns or for many rows, before, rounded to x's dtype
    bias_O      dtype of x, or None
    Returns     linear(x_TI) -> y_TO, dtype of x, dense; x_TI has the weight's dtype, if that is floats, and a
                dense last dimension. Rows are independent of each other up to rounding.
    Keeps       one copy of the weight: a reference to `weight` (reference, of packed ones those of a GPU) or the
                packed copy alone (others), so drop the original.
    Raises      KernelError for another dtype, kind or shape, or a backend that does not exist.
    """
    if isinstance(weight, Packed):
        kinds = OP.get(backend).kinds
        if weight.kind not in kinds or (bias_O is not None and bias_O.shape != weight.shape[:1]) or (
                not backend == "c" and not takes(weight.cols, weight.shape[1])):
            raise KernelError(f"linear={backend} takes packed weights of {', '.join(kinds) or 'no kind'}, on a GPU in "
                              "blocks of 16 columns or a multiple, and a bias of a number for each row: "
                              f"not {weight.kind} {tuple(weight.shape)} in {weight.rows} x {weight.cols}"
                              + ("" if bias_O is None else f" with a bias {tuple(bias_O.shape)}"))
        return OP.use(backend)(weight, bias_O)
    if weight.dim() != 2 or weight.dtype not in DTYPES:
        raise KernelError(f"linear packs two-dimensional weights of float32 or bfloat16, not "
                          f"{tuple(weight.shape)} of {weight.dtype}")
    if bias_O is not None and (bias_O.shape != weight.shape[:1] or bias_O.dtype != weight.dtype):
        raise KernelError(f"the bias of a {tuple(weight.shape)} {weight.dtype} weight is "
                          f"{tuple(bias_O.shape)} {bias_O.dtype}")
    return OP.use(backend)(weight, bias_O)
