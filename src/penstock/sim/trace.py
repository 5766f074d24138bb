"""Recorded event traces as plain text, and the digest of the plans that answer them.

A trace holds every event of a run in the batches in which the core saw them. Replayed, it must give
the same plans, unless a commit says `Plans: changed` and records it again.
"""
from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, get_args

from penstock.core.core import Core
from penstock.core.plan import Arrived, Event, StepPlan
from penstock.core.settings import CoreConfig
from penstock.sim.scenario import draw
from penstock.sim.world import MakeCore, World

KINDS = {kind.__name__: kind for kind in get_args(Event)}
Batch = tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """One recorded run: the engine, the batches, the digest of its plans."""

    cfg: CoreConfig
    batches: tuple[Batch, ...]
    digest: str


def replay(cfg: CoreConfig, batches: Iterable[Batch], make: MakeCore = Core,
           ) -> list[StepPlan | None]:
    """The plans that a fresh core makes of a recorded trace."""
    core = make(cfg)
    return [core.advance(events).plan for events in batches]


def digest(plans: Iterable[StepPlan | None]) -> str:
    return hashlib.sha256(repr(list(plans)).encode()).hexdigest()[:16]


def record(seed: int, mode: str = "") -> Trace:
    """Play `seed` and keep its trace."""
    world = World(draw(seed, mode), record=True).play()
    assert world.trace is not None
    return Trace(world.sc.cfg, tuple(world.trace), digest(world.plans))


# ---------------------------------------------------------------- text
def dump(trace: Trace) -> str:
    """One JSON line. Settings that are not numbers keep their defaults."""
    cfg = {f.name: v for f in fields(trace.cfg)
           if isinstance(v := getattr(trace.cfg, f.name), int)}
    batches = [[[type(e).__name__, *(_plain(getattr(e, f.name)) for f in fields(e))]
                for e in batch] for batch in trace.batches]
    return json.dumps([cfg, trace.digest, batches], separators=(",", ":"))


def load(line: str) -> Trace:
    """The trace of one line that `dump` wrote."""
    cfg, digest_, batches = json.loads(line)
    return Trace(CoreConfig(**cfg), tuple(tuple(map(_event, batch)) for batch in batches), digest_)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else value


def _event(item: list[Any]) -> Event:
    kind: Any = KINDS[item[0]]
    values = [_tuples(value) for value in item[1:]]
    if kind is Arrived:
        at = [f.name for f in fields(Arrived)].index("stop")
        values[at] = frozenset(values[at])
    event: Event = kind(*values)
    return event


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
