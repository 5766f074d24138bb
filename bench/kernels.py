"""Every implementation of every op, timed, beside what this machine's memory and cores can do.

Bounds are measured, not read off a data sheet: a copy of 256 MiB for bytes, the best large matrix
product of the type for flops. Reads from a cache may exceed the first. Times are the least of
`--repeats` rounds over all layers of a workload.

    python bench/kernels.py --threads 2
    python bench/kernels.py --only paged_attention --skip reference
"""
from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.kernels.gemm import linear
from penstock.kernels.op import Op, Unusable
from penstock.kernels.platform import probe
from penstock.kernels.registry import OPS

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kernels"))
from cases import workloads_of


def least_seconds(call: Callable[[int], object], layers: int, repeats: int) -> float:
    """Seconds of one call: the best of `repeats` rounds of at least a millisecond each."""
    call(0)
    started = time.perf_counter()
    call(0)
    rounds = math.ceil(1e-3 / (layers * max(1e-7, time.perf_counter() - started)))
    best = math.inf
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(rounds):
            for i in range(layers):
                call(i)
        best = min(best, (time.perf_counter() - started) / (rounds * layers))
    return best


def copy_gb_s(repeats: int) -> float:
    """Bytes read and written by a large copy, GB/s."""
    a, b = (torch.ones(64 << 20) for _ in range(2))
    return 2 * a.nbytes / least_seconds(lambda _: a.copy_(b), 1, repeats) / 1e9


def gemm_gflop_s(dtype: torch.dtype, repeats: int) -> float:
    """The best product of 1024 x 2048 with 2048 x 2048 among the usable linears."""
    x, weight = torch.randn(1024, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    return max(2 * 1024 * 2048 * 2048 / least_seconds(lambda _, run=run: run(x), 1, repeats) / 1e9
               for run in (linear.pack(weight, backend=name) for name in usable(linear.OP)))


def usable(op: Op[Any]) -> list[str]:
    names = []
    for implementation in op.implementations:
        try:
            implementation.usable_on(probe())
            names.append(implementation.name)
        except Unusable as why:
            print(f"{op.name} {implementation.name} skipped: {why}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", choices=list(OPS), help="one op")
    parser.add_argument("--skip", nargs="*", default=["reference"], help="implementations")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    copy = copy_gb_s(args.repeats)
    gemm = {str(t).removeprefix("torch."): gemm_gflop_s(t, args.repeats)
            for t in (torch.float32, torch.bfloat16)}
    print(f"{args.threads} threads; bounds: copy {copy:.1f} GB/s, products "
          + ", ".join(f"{name} {rate:.0f} GFLOP/s" for name, rate in gemm.items()))
    print(f"{'op':<16}{'by':<10}{'workload':<34}{'us':>10}{'GB/s':>8}{'share':>7}"
          f"{'GFLOP/s':>9}{'share':>7}")
    for op in OPS.values():
        if args.only not in (None, op.name):
            continue
        names = [name for name in usable(op) if name not in args.skip]
        for workload in workloads_of(op):
            peak = gemm["bfloat16" if "bfloat16" in workload.name else "float32"]
            for name in names:
                seconds = least_seconds(workload.prepare(op.get(name).run), workload.layers,
                                        args.repeats)
                bytes_rate = workload.num_bytes / seconds / 1e9
                flops_rate = workload.num_flops / seconds / 1e9
                print(f"{op.name:<16}{name:<10}{workload.name:<34}{seconds * 1e6:>10.1f}"
                      f"{bytes_rate:>8.1f}{bytes_rate / copy:>7.0%}{flops_rate:>9.1f}"
                      f"{flops_rate / peak:>7.0%}", flush=True)


if __name__ == "__main__":
    main()
