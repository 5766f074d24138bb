"""What is older than what is granted, begun or connected: a generation, an epoch. It does nothing."""
from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from pair_ends import BOUNDS, KEY, KV, WAIT_S, Pools, check, grant, push

from penstock.transfer.handshake import PeerSession, Stranger, handshake
from penstock.transfer.session import Session
from penstock.transfer.streams import Connection, LinkSettings


def test_a_page_of_an_older_generation_is_a_stray(ends) -> None:
    prefill = ends("prefill", "127.0.0.1:0")
    decode = ends("decode", prefill.link.address)
    epoch = decode.up()
    assert prefill.up() == epoch
    grant(decode, epoch, 16, generation=2)
    for group in (KV, BOUNDS):
        move = push(prefill, epoch, group, 0, 16, generation=1)
        prefill.wait(lambda event, move=move: getattr(event, "id", None) == move.id)
    counts, landings = decode.link._counts, decode.newest._landings
    deadline = time.monotonic() + WAIT_S
    while counts.strays < 2:
        assert time.monotonic() < deadline, "it was written, or never came"
        time.sleep(0.01)
    assert landings.landed(1, 1) is None and not landings.landed(1, 2).ok
    check(decode, {KV: [], BOUNDS: []}, 0)


def test_a_cancel_stops_the_pushes_of_its_generation_alone() -> None:
    session, pushes = object.__new__(Session), [
        SimpleNamespace(move=SimpleNamespace(transfer=t, generation=g), stopped=False)
        for t, g in ((1, 1), (1, 2), (2, 2))]
    session._news, session._pushes = threading.Condition(), pushes
    session.stop(1, 2)
    assert [push.stopped for push in pushes] == [False, True, False]


@pytest.mark.parametrize("epoch, newest", [(3, 5), (5, 5)])
def test_an_epoch_that_is_not_newer_is_no_pair(epoch: int, newest: int) -> None:
    stages = ((5,), (4,))
    ours, theirs = map(Connection, socket.socketpair())

    def end(stream: Connection, listens: bool) -> PeerSession:
        role = "prefill" if listens else "decode"
        settings = LinkSettings(role=role, address="unix:@x", listens=listens, key=KEY)
        facts = Pools(8, stages).facts(role, stages, {"weights": "abc"})
        known = 0 if listens else newest
        return handshake(stream, settings, facts, b"e" * 16, lambda: known, lambda _: epoch)

    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(end, ours, True)
        with pytest.raises(Stranger, match=f"begins epoch {epoch} and {newest} has been"):
            end(theirs, False)
        assert listening.result().epoch == epoch
    for stream in (ours, theirs):
        stream.close()
