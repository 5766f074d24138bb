"""The longest turn of the planner, case by case: what `planning.py --worst` runs, a test a part.

A turn is one `Core.advance`; the executor takes no time and answers in the next turn. In most cases some
rows decode, and one thing happens next to them: a long prompt, a hit, a pause, a flush. No turn of that may
take more than `BAR` times the median turn, or every stream of an engine stalls. The median is that of turns
in which the rows decode and nothing else happens, where a case says `calm`; else of the case's own turns.

A turn is measured in processor milliseconds of this thread, or in bytecode instructions, which a busy machine
does not change: `cpu_ms`, `instructions`.
"""
from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from penstock.config.base import collector
from penstock.core import plan
from penstock.core.core import Core
from penstock.core.lifecycle import Phase
from penstock.core.request import Request
from penstock.core.settings import CacheGroup, CoreConfig

BAR = 20.0                   # times its median that a turn may take
BURST_MS = 100.0             # a turn in which a burst of requests gets rows may take
BUDGET = 2_048               # tokens that a step of a request with sparse decode selects
ROW_TOKENS = 500             # prompt of a row that decodes next to the case
SMALL_PAGE = 4               # tokens a page where a pool's pages count, not its tokens

Meter = Callable[[Callable[[], Any]], tuple[Any, float]]


def cpu_ms(call: Callable[[], Any]) -> tuple[Any, float]:
    """What `call` returns, and milliseconds of processor time of this thread."""
    started = time.thread_time()
    return call(), 1e3 * (time.thread_time() - started)


def instructions(call: Callable[[], Any]) -> tuple[Any, float]:
    """What `call` returns, and how many bytecode instructions that took. A copy of a list is one, however
    long the list is."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        return call(), float(count)
    finally:
        sys.settrace(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What all cases of a run share."""
    rows: int = 64                             # that decode next to the case
    page: int = 16                             # tokens
    groups: tuple[CacheGroup, ...] = (CacheGroup(name="full", page_bytes=0),)
    calm: int = 64                             # turns in which the rows decode and nothing else happens
    after: int = 32                            # turns measured after a case's event has had its effect
    choices: int = 75                          # of one prompt
    meter: Meter = cpu_ms
    between: collector.BetweenTurns | None = None    # as the engine collects; None: Python does, during a turn
    limit_s: float = 60.0                      # processor time of measured turns, then a case stops
    repeats: int = 1                           # of each case: a turn takes the least that it took in any


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one case took, in the unit of its meter."""
    case: str
    size: int
    longest: float
    median: float
    turns: int
    pause: float                               # the longest collection between turns
    stopped: bool = False                      # its limit came first: the longest turn may still be to come
    bar_ms: float = 0.0                        # the bar, where that is not BAR times the median

    @property
    def multiple(self) -> float:
        return self.longest / self.median

    @property
    def fails(self) -> bool:
        return self.longest > self.bar_ms if self.bar_ms else self.multiple > BAR


class Stopped(Exception):
    """The limit of a case has passed."""


@dataclass
class Engine:
    """A core and an executor that takes no time."""
    scene: Scene
    cfg: CoreConfig
    core: Core = field(init=False)
    events: list[plan.Event] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)
    pause: float = 0.0                         # the longest collection after a measured turn
    calm: list[float] = field(default_factory=list)
    is_measured: bool = False
    ends: float = 0.0                          # processor time of this thread at which a case stops

    def __post_init__(self) -> None:
        self.core = Core(self.cfg)

    def turn(self, *more: plan.Event) -> None:
        events = [*self.events, *more]
        if not self.is_measured:
            step = self.core.advance(events).plan
        else:
            advance, cost = self.scene.meter(lambda: self.core.advance(events))
            self.taken.append(cost)
            step = advance.plan
            if time.thread_time() > self.ends:
                raise Stopped
        if (between := self.scene.between) is not None:
            cost = self.scene.meter(lambda: between.collect(idle=False))[1]
            self.pause = max(self.pause, cost if self.is_measured else 0.0)
        self.events = answer(step) if step is not None else []

    def until(self, done: Callable[[], bool], most: int = 1_000_000) -> None:
        """Turns until `done`. Raises AssertionError if it never is."""
        for _ in range(most):
            if done():
                return
            self.turn()
        raise AssertionError(f"this has no effect in {most} turns")

    def turns(self, n: int) -> None:
        for _ in range(n):
            self.turn()

    def measure(self, calm: int | None = None) -> None:
        """Measure all turns from here on; first some in which rows decode and nothing else happens. Prompts
        are older than that: the collector looks at each once, which is not the planner's."""
        gc.collect()
        self.is_measured, self.ends = True, time.thread_time() + self.scene.limit_s
        self.turns(self.scene.calm if calm is None else calm)
        self.calm, self.taken = self.taken, []

    def measured(self, event: plan.Event, done: Callable[[], bool]) -> None:
        """What an event leads to, until `done`, and some turns more."""
        self.measure()
        self.turn(event)
        self.until(done)
        self.turns(self.scene.after)

    def start_rows(self, n: int = 0, tokens: int = ROW_TOKENS, out: int = 100_000) -> None:
        """Rows that decode to the end of the case; their lengths differ, or all would grow at once."""
        core, n = self.core, n or self.scene.rows
        for i in range(n):
            prompt = numbers(1 + i, tokens - i % self.scene.page)
            self.events.append(plan.Arrived(plan.RequestId(1 + i), prompt, out))
        self.until(lambda: len(core.running) >= n and not core.transient
                   and all([r.num_output > 2 for r in core.running]))

    def serve(self, rid: int, prompt: Sequence[int], out: int = 1, **more: Any) -> None:
        """One request, to its end."""
        self.events.append(plan.Arrived(plan.RequestId(rid), tuple(prompt), out, **more))
        self.turn()
        self.until(lambda: rid not in self.core.live)
        self.turns(2)

    def decode(self, rid: int, prompt: Sequence[int], **more: Any) -> Request:
        """One request, up to its fifth token."""
        self.events.append(plan.Arrived(plan.RequestId(rid), tuple(prompt), 4_000, **more))
        self.turn()
        r = self.core.live[plan.RequestId(rid)]
        self.until(lambda: r.num_output >= 5)
        return r

    @property
    def held(self) -> int:
        """Device pages that are not free: of requests, and cached."""
        return sum([pool.num_held for pool in self.core.kv.arenas[plan.Tier.HBM].pools])


