"""Two ends and a stream: what is sent lands, what is over is never written, refusals are in words."""
from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace as alike
from pair_ends import BOUNDS, KEY, KV, WAIT_S, LinkEnd, check, grant, pages_for, push, transfer_all
from pair_proxy import Fault, Proxy

from penstock.config.base.errors import ConfigError
from penstock.config.request.params import SamplingParams
from penstock.core.pair.messages import Cancel, Drained, Reason, Refused
from penstock.core.pair.messages import End as Over
from penstock.core.plan import Tier
from penstock.transfer import events, session
from penstock.transfer import link as links
from penstock.transfer.codec import VERSION, checksum
from penstock.transfer.events import Down, PeerMessage, Pushed, Unpaired, Up
from penstock.transfer.facts import Facts
from penstock.transfer.handshake import handshake
from penstock.transfer.messages import Ask
from penstock.transfer.streams import LinkSettings, TlsStream

CERTIFICATE = str(Path(__file__).parents[1] / "data" / "pair_tls.pem")
TLS = {"unix": {}, "tcp": {}, "tls": {"tls": True}}


def pair(ends, prefill: dict | None = None, decode: dict | None = None,
         through: tuple[Fault, ...] | None = None):
    """Both ends, connected; with `through`, by way of a proxy, which is the third."""
    a = ends("prefill", "127.0.0.1:0", **(prefill or {}))
    proxy = None if through is None else Proxy(a.link.address, through)
    b = ends("decode", a.link.address if proxy is None else proxy.address, **(decode or {}))
    assert a.up() == b.up() == 1
    return (a, b) if proxy is None else (a, b, proxy)


@pytest.mark.parametrize("kind", list(TLS))
def test_pages_land_over_every_stream(kind: str, ends, tmp_path) -> None:
    address = f"unix:{tmp_path}/pair" if kind == "unix" else "127.0.0.1:0"
    cert = {"tls_cert": CERTIFICATE} if kind == "tls" else {}
    prefill = ends("prefill", address, **TLS[kind], **cert)
    decode = ends("decode", prefill.link.address, **TLS[kind])
    up = decode.wait(Up)
    assert up.session.info == {"engine": "prefill"} and prefill.up() == up.session.epoch == 1
    given, heard = transfer_all(prefill, decode, 1, 61, start=16)
    assert heard.message == Over(1, 1, 61, (7,))
    check(decode, given, 61, start=16)
    sent = 45 * 5 * 2 * 2 * 4 * 2 + 11 * 4 * 2 * 2 * 4 * 4      # whole units only, each position once
    assert heard.bytes == prefill.link.stats()["pair_sent_bytes_total"] == sent
    assert decode.link.stats()["pair_received_bytes_total"] == sent
    assert prefill.unsent(1) == 0


@pytest.mark.parametrize("tier", [Tier.HBM, Tier.DRAM])
@pytest.mark.parametrize(("sizes", "stages", "chunk"), [
    ((8, 16), (((5,), (4,)), ((2, 3), (4, 0))), 24), ((16, 8), (((1, 4), (2, 2)), ((5,), (4,))), 16),
    ((8, 8), (((3, 2), (2, 2)), ((2, 2, 1), (2, 1, 1))), 8)])
@pytest.mark.parametrize("limit", [500, 2600, 1 << 20])     # some layers of a page, two pages or so, all
def test_page_sizes_and_stages_may_differ_and_pushes_come_early(sizes, stages, chunk, tier, limit, ends,
                                                                monkeypatch) -> None:
    monkeypatch.setattr(session, "PAYLOAD_MAX", limit)
    prefill, decode = pair(ends, {"page_size": sizes[0], "stages": stages[0]},
                           {"page_size": sizes[1], "stages": stages[1]})
    for start, tokens in ((0, 48), (32, 75)):
        decode.pools.__init__(sizes[1], stages[1])
        decode.link._pages.__init__(decode.pools.stages)
        given, heard = transfer_all(prefill, decode, 1, tokens, start=start, tier=tier, chunk=chunk,
                                    generation=tokens)
        assert isinstance(heard.message, Over)
        decode.revoke(1, tokens)
        check(decode, given, tokens, start=start, tier=tier)


