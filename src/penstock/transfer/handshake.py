"""How two ends become a pair: nonces, keys, facts, and the number of their epoch.

Each end draws a nonce, so nothing recorded is right again. The end that dials then tells its facts, the
one that listens, once it has seen that the other has the key, answers with its own and the epoch: one
more than the newest that either knows.
"""
from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass

from penstock.config.base.decoding import ProtocolError
from penstock.transfer.codec import VERSION, SealedFrameReader, Sealer, connection_keys
from penstock.transfer.facts import Facts, differences
from penstock.transfer.messages import Greeting
from penstock.transfer.streams import Connection, LinkSettings

_MAGIC = b"penstock"
_NONCE_BYTES = 32
_OPENING = struct.Struct(f"<8sH{_NONCE_BYTES}s")
BEATS = 4                               # in the time after which silence is an end
_TLS_RECORDS = (0x15, 0x16)             # an alert, a handshake: what TLS sends first


class Unpairable(Exception):
    """No pair with this end, in words for the user."""


@dataclass(frozen=True, slots=True)
class PeerSession:
    epoch: int
    sealer: Sealer
    reader: SealedFrameReader
    theirs: Facts
    engine: bytes                       # which one the other end is
    beat_s: float                       # without a word of ours, after which we say that we live


def handshake(stream: Connection, settings: LinkSettings, facts: Facts, engine: bytes,
              newest: Callable[[], int], choose: Callable[[Greeting], int]) -> PeerSession:
    """engine: this one; newest: the newest epoch known here; choose: of the end that listens, a newer one
    than that and the one given, or 0 for an engine that is not to be paired with now. Raises Unpairable,
    and OSError where the stream ends."""
    read = io.BufferedReader(stream, 1 << 16).readinto
    ours = os.urandom(_NONCE_BYTES)
    stream.sendall(_OPENING.pack(_MAGIC, VERSION, ours))
    theirs = _opening(read)
    nonces = (theirs, ours) if settings.listens else (ours, theirs)
    dialling, listening = connection_keys(settings.key, VERSION, nonces, stream.binding)
    send, receive = (listening, dialling) if settings.listens else (dialling, listening)
    sealer, reader = Sealer(send, 0), SealedFrameReader(read, receive, 0)
    silence_ms = int(1000 * settings.silence_s)
    if settings.listens:
        heard = _greeting(reader)
        known, epoch = 0, choose(heard)
        _say(stream, sealer, Greeting(facts, newest(), silence_ms, engine, epoch))
    else:
        known = newest()
        _say(stream, sealer, Greeting(facts, known, silence_ms, engine))
        heard = _greeting(reader)
        epoch = heard.epoch
    if words := differences(facts, heard.facts):
        raise Unpairable(words)
    if not epoch:
        one, two = (facts.role, heard.facts.role) if settings.listens else (heard.facts.role, facts.role)
        raise Unpairable(f"the {one} engine has as many {two} engines as it takes, all alive: stop one, "
                         f"or start a second {one} engine")
    if epoch <= known:
        raise Unpairable(f"the other end begins epoch {epoch} and {known} has been")
    reader.begin(epoch)
    return PeerSession(epoch, Sealer(send, epoch), reader, heard.facts, heard.engine,
                  heard.silence_ms / 1000 / BEATS)


def _opening(read: Callable[[memoryview], int]) -> bytes:
    data = bytearray(_OPENING.size)
    n = read(memoryview(data))
    if n and data[0] in _TLS_RECORDS:
        raise Unpairable("the other end speaks TLS and this one does not: give --cluster-tls to both or to none")
    if n < len(data):
        raise Unpairable("the other end closed the connection before it said what it is: it may speak "
                         "TLS, or be no engine")
    magic, version, nonce = _OPENING.unpack(data)
    if magic != _MAGIC:
        raise Unpairable("the other end is no engine of a pair")
    if version != VERSION:
        raise Unpairable(f"pair protocol version: {VERSION} here and {version} there")
    return bytes(nonce)


def _greeting(reader: SealedFrameReader) -> Greeting:
    try:
        message = reader.next()
    except ProtocolError as e:
        raise Unpairable(f"the pair's key is another one there, or somebody is in between ({e})") from e
    if message is None:
        raise Unpairable("the other end closed the connection when it saw this one's key: it may be "
                         "another one there")
    if not isinstance(message, Greeting):
        raise Unpairable(f"the other end begins with {type(message).__name__}")
    return message


def _say(stream: Connection, sealer: Sealer, greeting: Greeting) -> None:
    for frame in sealer.message(greeting):
        stream.sendall(frame)
