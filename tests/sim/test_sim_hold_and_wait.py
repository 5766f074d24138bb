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
    WAITING,
    Lease,
    Mode,
    Phase,
    Place,
    Role,
    State,
    Trigger,
    changes,
    edges,
    holds,
    may_hold,
)
from penstock.core.request import Request
from penstock.sim.world import states
from penstock.sim.world.scenario import draw
from penstock.sim.world.world import World

Key = tuple[str, str, str]           # phase, place, edge; "grow" stands for growth inside a phase
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


def key_of(source: State, edge: str) -> Key:
    return source.phase.value, source.place.value, edge


def takes_while_holding() -> dict[Key, set[Lease]]:
    """What each edge takes, in any mode, when something is held or may be held. PAUSED may reserve host
    pages also if it has some; growth takes pages of the kinds that its state holds."""
    found: dict[Key, set[Lease]] = {}
    for mode in modes():
        must, may = holds(mode), may_hold(mode)
        for source, trigger, target in changes(mode):
            if not (must[source] or may[source]):
                continue
            if source.phase in (Phase.PREFILL, Phase.DECODE) and source.place is not Place.TO_HOST:
                grows = {x for x in must[source] if x in (Lease.HBM, Lease.DEVICE_ONLY, Lease.DRAM)}
                found.setdefault(key_of(source, "grow"), set()).update(grows)
            gains = {x for x in must[target] if x not in must[source]}
            if target.phase is Phase.PAUSED and mode.host:
                gains.add(Lease.DRAM)
            if gains:
                found.setdefault(key_of(source, states.edge(source, trigger, target)[1]), set()).update(gains)
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
        for source, trigger, target in changes(mode):
            assert trigger not in (Trigger.DROP, Trigger.END) or not must[target], (source, trigger)
        for phase in (*ACTIVE, *WAITING):
            if any(source is phase for source, _ in edges(mode)):
                assert (phase, Trigger.END) in edges(mode)


def test_what_is_said_not_to_be_taken_is_not_and_the_rest_mostly_is() -> None:
    seen: Counter[Key] = Counter()

    class Counting(Core):
        def transition(self, r: Request, trigger: Trigger, place: Place | None = None,
                       headroom: Headroom = NONE_LEFT) -> Trial:
            source = r.state
            taken = super().transition(r, trigger, place, headroom)
            seen[key_of(source, states.edge(source, trigger, r.state)[1])] += bool(taken)
            return taken

    for seed in range(100):
        World(draw(seed, "hot_pages=1"), Counting).play()
    for key, (_, kind, _) in EDGES.items():
        if kind == "not taken":
            assert not seen[key], key
    mostly = [bool(seen[key]) for key, (_, kind, _) in EDGES.items()
              if kind not in ("grows", "not taken") and key[0] != "receiving"]
    assert sum(mostly) > 0.7 * len(mostly), "hardly any of them was taken"