def test_each_connection_is_an_epoch_and_nothing_of_an_older_one_counts(ends) -> None:
    prefill, decode, proxy = pair(ends, through=())
    grant(decode, 1, 40)
    proxy.cut()
    assert decode.wait(Down).epoch == prefill.wait(Down).epoch == 1
    assert decode.up() == prefill.up() == 2
    move = push(prefill, 1, KV, 0, 40)
    assert prefill.wait(Pushed) == Pushed(move.id, False, 0, 0.0)
    prefill.say(1, Refused(1, 1, 1))
    prefill.say(2, Refused(9, 9, 1))
    assert decode.wait(PeerMessage).message.transfer == 9             # not the one of epoch 1
    grant(decode, 1, 40)                                        # came too late to count
    push(prefill, 2, KV, 0, 40)                                 # so nobody waits for these
    assert prefill.wait(Pushed).ok
    prefill.say(2, Refused(8, 9, 1))
    decode.wait(PeerMessage)
    assert decode.link.stats()["pair_stray_frames_total"] > 0
    check(decode, {KV: [], BOUNDS: []}, 40)
    given, heard = transfer_all(prefill, decode, 2, 40, generation=2)
    assert isinstance(heard.message, Over)
    check(decode, given, 40)
    proxy.close()


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_an_end_that_comes_back_pairs_again_in_a_newer_epoch(who: str, ends, tmp_path) -> None:
    address = f"unix:{tmp_path}/pair"
    both = {"prefill": ends("prefill", address), "decode": ends("decode", address)}
    assert [end.up() for end in both.values()] == [1, 1]
    both[who].link.close()
    other = both["decode" if who == "prefill" else "prefill"]
    assert other.wait(Down).epoch == 1
    both[who] = ends(who, address)
    assert [end.up() for end in both.values()] == [2, 2]
    given, heard = transfer_all(both["prefill"], both["decode"], 2, 20)
    assert isinstance(heard.message, Over)
    check(both["decode"], given, 20)


def lose(prefill: LinkEnd, decode: LinkEnd) -> None:
    """Say so much that a proxy which holds what comes after 8 KiB holds everything."""
    for end in (prefill, decode):
        for _ in range(200):
            end.say(1, Refused(9, 9, 1))


HELD = (Fault("out", at=8192, hold=True), Fault("in", at=8192, hold=True))


def test_an_end_that_dials_again_replaces_its_old_connection(ends) -> None:
    """The network between them forgot it, so nobody has told the other end that it is over."""
    prefill, decode, proxy = pair(ends, decode={"silence_s": 0.4}, through=HELD)
    lose(prefill, decode)
    assert "said nothing" in decode.wait(Down).cause
    assert "again" in prefill.wait(Down).cause
    assert prefill.up() == decode.up() >= 2
    proxy.close()


def test_a_second_end_does_not_take_the_first_ones_place(ends) -> None:
    """They would go on taking it from each other."""
    prefill, first = pair(ends)
    second = ends("decode", prefill.link.address)
    for end in (second, prefill):
        assert "the prefill engine has as many decode engines as it takes" in end.wait(Unpaired).words
    given, heard = transfer_all(prefill, first, 1, 20)
    assert isinstance(heard.message, Over)
    check(first, given, 20)
    assert not [e for e in (*prefill.seen, *first.seen) if isinstance(e, Down)]
    first.link.close()
    assert second.up() == prefill.up() >= 2


def test_each_end_that_calls_has_a_place_of_its_own(ends) -> None:
    """Two places: each end gets what is for it, under numbers that are alike; a third waits for one."""
    other = ends("prefill", "127.0.0.1:0", starts=False)
    prefill = ends("prefill", "127.0.0.1:0", beside=[other.link])
    first = ends("decode", prefill.link.address)
    assert first.up() == prefill.up()
    second = ends("decode", prefill.link.address)
    assert second.up() == other.up()
    third = ends("decode", prefill.link.address)
    assert "as many decode engines as it takes" in third.wait(Unpaired).words
    for there, here in ((first, prefill), (second, other)):
        given, heard = transfer_all(here, there, 1, 20)
        assert isinstance(heard.message, Over)
        check(there, given, 20)
    second.link.close()
    other.wait(Down)
    assert third.up() == other.up() == 2
    given, heard = transfer_all(other, third, 2, 20)
    check(third, given, 20)
    given, heard = transfer_all(prefill, first, 1, 20, transfer=2, generation=2, skip=6)
    assert isinstance(heard.message, Over)