def answer(step: plan.StepPlan, token: int = 7) -> list[plan.Event]:
    return [plan.Retired(step.step, ((token,),) * sum(step.samples)),
            *(plan.Moved(m.id, True) for m in step.moves)]


IDS = list(range(50_000))    # Python makes each number once


def numbers(seed: int, n: int) -> tuple[int, ...]:
    """`n` token ids, which begin otherwise than those of another seed."""
    first = seed // 2_500 % 50_000, seed % 50, seed // 50 % 50
    return (*(IDS[i] for i in first), *(IDS[(seed * 31 + i * 7_919) % 50_000] for i in range(n - 3)))


def config(s: Scene, **changes: Any) -> CoreConfig:
    """hbm_pages: beyond those of the rows that decode next to a case."""
    decoding = s.rows * ((ROW_TOKENS + 3_000) // s.page + 2)
    changes["hbm_pages"] = len(s.groups) * (changes.get("hbm_pages", 0) + decoding)
    return CoreConfig(**{"page_size": s.page, "rows": s.rows + 4, "groups": s.groups, "step_tokens": 8_192,
                         "max_len": 1 << 23, **changes})


def admission(s: Scene, n: int) -> Iterator[Engine]:
    """A prompt that hits nothing; the pool is full of another as long, which is evicted."""
    e = Engine(s, config(s, hbm_pages=n // s.page, step_tokens=4_096))
    yield e
    e.serve(90_000, numbers(90_000, n))
    other = numbers(90_001, n)
    e.start_rows()
    e.measure(calm=0)
    e.serve(90_001, other)


def hits(s: Scene, n: int, host: int = 0) -> Iterator[Engine]:
    """A prompt that is cached as a whole. host: so many times the device's pages, which others have by then."""
    cfg, prompt = config(s, hbm_pages=n // s.page + 64), numbers(90_000, n + 1)
    yield (e := Engine(s, replace(cfg, dram_pages=host * cfg.hbm_pages)))
    e.serve(90_000, prompt[:-1])
    if host:
        e.serve(90_001, numbers(90_001, (cfg.hbm_pages // len(s.groups) - 8) * s.page))
    e.start_rows()
    e.measure()
    e.serve(90_002, prompt, out=4)
    e.turns(s.after)


def hits_host(s: Scene, n: int) -> Iterator[Engine]:
    """The same, of which only the host has the pages."""
    return hits(s, n, host=3)


def forks(s: Scene, n: int) -> Iterator[Engine]:
    """Choices of one prompt: the turn in which they arrive, and all from the first token to the end."""
    e = Engine(s, config(s, rows=s.rows + s.choices, hbm_pages=n // s.page + 16 * s.choices))
    yield e
    prompt, first = numbers(90_000, n), plan.RequestId(90_000)
    e.start_rows()
    e.measure()
    e.turn(*(plan.Arrived(plan.RequestId(first + i), prompt, 16, leader=first if i else None)
             for i in range(s.choices)))
    e.is_measured = False
    leader = e.core.live[first]
    e.until(lambda: leader.todo <= e.cfg.step_tokens // 2 and not leader.num_output)
    e.is_measured = True
    e.until(lambda: all([rid <= s.rows for rid in e.core.live]))
    e.turns(s.after)


def _parked(s: Scene, n: int, host: float = 4) -> tuple[Engine, Request, plan.RequestId]:
    """A long request that decodes, and one that gets its row if it gives that up. host: times what it needs."""
    e = Engine(s, config(s, rows=s.rows + 1, hbm_pages=2 * n // s.page + 256,
                         dram_pages=int(host * n // s.page) + 256))
    e.start_rows()
    r, other = e.decode(90_000, numbers(90_000, n)), plan.RequestId(90_001)
    e.events.append(plan.Arrived(other, numbers(90_001, 60), 100_000, priority=-1))
    return e, r, other


def pause(s: Scene, n: int, host: float = 4) -> Iterator[Engine]:
    """A long request gives up its row, and keeps its KV in the host."""
    e, r, _ = _parked(s, n, host)
    yield e
    e.measured(plan.Paused(r.rid), lambda: (
        r.phase is Phase.PAUSED and r.saving.is_done and not (r.saving.is_copying or r.moves)))


def pause_short(s: Scene, n: int) -> Iterator[Engine]:
    """The same where the host has room for three quarters of that: the rest stays on the device."""
    return pause(s, n, 3 / 4)


def resume(s: Scene, n: int) -> Iterator[Engine]:
    """It gets a row again."""
    e, r, other = _parked(s, n)
    yield e
    e.turn(plan.Paused(r.rid))
    e.until(lambda: r.phase is Phase.PAUSED and r.saving.is_done and not (r.saving.is_copying or r.moves))
    e.turns(s.after)
    e.measured(plan.Aborted(other), lambda: r.state.name == "decode.device")


def _sparse(s: Scene, n: int) -> tuple[Engine, Request]:
    pages = n // s.page
    e = Engine(s, config(s, hbm_pages=pages + 4 * BUDGET // s.page, dram_pages=4 * pages + 4_000,
                         hot_pages=BUDGET // s.page + 1, budget=BUDGET))
    e.start_rows()
    return e, e.decode(90_000, numbers(90_000, n), selects=True)


def spill(s: Scene, n: int) -> Iterator[Engine]:
    """A request with sparse decode goes on from host pages."""
    e, r = _sparse(s, n)
    yield e
    e.measured(plan.Spilled(r.rid), lambda: r in e.core.hosted)


def promote(s: Scene, n: int) -> Iterator[Engine]:
    """It comes back to device pages, which another prompt has taken meanwhile."""
    e, r = _sparse(s, n)
    yield e
    e.turn(plan.Spilled(r.rid))
    e.until(lambda: r.state.name == "decode.host")
    e.serve(90_001, numbers(90_001, n))
    e.until(lambda: not (e.core.kv.freeing or e.core.kv.softening))
    e.measured(plan.Promoted(r.rid), lambda: r.state.name == "decode.device")


def _long(s: Scene, n: int) -> tuple[Engine, Request]:
    e = Engine(s, config(s, hbm_pages=n // s.page + 256))
    e.start_rows()
    return e, e.decode(90_000, numbers(90_000, n))


def abort(s: Scene, n: int) -> Iterator[Engine]:
    """A long request that decodes is aborted."""
    e, r = _long(s, n)
    yield e
    e.measured(plan.Aborted(r.rid), lambda: not e.core.kv.freeing)


def drop(s: Scene, n: int) -> Iterator[Engine]:
    """It gives up its KV, and finds that again."""
    e, r = _long(s, n)
    yield e
    e.measured(plan.Dropped(r.rid), lambda: r.state.name == "decode.device")


def decoding(s: Scene, n: int) -> Iterator[Engine]:
    """`n` rows that decode, and nothing else."""
    yield (e := Engine(s, config(s, rows=n, hbm_pages=n * ((ROW_TOKENS + 3_000) // s.page))))
    e.start_rows(n)
    e.measure(calm=0)
    e.turns(s.calm)


def burst(s: Scene, n: int) -> Iterator[Engine]:
    """`n` requests arrive in one turn, and there are rows for all."""
    yield (e := Engine(s, config(s, rows=n, hbm_pages=16 * n)))
    e.measure(calm=0)
    e.turn(*(plan.Arrived(plan.RequestId(1 + i), numbers(i, 60), 64) for i in range(n)))
    e.until(lambda: len(e.core.running) == n and all([r.num_output for r in e.core.running]))


def ends(s: Scene, n: int) -> Iterator[Engine]:
    """`n` rows end in one turn."""
    yield (e := Engine(s, config(s, rows=n, hbm_pages=40 * n, step_tokens=512 * n)))
    e.start_rows(n, out=96)
    e.measure(calm=32)
    e.until(lambda: not e.core.live)
    e.turns(s.after)


def _queued(e: Engine, n: int, out: int = 8, turns: int = 0) -> None:
    """`n` requests that wait. They come a hundred at a time, or in so many turns; that is not measured."""
    e.is_measured = False
    each = -(-n // turns) if turns else 100
    for first in range(0, n, each):
        e.turn(*(plan.Arrived(plan.RequestId(1_000_000 + i), numbers(1_000_000 + i, 60), out)
                 for i in range(first, min(n, first + each))))
    e.is_measured = True


def queue(s: Scene, n: int) -> Iterator[Engine]:
    """`n` requests wait for a row; some arrive, some in the middle of the line are aborted."""
    yield (e := Engine(s, config(s, rows=s.rows)))
    e.start_rows()
    e.measure()
    _queued(e, n)
    e.turns(s.after)
    for i in range(s.after):
        e.turn(plan.Arrived(plan.RequestId(2_000_000 + i), numbers(i, 60), 8))
        e.turn(plan.Aborted(e.core.waiting[n // 2].rid))


def stats(s: Scene, n: int) -> Iterator[Engine]:
    """`Core.stats()`, for each GET /metrics, next to `n` requests that wait."""
    yield (e := Engine(s, config(s, rows=s.rows)))
    e.start_rows()
    e.measure()
    _queued(e, n)
    e.is_measured = False
    for _ in range(8):
        e.turn()
        e.taken.append(s.meter(e.core.stats)[1])


def _short(s: Scene, rows: int, waiting: int, **changes: Any) -> Iterator[Engine]:
    """Rows that outgrow the device's pages, and requests that wait."""
    tokens, calm, filling = 64, min(32, s.calm), 16
    pages = rows * ((tokens + calm + filling) // s.page + 1)
    e = Engine(s, CoreConfig(page_size=s.page, rows=rows, hbm_pages=pages, groups=s.groups, max_len=4_096,
                             step_tokens=(tokens + 1) * rows, **changes))
    yield e
    e.start_rows(rows, tokens, 1_000)
    e.measure(calm)
    _queued(e, waiting, 1_000, filling)
    e.turns(5 * s.after)
    assert any([r.setbacks.preemptions for r in e.core.live.values()]), "pages are not short"


def short(s: Scene, n: int) -> Iterator[Engine]:
    """Device pages are short: `n` rows, four times as many wait, the host has room."""
    return _short(s, n, 4 * n, dram_pages=20 * n)


def short_no_host(s: Scene, n: int) -> Iterator[Engine]:
    """The same without host pages: requests are computed again."""
    return _short(s, n, 4 * n)


def short_line(s: Scene, n: int) -> Iterator[Engine]:
    """The same next to a long line: `n` requests wait."""
    return _short(s, s.rows, n, dram_pages=20 * s.rows)


def _filled(s: Scene, n: int) -> tuple[Engine, list[tuple[int, ...]]]:
    """A pool of `n` pages full of cached prompts of at most 512 pages."""
    each = min(512, n // 32)
    e = Engine(s, config(s, page_size=SMALL_PAGE, hbm_pages=n))
    prompts = [numbers(90_000 + i, each * SMALL_PAGE) for i in range(n // each)]
    for i, prompt in enumerate(prompts):
        e.events.append(plan.Arrived(plan.RequestId(90_000 + i), prompt, 1))
        e.turn()
    e.until(lambda: not e.core.live)
    return e, prompts


def eviction(s: Scene, n: int) -> Iterator[Engine]:
    """A pool of `n` cached pages: each is used again five times, then some are evicted."""
    e, prompts = _filled(replace(s, rows=0), n)      # no other row: the pool has `n` pages
    yield e
    for i in range(5 * len(prompts)):
        if i == 2 * len(prompts):
            e.measure(calm=0)
        e.turn(plan.Arrived(plan.RequestId(1_000_000 + i), prompts[i % len(prompts)], 1))
    for i in range(s.after):
        e.turn(plan.Arrived(plan.RequestId(90_000_000 + i), numbers(90_000_000 + i, len(prompts[0])), 1))


def flush(s: Scene, n: int) -> Iterator[Engine]:
    """All pages of a pool of `n` are cached, and are forgotten."""
    e, _ = _filled(s, n)
    yield e
    e.start_rows()
    left = sum([-(-len(r.tokens) // SMALL_PAGE) for r in e.core.running]) + n // 8 + 4 * s.rows
    e.measured(plan.Flushed(), lambda: e.held <= left + s.rows * s.after)


LONG = 262_144, 1_048_576
TOKENS, ROWS = (16_384, 65_536, *LONG), (64, 256, 1_024, 4_096)
LINE, POOL = (1_000, 10_000, 100_000), (10_000, 100_000, 1_000_000)


@dataclass(frozen=True, slots=True)
class Case:
    run: Callable[[Scene, int], Iterator[Engine]]
    sizes: tuple[int, ...]
    of: str                                    # what the sizes count
    bar_ms: float = 0.0

    def measure(self, s: Scene, size: int) -> Result:
        """The case at one size. Raises AssertionError if what it is about does not happen. All repeats have
        the same turns, so what one of them takes longer is the machine's."""
        runs, stopped, pauses = list[tuple[list[float], list[float]]](), False, list[float]()
        for _ in range(s.repeats):
            e = next(steps := self.run(s, size))
            try:
                next(steps, None)
            except Stopped:
                stopped = True
            runs.append((e.calm, e.taken))
            pauses.append(e.pause)
        calm, taken = ([min(turn) for turn in zip(*each, strict=not stopped)] for each in zip(*runs, strict=True))
        calm = sorted(calm or taken)
        return Result(case=self.name, size=size, longest=max(taken), median=calm[len(calm) // 2],
                      turns=len(taken), pause=min(pauses), stopped=stopped, bar_ms=self.bar_ms)

    @property
    def name(self) -> str:
        return self.run.__name__.replace("_", "-")


CASES = {case.name: case for case in (
    Case(admission, TOKENS, "tokens"), Case(hits, TOKENS, "tokens"), Case(hits_host, LONG, "tokens"),
    Case(forks, (16_384, 133_000), "tokens"), Case(pause, TOKENS, "tokens"), Case(pause_short, LONG, "tokens"),
    Case(resume, TOKENS, "tokens"), Case(spill, TOKENS, "tokens"), Case(promote, TOKENS, "tokens"),
    Case(abort, TOKENS, "tokens"), Case(drop, TOKENS, "tokens"),
    Case(decoding, ROWS, "rows"), Case(burst, ROWS, "rows", BURST_MS), Case(ends, ROWS, "rows", BURST_MS),
    Case(short, (64, 256, 1_024, 2_048, 4_096), "rows"), Case(short_no_host, ROWS, "rows"),
    Case(short_line, (1_000, 10_000, 50_000), "waiting"), Case(queue, LINE, "waiting"),
    Case(stats, LINE, "waiting"), Case(eviction, POOL, "pages"), Case(flush, POOL, "pages"))}
