"""Pages that the decode instance READs: what is offered lands; what failed or is over does not."""
from __future__ import annotations

import importlib.util
import os
import secrets
import time
from collections.abc import Callable, Iterator
from itertools import count

import pytest
from pair_ends import BOUNDS, KV, WAIT_S, LinkEnd, check, grant, push, transfer_all

from penstock.config.base.errors import ConfigError
from penstock.core.pair.messages import Drained, Grant, Reason
from penstock.core.pair.messages import End as Over
from penstock.transfer import session
from penstock.transfer.events import Down, PeerMessage, Pushed
from penstock.transfer.landing import GrantTable
from penstock.transfer.messages import Memory, Offer, Taken
from penstock.transfer.remote import carrier as carriers
from penstock.transfer.remote.carrier import BUFFER_BYTES, SLOT_BYTES, SLOTS, CarrierFault, buffer_of
from penstock.transfer.remote.opener import opener
from penstock.transfer.streams import Connection

TOKENS = 61


class Copies:
    """A transport within this process: `open` makes one end's. before: called with the reader's number of
    reads, before each; it may raise, or damage what is copied."""

    def __init__(self, before: Callable[[int, memoryview], None] = lambda n, data: None) -> None:
        self.ends: dict[bytes, Copying] = {}
        self.before, self.names, self.reads, self.closed = before, count(), 0, 0

    def open(self, host: str) -> Copying:
        assert host == "127.0.0.1"
        return Copying(self)


class Copying:
    shared = False

    def __init__(self, copies: Copies) -> None:
        self.buffer, _ = buffer_of(BUFFER_BYTES)
        self.here, self._copies, self._there = b"%d" % next(copies.names), copies, b""
        copies.ends[self.here] = self

    def meet(self, there: bytes) -> None:
        assert not self._there
        if there not in self._copies.ends:
            raise CarrierFault("nobody has that name")
        self._there = there

    def read(self, at: int, length: int, limit_s: float) -> memoryview:
        assert at % SLOT_BYTES == 0 and limit_s > 0
        there = self._copies.ends[self._there].buffer[at:at + length]
        self._copies.reads += 1
        self._copies.before(self._copies.reads, there)
        self.buffer[:length] = there
        return self.buffer[:length]

    def close(self) -> None:
        self._copies.closed += 1


def pair(ends, open_carrier, **more: object) -> tuple[LinkEnd, LinkEnd]:
    prefill = ends("prefill", "127.0.0.1:0", open_carrier=open_carrier, **more)
    decode = ends("decode", prefill.link.address, open_carrier=open_carrier, **more)
    assert prefill.up() == decode.up() == 1
    return prefill, decode


@pytest.fixture(params=["here", "nixl", "mooncake"])
def open_carrier(request) -> Iterator[carriers.Open]:
    if request.param == "here":
        yield Copies().open
    elif importlib.util.find_spec(request.param) is None:
        pytest.skip(f"pip install '.[{request.param}]'")
    else:
        made = opener(request.param)
        assert made is not None
        yield made


def test_pages_land_that_are_read_and_each_byte_once(open_carrier, ends) -> None:
    prefill, decode = pair(ends, open_carrier, silence_s=60.0)
    given, heard = transfer_all(prefill, decode, 1, TOKENS, start=16, chunk=8)
    assert heard.message == Over(1, 1, TOKENS, (7,))
    check(decode, given, TOKENS, start=16)
    sent = 45 * 5 * 2 * 2 * 4 * 2 + 11 * 4 * 2 * 2 * 4 * 4
    assert heard.bytes == decode.link.stats()["pair_received_bytes_total"] == sent


def test_more_pieces_than_slots_wait_for_those_that_are_taken(ends) -> None:
    copies = Copies()
    prefill, decode = pair(ends, copies.open)
    for generation in range(1, 2 * SLOTS):
        given, heard = transfer_all(prefill, decode, 1, 40, generation=generation, chunk=8)
        assert isinstance(heard.message, Over)
        decode.revoke(1, generation)
    check(decode, given, 40)
    assert copies.reads > 4 * SLOTS and copies.closed == 0
    for end in (prefill, decode):
        end.link.close()
    assert copies.closed == 2


def fails(n: int, data: memoryview) -> None:
    if n == 3:
        raise CarrierFault("no copy")


def damages(n: int, data: memoryview) -> None:
    if n == 3:
        data[0] ^= 1


@pytest.mark.parametrize("before", [fails, damages])
def test_a_read_that_fails_or_brings_other_bytes_is_the_end_of_its_transfer_only(before, ends) -> None:
    prefill, decode = pair(ends, Copies(before).open)
    _, heard = transfer_all(prefill, decode, 1, TOKENS, chunk=8)
    assert heard.message == Drained(1, 1, Reason.BROKEN)
    decode.revoke(1, 1)
    decode.pools.__init__(8, ((5,), (4,)))
    decode.link._pages.__init__(decode.pools.stages)
    given, heard = transfer_all(prefill, decode, 1, TOKENS, generation=2)
    assert isinstance(heard.message, Over)
    check(decode, given, TOKENS)


