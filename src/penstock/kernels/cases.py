"""What a case of an op is: inputs over the declared domain, the same for every implementation.

`tests/parity` and `bench/kernels.py` find the cases of each op as `kernels/<op>/cases.py`.
"""
from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.platform import Op


@dataclass(frozen=True, slots=True)
class Case:
    """`run(implementation.run)` makes the same inputs every time and returns the op's output.

    tolerance   largest |difference| to the reference, in units of the largest |value| of it
    """

    name: str
    run: Callable[[Any], Tensor]
    tolerance: float


# Rounding of a few operations: f32 sums in another order, bf16 keeps eight bits.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def cases_of(op: Op[Any]) -> list[Case]:
    """Every case of an op. Asserts that it has some."""
    module = importlib.import_module(f"penstock.kernels.{op.name}.cases")
    found: Iterable[Case] = module.cases()
    cases = list(found)
    assert cases, f"{op.name} has no cases"
    return cases
