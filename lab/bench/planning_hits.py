"""The longest planner turn of a long prefix hit, and of many choices of one long prompt.

Eight rows decode beside. Each case prints its longest turn as a multiple of the median turn of the same
run. The core runs alone, with the answers of a step in the next turn. Times are processor time of the thread.

    python lab/bench/planning_hits.py --tokens 65536 1048576 --page-size 16 64
    python lab/bench/planning_hits.py --choices 75 --tokens 133000
    python lab/bench/planning_hits.py --memory
"""
from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable

from penstock.config.base import collector
from penstock.core.core import Core
from penstock.core.plan import Arrived, Event, Moved, RequestId, Retired, StepPlan
from penstock.core.settings import CoreConfig
from penstock.engine.process import FULL

DECODING = 8                 # rows that decode beside
FIRST = RequestId(1)


def answer(plan: StepPlan | None, token: int) -> list[Event]:
    if plan is None:
        return []
    return [Retired(plan.step, ((token,),) * sum(plan.samples)), *(Moved(m.id, True) for m in plan.moves)]


class Turns:
    """A core and the processor time of each of its turns, in seconds."""

    def __init__(self, tokens: int, page_size: int, choices: int, *, host: bool) -> None:
        pages = tokens // page_size + 64 * (DECODING + choices) + 600 * DECODING
        self.core = Core(CoreConfig(
            page_size=page_size, rows=DECODING + choices + 1, hbm_pages=pages, max_len=2 * tokens + 8192,
            dram_pages=2 * pages if host else 0, step_tokens=tokens + 100))
        self.events: list[Event] = []
        self.taken: list[float] = []

    def turn(self, *events: Event) -> None:
        started = time.thread_time()
        plan = self.core.advance([*self.events, *events]).plan
        self.taken.append(time.thread_time() - started)
        self.events = answer(plan, 9)

    def until(self, done: Callable[[], bool]) -> None:
        while not done():
            self.turn()

    def fill(self, tokens: int) -> tuple[int, ...]:
        """Compute and cache a prompt, then start the rows that decode beside."""
        prompt = tuple(range(1 << 20, (1 << 20) + tokens))
        self.turn(Arrived(FIRST, prompt, 2))
        self.until(lambda: not self.core.live and not self.core.kv.freeing and not self.core.kv.moves.flying)
        for i in range(DECODING):
            self.turn(Arrived(RequestId(2 + i), (i, *range(600)), 8000))
        self.until(lambda: len(self.core.running) == DECODING and not self.core.transient)
        for _ in range(50):
            self.turn()
        gc.collect()
        self.taken.clear()
        return prompt


def report(name: str, taken: list[float]) -> None:
    times = sorted(taken)
    p50, most = times[len(times) // 2], times[-1]
    print(f"{name}: {len(taken)} turns, p50 {1e3 * p50:.3f} ms, longest {1e3 * most:.2f} ms "
          f"({most / p50:.0f} times), all {1e3 * sum(taken):.0f} ms", flush=True)


def hit(tokens: int, page_size: int, *, host: bool) -> list[float]:
    """Turns from the arrival of a prompt that is cached to its end; `host`: the device does not have it."""
    turns = Turns(tokens, page_size, 1, host=host)
    prompt, core, rid = turns.fill(tokens), turns.core, RequestId(1000)
    if host:
        core.kv.tree.evict_all(core.kv.device)
    turns.turn(Arrived(rid, prompt, 20))
    turns.until(lambda: rid not in core.live and not core.kv.freeing)
    assert core.counters["prefix_queries"] - 600 * 8 > 0
    found = core.counters["prefix_dram_hits" if host else "prefix_hbm_hits"]
    assert found >= tokens - page_size, found
    for _ in range(100):
        turns.turn()
    return turns.taken


def fork(tokens: int, page_size: int, choices: int) -> list[float]:
    """Turns of n choices of one prompt, which is cached."""
    turns = Turns(tokens, page_size, choices, host=False)
    prompt, core = turns.fill(tokens), turns.core
    rids = [RequestId(1000 + i) for i in range(choices)]
    turns.turn(*(Arrived(rid, prompt, 40, leader=rids[0] if rid != rids[0] else None) for rid in rids))
    turns.until(lambda: not any(rid in core.live for rid in rids) and not core.kv.freeing)
    for _ in range(100):
        turns.turn()
    return turns.taken


def memory(page_size: int, pages: int = 20_000) -> float:
    """Bytes of Python's heap for each cached page that is on the device alone."""
    core = Core(CoreConfig(page_size=page_size, rows=2, hbm_pages=pages + 64, max_len=2 * pages * page_size,
                           step_tokens=pages * page_size + 100))
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    prompt = tuple([7 * i + (1 << 20) for i in range(page_size * pages)])
    events: list[Event] = [Arrived(FIRST, prompt, 2)]
    del prompt
    while events or core.live or core.kv.freeing:
        events = answer(core.advance(events).plan, 9)
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return used / pages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[65_536, 1_048_576])
    parser.add_argument("--page-size", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--choices", type=int, default=0, help="so many choices of one prompt")
    parser.add_argument("--host", action="store_true", help="the prompt is cached on the host alone")
    parser.add_argument("--memory", action="store_true", help="bytes of a cached page")
    args = parser.parse_args()
    collector.spare(FULL)
    for size in args.page_size:
        if args.memory:
            print(f"page {size}: {memory(size):.0f} bytes a cached page")
            continue
        for tokens in args.tokens:
            if args.choices:
                report(f"{args.choices} choices of {tokens}, page {size}", fork(tokens, size, args.choices))
            else:
                report(f"hit of {tokens}, page {size}", hit(tokens, size, host=args.host))


if __name__ == "__main__":
    main()
