"""Hold and wait: the edges that the lease tables permit are those that somebody has argued about."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from penstock.core.core import Core
from penstock.core.kv.listing import Trial
from penstock.core.kv.pages import NONE_LEFT, Headroom
from penstock.core.lifecycle import (
    ACTIVE,
    DECODING,
    WAITING,
    Lease,
    Mode,
    Phase,
    Place,
    Role,
    Trigger,
    edges,
    holds,
    may_hold,
    place_after,
)
from penstock.core.request import Request
from penstock.sim.world.scenario import draw
from penstock.sim.world.world import World

Key = tuple[str, str, str]           # phase, place, trigger; "grow" stands for growth inside a phase
KINDS = ("waits in line", "grows", "waits for steps", "does not wait", "not taken")


def arguments() -> dict[Key, tuple[str, str, str]]:
    """What an edge takes, the kind of its argument, the argument."""
    shared, found = dict[str, str](), dict[Key, tuple[str, str, str]]()
    for line in (Path(__file__).parent / "hold_and_wait.tsv").read_text(encoding="ascii").splitlines():
        if line.startswith("@"):
            name, text = line[1:].split("\t")
            shared[name] = text
        elif line and not line.startswith("#"):
            phase, place, trigger, takes, kind, why = line.split("\t")
            assert (phase, place, trigger) not in found
            found[phase, place, trigger] = takes, kind, why.format_map(shared)
    return found


EDGES = arguments()


def modes() -> Iterator[Mode]:
    for host, disk, sparse, role in product((False, True), (False, True), (False, True), Role):
        if host or not (disk or sparse):
            yield Mode(host, disk, sparse, role)


def reachable(mode: Mode) -> list[tuple[Phase, Place]]:
    """From QUEUED on; the tables do not say more about where a request may be."""
    found = [(Phase.QUEUED, Place.DEVICE)]
    for phase, place in found:
        for (source, trigger), target in edges(mode).items():
            there = target, place_after(source, trigger, place)
            if source is phase and there not in found:
                found.append(there)
    return found


def takes_while_holding() -> dict[Key, set[Lease]]:
    """What each edge takes, in any mode, when something is held or may be held. PAUSED may reserve host
    pages also if it has some; growth takes pages of the kinds that its phase holds."""
    found: dict[Key, set[Lease]] = {}
    for mode in modes():
        must, may = holds(mode), may_hold(mode)
        for phase, place in reachable(mode):
            if not (must[phase, place] or may[phase, place]):
                continue
            if phase is Phase.PREFILL or phase in DECODING:
                grows = {x for x in must[phase, place] if x in (Lease.HBM, Lease.DEVICE_ONLY, Lease.DRAM)}
                found.setdefault((phase.value, place.value, "grow"), set()).update(grows)
            for (source, trigger), target in edges(mode).items():
                if source is not phase:
                    continue
                needs = must[target, place_after(source, trigger, place)]
                gains = {x for x in needs if x not in must[phase, place]}
                if target is Phase.PAUSED and mode.host:
                    gains.add(Lease.DRAM)
                if gains:
                    found.setdefault((phase.value, place.value, trigger.value), set()).update(gains)
    return found


def test_every_edge_that_holds_and_takes_has_an_argument_and_no_argument_is_idle() -> None:
    found = takes_while_holding()
    assert not sorted(found.keys() - EDGES.keys()), "without an argument"
    assert not sorted(EDGES.keys() - found.keys()), "an argument without an edge"


@pytest.mark.parametrize("key", EDGES, ids="-".join)
def test_an_argument_is_about_what_the_edge_takes(key: Key) -> None:
    leases, kind, why = EDGES[key]
    assert {Lease(name) for name in leases.split()} == takes_while_holding()[key]
    assert kind in KINDS and why.endswith(".") and len(why) > 40
    phase = Phase(key[0])
    if kind == "waits in line":
        assert phase in WAITING
    else:
        assert phase in ACTIVE
    assert (key[2] == "grow") == (kind == "grows") or kind == "not taken"


def test_only_ways_out_of_a_row_need_nothing() -> None:
    """What all arguments end with: DROP and END never take a lease, in any mode."""
    for mode in modes():
        must = holds(mode)
        for (source, trigger), target in edges(mode).items():
            if trigger in (Trigger.DROP, Trigger.END):
                for place in Place:
                    assert not must[target, place], (source, trigger)
        for phase in (*ACTIVE, *WAITING):
            if any(source is phase for source, _ in edges(mode)):
                assert (phase, Trigger.END) in edges(mode)


def test_what_is_said_not_to_be_taken_is_not_and_the_rest_mostly_is() -> None:
    seen: Counter[Key] = Counter()

    class Counting(Core):
        def transition(self, r: Request, trigger: Trigger, headroom: Headroom = NONE_LEFT) -> Trial:
            key = r.phase.value, r.place.value, trigger.value
            taken = super().transition(r, trigger, headroom)
            seen[key] += bool(taken)
            return taken

    for seed in range(100):
        World(draw(seed, "hot_pages=1"), Counting).play()
    for key, (_, kind, _) in EDGES.items():
        if kind == "not taken":
            assert not seen[key], key
    mostly = [bool(seen[key]) for key, (_, kind, _) in EDGES.items()
              if kind not in ("grows", "not taken") and key[0] != "receiving"]
    assert sum(mostly) > 0.7 * len(mostly), "hardly any of them was taken"
