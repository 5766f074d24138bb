"""A network that waits, cuts and flips bits between two ends; and seeded bugs of the link, each seen."""
from __future__ import annotations

import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from pair_ends import BOUNDS, KV, LinkEnd, Pools, check, grant, push, transfer_all
from pair_proxy import Fault, Proxy

from penstock.config.streams.frames import ProtocolError
from penstock.core.pair.messages import Drained, Grant, Refused
from penstock.core.pair.messages import End as Over
from penstock.core.plan import DramPage, Move, MoveId, StepId, Tier
from penstock.transfer import landing, session
from penstock.transfer.codec import PageFrame, PageHead, PairReader, PairWriter, checksum
from penstock.transfer.events import Down, LinkEvent, PeerMessage, Pushed
from penstock.transfer.landing import Counts, GrantTable
from penstock.transfer.layout import GroupProgress, PageSlice
from penstock.transfer.pages import PoolPages


def connected(*faults: Fault, **settings) -> tuple[LinkEnd, LinkEnd, Proxy]:
    prefill = LinkEnd("prefill", "127.0.0.1:0", **settings)
    proxy = Proxy(prefill.link.address, faults)
    return prefill, LinkEnd("decode", proxy.address, page_size=16, **settings), proxy


def end_of(*ends: LinkEnd | Proxy) -> None:
    for end in ends:
        end.link.close() if isinstance(end, LinkEnd) else end.close()


def fresh(end: LinkEnd) -> None:
    """Its pools as they were before anything landed."""
    end.pools = Pools(end.pools.page_size, ((5,), (4,)))
    end.link._pages.__init__(end.pools.stages)      # type: ignore[misc]


def attempt(prefill: LinkEnd, decode: LinkEnd, epoch: int, generation: int) -> str:
    """One transfer: "ok", and then its bytes are right; "damaged", of which the decode instance was told; or
    "down", and then both ends were."""
    fresh(decode)
    given = grant(decode, epoch, 40, generation=generation)
    decode.say(epoch, Grant(1, generation, 40))
    down = False

    def wait(what: Callable[[LinkEvent], bool]) -> None:
        nonlocal down
        down = down or isinstance(prefill.wait(lambda e: isinstance(e, Down) or what(e)), Down)

    wait(lambda e: isinstance(e, PeerMessage) and isinstance(e.message, Grant))
    for at in (0, 24):
        for group in (KV, BOUNDS):
            if not down:
                push(prefill, epoch, group, at, 24 if at == 0 else 16, generation=generation)
                wait(lambda e: isinstance(e, Pushed))
    prefill.say(epoch, Over(1, generation, 40, (7,)))
    heard = decode.wait(lambda e: isinstance(e, Down) or (
        isinstance(e, PeerMessage) and isinstance(e.message, Over | Drained)))
    if isinstance(heard, Down):
        if not down:
            wait(lambda e: False)
        return "down"
    decode.revoke(1, generation)
    assert isinstance(heard, PeerMessage)
    if isinstance(heard.message, Drained):
        return "damaged"
    check(decode, given, 40)
    return "ok"


def up_again(prefill: LinkEnd, decode: LinkEnd) -> int:
    epoch = decode.up()
    while prefill.up() < epoch:                 # some that only this end took for a pair
        pass
    return epoch


def weather(seed: int) -> str:
    """Transfers through one fault at a random byte, then through none. Returns what the fault came to."""
    rng = random.Random(seed)
    way, at = rng.choice(("in", "in", "out")), rng.choice((rng.randrange(900), rng.randrange(18_000)))
    kind = rng.choice(("cut", "flip", "delay"))
    fault = Fault(way, at, cut=kind == "cut", flip=kind == "flip", delay_s=0.002 * (kind == "delay"))
    prefill, decode, proxy = connected(fault)
    try:
        epoch, came = up_again(prefill, decode), []
        while len(came) < 4 or came[-1] != "ok":
            came.append(attempt(prefill, decode, epoch, len(came) + 1))
            if came[-1] == "down":
                epoch = up_again(prefill, decode)
            assert len(came) - came.count("ok") <= 1, f"one fault: {came}"
        assert kind != "delay" or (epoch == 1 and len(came) == 4)
        assert (decode.link.stats()["pair_damaged_frames_total"] > 0) == ("damaged" in came)
        return f"{kind} {'new epoch' if epoch > 1 else 'damaged' if 'damaged' in came else 'nothing'}"
    finally:
        end_of(decode, prefill, proxy)