def test_a_second_end_is_taken_when_the_first_has_been_silent(ends) -> None:
    """It may be the first one's machine, which has lost its power and started again."""
    prefill, first, proxy = pair(ends, prefill={"silence_s": 0.4}, through=HELD)
    lose(prefill, first)
    second = ends("decode", prefill.link.address)
    assert "said nothing" in prefill.wait(Down).cause
    assert prefill.up() == second.up() >= 2
    proxy.close()


def group(n: int, **changes: object) -> Callable[[Facts], Facts]:
    return lambda f: alike(f, groups=[alike(g, **changes) if i == n else g for i, g in enumerate(f.groups)])


@pytest.mark.parametrize(("alter", "words"), [
    (lambda f: alike(f, must={"weights": "abd"}),
     ["weights: abc here and abd there", "weights: abd here and abc there"]),
    (lambda f: alike(f, must={**f.must, "RoPE": "yarn"}),
     ["RoPE: nothing here and yarn there", "RoPE: yarn here and nothing there"]),
    (lambda f: alike(f, role="prefill"), ["both ends are prefill engines"] * 2),
    (group(1, unit=8), ["unit of bounds: 4 here and 8 there", "unit of bounds: 8 here and 4 there"]),
    (group(0, dtype="float16"), ["dtype of kv: bfloat16 here and float16 there",
                                 "dtype of kv: float16 here and bfloat16 there"]),
    (lambda f: alike(f, stages=[[9], [4]]), ["stages there that do not have the layers of each group"])])
def test_what_cannot_match_is_refused_with_both_values_in_words(alter, words, ends) -> None:
    prefill = ends("prefill", "127.0.0.1:0")
    decode = ends("decode", prefill.link.address, alter=alter)
    for end, said in zip((prefill, decode), words, strict=False):
        assert said in end.wait(Unpaired).words
        assert not [e for e in end.seen if isinstance(e, Up)]


@pytest.mark.parametrize(("settings", "words"), [
    ({"key": b"x" * 32}, ["another one there", "another one there"]),
    ({"tls": True}, ["does not: give the prefill instance --cluster-tls-cert", "no TLS with the other end"])])
def test_another_key_and_another_transport_are_refused(settings, words, ends) -> None:
    prefill = ends("prefill", "127.0.0.1:0")
    decode = ends("decode", prefill.link.address, **settings)
    assert words[0] in prefill.wait(Unpaired).words and words[1] in decode.wait(Unpaired).words


def test_an_end_without_tls_is_told_so_by_one_that_has_it(ends) -> None:
    prefill = ends("prefill", "127.0.0.1:0", tls=True, tls_cert=CERTIFICATE)
    decode = ends("decode", prefill.link.address)
    assert "no TLS" in prefill.wait(Unpaired).words and "TLS" in decode.wait(Unpaired).words


def connect(end: LinkEnd) -> socket.socket:
    host, _, port = end.link.address.rpartition(":")
    return socket.create_connection((host, int(port)))


def test_another_version_is_refused_with_both(ends) -> None:
    prefill = ends("prefill", "127.0.0.1:0")
    with connect(prefill) as other:
        other.sendall(b"penstock" + (VERSION + 1).to_bytes(2, "little") + bytes(32))
        assert f"version: {VERSION} here and {VERSION + 1} there" in prefill.wait(Unpaired).words


