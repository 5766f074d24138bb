"""What readers of the core have found, when seeds had not: one test for each, failing before."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from counting import bytecodes
from recorded import recorded

from penstock.core.core import Core
from penstock.core.lifecycle import Phase
from penstock.core.pair.decode_side import DecodeSide
from penstock.core.pair.messages import Cancel, Drained, Grant, Reason
from penstock.core.plan import (
    ONE_PEER,
    Aborted,
    Arrived,
    Event,
    Expired,
    Finished,
    Move,
    Moved,
    PeerJoined,
    Received,
    RequestId,
    Retired,
    Say,
    Spilled,
    StepPlan,
    Tier,
)
from penstock.core.settings import CacheGroup, CoreConfig
from penstock.replay import flight
from penstock.replay.recorder import Recorder
from penstock.replay.redact import redact
from penstock.sim.programs.rerun import alike


def answers(plan: StepPlan, hangs: Callable[[Move], bool] = lambda m: False) -> list[Event]:
    """All that an executor says to a plan, but for Moves that hang and grants."""
    events: list[Event] = [Moved(m.id, True) for m in plan.moves if m.src is not Tier.PEER and not hangs(m)]
    return [*events, Retired(plan.step, tuple((9,) for s in plan.samples if s))]


def play(core: Core, events: list[Event], hangs: Callable[[Move], bool] = lambda m: False,
         steps: int = 1_000_000) -> tuple[set[int], list[Move], list[Event]]:
    """Who has ended and what was moved before nothing happens any more, or after so many steps."""
    ended, moves, again = set[int](), list[Move](), True
    while again and steps:
        advance = core.advance(events)
        core.check()
        ended |= {o.rid for o in advance.outputs if isinstance(o, Finished)}
        events, plan = [], advance.plan
        again = plan is not None
        if plan is not None:
            steps -= 1
            moves += plan.moves
            events = answers(plan, hangs)
    return ended, moves, events


def cost_of(core: Core, events: list[Event], steps: int,
            hangs: Callable[[Move], bool] = lambda m: False) -> int:
    """What so many steps take."""
    def run() -> None:
        nonlocal events
        for _ in range(steps):
            plan = core.advance(events).plan
            assert plan is not None
            events = answers(plan, hangs)

    return bytecodes(run)


def from_storage(m: Move) -> bool:
    return m.src is Tier.DISK


# ---------------------------------------------------------------- damaged pages
@pytest.mark.parametrize("hosted", [False, True])
@pytest.mark.parametrize("refused", [False, True])
def test_a_fetch_does_not_bring_damaged_pages_back(hosted: bool, refused: bool) -> None:
    """Request 1 fetches, and holds host pages of a prefix that is then found damaged: it is computed from
    pages of its own, and what its read brings is no copy of these."""
    core = Core(CoreConfig(page_size=2, rows=4, hbm_pages=30, dram_pages=30, disk_pages=99,
                           hot_pages=int(hosted), always_hosted=hosted))
    device, host, tree = core.kv.device[0], core.kv.host[0], core.kv.tree
    play(core, [Arrived(RequestId(0), tuple(range(9)), 1, selects=hosted)])
    tree.evict(device, 99)
    tree.evict(host, 1)                        # the last page is in storage alone
    _, hung, _ = play(core, [Arrived(RequestId(1), tuple(range(12)), 2, selects=hosted)], from_storage)
    r = core.live[RequestId(1)]
    assert r.phase is Phase.FETCHING
    plan = core.advance([Arrived(RequestId(2), tuple(range(3)), 9, selects=hosted)]).plan
    assert plan is not None
    other = core.live[RequestId(2)]
    other.origin.retried, other.origin.own_from = True, 0    # it may have computed them
    damaged = list(r.path)
    if refused:
        play(core, [Moved(m.id, False) for m in hung])
    ended, _, _ = play(core, [Aborted(RequestId(2), damaged=True), *answers(plan)])
    assert damaged and damaged[0].banished and 2 in ended
    assert 1 in ended or refused, "a sound request waits for what is damaged"
    events: list[Event] = [] if refused else [Moved(m.id, True) for m in hung]
    play(core, [*events, Arrived(RequestId(3), tuple(range(9)), 1, selects=hosted)])
    assert not core.live and r.tokens[12:] and damaged[0] not in r.path
    assert not any(node.banished and node.refs for node in tree.nodes())


# ---------------------------------------------------------------- who else waits when something hangs
def test_a_hung_grant_stops_nobody_else() -> None:
    """Request 0 gives up its grant, but the peer never says that it writes no more. It cannot have a row
    beside its own old pages. Request 1 needs one page of the four that are free."""
    core = Core(CoreConfig(page_size=2, rows=4, hbm_pages=10, role="decode"))
    play(core, [PeerJoined(), Arrived(RequestId(0), tuple(range(12)), 2, transfer=7)])
    r = core.live[RequestId(0)]
    play(core, [Expired(r.rid, r.phase.value, r.visit)])
    assert r.phase is Phase.DROPPED
    ended, _, _ = play(core, [Arrived(RequestId(1), (1, 2), 2)])
    assert core.kv.device[0].pool.free >= 4
    assert ended == {1}


def test_a_hung_fetch_stops_nobody() -> None:
    """Request 1 can only run from the host, where its own fetch hangs. Request 2 needs no host page."""
    core = Core(CoreConfig(page_size=2, rows=4, hbm_pages=4, dram_pages=10, disk_pages=50, hot_pages=1))
    play(core, [Arrived(RequestId(0), tuple(range(13)), 1, selects=True)])
    core.kv.tree.evict_all((*core.kv.device, *core.kv.host))
    play(core, [Arrived(RequestId(1), tuple(range(12)), 3, selects=True)], from_storage)
    r = core.live[RequestId(1)]
    assert r.phase is Phase.FETCHING
    ended, _, _ = play(core, [Expired(r.rid, r.phase.value, r.visit), Arrived(RequestId(2), (1, 2), 2)])
    assert ended == {1, 2}


# ---------------------------------------------------------------- what a step costs
def test_a_page_that_grows_costs_the_same_in_any_memory() -> None:
    """Several groups, and all memory is cached: each new page evicts."""
    def cost(slabs: int) -> int:
        groups = CacheGroup(name="full", page_bytes=0), CacheGroup(name="window", page_bytes=0, window=8)
        core = Core(CoreConfig(page_size=2, rows=4, hbm_pages=slabs, groups=groups, group_base=1_000_000))
        play(core, [Arrived(RequestId(0), tuple(range(2 * slabs - 40)), 1)])
        events: list[Event] = [Arrived(RequestId(k), (k,) * 3, 200) for k in (1, 2, 3)]
        _, _, events = play(core, events, steps=20)
        return cost_of(core, events, 60)

    assert cost(1600) < 2 * cost(200)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_step_costs_the_same_however_many_wait_for_the_peer(role: str) -> None:
    def cost(others: int) -> int:
        core = Core(CoreConfig(page_size=2, rows=8, hbm_pages=9_000, role=role, step_tokens=4))
        events: list[Event] = [PeerJoined()]
        events += [Arrived(RequestId(k), (k, k), 2, transfer=k) for k in range(1, others + 1)]
        play(core, events)
        phase = Phase.SENDING if role == "prefill" else Phase.RECEIVING
        assert [r.phase for r in core.live.values()] == [phase] * others
        one = Arrived(RequestId(0), tuple(range(1000)), 500, transfer=9_999 if role == "prefill" else 0)
        _, _, events = play(core, [one], steps=3)
        return cost_of(core, events, 60)

    assert cost(300) < 2 * cost(3)


def test_a_step_costs_the_same_however_many_forks_wait_for_a_leader() -> None:
    """With storage: each fork is asked for in each turn, though its leader is not even admitted."""
    def cost(forks: int) -> int:
        core = Core(CoreConfig(page_size=2, rows=1, hbm_pages=900, dram_pages=90, disk_pages=90))
        play(core, [Arrived(RequestId(0), (1, 2, 3), 500)], steps=3)
        lead = RequestId(1)
        play(core, [Arrived(lead, (5, 5, 5), 5)], steps=1)
        events: list[Event] = [Arrived(RequestId(k), (5, 5, 5), 5, leader=lead) for k in range(2, forks + 2)]
        _, _, events = play(core, [*_next(core), *events], steps=2)
        return cost_of(core, events, 60)

    assert cost(300) < 2 * cost(3)


def _next(core: Core) -> list[Event]:
    """The result that is out."""
    step = core.kv.issued
    return [] if step == core.kv.retired else [
        Retired(step, tuple((9,) for row in core.in_flight[step] if row.samples))]


def test_a_store_that_fails_costs_the_same_however_long_the_tables_are() -> None:
    """A disk that is full fails every store: nobody has those pages, so no table need be searched."""
    def cost(tokens: int, ok: bool) -> int:
        core = Core(CoreConfig(page_size=2, rows=4, hbm_pages=9_000, dram_pages=9_000, disk_pages=9_000,
                               step_tokens=65_536))
        play(core, [Arrived(RequestId(0), tuple(range(tokens)), 500)], steps=8)
        node = core.live[RequestId(0)].path[0]
        host = core.kv.host[0]
        for space in core.kv.disk:           # once more
            core.kv.tree.evict(space, 9_000)
        core.kv.moves.store([(0, node)])
        assert node.ready(host)
        flying = [id for id, f in core.kv.moves.flying.items() if f.dst.tier is Tier.DISK]
        return bytecodes(lambda: core.advance([Moved(flying[-1], ok)]))

    assert cost(4000, False) < 2 * cost(4000, True)


# ---------------------------------------------------------------- flights
def test_a_flight_of_an_engine_whose_tiers_number_their_pages_alike_is_flown_again() -> None:
    """`exec.build` sets no base: each tier has a page 0. The simulator tells pages by their numbers alone."""
    core = Core(CoreConfig(page_size=2, rows=4, hbm_pages=20, dram_pages=40, overlap=True))
    recorder = Recorder(core, turns=30)
    events: list[Event] = [Arrived(RequestId(k), tuple(range(20 * k, 20 * k + 5)), 14) for k in range(9)]
    for _ in range(200):
        plan = recorded(recorder, events).plan
        events = [] if plan is None else answers(plan)
    assert not core.live
    log = flight.read(list(flight.write(redact(recorder), "x")))
    assert not log.complete
    alike(log)


# ---------------------------------------------------------------- a head that nobody wakes
def test_the_head_is_tried_when_pages_are_free_though_its_prefix_was_evicted() -> None:
    """Request 2 lacks pages beside its cached prefix. Request 0 grows into that prefix; then the pages of a
    grant come back. `is_short` subtracts what was evicted from pages that are free, and are plenty."""
    core = Core(CoreConfig(page_size=2, rows=4, hbm_pages=24, role="decode"))
    play(core, [PeerJoined(), Arrived(RequestId(9), tuple(range(900, 909)), 1)])
    _, _, events = play(core, [Arrived(RequestId(0), (7, 7, 7), 100)], steps=2)
    _, _, events = play(core, [*events, Arrived(RequestId(1), tuple(range(30)), 2, transfer=5)], steps=1)
    assert core.live[RequestId(1)].phase is Phase.RECEIVING
    _, _, events = play(core, [*events, Arrived(RequestId(2), tuple(range(900, 914)), 4)], steps=9)
    evicted = core.kv.device[0].evicted
    assert evicted > 0
    side = core.pairs[ONE_PEER].side
    assert isinstance(side, DecodeSide)
    generation = side.table[5].generation
    _, _, events = play(core, [*events, Aborted(RequestId(1))], steps=1)
    play(core, [*events, Received(Drained(5, generation, Reason.CANCELLED))], steps=2)
    assert core.live[RequestId(0)].state.name == "decode.device"
    free = core.kv.device[0].pool.free
    assert core.live[RequestId(2)].phase is not Phase.QUEUED, f"it waits, and {free} pages of 24 are free"


@pytest.mark.parametrize("pages", range(20, 25))
@pytest.mark.parametrize("other", [(4, 2), (4, 2, 3)], ids=["others go on", "nobody can go on"])
def test_a_row_that_needs_one_page_does_not_cancel_every_transfer(other: tuple[int, ...], pages: int) -> None:
    """A grant that is given up frees three pages as soon as the peer has answered, six turns later."""
    core = Core(CoreConfig(page_size=2, rows=4, hbm_pages=pages, role="decode"))
    events: list[Event] = [PeerJoined(), Arrived(RequestId(0), (1, 2, 3), 30),
                           Arrived(RequestId(9), other, 30)]
    _, _, events = play(core, events, steps=2)
    events += [Arrived(RequestId(k), tuple(range(100 * k, 100 * k + 6)), 2, transfer=k) for k in range(1, 6)]
    late, cancelled = list[tuple[int, Event]](), 0
    for turn in range(20):
        advance = core.advance(events)
        cancels = [o.what for o in advance.outputs if isinstance(o, Say) and isinstance(o.what, Cancel)]
        cancelled += len(cancels)
        late += [(turn + 6, Received(Drained(c.transfer, c.generation, Reason.CANCELLED)))
                 for c in cancels]
        events = [*(answers(advance.plan) if advance.plan is not None else ()),
                  *(e for at, e in late if at == turn)]
    assert 0 < cancelled <= 3
    assert all(core.live[RequestId(k)].state.name == "decode.device" for k in (0, 9))


def test_the_head_is_tried_when_pages_behind_a_fence_have_come() -> None:
    """Request 1 fits on the device as soon as the pages of request 2 are through their fence; beside request
    0 it does not fit on the host. The second way in overwrites what the first has said."""
    core = Core(CoreConfig(page_size=2, rows=4, hbm_pages=14, dram_pages=12, hot_pages=1, overlap=True))
    _, _, events = play(core, [Arrived(RequestId(0), (7, 7, 7, 7), 16, selects=True),
                               Arrived(RequestId(2), tuple(range(20)), 8)], steps=2)
    _, _, events = play(core, [*events, Spilled(RequestId(0))], steps=2)
    assert [r.state.name for r in core.running] == ["decode.host", "decode.device"]
    plan = core.advance([Arrived(RequestId(1), tuple(range(50, 58)), 4, selects=True)]).plan
    assert plan is not None
    r = core.live[RequestId(1)]
    assert r.phase is Phase.QUEUED
    r.setbacks.preemptions = r.setbacks.forced = 2
    core.advance([Aborted(RequestId(2))])      # its last step is in flight
    play(core, [*events, *answers(plan)], steps=3)
    assert core.live[RequestId(0)].state.name == "decode.host"
    free = core.kv.device[0].pool.free
    assert r.phase is not Phase.QUEUED, f"it waits, and {free} pages of 14 are free"


# ---------------------------------------------------------------- forks
def test_a_fork_starts_when_its_leader_has_answered_in_a_chunk_of_one_token() -> None:
    """The chunk before the last retires when the leader decodes on the device: so its first token is a calm result."""
    core = Core(CoreConfig(page_size=64, rows=4, hbm_pages=40, step_tokens=4, overlap=True))
    fork, out = RequestId(1), list[StepPlan]()
    events: list[Event] = [Arrived(RequestId(0), tuple(range(9)), 60),
                           Arrived(fork, tuple(range(9)), 60, leader=RequestId(0))]
    for _ in range(100):
        plan = core.advance(events).plan
        out += [] if plan is None else [plan]
        events = answers(out.pop(0)) if plan is None or len(out) == 2 else []
        if core.live[fork].phase is not Phase.QUEUED:
            break
    assert core.live[RequestId(0)].num_output == 1


def test_a_fork_starts_when_a_prefill_engine_has_computed_its_leader() -> None:
    """The leader waits for its grant, and the fork has one."""
    core = Core(CoreConfig(page_size=2, rows=4, hbm_pages=40, role="prefill"))
    prompt, fork = tuple(range(8)), RequestId(1)
    ended, _, _ = play(core, [
        PeerJoined(), Arrived(RequestId(0), prompt, 2, transfer=1),
        Arrived(fork, prompt, 2, transfer=2, leader=RequestId(0)), Received(Grant(2, 1, 8))])
    assert core.live[RequestId(0)].num_output == 1
    assert ended == {fork}


# ---------------------------------------------------------------- who else waits when something hangs, again
@pytest.mark.parametrize("n", [12, 13])
def test_a_hung_push_stops_nobody_else(n: int) -> None:
    """The same of a push whose request has ended, also if all of its pages are sealed: none is `away` then.
    Request 1 does not fit beside them, request 2 does."""
    core = Core(CoreConfig(page_size=2, rows=4, hbm_pages=10, role="prefill"))

    def hangs(m: Move) -> bool:
        return m.dst is Tier.PEER

    play(core, [PeerJoined(), Arrived(RequestId(0), tuple(range(n)), 2, transfer=1),
                Received(Grant(1, 1, n))], hangs)
    assert core.live[RequestId(0)].remote.is_pushed
    play(core, [Received(Cancel(1, 1))], hangs)
    assert not core.live
    play(core, [Arrived(RequestId(1), tuple(range(100, 114)), 2, transfer=2),
                Arrived(RequestId(2), (1, 2, 3), 2, transfer=3)], hangs)
    assert core.live[RequestId(2)].num_output == 1


# ---------------------------------------------------------------- damaged pages, again
def test_banished_pages_that_nobody_names_go_before_sound_ones() -> None:
    """Request 1 shares two pages with the damaged one, and has ended before that was seen."""
    core = Core(CoreConfig(page_size=2, rows=4, hbm_pages=40))
    play(core, [Arrived(RequestId(0), tuple(range(500, 509)), 1)])
    play(core, [Arrived(RequestId(1), (1, 2, 3, 4, 50, 51, 52, 53, 54), 1)])
    _, _, events = play(core, [Arrived(RequestId(2), (1, 2, 3, 4, 60, 61, 62, 63, 64), 9)], steps=2)
    core.live[RequestId(2)].origin.retried, core.live[RequestId(2)].origin.own_from = True, 0
    play(core, [*events, Aborted(RequestId(2), damaged=True)])
    core.kv.tree.evict(core.kv.device[0], 1)
    assert sum(not node.banished for node in core.kv.tree.nodes()) == 4


# ---------------------------------------------------------------- reading from storage, in turns
def _stored(prompts: int, pages: int, **settings: Any) -> Core:
    core = Core(CoreConfig(page_size=2, hbm_pages=8_000, disk_pages=9_000, step_tokens=65_536, **settings))
    for k in range(prompts):
        play(core, [Arrived(RequestId(1000 + k), tuple(range(10_000 * k, 10_000 * k + 2 * pages + 1)), 1)])
    core.kv.tree.evict_all((*core.kv.device, *core.kv.host))
    core.advance(())
    return core


def test_a_step_costs_the_same_however_long_the_prefix_is_that_waits_for_its_next_turn() -> None:
    """Request 1 has read 20 pages when request 2, which comes first, takes all that storage may hold."""
    def cost(pages: int) -> int:
        core = _stored(2, pages, rows=1, dram_pages=3_600)
        _, _, events = play(core, [Arrived(RequestId(7), (1, 2, 3), 500)], steps=3)

        def turn(*new: Event) -> list[Event]:
            nonlocal events
            plan = core.advance([*events, *new]).plan
            assert plan is not None
            events = answers(plan, lambda m: Tier.DISK in (m.src, m.dst))
            return [Moved(m.id, True) for m in plan.moves if from_storage(m)]

        first = turn(Arrived(RequestId(0), tuple(range(2 * core.cfg.store_pages - 39)), 1, priority=-2))
        second = turn(Arrived(RequestId(1), tuple(range(10_000, 10_001 + 2 * pages)), 1))
        turn(*first)
        third = turn(Arrived(RequestId(2), tuple(range(2 * pages + 1)), 1, priority=-1))
        turn(*second, *third)
        turn()
        return bytecodes(lambda: [turn() for _ in range(20)])

    assert cost(1500) < 2 * cost(460)


def test_a_step_costs_the_same_however_many_are_queued_when_a_store_hangs() -> None:
    def cost(others: int) -> int:
        core = _stored(1, 60, rows=1, dram_pages=64)
        _, _, events = play(core, [Arrived(RequestId(7), (1, 2, 3), 500)], steps=3)
        events += [Arrived(RequestId(0), tuple(range(121)), 1)]
        events += [Arrived(RequestId(k), (k,) * 5, 5) for k in range(2000, 2000 + others)]

        def hangs(m: Move) -> bool:
            return Tier.DISK in (m.src, m.dst)

        _, _, events = play(core, events, hangs, steps=3)
        return cost_of(core, events, 20, hangs)

    assert cost(300) < 2 * cost(3)


def test_a_step_costs_the_same_however_many_were_computed_and_dropped_without_a_grant() -> None:
    def cost(others: int) -> int:
        core = Core(CoreConfig(page_size=2, rows=4, hbm_pages=40, role="prefill", step_tokens=4))
        play(core, [PeerJoined()])
        for k in range(1, others + 1):
            play(core, [Arrived(RequestId(k), (k,) * 25, 5, transfer=k)])
        _, _, events = play(core, [Arrived(RequestId(0), tuple(range(60)), 1, transfer=9_999)], steps=3)
        return cost_of(core, events, 8)

    assert cost(300) < 2 * cost(20)