ALL = {"cut new epoch", "flip new epoch", "flip damaged", "delay nothing"}


def test_a_fault_of_the_network_costs_a_transfer_or_an_epoch_and_no_byte() -> None:
    assert {weather(seed) for seed in range(24)} >= ALL


@pytest.mark.sweep
def test_many_faults_of_the_network() -> None:
    assert {weather(seed) for seed in range(1_000, 1_200)} >= ALL


# ---------------------------------------------------------------- seeded bugs
def flipped_page() -> None:
    """One bit of a page's payload, on its way."""
    prefill, decode, proxy = connected()
    try:
        epoch, damaged = up_again(prefill, decode), False

        def damage(payload: memoryview) -> int:
            nonlocal damaged
            right = checksum(payload)
            if not damaged:
                damaged = True
                payload[5] ^= 4
            return right
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session, "checksum", damage)
            assert attempt(prefill, decode, epoch, 1) == "damaged"
    finally:
        end_of(decode, prefill, proxy)


def plain_transfer() -> None:
    prefill, decode, proxy = connected()
    try:
        epoch = up_again(prefill, decode)
        given, heard = transfer_all(prefill, decode, epoch, 75, start=32, chunk=24, tier=Tier.HBM)
        assert isinstance(heard, PeerMessage) and isinstance(heard.message, Over), f"ends with {heard}"
        check(decode, given, 75, start=32, tier=Tier.HBM)
        sent = prefill.link.stats()["pair_sent_bytes_total"]
        assert sent == 43 * 5 * 2 * 2 * 4 * 2 + 10 * 4 * 2 * 2 * 4 * 4
    finally:
        end_of(decode, prefill, proxy)


def early_end() -> None:
    """An End before the last position has come."""
    prefill, decode, proxy = connected()
    try:
        epoch = up_again(prefill, decode)
        grant(decode, epoch, 40)
        for group in (KV, BOUNDS):
            push(prefill, epoch, group, 0, 32)
            prefill.wait(Pushed)
        prefill.say(epoch, Over(1, 1, 40, (7,)))
        heard = decode.wait(PeerMessage)
        assert isinstance(heard, PeerMessage) and isinstance(heard.message, Drained), f"ends early with {heard}"
    finally:
        end_of(decode, prefill, proxy)


def older_epoch() -> None:
    """A frame of a connection that is over, when the same transfer and generation is granted again."""
    pools = Pools(8, ((5,), (4,)))
    page = pools.page(Tier.DRAM, KV, 0)
    facts = pools.facts("decode", ((5,), (4,)), {})
    move = Move(MoveId(1), KV, Tier.PEER, (), Tier.DRAM, (DramPage(page),), 8, StepId(0), 0, 1, 1)
    payload = memoryview(bytes(range(64)) * 10)                 # four units of five layers
    frame = PageFrame(PageHead(1, 1, 0, PageSlice(0, 5, 0, 4), checksum(payload)), payload)
    counts = Counts()
    older, newer = (GrantTable(facts, facts, PoolPages(pools.stages), counts) for _ in range(2))
    older.grant(move)
    older.end()
    newer.grant(move)
    older.land(frame)
    there = pools.of(Tier.DRAM, KV)[0].page(page).view(torch.uint8)
    assert there.unique().tolist() == [0xEE], "an older epoch's frame was written"
    older.grant(move)                                           # nor has a grant of it an effect
    older.land(frame)
    assert counts.strays == 2
    newer.land(frame)
    assert counts.strays == 2
    assert len(there.unique()) > 60


