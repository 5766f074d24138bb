"""What a case of an op is: inputs over the declared domain, the same for every implementation.

One module an op, named for it: `cases(device)` is what `tests/parity` runs, `workloads()` is what
`bench/kernels.py` times.
"""
from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.kernels.op import Implementation, Op

Output: TypeAlias = "Tensor | tuple[Tensor, ...]"


@dataclass(frozen=True, slots=True)
class Case:
    """`run(implementation.run)` makes the same inputs every time, on the device of the case, and
    returns the op's output or outputs.

    tolerance   largest |difference| to the reference, in units of the largest |value| of it
    kind        of packed weights, for implementations that take it; "": of floats
    check       why an output is not what the reference's is, or '': where several outputs are right. It
                gets both on the CPU; None: by tolerance
    """

    name: str
    run: Callable[[Any], Output]
    tolerance: float = 0.0
    check: Callable[[Any, Any], str] | None = None
    kind: str = ""

    def wrong(self, out: Output, want: Output) -> str:
        """Why `out` is not what the reference says, or ''."""
        if self.check is not None:
            why = self.check(_on_cpu(out), _on_cpu(want))
            return why and f"{self.name}: {why}"
        outs, wants = (x if isinstance(x, tuple) else (x,) for x in (out, want))
        if len(outs) != len(wants):
            return f"{self.name}: {len(outs)} outputs for {len(wants)}"
        for a, b in zip(outs, wants, strict=True):
            if a.shape != b.shape or a.dtype != b.dtype or not a.is_contiguous():
                return f"{self.name}: {tuple(a.shape)} {a.dtype} strides {a.stride()}"
            gap, most = (a.cpu().double() - b.cpu().double()).abs().max(), b.cpu().double().abs().max()
            if not gap <= self.tolerance * most:
                return f"{self.name}: differs by {gap:.2g} where the largest is {most:.2g}"
        return ""


def _on_cpu(out: Output) -> Output:
    return tuple(x.cpu() for x in out) if isinstance(out, tuple) else out.cpu()


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


DTYPES = (("float32", torch.float32), ("bfloat16", torch.bfloat16))
# Rounding of a few operations: f32 sums in another order, bf16 keeps eight bits.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
# Of what MLA KV entries and indexer keys may be: name, dtype of queries, dtype of pages; uint8 is `types.fp8`.
FORMATS = (("float32", torch.float32, torch.float32),
           ("float32 over bfloat16", torch.float32, torch.bfloat16),
           ("float32 over fp8", torch.float32, torch.uint8), ("bfloat16", torch.bfloat16, torch.bfloat16),
           ("bfloat16 over fp8", torch.bfloat16, torch.uint8))


def unseen(shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Values that no query sees: NaN, infinity and minus infinity by turns."""
    turns = torch.tensor([float("nan"), float("inf"), float("-inf")], dtype=dtype, device=device)
    num = math.prod(shape)
    return turns.repeat(num // 3 + 1)[:num].view(*shape)


def cases_of(op: Op[Any], device: str = "cpu") -> list[Case]:
    """Every case of an op, with inputs on `device`. Asserts that it has some."""
    found: Iterable[Case] = _module(op).cases(device)
    cases = list(found)
    assert cases, f"{op.name} has no cases"
    return cases


def takes(implementation: Implementation[Any], case: Case) -> bool:
    """Whether an implementation has the case: packed weights are on a GPU, and a CPU has tests of its own."""
    return not case.kind or (case.kind in implementation.kinds and "cuda" in implementation.devices)


def workloads_of(op: Op[Any]) -> list[Workload]:
    """What `bench/kernels.py` times of an op. Asserts that there is something."""
    found: Iterable[Workload] = _module(op).workloads()
    workloads = list(found)
    assert workloads, f"{op.name} has no workloads"
    return workloads


def _module(op: Op[Any]) -> Any:
    """Return the module of the op's cases, beside this one."""
    return importlib.import_module(f"{__name__}.{op.name}")
