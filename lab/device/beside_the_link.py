"""Whether products and attention run as fast beside a copy over the link, and the copy beside them.

    PYTHONPATH=src python lab/device/beside_the_link.py

Misses of 32 of 64 rows (W1's shape, 1,152 bytes each) from pinned memory by `gather`, beside products of 32 rows with
W1's weights, in one graph on two streams: alone, one after the other, and at once, by programs of the copy.
"""
from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from penstock.kernels.kv.gather import triton_copy


def timed(work: Callable[[], None]) -> float:
    """Median ms of a captured graph."""
    graph = torch.cuda.CUDAGraph()
    work()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    torch.cuda.synchronize()
    took = []
    for _ in range(20):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        took.append(a.elapsed_time(b))
    return statistics.median(took)


def main() -> None:
    misses, pages, width = int(32 * 2048 * .426), 4096, 576
    host = torch.empty(pages, 1, 1, 64, width, dtype=torch.bfloat16, pin_memory=True).normal_()
    pool = torch.empty(pages, 1, 1, 64, width, dtype=torch.bfloat16, device="cuda")
    at = torch.randperm(pages * 64)[:misses]
    miss = torch.stack((torch.zeros_like(at), at, torch.randperm(pages * 64)[:misses]), 1).int().cuda()
    num = torch.tensor([misses], dtype=torch.int32, device="cuda")
    weights = [torch.randn(6144, 6144, dtype=torch.bfloat16, device="cuda") * .01 for _ in range(20)]
    x = torch.randn(32, 6144, dtype=torch.bfloat16, device="cuda")
    big = torch.randn(64 << 20, device="cuda")
    side = torch.cuda.Stream()

    def copy() -> None:
        triton_copy.gather(host, pool, miss, num, unit=1)

    def products() -> None:
        y = x
        for weight in weights:
            y = y @ weight

    def memory() -> None:
        for _ in range(2):
            big.mul_(1.0)

    def both(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                copy()
            work()
            torch.cuda.current_stream().wait_stream(side)
        return run

    for grid in (132, 64, 32, 16):
        triton_copy.GRID = grid
        alone = timed(copy)
        line = [f"{grid} programs: copy alone {alone:.3f} ms ({misses * width * 2 / alone / 1e6:.1f} GB/s)"]
        for name, work in (("products", products), ("memory", memory)):
            line.append(f"{name} alone {timed(work):.3f}, both {timed(both(work)):.3f}")
        print("; ".join(line), flush=True)


if __name__ == "__main__":
    main()
