"""What planning a step costs: `Core.advance` with many decoding rows and an executor that takes no time.

Every row decodes one token a step; pages grow, seal and retire as they would with a model behind them.
Overlap is off: a turn is the one `advance` that retires a step and plans the next. "looked at" is how
many rows a turn had to look at, of those it planned and those that it retired; the others were only
counted on. The slowest turns hold Python's cycle collector: --gc says how it is set. Between two turns a
loop that only counts is timed: how much longer its p50 takes than its least says how much of a core this
machine had to give meanwhile, 1.0 is a quiet one.

    python bench/planning.py --rows 8 256 1024
    python bench/planning.py --rows 256 --hosted
    python bench/planning.py --rows 256 --groups 3
    python bench/planning.py --rows 64 --context 1000000 --shared --page-size 64
    python bench/planning.py --worst                         # every case at every size: an hour
    python bench/planning.py --worst hits pause --size 262144 --rows 8
    python bench/planning.py --worst admission --groups 3 --count
    python bench/planning.py --rows 256 --drafts 32 --cpu
    python bench/planning.py --residency
    python bench/planning.py --blocked --cpu
"""
from __future__ import annotations

import argparse
import gc
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import worst
from worst import answer

from penstock.config.base import collector
from penstock.core.core import Core
from penstock.core.plan import Arrived, Event, Finished, HotUse, RequestId, StepPlan
from penstock.core.request import Request
from penstock.core.settings import CacheGroup, CoreConfig
from penstock.engine.process import FULL
from penstock.replay.recorder import Recorder

HOT_PAGES = 4
DRAFTS = 3                   # of a step of a row
GROWN_PAGES = 128            # of 64 tokens: 4 times a budget of 2,048
CURVE = (1.0, 1.0), (1.5, 0.505), (2.0, 0.34), (4.0, 0.233)       # misses by size of a hot buffer
SPARE = 8                    # tokens that are left over when the last turn has been measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is planned."""

    rows: int
    context: int             # tokens of prompt and output
    page_size: int
    turns: int
    hosted: bool             # all rows decode from host pages, and a selector group stays on the device
    groups: int              # 3: as of a model with windows and states besides full attention
    shared: bool             # all but the last page of the prompts is the same
    waiting: int             # requests that have no row
    drafts: int              # rows that compute DRAFTS more positions, of which none comes back

    @property
    def prompt(self) -> int:
        return self.context - self.turns - SPARE


