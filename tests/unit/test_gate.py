"""A crowd beside streams: what begins or ends waits its turn, what runs goes on."""
from __future__ import annotations

import asyncio

import pytest

from penstock.config.settings.tree import Config, ModelConfig
from penstock.engine import wire
from penstock.engine.client import gate as gates
from penstock.engine.client import link as links
from penstock.engine.client.client import EngineClient
from penstock.engine.client.gate import Gate


def turns_of(count: int, seconds: float, monkeypatch) -> list[int]:
    """In which turn of the loop each of `count` pieces ran, where a turn takes so many seconds."""
    clock, turn, ran = 0.0, 0, []
    monkeypatch.setattr(gates.time, "thread_time", lambda: clock)

    async def go():
        nonlocal clock, turn
        gate = Gate()
        for _ in range(count):
            gate.later(lambda: ran.append(turn))
        while len(ran) < count:
            await asyncio.sleep(0)
            clock, turn = clock + seconds, turn + 1
    asyncio.run(go())
    return ran


def test_of_a_crowd_one_goes_in_each_turn_and_of_a_busy_loop_a_part_is_left_for_it(monkeypatch):
    assert turns_of(5, 0.0, monkeypatch) == [0, 1, 2, 3, 4]
    assert turns_of(7, 2.5 * gates.PIECE_S, monkeypatch) == [0, 1, 1, 1, 2, 2, 2]
    assert turns_of(20, 1.0, monkeypatch) == [0, *[1] * gates.PIECES_MAX, *[2] * gates.PIECES_MAX, 3, 3, 3]


def test_a_piece_that_raises_is_told_to_the_loop_and_the_next_ones_run():
    ran, told = [], []

    async def go():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
        gate = Gate()
        for work in (lambda: ran.append(1), lambda: 1 // 0, lambda: ran.append(2)):
            gate.later(work)
        while len(ran) < 2:
            await asyncio.sleep(0)
        gate.later(lambda: ran.append(3))               # it has not stopped
        await asyncio.sleep(0)
    asyncio.run(go())
    assert ran == [1, 2, 3] and [type(e) for e in told] == [ZeroDivisionError]


class Transport:
    """Of a link: whether it reads."""

    def __init__(self) -> None:
        self.reads, self.paused = True, 0

    def pause_reading(self) -> None:
        self.reads, self.paused = False, self.paused + 1

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return False


def inbox(client: EngineClient, rid: int) -> links.Inbox:
    found = client._inboxes[rid] = links.Inbox(rid)
    client.num_waiting += 1
    return found


def plain(rid: int, token: int, index: int = 0, **more) -> wire.OutputChunk:
    return wire.OutputChunk(rid=rid, tokens=[token], index=index, **more)


@pytest.mark.parametrize("logprobs", [False, True])
def test_what_has_come_before_it_is_read_is_one_chunk(logprobs):
    def made(token):
        scores = [wire.TokenLogprob(-float(token), 1, [])] if logprobs else None
        return plain(1, token, token, logprobs=scores)

    async def go():
        client = EngineClient(Config(model=ModelConfig(model="x")))
        of = inbox(client, 1)
        for chunk in (plain(1, 0, cached_tokens=3), made(1), made(2),
                      plain(1, 3, 3, kv_reads={"hot_hits": 1}), made(4), plain(1, 5, 5, finish="length")):
            client.receive(wire.Chunks([chunk]))
        return of
    of = asyncio.run(go())
    tokens = [chunk.tokens for chunk in of.chunks]
    if logprobs:                # a chunk has them of all of its tokens, or of none
        assert tokens == [[0], [1, 2], [3], [4], [5]]
        assert [score.logprob for score in of.chunks[1].logprobs] == [-1.0, -2.0]
    else:
        assert tokens == [[0, 1, 2], [3, 4], [5]]
    assert of.finished and of.chunks[-1].finish == "length" and of.chunks[0].cached_tokens == 3


def test_a_burst_of_the_engine_is_taken_in_slices_between_which_streams_run(monkeypatch):
    """And nothing more is read meanwhile."""
    monkeypatch.setattr(links, "SLICE_CHUNKS", 8)

    async def go():
        client, transport, seen = EngineClient(Config(model=ModelConfig(model="x"))), Transport(), []
        link = links.EngineLink(client)
        link.connection_made(transport)
        of = inbox(client, 1)
        of.begun = True
        data = b"".join(wire.FROM_ENGINE.frames(wire.Chunks([plain(1, n, n), plain(2, 0)])) for n in range(10))
        link.data_received(data[:-3])
        while not (seen and seen[-1] == 9):
            seen.append(sum(len(chunk.tokens) for chunk in of.chunks))
            assert transport.reads == (seen[-1] == 9)
            await asyncio.sleep(0)
        link.data_received(data[-3:])
        assert [t for chunk in of.chunks for t in chunk.tokens] == list(range(10))
        return seen
    assert asyncio.run(go()) == [4, 8, 9]


def test_streams_that_run_are_woken_at_once_and_those_that_begin_or_end_in_turn():
    async def go():
        client, woken = EngineClient(Config(model=ModelConfig(model="x"))), []
        inboxes = [inbox(client, rid) for rid in range(6)]
        for of in inboxes:
            of.waiter = client_future(woken, of.rid)
        inboxes[0].begun = inboxes[1].begun = True
        client.receive(wire.Chunks([*(plain(rid, 7, cached_tokens=0) for rid in (2, 3, 4)),
                                    plain(5, 7, finish="stop"), plain(0, 7), plain(1, 7)]))
        at_once = [of.rid for of in inboxes if of.waiter.done()]
        # What comes for one that waits its turn does not take it past the others.
        client.receive(wire.Chunks([plain(4, 8, 1)]))
        assert not inboxes[4].waiter.done() and inboxes[4].chunks[0].tokens == [7, 8]
        for _ in range(12):
            await asyncio.sleep(0)
        return at_once, woken
    at_once, woken = asyncio.run(go())
    assert at_once == [0, 1] and woken == [0, 1, 2, 3, 4, 5]


def client_future(woken: list[int], rid: int) -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda _: woken.append(rid))
    return future
