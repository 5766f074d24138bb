"""How long write-through holds the engine's thread, and what it costs steps that run meanwhile.

Pages of SmolLM2-135M's shape; a "step" is a few matrix products of a decode step's size. Both
ways of `memory.mover` are timed in turns, so that other work on the machine touches both.

    python lab/bench/copies.py --tokens 512
    python lab/bench/copies.py --tokens 6000 --threads 2
"""
from __future__ import annotations

import argparse
import statistics
import time

import torch

from penstock.core.plan import DramPage, Group, HbmPage, Move, MoveId, StepId, Tier
from penstock.memory.dram import DramPool
from penstock.memory.hbm import HbmPool
from penstock.memory.lateness import Promptly
from penstock.memory.mover import Mover
from penstock.memory.pool import PageLayout

SHAPE = PageLayout(num_layers=30, num_kv_heads=3, page_size=16, head_dim=64)
STEP_TOKENS = 512             # a prefill step's write-through is one move


def moves_of(tokens: int) -> list[Move]:
    pages = range(-(-tokens // SHAPE.page_size))
    each = STEP_TOKENS // SHAPE.page_size
    return [Move(MoveId(at), Group(0), Tier.HBM, tuple(HbmPage(p) for p in part), Tier.DRAM,
                 tuple(DramPage(p) for p in part), len(part) * SHAPE.page_size, StepId(0))
            for at in range(0, len(pages), each) if (part := pages[at:at + each])]


def one(mover: Mover, moves: list[Move], weights: list[torch.Tensor]) -> tuple[float, float, float]:
    """(seconds in which the mover held this thread before the first step, CPU seconds of this
    thread in it, seconds of the first step, in which copies may be flying)."""
    mover.add(moves)
    wall, cpu = time.perf_counter(), time.thread_time()
    mover.run(StepId(0), idle=False)
    held, held_cpu = time.perf_counter() - wall, time.thread_time() - cpu
    wall = time.perf_counter()
    step(weights)
    first = time.perf_counter() - wall
    while len(mover):
        mover.run(StepId(0), idle=True)
    return held, held_cpu, first


def step(weights: list[torch.Tensor]) -> None:
    x = torch.ones(1, weights[0].shape[0])
    for w in weights:
        x = x @ w


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=STEP_TOKENS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    num_pages = -(-args.tokens // SHAPE.page_size)
    hbm, dram = HbmPool(SHAPE, num_pages), DramPool(SHAPE, num_pages)
    hbm.fill(1.0)
    dram.fill(1.0)
    weights = [torch.eye(1024) for _ in range(100)]        # 400 MB, as SmolLM2 has in float32
    movers = {"inline": Mover([hbm, dram], Promptly()), "thread": Mover([hbm, dram])}
    moves = moves_of(args.tokens)
    one(movers["thread"], moves, weights)                  # starts the thread
    alone = []
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in movers}
    for _ in range(args.repeats):
        wall = time.perf_counter()
        step(weights)
        alone.append(time.perf_counter() - wall)
        for name, mover in movers.items():
            times[name].append(one(mover, moves, weights))
    print(f"{args.tokens} tokens, {args.tokens * SHAPE.unit_bytes / 1e6:.1f} MB in {len(moves)} "
          f"moves, {args.threads} threads, medians of {args.repeats}, ms")
    print(f"a step alone {statistics.median(alone) * 1e3:.2f}")
    for name, rows in times.items():
        held, cpu, first = (statistics.median(column) * 1e3 for column in zip(*rows, strict=True))
        print(f"{name}  held {held:.3f}  CPU of it {cpu:.3f}  the next step {first:.2f}  "
              f"until its token {held + first:.2f}")


if __name__ == "__main__":
    main()
