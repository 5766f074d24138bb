"""One decode step's attention through a hot buffer against dense attention of the same tokens.

Random keys, queries that drift, so that what is chosen changes from step to step; `--drift 1` draws
every query anew, the worst there is. Both arms take turns; the ratio is of medians.

    python lab/bench/sparse_step.py --context 6000 --budget 512 --threads 2
"""
from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from penstock.exec.sparse.layers import SparseLayers, unit_attention
from penstock.exec.sparse.selectors import KeyBounds
from penstock.kernels import registry
from penstock.kernels.attention.paged_attention import AttentionSpec, prepare
from penstock.kernels.choose.select import SelectRule
from penstock.kernels.fused.step import BlockTableRef
from penstock.kernels.kv.write_kv import WriteAt
from penstock.kernels.platform import probe
from penstock.kernels.types.ragged import Ragged
from penstock.memory.hot import HotBuffers

LAYERS, HEADS, GROUP, DIM, SIZE = 30, 3, 3, 64, 16              # SmolLM2-135M
OPS = ("write_kv", "select", "resolve", "gather", "sparse_attention", "paged_attention")


class Arms:
    """The same row twice: all on the device and dense, all on the host and selecting."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.unit, self.context = args.unit, args.context
        pages, self.hot_pages = -(-(args.context + args.steps) // SIZE), -(-args.budget // SIZE) + args.spare
        shape = (pages, LAYERS, HEADS, 2, SIZE, DIM)
        self.host = torch.randn(shape)
        self.device = torch.cat((self.host, torch.zeros(self.hot_pages, *shape[1:])))
        keys = self.host[:, :, :, 0].unflatten(3, (-1, args.unit))
        self.bounds = torch.stack((keys.amin(4), keys.amax(4)), 3)
        table = torch.randperm(pages).int()[None]
        hot = HotBuffers(layers=LAYERS, rows=1, kv_heads=HEADS, pages=pages, hot_pages=self.hot_pages,
                         page_units=SIZE // args.unit)
        hot.bind(0, list(range(pages, pages + self.hot_pages)), [-1] * self.hot_pages)
        layers = range(LAYERS)
        self.hot, self.table, self.budget = hot, table, args.budget // args.unit
        self.rule = SelectRule(unit=args.unit, sink=4, window=64)
        names = {op: registry.choose(probe(), ops=[op])[op].name for op in OPS}
        self.sparse = SparseLayers(
            unit_attention(names["sparse_attention"], unit=args.unit, scale=DIM ** -0.5), unit=args.unit,
            device=[self.device[:, i] for i in layers], host=[self.host[:, i] for i in layers],
            bounds=[self.bounds[:, i] for i in layers], device_RP=torch.full_like(table, -1),
            host_RP=table, hot=hot, backends=names)
        self.selector = KeyBounds(self.rule, [self.bounds[:, i] for i in layers], table, names["select"],
                                  BlockTableRef(table, SIZE // args.unit, args.unit))
        self.spec = AttentionSpec(num_heads=HEADS * GROUP, num_kv_heads=HEADS, head_dim=DIM,
                                  dtype=torch.float32, scale=DIM ** -0.5)
        self.backend, self.drift = names["paged_attention"], args.drift
        self.q = torch.randn(LAYERS, 1, HEADS * GROUP, DIM)

    def next_queries(self) -> None:
        keep = (1 - self.drift ** 2) ** 0.5
        self.q = keep * self.q + self.drift * torch.randn_like(self.q)

    def dense(self) -> None:
        at = torch.zeros(1, dtype=torch.int64)
        attend = prepare(Ragged((0, 1), (self.context,), (0,), self.table, at, at, SIZE), self.spec,
                         backend=self.backend)
        for i in range(LAYERS):
            attend(self.q[i], self.device[:, i, :, 0], self.device[:, i, :, 1])

    def sparse_step(self) -> None:
        position = self.context - 1
        slot = int(self.table[0, position // SIZE]) * SIZE + position % SIZE
        step = self.sparse.step([0], [position], [True], [self.budget])
        at = WriteAt(torch.tensor([-1]), torch.tensor([slot]), torch.tensor([slot // self.unit]),
                     torch.tensor([0], dtype=torch.int32), torch.tensor([position], dtype=torch.int32),
                     self.unit)
        new = self.q[0, :, :HEADS]
        for i in range(LAYERS):
            self.sparse.write_kv(i, (new, new), at)
            chosen = self.selector.choose(i, self.q[i], step)
            self.sparse.attend(i, self.q[i], chosen, step)


def seconds(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("context", 6000), ("budget", 512), ("unit", 8), ("spare", 1), ("steps", 40),
                        ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--drift", type=float, default=0.3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    arms, times = Arms(args), []
    for step in range(args.steps):
        arms.next_queries()
        pair = seconds(arms.sparse_step), seconds(arms.dense)
        if step == 0:
            arms.hot.count_LRKE[:, 0] = 0           # the first fills the hot buffer
        else:
            times.append(pair)
        arms.context += 1
    sparse, dense = ([1e3 * t for t in arm] for arm in zip(*times, strict=True))
    _, hits, misses, evicted = arms.hot.count_LRKE[:, 0].sum((0, 1)).tolist()
    print(f"{LAYERS} layers, {args.context} tokens, budget {args.budget}, unit {args.unit}, hot buffer "
          f"{arms.hot_pages * SIZE} tokens, {args.threads} threads: hits {hits / (hits + misses):.1%}, "
          f"{evicted / (args.steps - 1) / LAYERS / HEADS:.1f} evictions a step, layer and head")
    for name, arm in (("selecting", sparse), ("dense", dense)):
        print(f"{name:10} {statistics.median(arm):7.2f} ms a step ({min(arm):.2f} to {max(arm):.2f})")
    ratios = [a / b for a, b in zip(sparse, dense, strict=True)]
    print(f"selecting / dense: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