def replayed() -> None:
    """A frame that was recorded on another connection, with this one's epoch written into its head."""
    frame = bytearray(next(PairWriter(b"another connection", 1).message(Refused(9, 9, 1))))
    frame[8:16] = (2).to_bytes(8, "little")
    reader = PairReader(io.BufferedReader(io.BytesIO(frame)).readinto, b"this", 2)   # type: ignore[arg-type]
    with pytest.raises(ProtocolError):
        reader.next()


def revoked() -> None:
    prefill, decode, proxy = connected()
    try:
        epoch = up_again(prefill, decode)
        grant(decode, epoch, 40)
        decode.revoke(1, 1)
        push(prefill, epoch, KV, 0, 40)
        prefill.wait(Pushed)
        prefill.say(epoch, Refused(9, 9, 1))
        decode.wait(PeerMessage)
        check(decode, {KV: [], BOUNDS: []}, 40)
    finally:
        end_of(decode, prefill, proxy)


@dataclass(frozen=True)
class Bug:
    """seen: begins what the one assertion says that has to see it; a wait in vain is not seeing."""
    name: str
    seen: str
    scenario: Callable[[], None]
    where: object
    attribute: str
    made: Callable[[Callable], Callable]


def _of_another_page(right: Callable) -> Callable:
    """Selector state of the page before, of those that it has."""
    def place(group, there, first, pages, piece):
        spans = right(group, there, first, pages, piece)
        if group.unit == 1:
            return spans
        return [span._replace(page=pages[max(0, pages.index(span.page) - 1)]) for span in spans]
    return place


def _kv_units(right: Callable) -> Callable:
    """Selector state mapped as if its pages had as many units as pages of KV."""
    def place(group, there, first, pages, piece):
        spans, size, unit = [], group.page_size, piece.unit
        for span in right(group, there, first, pages, piece):
            spans.append(span._replace(page=pages[min(len(pages) - 1, unit // size - first // size)]))
            unit += span.units
        return spans
    return place


BUGS = (
    Bug("page-counted-before-its-checksum", "pages of Tier.DRAM of group 0",
        flipped_page, landing, "checksum", lambda right: lambda payload: mock.ANY),
    Bug("frame-of-an-older-epoch-written", "an older epoch's frame was written",
        older_epoch, GrantTable, "end", lambda right: lambda self: None),
    Bug("frame-of-another-connection-taken", "DID NOT RAISE",
        replayed, PairReader, "_authenticate", lambda right: lambda self, covered: None),
    Bug("selector-state-of-another-page", "pages of Tier.HBM of group 1",
        plain_transfer, landing, "place", _of_another_page),
    Bug("selector-state-mapped-by-tokens", "pages of Tier.HBM of group 1",
        plain_transfer, landing, "place", _kv_units),
    Bug("sent-from-another-page", "pages of Tier.HBM of group 1",
        plain_transfer, session, "place", _of_another_page),
    Bug("half-a-unit-sent", "ends with Down",
        plain_transfer, session, "whole_units",
        lambda right: lambda first, tokens, unit, states: right(first, tokens, unit, states=True)),
    Bug("done-before-all-has-landed", "ends early with",
        early_end, GroupProgress, "done", lambda right: property(lambda self: True)),
    Bug("revoked-and-written", "pages of Tier.DRAM of group 0",
        revoked, GrantTable, "revoke", lambda right: lambda self, transfer, generation: None),
)


@pytest.mark.parametrize("scenario", list(dict.fromkeys(bug.scenario for bug in BUGS)),
                         ids=lambda scenario: scenario.__name__)
def test_without_a_bug_the_scenario_passes(scenario: Callable[[], None]) -> None:
    scenario()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_each_seeded_bug_is_seen_by_its_assertion(bug: Bug, monkeypatch) -> None:
    right = getattr(bug.where, bug.attribute)
    monkeypatch.setattr(bug.where, bug.attribute, bug.made(right))
    with pytest.raises((AssertionError, pytest.fail.Exception), match=rf"\A{bug.seen}"):
        bug.scenario()
