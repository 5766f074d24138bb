"""Inputs of scaled_linear: odd sizes, blocks that are cut at edges, row counts from one to hundreds."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from cases import DTYPES, TOLERANCE, Case, Workload
from penstock.kernels.gemm.scaled_linear import Pack
from penstock.kernels.types.packed import E4M3, Packed

# outputs, inputs, rows and columns of a block
_SHAPES = ((1, 1, 128, 128), (37, 19, 4, 16), (64, 576, 128, 128), (300, 130, 1, 64), (129, 257, 100, 48))
_ROWS = (1, 2, 9, 17, 65, 130)


def cases(device: str = "cpu") -> Iterator[Case]:
    for name, dtype in DTYPES:
        for shape in _SHAPES:
            for rows in _ROWS:
                yield Case(f"{name}-{'x'.join(map(str, shape))}-{rows}",
                           partial(_run, device, dtype, shape, rows), TOLERANCE[dtype])
        yield Case(f"{name}-more outputs than a GPU has blocks",
                   partial(_run, device, dtype, (4500, 640, 96, 64), 9), TOLERANCE[dtype])
        yield Case(f"{name}-the smallest elements", partial(_smallest, device, dtype), TOLERANCE[dtype])


def weight_of(outputs: int, inputs: int, rows: int, cols: int, device: str = "cpu") -> Packed:
    """Elements of all sizes that e4m3 has, and scales that differ much from block to block."""
    generator = torch.Generator().manual_seed(outputs * 1000 + inputs)
    elements = torch.randn(outputs, inputs, generator=generator).mul_(60).clamp_(-448, 448).to(E4M3)
    scales = torch.rand(-(-outputs // rows), -(-inputs // cols), generator=generator).add_(0.01)
    return Packed(elements, scales, rows, cols).to(device)


def _run(device: str, dtype: torch.dtype, shape: tuple[int, int, int, int], rows: int, pack: Pack) -> Tensor:
    """x is some columns of a wider one; an odd number of rows has a bias."""
    outputs, inputs = shape[:2]
    generator = torch.Generator().manual_seed(outputs + rows)
    x = torch.randn(rows, inputs + 24, generator=generator).to(device, dtype)[:, 8:8 + inputs]
    bias = torch.randn(outputs, generator=generator).to(device, dtype) * 50 if rows % 2 else None
    return pack(weight_of(*shape, device), bias)(x)


def _smallest(device: str, dtype: torch.dtype, pack: Pack) -> Tensor:
    """Of elements whose exponent is 0 alone, in a float32 that is brought to 1."""
    codes = (torch.arange(24 * 128) % 7 + 1).to(torch.uint8).view(24, 128).view(E4M3)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    return pack(Packed(codes, torch.full((1, 1), 512.0), 128, 128).to(device), None)(x)


def workloads() -> Iterator[Workload]:
    """A projection of Qwen3-30B-A3B's attention in blocks of 128 x 128."""
    outputs, inputs = 4096, 2048
    for rows in (1, 8, 512):
        yield Workload(f"bfloat16 {outputs}x{inputs}, {rows} rows", partial(_prepare, outputs, inputs, rows),
                       outputs * inputs + 2 * rows * (outputs + inputs), 2 * rows * outputs * inputs, 4)


def _prepare(outputs: int, inputs: int, rows: int, pack: Pack) -> Callable[[int], object]:
    linears = [pack(weight_of(outputs, inputs, 128, 128), None) for _ in range(4)]
    x = torch.randn(rows, inputs).bfloat16()
    return lambda layer: linears[layer](x)