def test_the_certificate_must_be_the_one_that_the_key_was_said_over(ends, monkeypatch) -> None:
    """Somebody in between with a certificate of his own gets no pair, though nobody checks names."""
    prefill = ends("prefill", "127.0.0.1:0", tls=True, tls_cert=CERTIFICATE)
    seen = TlsStream._peer_certificate
    monkeypatch.setattr(TlsStream, "_peer_certificate", lambda self: seen(self) + b"of another")
    decode = ends("decode", prefill.link.address, tls=True)
    assert "key" in prefill.wait(Unpaired).words and "another one there" in decode.wait(Unpaired).words


def test_what_is_revoked_is_written_no_more(ends) -> None:
    prefill, decode = pair(ends)
    given = grant(decode, 1, 48)
    push(prefill, 1, KV, 0, 16)
    prefill.wait(Pushed)
    prefill.say(1, Refused(9, 9, 1))
    decode.wait(PeerMessage)                                          # so the first pages have landed
    decode.revoke(1, 1)
    for pool in decode.pools.every():
        pool.pages.view(torch.uint8).fill_(0xEE)                # they belong to somebody else now
    push(prefill, 1, KV, 16, 32)
    push(prefill, 1, BOUNDS, 0, 48)
    prefill.wait(Pushed)
    prefill.wait(Pushed)
    prefill.say(1, Over(1, 1, 48, (7,)))
    assert isinstance(decode.wait(PeerMessage).message, Over)         # the core ignores it: it knows no such grant
    check(decode, {KV: [], BOUNDS: []}, 48)
    assert len(given[KV]) == 6


@pytest.mark.parametrize("fault", ["missing", "damaged"])
def test_an_end_without_all_its_bytes_is_heard_as_a_failure(fault: str, ends, monkeypatch) -> None:
    prefill, decode = pair(ends)
    grant(decode, 1, 40)
    if fault == "damaged":
        monkeypatch.setattr("penstock.transfer.session.checksum", lambda data: checksum(data) ^ 1)
    push(prefill, 1, KV, 0, 40 if fault == "damaged" else 32)
    push(prefill, 1, BOUNDS, 0, 40)
    prefill.wait(Pushed)
    prefill.wait(Pushed)
    prefill.say(1, Over(1, 1, 40, (7,)))
    assert decode.wait(PeerMessage).message == Drained(1, 1, Reason.BROKEN)
    if fault == "damaged":
        check(decode, {KV: [], BOUNDS: []}, 40)                 # not a byte of it was written
    monkeypatch.undo()
    decode.revoke(1, 1)
    decode.pools.__init__(8, ((5,), (4,)))
    decode.link._pages.__init__(decode.pools.stages)
    given, heard = transfer_all(prefill, decode, 1, 40, generation=2)
    assert isinstance(heard.message, Over)                      # the connection has lived on
    check(decode, given, 40)
    assert decode.link.stats()['pair_failures_total{cause="damaged"}'] == 1


@pytest.mark.parametrize("wrong", ["twice", "gap", "outside", "group"])
def test_positions_that_were_not_granted_end_the_connection(wrong: str, ends) -> None:
    prefill, decode = pair(ends)
    if wrong == "group":
        decode.grant(1, decode.move(Tier.DRAM, KV, pages_for(decode, Tier.DRAM, KV, 0, 16), 0, 16,
                                         to_peer=False))
    else:
        grant(decode, 1, 16)
    push(prefill, 1, BOUNDS if wrong == "group" else KV, 8 if wrong == "gap" else 0,
         24 if wrong == "outside" else 8)
    if wrong == "twice":
        push(prefill, 1, KV, 0, 8)
    assert "PageSlice" in (cause := decode.wait(Down).cause) or "not granted" in cause
    prefill.wait(Down)


class Gate:
    """Pages whose second read waits until it is opened."""

    def __init__(self, pages) -> None:
        self.pages, self.reads, self.open = pages, 0, threading.Event()

    def read(self, *args) -> None:
        self.reads += 1
        if self.reads == 2:
            assert self.open.wait(60)
        self.pages.read(*args)