def test_a_read_that_comes_back_after_its_grant_was_revoked_changes_no_page(ends) -> None:
    """The fence: `revoke` returns at once, though a READ is in flight, for that goes to no page."""
    def revokes(n: int, data: memoryview) -> None:
        if n == 1:
            decode.revoke(1, 1)

    prefill, decode = pair(ends, Copies(revokes).open)
    grant(decode, 1, 40)
    decode.say(1, Grant(1, 1, 40))
    prefill.wait(lambda e: isinstance(e, PeerMessage))
    for group in (KV, BOUNDS):
        push(prefill, 1, group, 0, 40)
        assert prefill.wait(Pushed).ok
    prefill.say(1, Over(1, 1, 40, (7,)))
    decode.wait(PeerMessage)
    check(decode, {KV: [], BOUNDS: []}, 40)
    assert decode.link.stats()["pair_stray_frames_total"] > 0


def test_one_that_changes_a_page_is_seen(ends, monkeypatch) -> None:
    monkeypatch.setattr(GrantTable, "revoke", lambda *_: None)
    with pytest.raises(AssertionError):
        test_a_read_that_comes_back_after_its_grant_was_revoked_changes_no_page(ends)


@pytest.mark.parametrize("message", [
    Memory(b"?"), Taken(3), Offer(1, 1, 0, (0, 1, 0, 1, 0, 0), b"12345678", SLOTS, 1),
    Offer(1, 1, 0, (0, 1, 0, 1, 0, 0), b"12345678", 0, SLOT_BYTES + 1)])
@pytest.mark.parametrize("reads", [True, False])
def test_what_no_end_says_ends_the_connection(message, reads, ends) -> None:
    prefill, decode = pair(ends, Copies().open if reads else None)
    prefill.say(1, message)
    assert decode.wait(Down).epoch == 1


def test_a_backend_that_is_not_installed_is_named(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert opener("stream") is None
    with pytest.raises(ConfigError, match=r"pip install '\.\[nixl\]'"):
        opener("nixl")


def one_machine(ends) -> tuple[LinkEnd, LinkEnd]:
    prefill = ends("prefill", f"unix:@penstock-test-{secrets.token_hex(8)}")
    decode = ends("decode", prefill.link.address)
    assert prefill.up() == decode.up() == 1
    return prefill, decode


@pytest.fixture
def checked(monkeypatch) -> list[bool | None]:
    """Of each piece that lands, whether it was said to be what was sent: None has a checksum."""
    found: list[bool | None] = []
    land = GrantTable.land

    def noted(self, frame, *, sound=None):
        found.append(sound)
        land(self, frame, sound=sound)

    monkeypatch.setattr(GrantTable, "land", noted)
    return found


def test_two_processes_of_one_machine_have_a_memory_in_common(ends, checked) -> None:
    prefill, decode = one_machine(ends)
    until = time.monotonic() + WAIT_S
    while prefill.newest._offers is None and time.monotonic() < until:
        time.sleep(0.01)
    for generation in range(1, 2 * SLOTS):
        given, heard = transfer_all(prefill, decode, 1, 40, generation=generation, chunk=8)
        assert isinstance(heard.message, Over)
        decode.revoke(1, generation)
    check(decode, given, 40)
    assert set(checked) == {True}


PAGE = 8 * 5 * 2 * 2 * 4 * 2             # bytes of KV


@pytest.mark.parametrize(("slot", "pieces"), [(SLOT_BYTES, 2), (2 * PAGE, 4), (PAGE, 8), (PAGE // 2, 20)])
@pytest.mark.parametrize("here", [True, False])
def test_a_slot_or_a_frame_takes_as_many_pages_as_fit(slot: int, pieces: int, here: bool, ends, checked,
                                                      monkeypatch) -> None:
    """Five pages of KV, of 1,280 bytes, and five of summaries, of 512."""
    monkeypatch.setattr(session, "SLOT_BYTES", slot)
    monkeypatch.setattr(session, "PAYLOAD_MAX", slot)
    prefill, decode = one_machine(ends) if here else pair(ends, None)
    until = time.monotonic() + WAIT_S
    while here and prefill.newest._offers is None and time.monotonic() < until:
        time.sleep(0.01)
    given, heard = transfer_all(prefill, decode, 1, 40)
    assert isinstance(heard.message, Over)
    check(decode, given, 40)
    assert checked == [True if here else None] * pieces


@pytest.mark.parametrize("file", [None, os.devnull, "other memory"])
def test_without_that_memory_pages_come_in_the_stream(file, ends, checked, monkeypatch) -> None:
    """Somebody in between passes bytes on and no file, or another one."""
    hand = Connection.hand

    def other(self, data, fd) -> None:
        if file is None:
            self.sendall(data)
            return
        fd = os.memfd_create("test") if file == "other memory" else os.open(file, os.O_RDWR)
        try:
            if file == "other memory":
                os.ftruncate(fd, BUFFER_BYTES)
            hand(self, data, fd)
        finally:
            os.close(fd)

    monkeypatch.setattr(Connection, "hand", other)
    prefill, decode = one_machine(ends)
    given, heard = transfer_all(prefill, decode, 1, TOKENS, chunk=8)
    assert heard.message == Over(1, 1, TOKENS, (7,))
    check(decode, given, TOKENS)
    assert set(checked) == {None}
    assert decode.link.stats().get('pair_failures_total{cause="memory"}', 0) == (file is not None)
