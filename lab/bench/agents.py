"""Agents that share a prefix and go on turn by turn: the engine's core, with an executor that takes no time.

Says how many positions are computed with memory for all, with a share of what that has used, and the same
where states are evicted as all else is, when they are least recently used. Of each turn the branches come in
an order of its own.

    python lab/bench/agents.py FOLDER                          # whose config.json says what is kept
    python lab/bench/agents.py FOLDER --state-interval 128
"""
from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch

from penstock.core.core import Core
from penstock.core.kv.prefix_tree import Tree
from penstock.core.plan import Arrived, Event, Finished, Moved, RequestId, Retired, Tier
from penstock.core.settings import CoreConfig
from penstock.exec.load.layout import caches_of
from penstock.model.base import GlobalLayer, Stage
from penstock.model.registry import read_spec_of
from penstock.model.weights.locate import locate

WORDS = 50_000


@dataclass(frozen=True, slots=True)
class Trace:
    """Tokens of the prefix, of what each turn adds and of its answer; requests that run at once."""

    branches: int
    turns: int
    prefix: int
    said: int
    answer: int
    running: int

    @property
    def context(self) -> int:
        return self.prefix + self.turns * (self.said + self.answer)


def play(trace: Trace, cfg: CoreConfig) -> tuple[int, int, Core]:
    """Positions that were computed, slabs in use at the end, by what is cached too, and the core."""
    core, rng, computed, number = Core(cfg), Random(0), 0, 0

    def words(n: int) -> tuple[int, ...]:
        return tuple([rng.randrange(WORDS) for _ in range(n)])

    prefix = words(trace.prefix)
    texts = [prefix for _ in range(trace.branches)]
    open_: dict[RequestId, tuple[int, list[int]]] = {}
    for _ in range(trace.turns):
        waiting, events = list(range(trace.branches)), list[Event]()
        rng.shuffle(waiting)
        while waiting or open_ or events:
            while waiting and len(open_) < trace.running:
                number, branch = number + 1, waiting.pop()
                texts[branch] += words(trace.said)
                open_[RequestId(number)] = branch, []
                events.append(Arrived(RequestId(number), texts[branch], trace.answer))
            done = core.advance(events)
            plan, events = done.plan, []
            if plan is not None:
                computed += sum(plan.count)
                tokens = tuple(words(int(sampled)) for sampled in plan.samples)
                for rid, said in zip(plan.rids, tokens, strict=True):
                    open_[rid][1].extend(said)
                events = [Retired(plan.step, tokens), *(Moved(move.id, True) for move in plan.moves)]
            for output in done.outputs:
                if isinstance(output, Finished):
                    branch, answer = open_.pop(output.rid)
                    texts[branch] += tuple(answer)
    arena = core.kv.arenas[Tier.HBM]
    return computed, arena.slabs - len(arena.free), core


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for field, default in (("branches", 30), ("turns", 10), ("prefix", 2000), ("said", 64), ("answer", 64),
                           ("running", 8)):
        parser.add_argument(f"--{field}", type=int, default=default)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--state-interval", type=int, default=0)
    args = parser.parse_args()
    trace = Trace(args.branches, args.turns, args.prefix, args.said, args.answer, args.running)
    spec = read_spec_of(locate(str(args.folder)).config)
    whole = Stage(GlobalLayer(0), GlobalLayer(spec.num_layers), embeds=True, heads=True)
    groups = [replace(group, page_tokens=args.state_interval * group.snapshot)
              for group in spec.groups(whole)]
    caches = caches_of(groups, 16, torch.float32)
    slab = caches.slabs.slab_pages[0]
    large = 40 * trace.branches * -(-trace.context // 16)
    cfg = CoreConfig(page_size=16, rows=trace.running, hbm_pages=large // slab * slab, step_tokens=512,
                     max_len=trace.context + 16, groups=caches.groups)
    least, used, _ = play(trace, cfg)
    small = replace(cfg, hbm_pages=int(args.share * used) * slab)
    print(f"{caches.words}; slabs of {caches.slabs.slab_bytes} bytes")
    print(f"{trace}: memory for all is {used} slabs, {least} positions")
    for name in ("inner states first", "last used last"):
        if name == "last used last":
            setattr(Tree, "is_inner", lambda tree, node, space: False)      # noqa: B010
        computed, _, core = play(trace, small)
        stats = core.stats()
        lost = sum(n for key, n in stats.items() if key.startswith("prefix_cache_cut"))
        print(f"{small.hbm_pages // slab} slabs, {name}: {computed} positions, {computed / least:.3f} of "
              f"that; hits {lost:.0f} tokens shorter for want of a state; {stats['drops']:.0f} drops")


if __name__ == "__main__":
    main()
