"""Programs over whole runs: sweeps, the n-th failure of each kind, a storm, and what they must reach.

Each returns what it saw; judging is the caller's. A finding carries the line that replays it.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from penstock.core.core import Core
from penstock.core.lifecycle import Mode, Role, changes
from penstock.core.settings import CoreConfig
from penstock.sim.world.pair import Pair, start
from penstock.sim.world.scenario import TIERS, Scenario, draw
from penstock.sim.world.shared import SharedEngines
from penstock.sim.world.states import edge, possible
from penstock.sim.world.view import refusable
from penstock.sim.world.world import MakeCore, World

Run = World | SharedEngines
Edge = tuple[str, str, str, str]       # role, tiers, state, trigger
Seen = tuple[str, str, str, str]       # role, state, event, state directly after it


@dataclass(slots=True)
class Report:
    """What a sweep saw. `fired[x]` counts events, `seeds[x]` runs in which x fired at all."""

    runs: int = 0
    steps: int = 0
    failures: list[str] = field(default_factory=list)
    fired: Counter[str] = field(default_factory=Counter)
    seeds: Counter[str] = field(default_factory=Counter)
    edges: Counter[Edge] = field(default_factory=Counter)
    met: Counter[Seen] = field(default_factory=Counter)

    def add(self, run: Run) -> None:
        self.runs += 1
        self.fired.update(run.stats)
        self.fired["pairs"] += run.sc.pair
        self.seeds.update(name for name, n in run.stats.items() if n)
        self.seeds["pairs"] += run.sc.pair
        for world in run.worlds:
            cfg, judge = world.sc.cfg, world.judge
            role, tiers = cfg.role, _tiers(cfg.dram_pages > 0, cfg.disk_pages > 0, cfg.sparse)
            self.steps += judge.issued
            for taken, n in judge.edges.items():
                self.edges[(role, tiers, *taken)] += n
            for seen, n in judge.met.items():
                self.met[(role, *seen)] += n

    def merge(self, part: Report) -> None:
        self.runs += part.runs
        self.steps += part.steps
        self.failures += part.failures
        for mine, other in ((self.fired, part.fired), (self.seeds, part.seeds)):
            mine.update(other)
        self.edges.update(part.edges)
        self.met.update(part.met)

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return {"runs": self.runs, "steps": self.steps, "failures": self.failures,
                "fired": self.fired, "seeds": self.seeds,
                "edges": [[*key, n] for key, n in self.edges.items()],
                "met": [[*key, n] for key, n in self.met.items()]}

    @staticmethod
    def of(plain: dict[str, Any]) -> Report:
        """What `plain` wrote."""
        return Report(plain["runs"], plain["steps"], plain["failures"], Counter(plain["fired"]),
                      Counter(plain["seeds"]),
                      Counter({tuple(edge): n for *edge, n in plain["edges"]}),
                      Counter({(role, *seen): n for role, *seen, n in plain["met"]}))


def describe(sc: Scenario, error: BaseException, command: str = "penstock sim") -> str:
    """The line that replays it: `command`, its options, and what was found."""
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{command} {sc.replay}    # {type(error).__name__}: {text}"


def sweep(seeds: Iterable[int], mode: str = "", make: MakeCore = Core, *, blind: bool = False,
          first_only: bool = False, command: str = "penstock sim") -> Report:
    """Run every seed; failures are collected as replay lines."""
    report = Report()
    for seed in seeds:
        sc = draw(seed, mode)
        run = start(sc, make, blind=blind)
        try:
            run.play()
        except Exception as error:     # whatever a broken core raises is a finding
            report.failures.append(describe(sc, error, command))
        report.add(run)
        if first_only and report.failures:
            break
    return report


# What every sweep of some hundred seeds must have seen; a name with zero is a hole in the workload.
MUST_FIRE = (
    "aborted", "aborted twice", "aborted unknown", "paused", "paused unknown", "dropped",
    "dropped unknown", "stopped late", "stopped unknown", "spilled unknown", "promoted unknown", "flushed",
    "moves", "dram to hbm failed", "hbm to dram failed", "dram to disk failed", "disk to dram failed",
    "step read a torn load", "fetching expired", "queued expired", "stale deadline", "rates",
    "prefix hits from storage", "evicted disk", "ended timeout",
    "moves reordered", "late copy", "back-pressure", "evicted hbm", "evicted dram",
    "pause by pressure", "drop by pressure", "prefix hits", "prefix hits from host",
    "spilled", "promoted", "promoted by itself", "spill by pressure", "hot hits", "hot misses",
    "step waited for a load", "ranks apart", "straggler", "events held",
    "unmaps", "maps", "hot buffer grows", "hot buffer shrinks",
    "longer than the device", "hosted rows", "rows in both places", "window left behind",
    "drafts", "drafts declined", "fewer tokens than planned", "ahead of its token", "forks shared",
    "cut by a limit", "ended stop", "ended length", "ended abort", "ended refused",
    # of a pair
    "pairs", "claimed", "messages", "message lost", "answer kept",
    "pushes", "push failed", "write refused", "late write", "write of the dead landed",
    "bytes damaged", "cut off",
    "prefill engine died", "decode engine died", "delivered by the peer",
    "computed here after all", "receiving expired", "ended sent", "ended lost", "messages without effect",
    # of storage, of clocks, of KV that is found to be damaged
    "storage slow", "storage full", "storage hung", "storage lied", "lie found", "clock leapt",
    "damaged", "damaged page in hbm", "damaged page in dram", "damaged page in disk",
    "damaged page in flight", "damaged beside a sound one", "computed again for itself",
    "storage dead", "storage forgot a page", "sessionended", "pages of ended sessions", "ended warmed",
    "retentionended", "retained pages", "pages of windows left out",
    # of two engines on one storage
    "engine on a shared storage died", "store of the dead lost", "hits after a restart",
    "hits of the second engine",
)
# Of those, what 600 runs may do without: in the first eight ranges of 600 the first fired in 5 runs of 4,800,
# the others in 15 and 35, in one of some range. Nearly all else was in 3 runs of each range at least.
# What engines that share a storage meet, the first 600 had in 4 to 18 runs.
RARE = frozenset(("write of the dead landed", "disk to dram failed", "prefix hits from storage",
                  "storage dead", "store of the dead lost", "hits after a restart",
                  "hits of the second engine"))


# ---------------------------------------------------------------- the n-th of a kind
def _refusing(n: int, calls: list[int]) -> MakeCore:
    """Makes cores whose n-th acquisition, of all together, finds nothing, as if a pool were exhausted
    just then. `calls[0]` counts them."""

    def make(cfg: CoreConfig) -> Core:
        core = Core(cfg)
        refusable(core, refuses)
        return core

    def refuses() -> bool:
        calls[0] += 1
        return calls[0] == n

    return make


def refuse_each(seed: int, mode: str = "") -> Iterator[tuple[int, Run]]:
    """Refuse the n-th acquisition, n = 1, 2, ..., until a run passes without reaching n."""
    n, calls = 0, [0]
    while calls[0] >= n:
        n, calls[0] = n + 1, 0
        yield n, start(draw(seed, mode), _refusing(n, calls), ticks=50)


def fail_each(seed: int, mode: str = "") -> Iterator[tuple[int, Run]]:
    """Fail the n-th copy of an engine, or the n-th push to it, until a run has fewer."""
    parts = 3 if draw(seed, mode).pair else 1
    for part in range(parts):
        n, reached = 0, True
        while reached:
            n += 1
            run = start(draw(seed, mode))
            if part < 2:
                run.worlds[-1 - part].executor.fail_move = n
            elif isinstance(run, Pair):
                run.fail_push = n
            executors = [world.executor for world in run.worlds]
            yield n, run
            copies = executors[-1 - part].stats["moves"] if part < 2 else run.stats["writes"]
            reached = copies >= n


def abort_each(seed: int, mode: str = "") -> Iterator[tuple[int, Run]]:
    """Abort some live request behind the n-th event of an engine, until a run has fewer."""
    for part in range(2 if draw(seed, mode).pair else 1):
        n, reached = 0, True
        while reached:
            n += 1
            run = start(draw(seed, mode))
            world = run.worlds[-1 - part]
            world.abort_at = n
            yield n, run
            reached = world.heard >= n


ANOMALIES = {"refuse": refuse_each, "fail": fail_each, "abort": abort_each}


def anomaly(kind: str, seed: int, mode: str = "") -> Report:
    """Play one of ANOMALIES to its end."""
    report = Report()
    for n, run in ANOMALIES[kind](seed, mode):
        try:
            run.play()
        except Exception as error:
            report.failures.append(describe(run.sc, error, f" --anomaly {kind}    # n = {n}"))
        report.add(run)
    return report


# ---------------------------------------------------------------- coverage
def _tiers(host: bool, disk: bool, sparse: bool) -> str:
    names = [name for name, has in (("host", host), ("disk", disk), ("sparse", sparse)) if has]
    return "+".join(names) or "device"


def never_taken(seen: Counter[Edge]) -> list[Edge]:
    """Legal edges of every role with every set of tiers that `seen` does not have."""
    missing = []
    for role, tiers in product(Role, TIERS):
        host, disk, sparse = map(bool, tiers)
        legal = changes(Mode(host=host, disk=disk, sparse=sparse, role=role))
        for name, what in dict.fromkeys(edge(*change) for change in legal):
            if not host and name == "loading" and what != "landed":
                continue                       # nothing is loaded: it is over at once
            taken = role.value, _tiers(host, disk, sparse), name, what
            if not seen[taken]:
                missing.append(taken)
    return missing


def never_met(seen: Counter[Seen]) -> list[tuple[str, str, str]]:
    """Role, phase and event that can meet and did not."""
    met = {key[:3] for key in seen}
    return [key for role in Role for phase, event in possible(role)
            if (key := (role.value, phase, event)) not in met]
