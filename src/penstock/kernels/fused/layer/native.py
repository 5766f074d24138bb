"""A layer's small operations in C (`layer.c`): one call and one pass each.

torch's RMS norm is eight operations on a CPU: 9 to 14 us for one to eight tokens of 576, here 2 to 4.
"""
from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.c.build import library
from penstock.kernels.fused.layer import reference, stack
from penstock.kernels.fused.layer.latent import ByParts
from penstock.kernels.op import WrongResult
from penstock.kernels.platform import Platform

_SOURCE = Path(__file__).with_name("layer.c")
_P, _N, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_ARGUMENTS = {
    "norm": (_P, _P, _P, _P, _N, _N, ctypes.c_float), "rotate": (_P, _N, _P, _P, _N, _N, _N),
    "norm_rotate": (_P, _N, _P, _P, _P, _P, _N, _N, _N, _N, ctypes.c_float), "gate": (_P, _N, _P, _N, _N)}


def probe(platform: Platform) -> str:
    """Builds the operations and compares each with the reference on a few odd tokens."""
    _, compiler = library(_SOURCE, platform.cache)
    library(stack.SOURCE, platform.cache)
    native, definition = Native(), reference.LayerReference()
    generator = torch.Generator().manual_seed(0)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        h, delta, angle = (torch.randn(3, 38, generator=generator).to(dtype) for _ in range(3))
        outs = []
        for ops in (native, definition):
            sum_, turned = h.clone(), h.clone().view(3, 1, 38)
            heads = torch.stack((h, delta), 1)
            outs.append([ops.norm(sum_, delta, angle[0], 1e-5), sum_, turned, ops.gate(h), heads])
            ops.rotate(turned, angle[:, None], delta[:, None])
            ops.norm_rotate(heads, angle[:, None], delta[:, None], angle[0], angle[1], 1, 1e-5)
        gap = max(float((a.float() - b.float()).abs().max() / b.float().abs().max())
                  for a, b in zip(*outs, strict=True))
        if not gap <= tolerance:
            raise WrongResult(f"{compiler}: {dtype} differs by {gap:.2g} on a small case")
    return f"{platform.best('avx512_f', 'avx2', 'sve')}, {compiler}"


@functools.cache
def _function(name: str) -> Callable[..., None]:
    function = getattr(library(_SOURCE)[0], f"penstock_{name}")
    function.argtypes = (*_ARGUMENTS[name], _I, _I)             # ..., is it bf16, threads
    function.restype = None
    return function  # type: ignore[no-any-return]


def functions() -> tuple[Callable[..., None], ...]:
    """norm, rotate, norm_rotate and gate of layer.c, for a kernel that calls them."""
    return tuple(map(_function, _ARGUMENTS))


class Native(ByParts):
    def norm(self, h_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
        x_TD = torch.empty_like(h_TD)
        _function("norm")(
            h_TD.data_ptr(), None if delta_TD is None else delta_TD.data_ptr(),
            weight_D.data_ptr(), x_TD.data_ptr(), *h_TD.shape, eps,
            h_TD.dtype is torch.bfloat16, torch.get_num_threads())
        return x_TD

    def rotate(self, x_TMH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> None:
        _function("rotate")(
            x_TMH.data_ptr(), x_TMH.stride(0), cos_T1H.data_ptr(), sin_T1H.data_ptr(),
            *x_TMH.shape, x_TMH.dtype is torch.bfloat16, torch.get_num_threads())

    def norm_rotate(self, x_TMH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor, q_weight_H: Tensor,
                    k_weight_H: Tensor, num_heads: int, eps: float) -> None:
        _function("norm_rotate")(
            x_TMH.data_ptr(), x_TMH.stride(0), cos_T1H.data_ptr(), sin_T1H.data_ptr(),
            q_weight_H.data_ptr(), k_weight_H.data_ptr(), *x_TMH.shape, num_heads, eps,
            x_TMH.dtype is torch.bfloat16, torch.get_num_threads())

    def gate(self, gate_up_TJ: Tensor) -> Tensor:
        tokens, width = gate_up_TJ.shape[0], gate_up_TJ.shape[1] // 2
        out_TI = gate_up_TJ.new_empty(tokens, width)
        _function("gate")(
            gate_up_TJ.data_ptr(), gate_up_TJ.stride(0), out_TI.data_ptr(), tokens, width,
            gate_up_TJ.dtype is torch.bfloat16, torch.get_num_threads())
        return out_TI
