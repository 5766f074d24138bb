"""Inputs of linear: odd sizes, row counts from one to hundreds, strided weights and rows."""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from penstock.kernels.cases import TOLERANCE, Case
from penstock.kernels.linear import DTYPES, Pack

_SHAPES = ((1, 1), (37, 19), (64, 576), (576, 64), (1000, 33))
_ROWS = (1, 2, 3, 8, 17, 130)


def cases() -> Iterator[Case]:
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for outputs, inputs in _SHAPES:
            for rows in _ROWS:
                yield Case(f"{name}-{outputs}x{inputs}-{rows}",
                           partial(_run, dtype, outputs, inputs, rows, rows % 2 == 0, "dense"),
                           TOLERANCE[dtype])
        for layout in ("weight columns", "weight rows", "weight transposed", "rows of a wider x"):
            yield Case(f"{name}-{layout}", partial(_run, dtype, 48, 40, 5, True, layout),
                       TOLERANCE[dtype])


def _run(dtype: torch.dtype, outputs: int, inputs: int, rows: int, with_bias: bool, layout: str,
         pack: Pack) -> Tensor:
    generator = torch.Generator().manual_seed(outputs * 1000 + inputs + rows)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)
    weight = {"weight columns": lambda: randn(outputs, 2 * inputs)[:, ::2],
              "weight rows": lambda: randn(2 * outputs, inputs)[::2],
              "weight transposed": lambda: randn(inputs, outputs).t(),
              }.get(layout, lambda: randn(outputs, inputs))()
    bias = randn(outputs) if with_bias else None
    x = (randn(rows, inputs + 24)[:, 8:8 + inputs] if layout == "rows of a wider x"
         else randn(rows, inputs))
    return pack(weight, bias)(x)
