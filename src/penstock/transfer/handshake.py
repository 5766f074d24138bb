"""How two ends become a pair: nonces, keys, facts, and the number of their epoch.

Each end draws a nonce, so nothing recorded is right again. The end that dials then tells its facts, the
one that listens, once it has seen that the other has the key, answers with its own and the epoch: one
more than the newest that either knows.
"""
from __future__ import annotations

import hmac
import io
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from penstock.config.streams.frames import ProtocolError
from penstock.config.streams.heartbeat import Heartbeat
from penstock.transfer.codec import VERSION, PairReader, PairWriter
from penstock.transfer.facts import Facts, differences
from penstock.transfer.messages import Greeting
from penstock.transfer.streams import Connection, LinkSettings

_NONCE_BYTES = 32
_TLS_RECORDS = (0x15, 0x16)             # an alert, a handshake: what TLS sends first


class Stranger(Exception):
    """The other end is not one that belongs there, in words for the user."""


class Opening(NamedTuple):
    """What an end of a signed stream says first, with a nonce. `protocol`, `stranger`: what it is called, and an end
    that is none of it. `tls_flags`: by which an end of it gets TLS, in words."""

    magic: bytes
    version: int
    protocol: str
    stranger: str
    tls_flags: str

    def keys(self, stream: Connection, read: Callable[[memoryview], int], key: bytes, listens: bool,
             ) -> tuple[bytes, bytes]:
        """Keys of what this end sends and of what it receives. Raises Stranger, and OSError where the stream ends."""
        form = struct.Struct(f"<{len(self.magic)}sH{_NONCE_BYTES}s")
        ours, data = os.urandom(_NONCE_BYTES), bytearray(form.size)
        stream.sendall(form.pack(self.magic, self.version, ours))
        n = read(memoryview(data))
        if n and data[0] in _TLS_RECORDS:
            raise Stranger(f"the other end speaks TLS and this one does not: give {self.tls_flags}")
        if n < len(data):
            raise Stranger("the other end closed the connection before it said what it is: it may speak TLS, or be "
                           + self.stranger)
        magic, version, theirs = form.unpack(data)
        if magic != self.magic:
            raise Stranger(f"the other end is {self.stranger}")
        if version != self.version:
            raise Stranger(f"{self.protocol} version: {self.version} here and {version} there")
        nonces = (theirs, ours) if listens else (ours, theirs)
        dialling, listening = connection_keys(key, self.version, nonces, stream.binding)
        return (listening, dialling) if listens else (dialling, listening)


def connection_keys(key: bytes, version: int, nonces: tuple[bytes, bytes],
                    binding: bytes) -> tuple[bytes, bytes]:
    """Keys of what the dialling end sends and of what the listening end sends. Both have drawn a nonce,
    so no frame of another connection is right under them; nor is one of another TLS certificate, whose
    digest `binding` is."""
    connection = hmac.digest(key, b"penstock pair %d" % version + b"".join(nonces) + binding, "sha256")
    return hmac.digest(connection, b"dialling", "sha256"), hmac.digest(connection, b"listening", "sha256")


OPENING = Opening(b"penstock", VERSION, "pair protocol", "no engine of a pair",
                  "the prefill instance --cluster-tls-cert and the decode instance --cluster-tls, or neither")


@dataclass(frozen=True, slots=True)
class PeerSession:
    epoch: int
    writer: PairWriter
    reader: PairReader
    theirs: Facts
    engine: bytes                       # which one the other end is
    beats: Heartbeat                    # by which the other end counts


def handshake(stream: Connection, settings: LinkSettings, facts: Facts, engine: bytes,
              newest: Callable[[], int], choose: Callable[[Greeting], int]) -> PeerSession:
    """engine: this one; newest: the newest epoch known here; choose: of the end that listens, a newer one
    than that and the one given, or 0 for an engine that is not to be paired with now. Raises Stranger,
    and OSError where the stream ends."""
    read = io.BufferedReader(stream, 1 << 16).readinto
    send, receive = OPENING.keys(stream, read, settings.key, settings.listens)
    writer, reader = PairWriter(send, 0), PairReader(read, receive, 0)
    silence_ms = int(1000 * settings.silence_s)
    if settings.listens:
        heard = _greeting(reader)
        known, epoch = 0, choose(heard)
        _say(stream, writer, Greeting(facts, newest(), silence_ms, engine, epoch))
    else:
        known = newest()
        _say(stream, writer, Greeting(facts, known, silence_ms, engine))
        heard = _greeting(reader)
        epoch = heard.epoch
    if words := differences(facts, heard.facts):
        raise Stranger(words)
    if not epoch:
        one, two = (facts.role, heard.facts.role) if settings.listens else (heard.facts.role, facts.role)
        raise Stranger(f"the {one} engine has as many {two} engines as it takes, all alive: stop one, "
                         f"or start a second {one} engine")
    if epoch <= known:
        raise Stranger(f"the other end begins epoch {epoch} and {known} has been")
    reader.begin(epoch)
    return PeerSession(epoch, PairWriter(send, epoch), reader, heard.facts, heard.engine,
                  Heartbeat(heard.silence_ms / 1000))


def _greeting(reader: PairReader) -> Greeting:
    try:
        message = reader.next()
    except ProtocolError as e:
        raise Stranger(f"the pair's key is another one there, or somebody is in between ({e})") from e
    if message is None:
        raise Stranger("the other end closed the connection when it saw this one's key: it may be "
                         "another one there")
    if not isinstance(message, Greeting):
        raise Stranger(f"the other end begins with {type(message).__name__}")
    return message


def _say(stream: Connection, writer: PairWriter, greeting: Greeting) -> None:
    for frame in writer.message(greeting):
        stream.sendall(frame)
