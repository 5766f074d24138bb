"""Recorded event traces as plain text, and the digest of the plans that answer them.

A trace holds every event of a run in the batches in which the core saw them. Replayed, it must give
the same plans, unless a commit says `Plans: changed` and records it again.
"""
from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.core.core import Core
from penstock.core.plan import Event, StepPlan
from penstock.core.settings import CoreConfig
from penstock.replay.text import config_of, event_of, plain_config, plain_event
from penstock.sim.world.pair import start
from penstock.sim.world.scenario import draw
from penstock.sim.world.world import MakeCore

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
    """Of all that they say."""
    return hashlib.sha256(repr(list(plans)).encode()).hexdigest()[:16]


def record(seed: int, mode: str = "") -> list[Trace]:
    """Play `seed` and keep the trace of each engine that there was."""
    run = start(draw(seed, mode), record=True)
    run.play()
    return [Trace(world.sc.cfg, tuple(world.trace or ()), digest(world.plans)) for world in run.worlds]


# ---------------------------------------------------------------- text
def dump(trace: Trace) -> str:
    """One JSON line."""
    batches = [list(map(plain_event, batch)) for batch in trace.batches]
    return json.dumps([plain_config(trace.cfg), trace.digest, batches], separators=(",", ":"))


def load(line: str) -> Trace:
    """The trace of one line that `dump` wrote."""
    cfg, digest_, batches = json.loads(line)
    return Trace(config_of(cfg), tuple(tuple(map(event_of, batch)) for batch in batches), digest_)
