"""The codec: every message survives, and no bytes raise anything but ProtocolError."""
from __future__ import annotations

import io
import random
import socket

import pytest
from mutated import mutate

from penstock.config.base.errors import ConfigError
from penstock.config.request.params import SamplingParams
from penstock.config.request.selection import Selection
from penstock.config.streams import frames
from penstock.config.streams.frames import FrameBuffer, FrameReader, ProtocolError
from penstock.engine import process, wire

TO_ENGINE = [
    wire.Hello(wire.VERSION, {"model": {"model": "demo", "seed": 0, "x": None, "y": ["a", "b"]}}),
    wire.Submit(rid=7, prompt=[1, 2, 3], stop_ids=[2], max_new=5, leader=6, choice=1,
                selects=True, attention=(1 << 63) - 1,
                params=SamplingParams(stop=("é", "##"), logit_bias={5: -1.5}, seed=-3, n=2,
                                      forced=(4, 0))),
    wire.Abort(7), wire.StopAt(7, 3), wire.Flush(), wire.OfSession(1 << 62, True),
    wire.AskStats(1), wire.AskShown(2), wire.Shutdown()]
FROM_ENGINE = [
    wire.EngineReady(pid=1, vocab_size=9, max_model_len=8, info={"dtype": "float32", "none": None},
               selection=Selection(selector="bounds", version=1, unit=8, budget=512, sinks=16, window=64,
                                   dense=(0, 3))),
    wire.Failed("no such model"), wire.PeerNews("silent for 10 s", False, {"model": "x", "pp": 2, "none": None}),
    wire.Chunks([wire.OutputChunk(rid=1, tokens=[4, 5], index=3, finish="stop", reason="",
                            logprobs=[wire.TokenLogprob(-0.5, 1, [(4, -0.5), (9, -1.0)])] * 2,
                            cached_tokens=16, cached_by_tier={"hbm": 16, "dram": 0},
                            kv_reads={"hot_hits": 3}, drafts=(7, 4)),
                 wire.OutputChunk(rid=2, tokens=[], index=0)]),
    wire.Timelines([wire.Timeline("00-1-2-01", 1, [("queued", 1 << 60, 1 << 61)])]),
    wire.Stats(1, {"pages_free": 3.0}),
    wire.Shown(2, 1, [wire.SeenRequest(7, "prefill", 9, 3, 0)],
               [wire.SeenTurn(4, 2, 1, 3, 0, [(7, "queued", "prefill")])])]


KINDS = [(wire.TO_ENGINE, TO_ENGINE), (wire.FROM_ENGINE, FROM_ENGINE)]


def read(kinds, *parts):
    """What is read of a stream that comes in these parts."""
    buffer = FrameBuffer(kinds)
    return [message for part in parts for message in buffer.feed(part)]


def test_every_message_survives():
    for kinds, messages in KINDS:
        assert {type(m) for m in messages} == set(kinds.of)
        assert [read(kinds, kinds.frames(m)) for m in messages] == [[m] for m in messages]


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda m: type(m).__name__)
def test_a_message_of_the_other_direction_is_refused(message):
    with pytest.raises(ProtocolError):
        read(wire.FROM_ENGINE, wire.TO_ENGINE.frames(message))


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 9, 1000])
@pytest.mark.parametrize("frame", [frames.FRAME_BYTES_MAX, 40])
def test_frames_survive_any_cut(monkeypatch, cut, frame):
    """Those of a message in parts too."""
    monkeypatch.setattr(frames, "FRAME_BYTES_MAX", frame)
    stream = b"".join(map(wire.TO_ENGINE.frames, TO_ENGINE))
    assert read(wire.TO_ENGINE, *(stream[i:i + cut] for i in range(0, len(stream), cut))) == TO_ENGINE


def test_what_a_buffer_and_a_reader_read_is_the_same(monkeypatch):
    monkeypatch.setattr(frames, "FRAME_BYTES_MAX", 40)
    stream = io.BytesIO(b"".join(map(wire.FROM_ENGINE.frames, FROM_ENGINE)))
    reader = FrameReader(io.BufferedReader(stream).readinto, wire.FROM_ENGINE)
    assert [reader.next() for _ in FROM_ENGINE] == FROM_ENGINE and reader.next() is None


def test_a_length_over_the_limit_is_refused_before_its_body_arrives():
    with pytest.raises(ProtocolError, match="bytes"):
        read(wire.TO_ENGINE, frames._HEAD.pack(1, 0, frames.FRAME_BYTES_MAX))


def test_a_message_over_the_limit_is_refused_where_it_is_made_and_where_it_arrives(monkeypatch):
    made = wire.TO_ENGINE.frames(message := TO_ENGINE[1])
    monkeypatch.setattr(wire.TO_ENGINE, "bytes_max", 40)
    with pytest.raises(ProtocolError, match="over 40"):
        wire.TO_ENGINE.frames(message)
    with pytest.raises(ProtocolError, match="over 40"):
        read(wire.TO_ENGINE, made)


def test_an_integer_that_msgpack_cannot_carry_is_a_protocol_error():
    with pytest.raises(ProtocolError, match="64 bits"):
        wire.TO_ENGINE.frames(wire.Abort(1 << 64))


def test_deep_nesting_is_a_protocol_error():
    with pytest.raises(ProtocolError):
        read(wire.TO_ENGINE, frames._HEAD.pack(1, 0, 100_000) + b"\x91" * 100_000)


def fuzz(count: int, seed: int) -> tuple[int, int]:
    """(accepted, refused) of `count` mutated streams of a message, of most only the body."""
    rng = random.Random(seed)
    accepted = refused = 0
    for _ in range(count):
        kinds, messages = rng.choice(KINDS)
        stream = kinds.frames(message := rng.choice(messages))
        if rng.random() < 0.3:
            stream = mutate(rng, stream, 6)
        else:
            body = mutate(rng, stream[frames.HEAD_BYTES:], 6)
            stream = frames._HEAD.pack(kinds.of[type(message)], 0, len(body)) + body
        try:
            read(kinds, stream)
            accepted += 1
        except ProtocolError:
            refused += 1
    return accepted, refused


def test_mutated_frames_raise_only_protocol_errors():
    accepted, refused = fuzz(6_000, seed=1)
    assert accepted > 100 and refused > 3_000      # both sides of the border are exercised


@pytest.mark.parametrize("count", [pytest.param(60_000, marks=pytest.mark.sweep),
                                   pytest.param(300_000, marks=pytest.mark.soak)])
def test_many_mutated_frames_raise_only_protocol_errors(count):
    accepted, refused = fuzz(count, seed=2)
    assert accepted + refused == count and refused > count / 2


def test_numbers_of_the_messages_that_name_a_version_never_change():
    """An engine of another installation can read Hello, and say so: whatever else the two have more."""
    assert wire.TO_ENGINE.of[wire.Hello] == 1 and wire.FROM_ENGINE.of[wire.Failed] == 66
    assert not {*wire.TO_ENGINE.decoders} & {*wire.FROM_ENGINE.decoders}


def test_an_engine_that_cannot_read_the_first_message_names_its_version():
    here, there = socket.socketpair()
    with here, there:
        link = object.__new__(process.ApiLink)          # without its thread, which ends the process
        link._socket, link._reader = here, FrameBuffer(wire.TO_ENGINE)
        there.sendall(bytes([200]) + bytes(7))
        with pytest.raises(ConfigError, match=f"version {wire.VERSION} and the API process another .*kind 200"):
            process.hello(link)
