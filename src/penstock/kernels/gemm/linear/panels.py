"""linear in C (`panels.c`): weights as they are stored, in panels of a few outputs, sums in f32.

A row's result does not depend on the rows beside it, so batching changes nothing in it. Decoding reads
bf16 at half of f32's bytes on any CPU: a shift makes it f32, AVX512-BF16 and AMX take it as it is. Prefill
multiplies with the same panels.
"""
from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.c.build import entry, library
from penstock.kernels.op import Unusable, WrongResult
from penstock.kernels.platform import KernelError, Platform
from penstock.kernels.types.packed import Packed

SOURCE = Path(__file__).with_name("panels.c")
_P, _N = ctypes.c_void_p, ctypes.c_int64


class Args(ctypes.Structure):
    """`Linear` of calls.h."""

    _fields_ = [("weight", _P), ("bias", _P), ("x", _P), ("y", _P), ("rows", _N), ("outputs", _N),
                ("inputs", _N), ("stride", _N), ("bf16", _N), ("scales", _P), ("bits", _N), ("group", _N)]


class Panels:
    """`pack` compiled for one instruction set: 'native', 'avx512' (native without AMX), 'avx2' or 'plain'."""

    def __init__(self, isa: str) -> None:
        self._isa = isa

    def probe(self, platform: Platform) -> str:
        """Builds it and compares every kind of weight on an odd shape. Raises Unusable."""
        if self._isa == "avx2" and not {"avx2", "fma3"} <= set(platform.features):
            raise Unusable("this CPU has no AVX2 with FMA")
        if self._isa == "avx512" and "amx_bf16" not in platform.features:
            raise Unusable("this CPU has no AMX, without which it is 'native'")
        _, compiler = library(SOURCE, platform.cache, self._isa)
        for what, got, want, tolerance in self._trials():
            gap = float((got.float() - want).abs().max() / want.abs().max())
            if not gap <= tolerance:
                raise WrongResult(f"{compiler}: {what} differs by {gap:.2g} on a small case")
        best = {"native": platform.best("avx512_bf16", "avx512_f", "avx2", "sve")}.get(self._isa, self._isa)
        return f"{'amx_bf16' if self._ask('penstock_tiles') else best}, {compiler}"

    def _trials(self) -> Iterator[tuple[str, Tensor, Tensor, float]]:
        """(weights, result, what it should be, tolerance) of rows as in decoding and as in a prompt."""
        generator = torch.Generator().manual_seed(0)
        weight_OI, bias_O, x_TI, scale_BOG = (torch.randn(*shape, generator=generator) for shape in (
            (37, 32), (37,), (17, 32), (2, 37, 2)))
        scale_OG, shift_OG = scale_BOG.half().float()
        for rows in (3, 17):
            for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
                w, b, x = weight_OI[:, :19].to(dtype), bias_O.to(dtype), x_TI[:rows, :19].to(dtype)
                yield str(dtype), self(w, b)(x), F.linear(x.float(), w.float(), b.float()), tolerance
            for most in (16, 256):
                code_OI = torch.randint(0, most, (37, 32), dtype=torch.uint8, generator=generator)
                weight = Packed(code_OI, scale_OG, 1, 16, shift_OG)
                want = F.linear(x_TI[:rows], weight.floats(), bias_O)
                yield f"codes below {most}", self.codes(weight, bias_O)(x_TI[:rows]), want, 1e-5

    def __call__(self, weight_OI: Tensor | Packed, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
        if isinstance(weight_OI, Packed):
            return self.codes(weight_OI, bias_O)
        width, dtype = self._ask("penstock_panel"), weight_OI.dtype
        pair, whole = (2, self._ask("penstock_whole")) if dtype is torch.bfloat16 else (1, 1)
        panels_PGWB = _panels(weight_OI, width, pair, whole)
        return self._linear(weight_OI.shape, dtype, panels_PGWB, bias_O)

    def codes(self, weight: Packed, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
        """Implement `linear.pack` of codes of u8."""
        weight = weight.wide()
        assert weight.kind == "u8", "codes of e4m3 are floats on a CPU"
        weight = weight.finer(1, math.gcd(weight.cols, weight.shape[1]))
        width, nibbles = self._ask("penstock_panel"), int(weight.code_OI.max()) < 16
        panels_PGWB = _panels(weight.code_OI, width, *((2, 2) if nibbles else (1, 1)))
        if nibbles:
            panels_PGWB = panels_PGWB[..., 0] | panels_PGWB[..., 1] << 4
        parts = weight.rounded(15 if nibbles else 255)
        scales = [_panels(part_OG, width, 1, 1)[..., 0] for part_OG in parts]
        scales_PGBW = torch.stack(scales, 2).to(torch.float16)
        return self._linear(weight.shape, torch.float32, panels_PGWB, bias_O, scales_PGBW,
                            4 if nibbles else 8, weight.cols)

    def _ask(self, name: str) -> int:
        """One of the numbers that packing goes by."""
        return entry(SOURCE, name, isa=self._isa)(None, 0)

    def _linear(self, shape: Sequence[int], dtype: torch.dtype, panels: Tensor, bias_O: Tensor | None,
                scales: Tensor | None = None, bits: int = 0, group: int = 0) -> Product:
        run = entry(SOURCE, "penstock_linear", isa=self._isa)
        return Product(run, shape, dtype, panels, bias_O, scales, bits, group)


class Product:
    """`y_TO = product(x_TI)` of one packed weight. For a kernel that calls it itself: `run` is the function,
    `args` its argument but for `x`, `y`, `rows` and `stride`."""

    def __init__(self, run: Callable[..., int], shape: Sequence[int], dtype: torch.dtype, panels: Tensor,
                 bias_O: Tensor | None, scales: Tensor | None, bits: int, group: int) -> None:
        bias = None if bias_O is None else bias_O.contiguous()
        self._held = panels, bias, scales           # `args` has only their addresses
        self.run, self.dtype = run, dtype
        self.outputs, self.inputs = shape
        self.args = Args(weight=panels.data_ptr(), bias=None if bias is None else bias.data_ptr(),
                         outputs=self.outputs, inputs=self.inputs, bf16=dtype is torch.bfloat16,
                         scales=None if scales is None else scales.data_ptr(), bits=bits, group=group)

    def __call__(self, x_TI: Tensor) -> Tensor:
        rows, inputs = x_TI.shape
        assert x_TI.dtype is self.dtype and inputs == self.inputs and (x_TI.stride(1) == 1 or inputs == 1)
        y_TO = torch.empty(rows, self.outputs, dtype=self.dtype)
        args = Args.from_buffer_copy(self.args)
        args.x, args.y, args.rows, args.stride = x_TI.data_ptr(), y_TO.data_ptr(), rows, x_TI.stride(0)
        if self.run(ctypes.byref(args), torch.get_num_threads()):
            raise KernelError(f"no memory for {rows} rows of {inputs} inputs")
        return y_TO


def _panels(weight_OI: Tensor, width: int, pair: int, whole: int) -> Tensor:
    """[O / width, I / pair, width, pair] of it, zero where it ends: input i of output o is
    [o // width, i // pair, o % width, i % pair]. I is rounded up to a multiple of `whole`."""
    outputs, inputs = weight_OI.shape
    count, groups = -(-outputs // width), -(-inputs // whole) * (whole // pair)
    panels_PGWB = torch.zeros(count, groups, width, pair, dtype=weight_OI.dtype)
    for p in range(count):                      # one at a time: no second copy of a large weight
        rows_WI = weight_OI[p * width : (p + 1) * width]
        for b in range(pair):
            part_GW = rows_WI[:, b::pair].T
            panels_PGWB[p, : part_GW.shape[0], : part_GW.shape[1], b] = part_GW
    return panels_PGWB


NATIVE = Panels("native")