def test_messages_pass_between_the_frames_of_a_push_which_can_be_stopped(ends, monkeypatch) -> None:
    monkeypatch.setattr(session, "PAYLOAD_MAX", 2 * 8 * 5 * 2 * 2 * 4 * 2)      # two pages
    prefill, decode = pair(ends)
    gate = prefill.newest._pages = Gate(prefill.link._pages)
    given = grant(decode, 1, 40)
    prefill.pools.fill(Tier.HBM, KV, pages_for(prefill, Tier.HBM, KV, 0, 40), 0)
    push(prefill, 1, KV, 0, 40)                                 # five pages
    last = push(prefill, 1, BOUNDS, 0, 40)
    prefill.say(1, Refused(9, 9, 1))
    gate.open.set()
    assert decode.wait(PeerMessage).message.transfer == 9
    assert prefill.wait(Pushed).ok and prefill.wait(Pushed).id == last.id
    prefill.say(1, Over(1, 1, 40, (7,)))
    assert isinstance(decode.wait(PeerMessage).message, Over)
    check(decode, given, 40)
    gate.reads, gate.open = 0, threading.Event()
    push(prefill, 1, KV, 0, 40, generation=2)
    push(prefill, 1, BOUNDS, 0, 40, generation=2)
    assert prefill.unsent(1) > 0
    prefill.stop(1, 2)
    gate.open.set()
    first, second = prefill.wait(Pushed), prefill.wait(Pushed)
    assert not first.ok and not second.ok and second.bytes == 0 and prefill.unsent(1) == 0


def test_whoever_does_not_listen_is_not_told_more_than_fits(ends, monkeypatch) -> None:
    monkeypatch.setattr(events, "WAITING_MAX", 10)
    prefill, decode = pair(ends)
    for i in range(1000):
        prefill.say(1, Refused(i + 1, 1, 1))
    most = 0
    for i in range(1000):
        most = max(most, len(decode.link.events._waiting))
        assert decode.wait(PeerMessage).message.transfer == i + 1
    assert most <= 10


@pytest.mark.parametrize("way", ["in", "out"])
def test_an_end_that_falls_silent_is_cut(way: str, ends) -> None:
    fault = Fault(way, at=2000, hold=True)
    prefill, decode, proxy = pair(ends, {"silence_s": 0.5}, {"silence_s": 0.5}, through=(fault,))
    for i in range(40):                                         # past byte 2,000, if nothing else is
        prefill.say(1, Refused(i + 1, 1, 1))
        decode.say(1, Cancel(i + 1, 1))
    first = decode if way == "in" else prefill
    assert "nothing for 0.5 s" in first.wait(Down).cause
    assert decode.up() == prefill.up() >= 2
    proxy.close()


def test_an_end_that_takes_nothing_is_cut(ends) -> None:
    prefill, decode, proxy = pair(ends, {"silence_s": 0.5}, through=(Fault("in", at=2000, hold=True),))
    long = Ask(transfer=1, prompt=b"\1\0\0\0" * (1 << 20), params=SamplingParams(), stop_ids=[], max_new=1,
               namespace=bytes(16))
    for _ in range(8):                                          # more than the sockets between them hold
        prefill.say(1, long)
    assert prefill.wait(Down).cause == "took nothing for 0.5 s"
    assert decode.up() == prefill.up() >= 2
    proxy.close()


@pytest.mark.parametrize("how", ["cut", "close"])
def test_after_the_end_of_an_epoch_nobody_writes(how: str, ends) -> None:
    prefill, decode = pair(ends)
    for generation in range(1, 30):
        grant(decode, 1, 72, generation=generation)
        push(prefill, 1, KV, 0, 72, generation=generation)
        push(prefill, 1, BOUNDS, 0, 72, generation=generation)
    if how == "cut":
        decode.cut(1)
        assert decode.wait(Down).cause == "cut here"
    else:
        decode.link.close()
    for pool in decode.pools.every():
        pool.pages.view(torch.uint8).fill_(0xEE)
    moves = [prefill.wait(Pushed) for _ in range(58)]
    assert len({m.id for m in moves}) == 58
    assert prefill.wait(Down).epoch == 1
    check(decode, {KV: [], BOUNDS: []}, 72)


