"""The real core against fake ranks: no finding in any seed, every fault fires, every edge is taken."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.core.core import Core
from penstock.core.lifecycle import Phase
from penstock.core.plan import Dropped, Paused, Stopped
from penstock.core.room import GAVE_WAY_MAX
from penstock.sim.programs import (
    ANOMALIES,
    MUST_FIRE,
    anomaly,
    never_met,
    never_taken,
    storm,
    sweep,
)
from penstock.sim.scenario import draw
from penstock.sim.trace import digest, dump, load, record, replay
from penstock.sim.world import World


def test_no_seed_finds_anything_and_everything_happens() -> None:
    report = sweep(range(240))
    assert not report.failures, "\n".join(report.failures[:5])
    assert not [name for name in MUST_FIRE if not report.fired[name]]
    assert not never_taken(report.edges)
    rare = {(Phase.LOADING, Stopped), (Phase.FETCHING, Dropped), (Phase.FETCHING, Paused)}
    assert set(never_met(report.pairs)) <= rare      # the sweep meets these too


@pytest.mark.parametrize("mode", ["dram_pages=0", "pp_size=3,overlap=1,ranks=3", "step_tokens=1"])
def test_fixed_dimensions_find_nothing(mode: str) -> None:
    assert not sweep(range(15), mode).failures


@pytest.mark.parametrize("kind", sorted(ANOMALIES))
def test_the_nth_failure_of_a_kind_harms_nobody_else(kind: str) -> None:
    runs = 0
    for seed in (5, 9, 10):
        report = anomaly(kind, seed, "requests=3,turns=0,pauses=3,dram_pages=12")
        assert not report.failures, "\n".join(report.failures[:5])
        runs += report.runs
    assert runs > 20, "hardly anything was broken"


def test_recorded_events_replay_to_identical_plans() -> None:
    for seed in range(12):
        world = World(draw(seed), record=True).play()
        assert world.trace is not None
        assert replay(world.sc.cfg, world.trace) == world.plans


def test_recorded_traces_still_get_the_plans_that_were_recorded() -> None:
    """Byte for byte. If plans change on purpose: `penstock sim --record tests/sim/traces.jsonl
    --seeds 8`, and `Plans: changed, because ...` in the commit."""
    lines = (Path(__file__).parent / "traces.jsonl").read_text().splitlines()
    assert len(lines) == 8
    for seed, line in enumerate(lines):
        trace = load(line)
        assert digest(replay(trace.cfg, trace.batches)) == trace.digest, f"seed {seed}"


def test_a_trace_survives_its_text() -> None:
    trace = record(1)
    assert load(dump(trace)) == trace


@pytest.mark.parametrize("seed", range(3))
def test_a_storm_pauses_nobody_often_and_the_first_never(seed: int) -> None:
    world, gave_way = storm(seed, requests=32)
    assert sum(gave_way.values()) > 0, "no pressure: this tests nothing"
    assert max(gave_way.values()) <= GAVE_WAY_MAX
    first = min(world.load.made, key=lambda e: (e.arrived.priority, e.at, e.arrived.rid))
    assert gave_way[first.arrived.rid] == 0


DIGESTS = """
from penstock.sim.scenario import draw
from penstock.sim.world import World
print([World(draw(seed), record=True).play().digest() for seed in range(12)])
"""


def test_digests_do_not_depend_on_the_process_or_its_hash_seed() -> None:
    out = [subprocess.run([sys.executable, "-c", DIGESTS], check=True, capture_output=True,
                          env={**os.environ, "PYTHONHASHSEED": seed}).stdout
           for seed in ("0", "4711")]
    assert out[0] == out[1] != b""


@pytest.mark.sweep
def test_thousands_of_seeds_find_nothing() -> None:
    report = sweep(range(1_000, 4_000))
    assert not report.failures, "\n".join(report.failures[:5])
    assert not never_met(report.pairs)
    # Each of them in at least 0.1 % of the seeds.
    assert not [name for name in MUST_FIRE if report.seeds[name] < 3]


@pytest.mark.sweep
@pytest.mark.parametrize("kind", sorted(ANOMALIES))
def test_the_nth_failure_over_many_seeds(kind: str) -> None:
    for seed in range(12):
        report = anomaly(kind, seed, "requests=5")
        assert not report.failures, "\n".join(report.failures[:5])


def test_a_bare_core_with_nothing_to_do_plans_nothing() -> None:
    core = Core(draw(0).cfg)
    assert core.advance(()).plan is None
    core.check()