def settings(w: Work) -> CoreConfig:
    pages = w.rows * (-(-w.context // w.page_size) + 2)
    full, window = CacheGroup(name="full", page_bytes=0), CacheGroup(name="window", page_bytes=0, window=128)
    state = CacheGroup(name="state", page_bytes=0, snapshot=True, page_tokens=4 * w.page_size)
    groups = (full, window, state)[:w.groups]
    if w.hosted:
        groups += (CacheGroup(name="selector", page_bytes=0, selector=True, slab_pages=8),)
    # One step takes all prompts whole: then all rows decode from the same step on.
    return CoreConfig(
        page_size=w.page_size, rows=w.rows, hbm_pages=(len(groups) + HOT_PAGES) * pages, groups=groups,
        dram_pages=(len(groups) + 1) * pages if w.hosted else 0, hot_pages=HOT_PAGES if w.hosted else 0,
        always_hosted=w.hosted, max_len=w.context, step_tokens=w.rows * w.context,
        draft_tokens=DRAFTS if w.drafts else 0,
        admissions=w.rows * (1 + w.context // w.page_size))


def requests(w: Work) -> list[Arrived]:
    """Lengths differ, or all rows would grow and seal a page in the same turn."""
    common = tuple(range(w.prompt)) if w.shared else ()
    made = []
    for i in range(w.rows):
        n = w.prompt - i % w.page_size
        prompt = ((*common[:n - 1], w.prompt + i) if w.shared
                  else tuple(i * 10_000 + p for p in range(n)))
        made.append(Arrived(RequestId(i + 1), prompt, w.turns + SPARE, selects=w.hosted,
                            drafts=DRAFTS if i < w.drafts else 0))
    return made


def fixed_work() -> None:
    """The same work whenever it is called: a quarter of a millisecond, or what the machine makes of it."""
    total = 0
    for i in range(6_000):
        total += i


def decode_turns(w: Work, *, record: bool, clock: Callable[[], float] = time.perf_counter,
                 ) -> tuple[list[float], list[float], float]:
    """Seconds of each turn in which all rows decode, and of `fixed_work` behind it; how many rows a turn
    looked at."""
    core = Core(settings(w))
    recorder = Recorder(core) if record else None

    def advance(events: Sequence[Event]) -> StepPlan | None:
        if recorder is not None:
            recorder.begin(events)
        answer = core.advance(events)
        if recorder is not None:
            recorder.end(answer)
        return answer.plan

    arrived = requests(w)
    plan = None
    if w.shared:                               # the first computes it, the others find it
        plan = advance([arrived.pop(0)])
        assert plan is not None
    events: list[Event] = [*(answer(plan, 1) if plan is not None else ()), *arrived]
    events += [Arrived(RequestId(w.rows + 1 + i), (i, *range(50)), 10) for i in range(w.waiting)]
    for token in range(4):                     # until all are under way, and told the device so
        plan = advance(events)
        assert plan is not None
        events = answer(plan, token)
    plan = advance(events)
    taken, beside, looked = [], [], core.counters["rows_looked_at"]
    for token in range(w.turns - 8):
        assert plan is not None and len(plan.rows) == w.rows
        assert sum(plan.count) == w.rows + DRAFTS * w.drafts
        events = answer(plan, token)
        started = clock()
        plan = advance(events)
        taken.append(clock() - started)
        started = clock()
        fixed_work()
        beside.append(clock() - started)
    assert len(core.running) == w.rows and len(core.waiting) == w.waiting
    return taken, beside, (core.counters["rows_looked_at"] - looked) / len(taken)


def missing(pages: float) -> float:
    """Of what a hot buffer of the least size misses, the part that one of `pages` times as many does, as
    docs/performance.md has it."""
    for (small, a), (large, b) in itertools.pairwise(CURVE):
        if pages < large:
            return a + (b - a) * math.log(max(1.0, pages / small)) / math.log(large / small)
    return CURVE[-1][1]


def residency(rows: int, length: int, over: float, hits: float, most: int = 0, *, bounds: bool = False,
              ) -> tuple[float, int, int, float, float, float]:
    """A closed loop of `rows` requests that select, of so many tokens give or take a fifth, on a device that
    holds 1/`over` of them; of what a row selects and no device page has, `hits` is in its hot buffer of the
    least size, which grows to `most` pages. bounds: of each row an eighth of its KV stays on the device, for
    what chooses. Returns the part of the device that is free while a row lacks pages, promotions, those of
    them that load more than they save, what they load for each token that is missed, tokens that a step
    misses, and those missed for each token that comes out."""
    page, budget, out, rng = 64, 2048, 512, Random(1)
    pages = rows * ((length + out) // page + 1)
    groups = (CacheGroup(name="full", page_bytes=0),
              CacheGroup(name="selector", page_bytes=0, selector=True, slab_pages=8))
    core = Core(CoreConfig(page_size=page, rows=rows, hbm_pages=int(pages / over), dram_pages=3 * pages,
                           hot_pages=budget // page + 1, hot_pages_max=most, budget=budget, step_tokens=8192,
                           max_len=1 << 18, groups=groups[:1 + bounds]))
    ids, back = itertools.count(1), set[RequestId]()
    idle = steps = loaded = vain = came = 0.0
    missed, promotions = 1.0, 0

    def new() -> Arrived:
        rid = next(ids)
        n = int(length * rng.uniform(0.8, 1.2))
        return Arrived(RequestId(rid), tuple(range(rid << 20, (rid << 20) + n)), out, selects=True)

    def misses(r: Request) -> float:
        lacks = r.tables[0].device.count(None) / len(r.tables[0].device)
        return budget * (1 - hits) * missing(len(r.tables[0].hot) / r.hot.least) * lacks

    events: list[Event] = [new() for _ in range(rows)]
    for _ in range(3_000):
        advance = core.advance(events)
        plan, events = advance.plan, [new() for o in advance.outputs if isinstance(o, Finished)]
        if plan is None:
            continue
        came += sum(plan.samples)
        hosted = core.hosted
        lacking = any(r.state.name == "decode.host" and None in r.tables[0].device for r in hosted)
        idle, steps = idle + lacking * core.kv.device[0].pool.free / int(pages / over), steps + lacking
        missed += sum(map(misses, hosted))
        for r in [r for r in hosted if r.state.name == "decode.to_device" and r.rid not in back]:
            load = page * sum(c is not None and not c.ready for c in r.tables[0].device)
            left = r.num_prompt + r.max_new - len(r.tokens)
            promotions, loaded = promotions + 1, loaded + load
            vain += left * budget * (1 - hits) * missing(len(r.tables[0].hot) / r.hot.least) < load
        back = {r.rid for r in hosted if r.state.name == "decode.to_device"}
        events += answer(plan, 9)
        if plan.step % 16 == 0:
            events.append(HotUse(plan.step, tuple((r.rid, budget, int(misses(r))) for r in hosted)))
    return (idle / max(1.0, steps), promotions, int(vain), loaded / missed, missed / max(1.0, steps),
            missed / came)


def report_residency() -> None:
    """Raises AssertionError if more than one promotion in ten does not pay back, or the device lies idle."""
    idle, promotions, vain, ratios = [], 0, 0, []
    sizes = (8, 65_536), (16, 32_768)
    for (rows, length), over, hits in itertools.product(sizes, (1.2, 1.5, 2, 4), (0.79, 0.93)):
        arms = [residency(rows, length, over, hits, most) for most in (0, GROWN_PAGES)]
        for name, (free, tried, lost, loaded, missed, _) in zip(("one size", "growing"), arms, strict=True):
            print(f"{rows} x {length >> 10}k, {over} times the device, {hits} hits, hot buffers of {name}: "
                  f"{100 * free:.1f} % idle, {tried} promotions, {lost} in vain, {loaded:.2f} tokens loaded "
                  f"for each missed, {missed:.0f} missed a step")
            promotions, vain = promotions + tried, vain + lost    # of growing ones alone there are too few
        idle.append(arms[1][0])
        ratios.append(arms[1][-2] / arms[0][-2])
    assert 10 * vain <= promotions, f"{vain} of {promotions} promotions do not pay back"
    print(f"missed a step, growing over one size: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")
    for over in (4 / 3, 2, 3, 4):
        print(f"8 x 64k beside their bounds, {over:.2f} times the device: "
              f"{residency(8, 65_536, over, 0.79, GROWN_PAGES, bounds=True)[-1]:.0f} missed for each token")
    free = sum(idle) / len(idle)
    assert free <= 0.01, f"{free:.3f} of the device is idle beside rows that lack pages"


def blocked(clock: Callable[[], float], *, tried: bool) -> list[float]:
    """Turns of 16 rows that decode while the head of the line waits for pages, of whose 120,000 tokens half
    are cached. tried: in each turn, as if nobody knew what it lacked."""
    page, prefix = 64, tuple(range(60_000))
    core = Core(CoreConfig(page_size=page, rows=32, hbm_pages=2_200, dram_pages=9_000, step_tokens=8_192,
                           max_len=1 << 18))
    if tried:
        core.admission._is_blocked = lambda r: False  # type: ignore[method-assign]

    def go(events: list[Event], until: Callable[[], bool]) -> list[Event]:
        while not until():
            plan = core.advance(events).plan
            events = answer(plan, 9) if plan is not None else []
        return events

    first, last = RequestId(1), RequestId(2)
    events = go([Arrived(first, prefix, 4)], lambda: core.kv.issued > 0 and first not in core.live)
    events += [Arrived(RequestId(10 + i), tuple(range(i << 20, (i << 20) + n)), 4_000)
               for i, n in enumerate([8_000] + [2_000] * 15, 1)]
    events = go(events, lambda: len(core.running) == 16 and all([r.num_output for r in core.running]))
    events.append(Arrived(last, prefix + tuple(range(1 << 30, (1 << 30) + len(prefix))), 4))
    times = []
    for _ in range(300):
        start = clock()
        plan = core.advance(events).plan
        times.append(clock() - start)
        events = answer(plan, 9) if plan is not None else []
    assert core.live[last].row is None, "it had room: this measures nothing"
    return sorted(times)


def report_blocked(clock: Callable[[], float]) -> None:
    for tried in (False, True, False, True):
        times = blocked(clock, tried=tried)
        print(f"{'tried each turn' if tried else 'as it is'}: p50 {1e3 * times[len(times) // 2]:.3f} ms, "
              f"p99 {1e3 * times[len(times) * 99 // 100]:.3f} ms")


def report_worst(args: argparse.Namespace) -> None:
    """Exits with 1 if a turn of some case is longer than its bar."""
    one = Work(rows=1, context=600, page_size=args.page_size, turns=1, hosted=False, groups=args.groups,
               shared=False, waiting=0, drafts=0)
    unit, failed = "instructions" if args.count else "ms", []
    for rows in args.rows or (64,):
        scene = worst.Scene(rows=rows, page=args.page_size, groups=settings(one).groups, limit_s=args.limit,
                            repeats=args.repeats,
                            between=None if args.gc or args.count else collector.BetweenTurns(),
                            meter=worst.instructions if args.count else worst.cpu_ms)
        for name in args.worst or worst.CASES:
            case = worst.CASES[name]
            for size in args.size or case.sizes:
                r = case.measure(scene, size)
                gc.collect()
                bar = f"bar {r.bar_ms:g} ms" if r.bar_ms else f"bar {worst.BAR:g}"
                fails = r.fails and not (args.count and r.bar_ms)
                print(f"{name} {size:,} {case.of}, {rows} rows: longest turn {r.longest:,.2f} {unit}, median "
                      f"{r.median:,.3f}, {r.multiple:,.1f} times ({bar}), {r.turns} turns"
                      f"{'' if args.gc or args.count else f', collections between them {r.pause:,.1f} ms'}"
                      f"{', stopped by --limit' if r.stopped else ''}{', FAILS' if fails else ''}",
                      flush=True)
                failed += [f"{name} {size:,}"] if fails else []
    print(f"fail: {', '.join(failed)}" if failed else "all within their bars")
    raise SystemExit(bool(failed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", help="that decode (8 256 1024)")
    parser.add_argument("--context", type=int, default=600, help="tokens of prompt and output")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--hosted", action="store_true", help="all rows decode from host pages")
    parser.add_argument("--groups", type=int, choices=(1, 3), default=1, help="cache groups")
    parser.add_argument("--shared", action="store_true", help="one prompt: for contexts of a million "
                        "tokens, of which no machine has memory for many")
    parser.add_argument("--waiting", type=int, default=0, help="requests that wait for a row")
    parser.add_argument("--drafts", type=int, default=0, help="rows of these that draft")
    parser.add_argument("--gc", choices=("default", "engine", "off"),
                        help="Python's cycle collector as it is, with the engine's thresholds, or off. "
                        "By --worst it runs between turns, as the engine's does")
    parser.add_argument("--record", action="store_true", help="through the flight recorder, as the engine "
                        "does; its ring is full after 512 turns: --context 1400 --turns 1200")
    parser.add_argument("--cpu", action="store_true", help="processor time, not wall time: for a machine "
                        "that does other things too")
    parser.add_argument("--worst", nargs="*", metavar="CASE", choices=[[], *worst.CASES],
                        help=f"the longest turn of these cases, of all without a name, in processor time: "
                        f"{', '.join(worst.CASES)}. --rows decode next to it (64)")
    parser.add_argument("--size", type=int, nargs="+", help="of --worst: tokens, rows, requests that wait or "
                        "pages of a pool, instead of each case's own sizes")
    parser.add_argument("--count", action="store_true", help="of --worst: bytecode instructions in place of "
                        "time. Slower, and the same on a busy machine; no bar of milliseconds holds")
    parser.add_argument("--repeats", type=int, default=1, help="of --worst: runs of each case, of which the least "
                        "time of each turn counts: for a machine that does other things too")
    parser.add_argument("--limit", type=float, default=60.0, help="of --worst: seconds of processor time, "
                        "then a case stops")
    parser.add_argument("--residency", action="store_true", help="what promotions cost and what lies idle "
                        "where the device holds a part of the rows")
    parser.add_argument("--blocked", action="store_true", help="rows that decode beside a long prompt that "
                        "waits for pages, with and without what is remembered of why")
    args = parser.parse_args()
    if args.residency:
        return report_residency()
    if args.blocked:
        return report_blocked(time.thread_time if args.cpu else time.perf_counter)
    if args.gc == "engine" or (args.worst is not None and args.gc is None):
        collector.spare(FULL)
    elif args.gc == "off":
        gc.disable()
    if args.worst is not None:
        return report_worst(args)
    for rows in args.rows or (8, 256, 1024):
        w = Work(rows=rows, context=args.context, page_size=args.page_size, turns=args.turns,
                 hosted=args.hosted, groups=args.groups, shared=args.shared, waiting=args.waiting,
                 drafts=min(rows, args.drafts))
        times, beside, looked = decode_turns(w, record=args.record,
                                             clock=time.thread_time if args.cpu else time.perf_counter)
        times.sort()
        noise = sorted(beside)[len(beside) // 2] / min(beside)
        p50, p99 = (1e3 * times[len(times) * p // 100] for p in (50, 99))
        print(f"{rows} rows: p50 {p50:.3f} ms, p99 {p99:.3f} ms, least {1e3 * times[0]:.3f} ms, "
              f"most {1e3 * times[-1]:.1f} ms ({1e6 * times[0] / rows:.2f} us a row); "
              f"{looked:.1f} rows looked at; fixed work {noise:.2f} of its least")


if __name__ == "__main__":
    main()