def test_a_bug_in_a_thread_reaches_the_loop(ends) -> None:
    prefill, decode = pair(ends)
    grant(decode, 1, 8)
    decode.newest._landings._pages = None                         # type: ignore[assignment]
    push(prefill, 1, KV, 0, 8)
    with pytest.raises(RuntimeError, match="thread of the pair's link died"):
        decode.wait(Down)


def sound(**settings) -> LinkSettings:
    given = {"role": "prefill", "address": "127.0.0.1:0", "listens": True, "key": KEY}
    return LinkSettings(**{**given, **settings})


@pytest.mark.parametrize(("settings", "words"), [
    ({"key": b"short"}, "5 bytes"), ({"address": "10.0.0.1:9"}, "--cluster-insecure"),
    ({"address": "9"}, "HOST:PORT"),
    ({"address": "0.0.0.0:9"}, "from other machines"), ({"address": "unix:" + "x" * 200}, "100 bytes"),
    ({"tls": True}, "--cluster-tls-cert"), ({"tls": True, "plaintext": True}, "exclude"),
    ({"address": "host:99999"}, "HOST:PORT"), ({"silence_s": 0.01}, "0.1 or more")])
def test_settings_are_refused_in_words(settings, words) -> None:
    with pytest.raises(ConfigError, match=words):
        sound(**settings).check()


@pytest.mark.parametrize("settings", [
    {"address": "10.0.0.1:9", "plaintext": True}, {"address": "[::1]:9"}, {"address": "localhost:9"},
    {"address": "10.0.0.1:9", "tls": True, "listens": False},
    {"address": "10.0.0.1:9", "tls": True, "tls_cert": "x"}])
def test_settings_that_are_sound(settings) -> None:
    sound(**settings).check()


def test_an_address_that_is_taken_and_a_file_that_is_no_certificate_are_refused(ends, tmp_path) -> None:
    prefill = ends("prefill", "127.0.0.1:0")
    with pytest.raises(ConfigError, match="cannot listen"):
        LinkEnd("prefill", prefill.link.address)
    with pytest.raises(ConfigError, match="no PEM file"):
        LinkEnd("prefill", "127.0.0.1:0", tls=True, tls_cert=__file__)
    with pytest.raises(ConfigError, match="cannot listen"):
        LinkEnd("prefill", f"unix:{tmp_path}/no/such/folder")
    ends("prefill", f"unix:{tmp_path}/pair")
    with pytest.raises(ConfigError, match="somebody does already"):
        LinkEnd("prefill", f"unix:{tmp_path}/pair")


@pytest.mark.parametrize("address, said", [
    ("127.0.0.1:1", "cannot connect to 127.0.0.1:1: Connection refused"),
    ("a..b:1", "cannot connect to a..b:1: "), ("unix:/nowhere/pair", "No such file or directory")])
def test_who_cannot_connect_says_why_once(address: str, said: str, ends) -> None:
    decode = ends("decode", address, plaintext=True)
    assert said in decode.wait(Unpaired).words
    time.sleep(0.3)                             # some attempts more
    assert not decode.link.events.collect()


def test_a_host_that_cannot_be_one_is_not_listened_on(ends) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on a\.\.b:1"):
        ends("prefill", "a..b:1", plaintext=True)


def test_who_is_called_during_a_handshake_with_another_is_who_it_is_paired_with(ends, monkeypatch):
    def named(name: str):
        return ends("prefill", "127.0.0.1:0", alter=lambda facts: alike(facts, info={"engine": name}))

    first, second = named("first"), named("second")
    decode = ends("decode", first.link.address, starts=False)
    met, goes_on = threading.Event(), threading.Event()

    def slow(stream, settings, *more):
        found = handshake(stream, settings, *more)
        if settings.address == first.link.address and not settings.listens:
            met.set()
            assert goes_on.wait(WAIT_S)
        return found

    monkeypatch.setattr(links, "handshake", slow)
    decode.link.start()
    assert met.wait(WAIT_S)
    decode.link.call(second.link.address)
    goes_on.set()
    assert decode.wait(Up).session.info["engine"] == "second"
    assert not any(isinstance(event, Up) and event.session.info["engine"] == "first" for event in decode.seen)
