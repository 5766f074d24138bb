"""What a case of an op is: inputs over the declared domain, the same for every implementation.

`tests/parity` finds the cases of each op in `kernels/<op>/cases.py`, `bench/kernels.py` its
workloads.
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


@dataclass(frozen=True, slots=True)
class Workload:
    """Something worth timing. `prepare(implementation.run)` returns the call for layer 0, 1, ...

    num_bytes, num_flops   of one call, that no implementation can avoid
    layers                 calls that touch different memory, so that caches do not flatter
    """

    name: str
    prepare: Callable[[Any], Callable[[int], object]]
    num_bytes: int
    num_flops: int
    layers: int = 1


# Rounding of a few operations: f32 sums in another order, bf16 keeps eight bits.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def cases_of(op: Op[Any]) -> list[Case]:
    """Every case of an op. Asserts that it has some."""
    found: Iterable[Case] = _module(op).cases()
    cases = list(found)
    assert cases, f"{op.name} has no cases"
    return cases


def workloads_of(op: Op[Any]) -> list[Workload]:
    """What `bench/kernels.py` times of an op. Asserts that there is something."""
    found: Iterable[Workload] = _module(op).workloads()
    workloads = list(found)
    assert workloads, f"{op.name} has no workloads"
    return workloads


def _module(op: Op[Any]) -> Any:
    return importlib.import_module(f"penstock.kernels.{op.name}.cases")
