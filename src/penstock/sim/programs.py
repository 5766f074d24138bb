"""Programs over whole runs: sweeps, the n-th failure of each kind, coverage, a storm.

Each returns what it saw; judging is the caller's. A finding carries the line that replays it.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from penstock.core.core import Core
from penstock.core.lifecycle import Mode, Phase, edges
from penstock.core.plan import Aborted, Dropped, Expired, Paused, RequestId, Retired, Stopped
from penstock.core.settings import CoreConfig
from penstock.sim.judge import Edge, Pair
from penstock.sim.scenario import Scenario, draw
from penstock.sim.world import MakeCore, World


@dataclass(slots=True)
class Report:
    """What a sweep saw. `fired[x]` counts events, `seeds[x]` runs in which x fired at all."""

    runs: int = 0
    steps: int = 0
    failures: list[str] = field(default_factory=list)
    fired: Counter[str] = field(default_factory=Counter)
    seeds: Counter[str] = field(default_factory=Counter)
    edges: Counter[Edge] = field(default_factory=Counter)
    pairs: Counter[Pair] = field(default_factory=Counter)

    def add(self, world: World) -> None:
        self.runs += 1
        self.steps += world.judge.issued
        self.fired.update(world.stats)
        self.seeds.update(name for name, n in world.stats.items() if n)
        self.edges.update(world.judge.edges)
        self.pairs.update(world.judge.pairs)


def describe(sc: Scenario, error: BaseException, extra: str = "") -> str:
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{sc.replay}{extra}    # {type(error).__name__}: {text}"


def sweep(seeds: Iterable[int], mode: str = "", make: MakeCore = Core, *, blind: bool = False,
          first_only: bool = False, extra: str = "") -> Report:
    """Run every seed; failures are collected as replay lines."""
    report = Report()
    for seed in seeds:
        sc = draw(seed, mode)
        world = World(sc, make, blind=blind)
        try:
            world.play()
        except Exception as error:     # whatever a broken core raises is a finding
            report.failures.append(describe(sc, error, extra))
        report.add(world)
        if first_only and report.failures:
            break
    return report


# What every sweep of some hundred seeds must have seen; a name with zero is a hole in the workload.
MUST_FIRE = (
    "aborted", "aborted twice", "aborted unknown", "paused", "paused unknown", "dropped",
    "dropped unknown", "stopped late", "flushed", "moves", "dram to hbm failed", "hbm to dram failed",
    "dram to disk failed", "disk to dram failed", "fetch expired", "stale deadline", "rates",
    "prefix hits from storage", "evicted disk", "ended timeout",
    "moves reordered", "late copy", "back-pressure", "evicted hbm", "evicted dram",
    "pause by pressure", "drop by pressure", "prefix hits", "prefix hits from host",
    "cut by a limit", "ended stop", "ended length", "ended abort", "ended refused",
)


# ---------------------------------------------------------------- the n-th of a kind
def _refusing(n: int) -> type[Core]:
    """A core whose n-th acquisition finds nothing, as if a pool were exhausted just then."""

    class Refusing(Core):
        calls = 0

        def __init__(self, cfg: CoreConfig) -> None:
            super().__init__(cfg)
            for name in ("acquire", "grow"):
                setattr(self.have, name, self._counted(getattr(self.have, name)))

        def _counted(self, real: Callable[..., bool]) -> Callable[..., bool]:
            def call(*args: object, **kw: object) -> bool:
                self.calls += 1
                return False if self.calls == n else real(*args, **kw)
            return call

    return Refusing


def refuse_each(seed: int, mode: str = "") -> Iterator[tuple[int, World]]:
    """Refuse the n-th acquisition, n = 1, 2, ..., until a run passes without reaching n."""
    n, reached = 0, True
    while reached:
        n += 1
        world = World(draw(seed, mode), _refusing(n), ticks=50)
        yield n, world
        calls = getattr(world.core, "calls", 0)
        assert isinstance(calls, int)
        reached = calls >= n


def fail_each(seed: int, mode: str = "") -> Iterator[tuple[int, World]]:
    """Fail the n-th Move, until a run has fewer."""
    n, reached = 0, True
    while reached:
        n += 1
        world = World(draw(seed, mode))
        world.executor.fail_move = n
        yield n, world
        reached = world.executor.stats["moves"] >= n


def abort_each(seed: int, mode: str = "") -> Iterator[tuple[int, World]]:
    """Abort some live request at the n-th turn of the loop, until a run is shorter."""
    n, reached = 0, True
    while reached:
        n += 1
        world = World(draw(seed, mode))
        world.abort_turn = n
        yield n, world
        reached = world.turns >= n


ANOMALIES = {"refuse": refuse_each, "fail": fail_each, "abort": abort_each}


def anomaly(kind: str, seed: int, mode: str = "") -> Report:
    """Play one of ANOMALIES to its end."""
    report = Report()
    for n, world in ANOMALIES[kind](seed, mode):
        try:
            world.play()
        except Exception as error:
            report.failures.append(describe(world.sc, error, f" --anomaly {kind}    # n = {n}"))
        report.add(world)
    return report


# ---------------------------------------------------------------- coverage
def never_taken(seen: Counter[Edge]) -> list[Edge]:
    """Legal edges (of an engine with every tier) that `seen` does not have."""
    return [edge for edge in edges(Mode(host=True, disk=True)) if not seen[edge]]


def never_met(seen: Counter[Pair]) -> list[Pair]:
    """Pairs of phase and event that can meet and did not."""
    every: list[Pair] = [(p, kind) for p in Phase for kind in (Aborted, Paused, Dropped)]
    new = (Phase.QUEUED, Phase.FETCHING)             # never had a row
    every += [(p, Stopped) for p in Phase if p not in new]               # it has output
    every += [(p, Retired) for p in Phase if p not in (*new, Phase.LOADING)]
    every += [(p, Expired) for p in new]
    return [pair for pair in every if not seen[pair]]


# ---------------------------------------------------------------- pressure, minimising
def storm(seed: int, requests: int = 64) -> tuple[World, Counter[RequestId]]:
    """Requests that arrive together and outgrow a pool of 1.1 times the largest of them. Returns the
    finished world, and how often each request gave up its row."""
    calm = "pauses=0,drops=0,aborts=0,stops=0,abort=0,stop=0,turns=0,flushes=0,fail=0"
    sc = draw(seed, f"requests={requests},span=1,{calm},prompt_max=12,new_max=40,rows=6")
    largest = -(-(sc.prompt_max + sc.new_max) // sc.cfg.page_size)
    cfg = replace(sc.cfg, hbm_pages=int(1.1 * largest) + 1, dram_pages=requests * largest,
                  max_len=1 << 20)
    world = World(replace(sc, cfg=cfg)).play()
    return world, world.judge.gave_way


SIMPLER = ("aborts=0", "stops=0", "pauses=0", "drops=0", "flushes=0", "abort=0", "stop=0", "turns=0",
           "fail=0", "straggle=0", "hold=0", "ranks=1", "overlap=0", "pp_size=1", "report=0",
           "prefix_cache=0", "disk_pages=0", "expire=0", "dram_pages=0", "step_tokens=64",
           "requests=1", "requests=2", "requests=3", "requests=5", "requests=8")


def shrink(seed: int, mode: str = "", make: MakeCore = Core, extra: str = "") -> str:
    """The replay line of a simpler mode in which `seed` still fails; empty if it passes."""
    failure = _failure(seed, mode, make, extra)
    for change in SIMPLER:
        name = change.split("=")[0]
        rest = [item for item in mode.split(",") if item and not item.startswith(f"{name}=")]
        if name == "requests" and "requests=" in mode:
            break                                             # smaller numbers were tried first
        simpler = ",".join([*rest, change])
        if found := _failure(seed, simpler, make, extra):
            mode, failure = simpler, found
    return failure


def _failure(seed: int, mode: str, make: MakeCore, extra: str) -> str:
    sc = draw(seed, mode)
    try:
        World(sc, make).play()
    except Exception as error:
        return describe(sc, error, extra)
    return ""
