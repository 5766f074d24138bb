"""Packed weights of linear: every kind, odd sizes, blocks that are cut at edges, row counts from one to hundreds."""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from cases import DTYPES, TOLERANCE, Case
from penstock.kernels.gemm.linear import Pack
from penstock.kernels.types.packed import E4M3, Kind, Packed

# kind, outputs, inputs, rows and columns of a block; offsets: of codes, added after scaling, or none
_SHAPES: tuple[tuple[Kind, int, int, int, int, str], ...] = (
    ("e4m3", 1, 1, 128, 128, ""), ("e4m3", 37, 19, 4, 16, ""), ("e4m3", 64, 576, 128, 128, ""),
    ("e4m3", 300, 130, 1, 64, ""), ("e4m3", 129, 257, 100, 48, ""), ("e4m3", 40, 96, 1, 32, ""),
    ("e4m3", 37, 100, 1, 100, ""), ("e4m3", 37, 100, 37, 100, ""),
    ("u4", 1, 2, 1, 2, ""), ("u4", 37, 50, 1, 16, "code"), ("u4", 64, 576, 1, 32, ""), ("u4", 130, 320, 1, 64, "code"),
    ("u4", 70, 512, 1, 128, "code"), ("u4", 33, 290, 1, 290, "code"), ("u4", 20, 96, 1, 48, ""),
    ("u4", 37, 160, 1, 32, "shift"), ("u4", 16, 256, 1, 256, ""), ("u4", 37, 448, 1, 128, "code"),
    ("e2m1", 37, 50, 1, 16, ""), ("e2m1", 37, 320, 1, 32, ""), ("e2m1", 20, 192, 1, 16, ""),
    ("e2m1", 64, 288, 1, 32, ""), ("e2m1", 9, 256, 3, 128, ""),
    ("u8", 37, 51, 1, 16, "code"), ("u8", 64, 577, 1, 577, ""), ("u8", 50, 256, 1, 128, "shift"),
    ("u8", 20, 96, 20, 96, "code"))
_ROWS = (1, 2, 9, 17, 65, 130)


def cases(device: str = "cpu") -> Iterator[Case]:
    for name, dtype in DTYPES:
        for i, shape in enumerate(_SHAPES):
            for rows in _ROWS if shape[0] == "e4m3" else (_ROWS[i % 3], _ROWS[3 + i % 3]):
                yield Case(f"{name}-{' '.join(map(str, shape))}-{rows}", partial(_run, device, dtype, shape, rows),
                           TOLERANCE[dtype], kind=shape[0])
        for kind, cols in (("e4m3", 64), ("u4", 32)):
            yield Case(f"{name}-{kind} more outputs than a GPU has blocks", partial(
                _run, device, dtype, (kind, 4500, 640, 1, cols, ""), 9), TOLERANCE[dtype], kind=kind)
        yield Case(f"{name}-the smallest elements", partial(_smallest, device, dtype), TOLERANCE[dtype], kind="e4m3")
        yield Case(f"{name}-every code", partial(_every, device, dtype), TOLERANCE[dtype], kind="e2m1")


def weight_of(kind: Kind, outputs: int, inputs: int, rows: int, cols: int, offset: str = "",
              device: str = "cpu") -> Packed:
    """Elements of all sizes that there are, scales that differ much from block to block, in 16 bits where groups are
    small. What follows the last row in memory is no number."""
    generator = torch.Generator().manual_seed(outputs * 1000 + inputs)
    four = kind if kind in ("u4", "e2m1") else None
    stored = inputs // 2 if four else inputs
    if kind == "e4m3":
        elements = torch.randn(outputs, inputs, generator=generator).mul_(60).clamp_(-448, 448).to(E4M3)
    else:
        elements = torch.randint(0, 256, (outputs, stored), generator=generator, dtype=torch.uint8)
    shape = -(-outputs // rows), -(-inputs // cols)
    scales = torch.rand(*shape, generator=generator).add_(0.01)
    if cols <= 64 and kind != "e4m3" and offset != "shift":
        scales = scales.to(torch.bfloat16 if kind == "e2m1" else torch.float16)
    offsets = None
    if offset == "code":
        offsets = torch.randint(0, 17 if four else 257, shape, generator=generator).short()
    elif offset == "shift":
        offsets = torch.randn(*shape, generator=generator) * (8 if four else 128)
    return Packed(*(_guarded(part.to(device)) for part in (elements, scales)), rows, cols,
                  None if offsets is None else offsets.to(device), four)


def _guarded(part: Tensor) -> Tensor:
    """The same in front of 4,096 bytes that are NaN in floats of eight bits or more."""
    raw = part.contiguous().view(torch.uint8) if part.dtype == E4M3 else part.contiguous()
    width = raw.shape[1] * raw.element_size()
    rows = -(-4096 // width)
    whole = torch.full((len(raw) + rows, width), 127, dtype=torch.uint8, device=raw.device)
    whole = whole.view(raw.dtype) if raw.dtype != torch.uint8 else whole
    if raw.dtype.is_floating_point:
        whole[len(raw):] = torch.nan
    whole[:len(raw)] = raw
    return whole[:len(raw)].view(part.dtype)


def _run(device: str, dtype: torch.dtype, shape: tuple[Kind, int, int, int, int, str], rows: int,
         pack: Pack) -> Tensor:
    """x is some columns of a wider one; an odd number of rows has a bias."""
    outputs, inputs = shape[1:3]
    generator = torch.Generator().manual_seed(outputs + rows)
    x = torch.randn(rows, inputs + 24, generator=generator).to(device, dtype)[:, 8:8 + inputs]
    bias = torch.randn(outputs, generator=generator).to(device, dtype) * 50 if rows % 2 else None
    return pack(weight_of(*shape, device), bias)(x)


def _smallest(device: str, dtype: torch.dtype, pack: Pack) -> Tensor:
    """Of elements whose exponent is 0 alone, in a float32 that is brought to 1."""
    codes = (torch.arange(24 * 128) % 7 + 1).to(torch.uint8).view(24, 128).view(E4M3)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    return pack(Packed(codes, torch.full((1, 1), 512.0), 128, 128).to(device), None)(x)


def _every(device: str, dtype: torch.dtype, pack: Pack) -> Tensor:
    """Each element of four bits by itself: one input is not 0. Scales are powers of two, the smallest there is too."""
    codes = torch.arange(16 * 16).to(torch.uint8).view(16, 16)
    scales = torch.tensor([1.0, 2.0 ** -100]).repeat(8)[:, None].bfloat16()
    x = torch.eye(32).to(device, dtype)
    return pack(Packed(codes, scales, 1, 32, four="e2m1").to(device), None)(x)
