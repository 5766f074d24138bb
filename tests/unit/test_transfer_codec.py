"""Frames of a pair: every message survives, nothing but what was signed next is taken, ProtocolError only."""
from __future__ import annotations

import hmac
import io
import random

import msgspec
import pytest
from mutated import mutate

from penstock.config.request.params import SamplingParams
from penstock.config.request.scores import Scores
from penstock.config.streams import frames
from penstock.config.streams.frames import ProtocolError
from penstock.config.streams.heartbeat import Beat
from penstock.core.pair.messages import Cancel, Drained, End, Grant, Reason, Refused
from penstock.transfer import codec
from penstock.transfer.codec import PageFrame, PageHead, PairReader, PairWriter, checksum
from penstock.transfer.facts import Facts, GroupFacts
from penstock.transfer.handshake import connection_keys
from penstock.transfer.layout import PageSlice
from penstock.transfer.messages import Ask, First, Greeting, Memory, Offer, Prompted, SessionNews, Taken

KEY, EPOCH = b"k" * 32, 7
FACTS = Facts("decode", {"weights": "abc", "RoPE": "none"},
              [GroupFacts("kv", 3, 2, 2, 8, 1, "bfloat16", 2, 16)], [[1, 2]], {"model": "demo", "x": None})
MESSAGES = [
    Grant(9, 2, 100, 16), Cancel(9, 2), End(9, 2, 100, (5, 6)), Refused(9, 2, Reason.REFUSED),
    Drained(9, 2, Reason.CANCELLED), Greeting(FACTS, 6, 10_000, b"e" * 16, 7), Beat(),
    Ask(transfer=9, prompt=b"\1\0\0\0" * 5, params=SamplingParams(stop=("é",), logit_bias={5: -1.5}, seed=-3),
        stop_ids=[2], max_new=5, namespace=b"n" * 16, choice=1, leader=8, selects=True,
        attention=(1 << 63) - 1, trace="00-1-2-01", session=1 << 62),
    First(9, 2, [(-0.5, 1, [(4, -0.5), (9, -1.0)])], 16, 32, 48),
    SessionNews((1 << 63) - 1, True),
    Prompted(9, 2, Scores(7, b"\0" * 8, b"\1\0\0\0" * 2, b"", b"")),
    Memory(b"where it lies"), Offer(9, 2, 1, (0, 3, 16, 2, 0, 0), b"\5" * 8, 15, 1 << 20), Taken(15)]
HEAD = PageHead(9, 2, 1, PageSlice(2, 1, 16, 1, 4, 3), 0)


def page(payload: bytes) -> PageHead:
    return HEAD._replace(checksum=checksum(payload))


def stream(messages=MESSAGES, payload: bytes = b"bytes of a page", epoch: int = EPOCH,
           key: bytes = KEY) -> bytes:
    writer = PairWriter(key, epoch)
    head = writer.page(page(payload), len(payload)) + payload
    return head + b"".join(frame for m in messages for frame in writer.message(m))


def reader(data: bytes, epoch: int = EPOCH, key: bytes = KEY) -> PairReader:
    return PairReader(io.BufferedReader(io.BytesIO(data)).readinto, key, epoch)  # type: ignore[arg-type]


def read(data: bytes, epoch: int = EPOCH, key: bytes = KEY) -> list[object]:
    coming, out = reader(data, epoch, key), []
    while (frame := coming.next()) is not None:
        out.append(PageFrame(frame.head, memoryview(bytes(frame.payload)))
                   if isinstance(frame, PageFrame) else frame)
    return out


def test_every_message_survives() -> None:
    assert {type(m) for m in MESSAGES} == set(codec.PAIR.of)
    assert read(stream()) == [PageFrame(page(b"bytes of a page"), memoryview(b"bytes of a page")), *MESSAGES]


def test_a_long_message_goes_in_frames_of_at_most_a_mebibyte() -> None:
    long = msgspec.structs.replace(MESSAGES[7], prompt=b"\1\2\0\0" * (1 << 20))
    made = list(PairWriter(KEY, EPOCH).message(long))
    assert len(made) == 5 and max(map(len, made)) == frames.FRAME_BYTES_MAX
    assert read(b"".join(made)) == [long]


