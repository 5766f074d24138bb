"""The codec: every message survives, and no bytes raise anything but ProtocolError."""
from __future__ import annotations

import random

import pytest
from mutated import mutate

from penstock.config.request.params import SamplingParams
from penstock.config.request.selection import Selection
from penstock.engine import wire

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


def bodies(messages):
    return [wire.frame(m)[4:] for m in messages]


def test_every_message_survives():
    assert {type(m) for m in TO_ENGINE} == set(wire.ToEngine.__args__)
    assert {type(m) for m in FROM_ENGINE} == set(wire.FromEngine.__args__)
    assert [wire.decode_to_engine(b) for b in bodies(TO_ENGINE)] == TO_ENGINE
    assert [wire.decode_from_engine(b) for b in bodies(FROM_ENGINE)] == FROM_ENGINE


@pytest.mark.parametrize("body", bodies(TO_ENGINE))
def test_a_message_of_the_other_direction_is_refused(body):
    with pytest.raises(wire.ProtocolError):
        wire.decode_from_engine(body)


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 1000])
def test_frames_survive_any_cut(cut):
    stream = b"".join(map(wire.frame, TO_ENGINE))
    reader = wire.FrameReader()
    got = [body for i in range(0, len(stream), cut) for body in reader.feed(stream[i:i + cut])]
    assert [wire.decode_to_engine(b) for b in got] == TO_ENGINE


def test_a_length_over_the_limit_is_refused_before_its_body_arrives():
    with pytest.raises(wire.ProtocolError, match="over"):
        wire.FrameReader().feed((wire.FRAME_BYTES_MAX + 1).to_bytes(4, "little"))


def test_an_integer_that_msgpack_cannot_carry_is_a_protocol_error():
    with pytest.raises(wire.ProtocolError, match="64 bits"):
        wire.frame(wire.Abort(1 << 64))


def test_deep_nesting_is_a_protocol_error():
    with pytest.raises(wire.ProtocolError):
        wire.decode_to_engine(b"\x91" * 100_000)


def fuzz(count: int, seed: int) -> tuple[int, int]:
    """(accepted, refused) of `count` mutated frames, through the reader and both decoders."""
    rng = random.Random(seed)
    pairs = [(wire.decode_to_engine, m) for m in TO_ENGINE]
    pairs += [(wire.decode_from_engine, m) for m in FROM_ENGINE]
    accepted = refused = 0
    for _ in range(count):
        decode, message = rng.choice(pairs)
        stream = mutate(rng, wire.frame(message), 6) if rng.random() < 0.3 else None
        body = mutate(rng, wire.frame(message)[4:], 6)
        try:
            for one in [body] if stream is None else wire.FrameReader().feed(stream):
                decode(one)
            accepted += 1
        except wire.ProtocolError:
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
