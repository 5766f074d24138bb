"""Inputs of linear: odd sizes, row counts from one to hundreds, strided weights and rows."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from cases import TOLERANCE, Case, Workload, packed_linear
from penstock.kernels.gemm.linear import DTYPES, Pack

_SHAPES = ((1, 1), (37, 19), (64, 576), (576, 64), (1000, 33))
_ROWS = (1, 2, 3, 8, 17, 130)


def cases(device: str) -> Iterator[Case]:
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for outputs, inputs in _SHAPES:
            for rows in _ROWS:
                yield Case(f"{name}-{outputs}x{inputs}-{rows}",
                           partial(_run, device, dtype, outputs, inputs, rows, rows % 2 == 0, "dense"),
                           TOLERANCE[dtype])
        for layout in ("weight columns", "weight rows", "weight transposed", "rows of a wider x"):
            yield Case(f"{name}-{layout}", partial(_run, device, dtype, 48, 40, 5, True, layout),
                       TOLERANCE[dtype])
    yield from packed_linear.cases(device)


def _run(device: str, dtype: torch.dtype, outputs: int, inputs: int, rows: int, with_bias: bool,
         layout: str, pack: Pack) -> Tensor:
    generator = torch.Generator().manual_seed(outputs * 1000 + inputs + rows)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)
    weight = {"weight columns": lambda: randn(outputs, 2 * inputs)[:, ::2],
              "weight rows": lambda: randn(2 * outputs, inputs)[::2],
              "weight transposed": lambda: randn(inputs, outputs).t(),
              }.get(layout, lambda: randn(outputs, inputs))()
    bias = randn(outputs) if with_bias else None
    x = (randn(rows, inputs + 24)[:, 8:8 + inputs] if layout == "rows of a wider x"
         else randn(rows, inputs))
    return pack(weight, bias)(x)


def workloads() -> Iterator[Workload]:
    """SmolLM2-135M's gate and up projection, over more layers than fit into a cache."""
    outputs, inputs, layers = 3072, 576, 16
    for dtype in DTYPES:
        for rows in (1, 8, 64, 512):
            yield Workload(
                f"{str(dtype).removeprefix('torch.')} {outputs}x{inputs}, {rows} rows",
                partial(_prepare, dtype, outputs, inputs, rows, layers),
                dtype.itemsize * (outputs * inputs + rows * (outputs + inputs)),
                2 * rows * outputs * inputs, layers)


def _prepare(dtype: torch.dtype, outputs: int, inputs: int, rows: int, layers: int,
             pack: Pack) -> Callable[[int], object]:
    linears = [pack(torch.randn(outputs, inputs).to(dtype), None) for _ in range(layers)]
    x = torch.randn(rows, inputs).to(dtype)
    return lambda layer: linears[layer](x)
