"""oneDNN's prepacked linear, reached through two ops that torch keeps for its own compiler.

The plain F.linear of one to eight rows reads weights at 11 to 20 GB/s on a CPU whose memory gives
60; the blocked layout reads them at 35 to 55 and is no slower for thousands of rows. The ops are
private, so the probe runs them on a small case and compares before anything depends on them.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.op import Unusable, WrongResult
from penstock.kernels.platform import Platform
from penstock.kernels.types.packed import Packed


def probe(platform: Platform) -> str:
    """Tries both ops, both dtypes, on an odd shape. Raises Unusable with what went wrong."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        raise Unusable("this torch is built without oneDNN")
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(37, 19, generator=generator)
    bias_O = torch.randn(37, generator=generator)
    x_TI = torch.randn(3, 19, generator=generator)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.15)):
        w, b, x = weight_OI.to(dtype), bias_O.to(dtype), x_TI.to(dtype)
        try:
            gap = (pack(w, b)(x).float() - F.linear(x.float(), w.float(), b.float())).abs().max()
        except (AttributeError, RuntimeError, NotImplementedError) as error:
            raise Unusable(f"torch {platform.torch}: {str(error).splitlines()[0]}") from None
        if not gap <= tolerance:
            raise WrongResult(
                f"torch {platform.torch}: {dtype} differs by {gap:.2g} on a small case")
    return platform.best("amx_bf16", "avx512_bf16", "avx512_f", "avx2", "sve")


def pack(weight_OI: Tensor | Packed, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    assert isinstance(weight_OI, Tensor), "takes no packed weights"
    # No row count is given: with one, f32 takes a layout that is 2x slower from two rows on
    # (bench/kernels.py, T = 1, 2, 8, 64, 512).
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), None)
    run = torch.ops.mkldnn._linear_pointwise.default

    def linear(x_TI: Tensor) -> Tensor:
        y_TO: Tensor = run(x_TI, packed, bias_O, "none", [], "")
        return y_TO
    return linear