def test_a_message_that_is_too_long_is_refused_where_it_is_made_and_where_it_arrives(monkeypatch) -> None:
    long = msgspec.structs.replace(MESSAGES[7], prompt=b"\1\2\0\0" * (1 << 20))
    made = list(PairWriter(KEY, EPOCH).message(long))
    monkeypatch.setattr(codec.PAIR, "bytes_max", 1 << 21)
    with pytest.raises(ProtocolError, match="over"):
        read(b"".join(made))
    with pytest.raises(ProtocolError, match="over"):
        list(PairWriter(KEY, EPOCH).message(long))


def test_a_frame_of_an_older_epoch_is_refused_and_so_is_one_sent_twice() -> None:
    old = stream(epoch=EPOCH - 1)
    with pytest.raises(ProtocolError, match=f"epoch {EPOCH - 1}"):
        read(old)
    # Not even if its head claims to be of this one: the key's MAC covers the epoch.
    forged = bytearray(old)
    forged[8:16] = EPOCH.to_bytes(8, "little")
    with pytest.raises(ProtocolError, match="key"):
        read(bytes(forged))
    first = stream([])
    with pytest.raises(ProtocolError, match="frame 0"):
        read(first + first)


@pytest.mark.parametrize("other", [0, 1, 2])
def test_no_key_of_another_connection_direction_or_certificate_is_right(other: int) -> None:
    nonces = (b"a" * 32, b"b" * 32)
    dialling, listening = connection_keys(KEY, 1, nonces, b"")
    keys = [listening, connection_keys(KEY, 1, (b"a" * 32, b"c" * 32), b"")[0],
            connection_keys(KEY, 1, nonces, b"certificate")[0]]
    assert read(stream(key=dialling), key=dialling)
    with pytest.raises(ProtocolError, match="key"):
        read(stream(key=dialling), key=keys[other])


def flipped(data: bytes, at: int, bit: int) -> bytes:
    bad = bytearray(data)
    bad[at] ^= 1 << bit
    return bytes(bad)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_every_bit_of_a_message_and_of_a_page_head_is_authenticated(message) -> None:
    """And of a page's payload the checksum, which is in its head, tells."""
    data = stream([message])
    payload = range(frames.SIGNED_BYTES + codec.PAGE_HEAD_BYTES,
                    frames.SIGNED_BYTES + codec.PAGE_HEAD_BYTES + len(b"bytes of a page"))
    for at in range(len(data)):
        for bit in (0, 7):
            bad = flipped(data, at, bit)
            if at in payload:
                frame = reader(bad).next()
                assert isinstance(frame, PageFrame) and checksum(frame.payload) != frame.head.checksum
            else:
                with pytest.raises(ProtocolError):
                    read(bad)


def test_each_part_of_a_long_message_is_authenticated_to_its_last_byte() -> None:
    long = msgspec.structs.replace(MESSAGES[7], prompt=b"\1\2\0\0" * (1 << 19))
    made = list(PairWriter(KEY, EPOCH).message(long))
    assert len(made) == 3
    ends = [sum(map(len, made[:i + 1])) for i in range(3)]
    data = b"".join(made)
    for at in (ends[0], ends[0] + frames.SIGNED_BYTES, ends[1] - 1, ends[1] + frames.SIGNED_BYTES, ends[2] - 1):
        with pytest.raises(ProtocolError):
            read(flipped(data, at, 3))


def test_a_payload_is_checked_to_its_last_byte() -> None:
    payload = bytes(range(256)) * 1024
    whole = checksum(payload)
    places = 0, 1 << 16, (1 << 16) + 1, len(payload) - 1
    assert all(checksum(flipped(payload, at, 5)) != whole for at in places)


@pytest.mark.parametrize("message", [
    End(1, 1, 1, tuple(range(65))), End(1, 1, 1, (-1,)), Grant(-1, 1, 1),
    Grant(1 << 63, 1, 1)])
def test_numbers_of_the_cores_messages_are_bounded(message) -> None:
    with pytest.raises(ProtocolError, match="bounds"):
        read(b"".join(PairWriter(KEY, EPOCH).message(message)))


def test_a_length_is_checked_before_anything_is_read() -> None:
    writer = PairWriter(KEY, EPOCH)
    head = writer._head(1, False, frames.FRAME_BYTES_MAX, b"")
    with pytest.raises(ProtocolError, match="bytes"):
        read(head)


