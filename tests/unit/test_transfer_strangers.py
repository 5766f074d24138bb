"""Connections that are no pair's: they neither pair, nor stand in the way, nor outlive the end."""
from __future__ import annotations

import contextlib
import socket
import threading

from pair_ends import WAIT_S, LinkEnd, check, transfer_all

from penstock.core.pair.messages import End as Over
from penstock.transfer import link, streams
from penstock.transfer.codec import VERSION
from penstock.transfer.events import Unpaired


def connect(end: LinkEnd) -> socket.socket:
    host, _, port = end.link.address.rpartition(":")
    return socket.create_connection((host, int(port)))


def test_strangers_neither_pair_nor_stand_in_the_way(ends) -> None:
    prefill = ends("prefill", "127.0.0.1:0")
    strangers = [connect(prefill) for _ in range(4)]
    strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100)
    strangers[2].sendall(b"penstock" + VERSION.to_bytes(2, "little") + b"n" * 32 + b"\0" * 500)
    strangers[3].close()
    decode = ends("decode", prefill.link.address)
    epoch = decode.up()
    given, heard = transfer_all(prefill, decode, epoch, 20)
    assert isinstance(heard.message, Over)
    check(decode, given, 20)
    words = {e.words for e in prefill.seen if isinstance(e, Unpaired)}
    assert any("no engine" in w for w in words) and any("key" in w for w in words)
    for s in strangers:
        s.close()


def test_strangers_who_say_nothing_do_not_keep_an_end_out(ends, monkeypatch) -> None:
    for module in (link, streams):
        monkeypatch.setattr(module, "CONNECT_S", 600.0)
    prefill = ends("prefill", "127.0.0.1:0")
    strangers = [connect(prefill) for _ in range(3 * link.HANDSHAKES_MAX)]
    decode = ends("decode", prefill.link.address)
    assert decode.up() == prefill.up()
    more = [connect(prefill) for _ in range(3 * link.HANDSHAKES_MAX)]
    given, heard = transfer_all(prefill, decode, 1, 20)         # those neither
    assert isinstance(heard.message, Over)
    check(decode, given, 20)
    for s in (*strangers, *more):
        s.close()


def test_a_connection_that_is_accepted_while_the_end_closes_is_closed(ends, monkeypatch) -> None:
    for module in (link, streams):
        monkeypatch.setattr(module, "CONNECT_S", 600.0)
    prefill, accepted = ends("prefill", "127.0.0.1:0"), threading.Event()
    real, cut = prefill.link._begin, link.shut

    def late(sock: socket.socket) -> None:
        accepted.set()
        assert closing.wait(WAIT_S)
        real(sock)

    closing = threading.Event()
    monkeypatch.setattr(prefill.link, "_begin", late)
    with connect(prefill) as stranger:
        assert accepted.wait(WAIT_S)
        monkeypatch.setattr(link, "shut", lambda sock: (cut(sock), closing.set()))     # it has looked at all
        prefill.link.close()
        stranger.settimeout(WAIT_S)
        while stranger.recv(1 << 10):
            pass


def test_strangers_who_send_a_byte_now_and_then_are_not_waited_for(ends, monkeypatch) -> None:
    monkeypatch.setattr(link, "CONNECT_S", 0.3)
    prefill = ends("prefill", "127.0.0.1:0")
    strangers = [connect(prefill) for _ in range(link.HANDSHAKES_MAX)]
    over = threading.Event()

    def drip() -> None:
        while not over.wait(0.05):
            for s in strangers:
                with contextlib.suppress(OSError):
                    s.sendall(b"p")
    dripping = threading.Thread(target=drip)
    dripping.start()
    for s in strangers:
        s.settimeout(WAIT_S)
        with contextlib.suppress(ConnectionError):
            while s.recv(1 << 10):                              # its opening, then the end
                pass
    over.set()
    dripping.join()
    for s in strangers:
        s.close()