def test_a_stream_that_ends_inside_a_frame_says_so() -> None:
    data = stream()
    ends, at = {0}, 0
    while at < len(data):
        at += frames.SIGNED_BYTES + int.from_bytes(data[at + 4:at + 8], "little")
        ends.add(at)
    for cut in range(len(data)):
        if cut in ends:
            read(data[:cut])
        else:
            with pytest.raises(ProtocolError, match="inside"):
                read(data[:cut])


def resealed(rng: random.Random, kind: int, body: bytes) -> bytes:
    """A frame by somebody who has the key, and talks nonsense."""
    changed = body
    while changed == body:
        changed = mutate(rng, changed, 4)
    more = rng.random() < 0.05
    covered = changed[:codec.PAGE_HEAD_BYTES] if kind == 0 else changed
    head = frames._HEAD.pack(kind, more, len(changed)) + frames._ORDER.pack(EPOCH, 0)
    return head + hmac.digest(KEY, head + covered, "sha256") + changed


def sealed_parts() -> tuple[list[object], list[bytes]]:
    """What is said, pages before and behind messages of one frame and of several, and its frames."""
    writer, said, made = PairWriter(KEY, EPOCH), [], []
    long = msgspec.structs.replace(MESSAGES[7], prompt=b"\1\2\0\0" * 100)
    for what in (b"one page", *MESSAGES[:4], b"another" * 9, long, *MESSAGES[4:], b"the last"):
        if isinstance(what, bytes):
            made.append(writer.page(page(what), len(what)) + what)
            said.append(PageFrame(page(what), memoryview(what)))
        else:
            made += writer.message(what)
            said.append(what)
    return said, made


def taken_of(data: bytes, said: list[object]) -> bool:
    """Reads a stream to its end; whether nothing was refused. What is taken was said, in that order; of a
    page with another payload the checksum tells."""
    coming = reader(data)
    for was in [*said, None]:
        try:
            frame = coming.next()
        except ProtocolError:
            return False
        if isinstance(frame, PageFrame):
            assert isinstance(was, PageFrame) and frame.head == was.head
            assert (checksum(frame.payload) == was.head.checksum) == (frame.payload == was.payload)
        else:
            assert frame is None or frame == was
        if frame is None:
            return True
    raise AssertionError("more was taken than was said")


def fuzz(count: int, seed: int) -> tuple[int, int]:
    """(taken, refused) of `count` streams with a frame that is mutated, half of them frames alone that are
    signed with the right key."""
    rng = random.Random(seed)
    bodies = [(codec.PAIR.of[type(m)], next(PairWriter(KEY, EPOCH).message(m))[frames.SIGNED_BYTES:])
              for m in MESSAGES]
    bodies.append((0, PairWriter(KEY, EPOCH).page(page(b"x" * 50), 50)[frames.SIGNED_BYTES:] + b"x" * 50))
    said, made = sealed_parts()
    assert len(made) > len(said)
    taken = 0
    for _ in range(count):
        if rng.random() < 0.5:
            kind, body = rng.choice(bodies)
            kind = rng.randrange(14) if rng.random() < 0.1 else kind
            try:
                reader(resealed(rng, kind, body)).next()
                taken += 1
            except ProtocolError:
                pass
            continue
        at = rng.randrange(len(made))
        changed = made[at]
        while changed == made[at]:
            changed = mutate(rng, changed, 4)
        taken += taken_of(b"".join((*made[:at], changed, *made[at + 1:])), said)
    return taken, count - taken


@pytest.fixture
def short_frames(monkeypatch) -> None:
    """So that a message has parts without a mebibyte of it."""
    monkeypatch.setattr(frames, "FRAME_BYTES_MAX", 400)


def test_mutated_frames_raise_only_protocol_errors(short_frames) -> None:
    taken, refused = fuzz(3_000, seed=1)
    assert taken > 100 and refused > 1_000      # both sides of the border are exercised


@pytest.mark.parametrize("count", [pytest.param(30_000, marks=pytest.mark.sweep),
                                   pytest.param(100_000, marks=pytest.mark.soak)])
def test_many_mutated_frames_raise_only_protocol_errors(short_frames, count: int) -> None:
    _, refused = fuzz(count, seed=2)
    assert refused > .6 * count
