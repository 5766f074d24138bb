"""The stream between node 0 and another machine's agent: what they say, who proves what, when one is gone.

Every byte between the executor and a rank of the other machine, and between ranks on two machines, goes through
it, by channel. Frames are those of `transfer.codec`, each from who has the key. Decides nothing.
"""
from __future__ import annotations

import hmac
import io
import socket
import threading
from collections.abc import Callable
from typing import Annotated, Any

from msgspec import Meta

from penstock.config.settings.pairkey import node_key
from penstock.config.settings.plain import Plain
from penstock.config.settings.tree import Config
from penstock.config.streams.frames import FrameReader, FrameWriter, Kinds, Message, ProtocolError
from penstock.config.streams.heartbeat import Beat, Heartbeat
from penstock.core.settings import CoreConfig
from penstock.exec.load.weights import digest_of
from penstock.model.weights.checkpoint import weights_digest
from penstock.model.weights.locate import files_of
from penstock.transfer.codec import MESSAGE_BYTES_MAX
from penstock.transfer.handshake import Opening
from penstock.transfer.streams import Connection, LinkSettings, read_certificate, secure

VERSION = 4
CHUNK = 1 << 19                 # bytes of a channel, or of pages that are whole, in one message
EXECUTOR, BEFORE, AFTER, TOKENS = range(4)         # ends that a rank has
OPENING = Opening(b"penstocknode", VERSION, "node protocol", "no node",
                  "--cluster-tls-cert to all machines or to none")
Number = Annotated[int, Meta(ge=0, lt=1 << 62)]


class Join(Message, frozen=True):
    """The first of an agent: which node it is, of which version, with which settings and weights, at which
    address TP ranks of other machines reach its own, and how many GPUs it sees."""

    version: str
    node: Number
    settings: Plain
    weights: str
    threads: Number
    host: str
    gpus: Number


class Start(Message, frozen=True):
    """The answer: start the ranks of this node with these settings."""

    config: Plain
    num_layers: Number


class Refuse(Message, frozen=True):
    """The other answer."""

    why: str


class NodeStarted(Message, frozen=True):
    """Processes of the node's ranks, in their order."""

    pids: list[Number]


class Data(Message, frozen=True):
    """Bytes to, or from, an end that a rank has: `rank * 4` + EXECUTOR, BEFORE, AFTER or TOKENS."""

    channel: Number
    body: bytes


class ToAll(Message, frozen=True):
    """A frame of the executor to each rank of the node: a plan crosses once."""

    body: bytes


class NodePools(Message, frozen=True):
    """Pools of these sizes come: make room. Ranks are told behind it."""

    core: CoreConfig


class Seen(Message, frozen=True):
    """Of an engine of a pair or with storage: what Read and Write are of. `handles`: of each rank's pools on
    its GPU, "" on a CPU."""

    core: CoreConfig
    handles: list[bytes]


class Exited(Message, frozen=True):
    """A rank's process has ended; its exit code."""

    rank: Number
    code: int


class NodeStack(Message, frozen=True):
    """Print what this rank does: it has said nothing for long."""

    rank: Number


class Read(Message, frozen=True):
    """Send these layers of parts of pages: answered by NodeBytes, part after part.

    layers   the first, as the node counts them, and their number
    heads    the same of heads
    spans    of each part its page, the first of its units, and their number
    """

    number: Number
    tier: str
    group: Number
    layers: tuple[Number, Number]
    heads: tuple[Number, Number]
    spans: list[tuple[Number, Number, Number]]


class Write(Read, frozen=True):
    """Write them, dense as NodeBytes has them; answered by empty NodeBytes."""

    body: bytes


class NodeBytes(Message, frozen=True):
    """Answers Read and Write, each by its number."""

    number: Number
    body: bytes = b""


class Bye(Message, frozen=True):
    """Node 0 ends as it was asked to."""


SAYS: Kinds[Message] = Kinds(f"node protocol version {VERSION}", (
    Join, Start, Refuse, NodeStarted, Data, ToAll, NodePools, Exited, NodeStack, Read, Write,
    NodeBytes, Beat, Bye, Seen), MESSAGE_BYTES_MAX)


def settings_of(config: Config) -> LinkSettings:
    """How nodes reach each other. Raises ConfigError: the key, or the certificate of node 0."""
    nodes, cluster = config.nodes, config.cluster
    listens, certificate = nodes.rank == 0, cluster.cluster_tls_cert
    if listens and certificate is not None:
        read_certificate(certificate)
    assert nodes.dist_init_addr is not None, "refused"
    return LinkSettings(role="node", address=nodes.dist_init_addr, listens=listens, key=node_key(cluster),
                        tls=certificate is not None, tls_cert=certificate or "",
                        plaintext=cluster.cluster_insecure, silence_s=cluster.node_silence_s)


def weights_of(config: Config) -> str:
    """What tells other weights apart, without reading all of them. Raises ConfigError."""
    files = files_of(config.model)
    return f"{digest_of(files.config)[:8]}-" + (
        "random" if files.load_format == "dummy" else weights_digest(files, sampled=True)[:16])


class NodeLink:
    """One end. Any thread says; one reads; a third says that this end lives."""

    def __init__(self, sock: socket.socket, settings: LinkSettings) -> None:
        """Shakes hands: what comes afterwards is from who has the key, in this connection alone. Raises
        Stranger, and OSError where the stream ends."""
        self._stream: Connection = secure(sock, settings)
        self.host, self.peer = sock.getsockname()[0], sock.getpeername()[0]
        read = io.BufferedReader(self._stream, CHUNK).readinto
        key = hmac.digest(settings.key, b"penstock nodes", "sha256")
        try:
            send, receive = OPENING.keys(self._stream, read, key, settings.listens)
        except BaseException:
            self.close()
            raise
        self._writer, self._reader = FrameWriter(SAYS, send), FrameReader(read, SAYS, receive)
        self._lock = threading.Lock()
        self._beats = Heartbeat(settings.silence_s)
        self._why = ""

    def say(self, message: Message) -> None:
        """Raises ConnectionError when the other end is gone."""
        try:
            with self._lock:
                for frame in self._writer.message(message):
                    self._stream.sendall(frame)
        except OSError as e:
            self.cut(_why(e, self._beats.silence_s))
            raise ConnectionError(self._why) from e

    def data(self, channel: int, body: bytes | memoryview) -> None:
        """Raises ConnectionError when the other end is gone."""
        for at in range(0, len(body), CHUNK):
            self.say(Data(channel, bytes(body[at:at + CHUNK])))

    def next(self) -> Any:
        """The next message. Raises ConnectionError when there is none: the other end is gone, silent, or not
        who it was."""
        try:
            message = self._reader.next()
        except ProtocolError as e:
            self.cut(str(e))
        except OSError as e:
            self.cut(_why(e, self._beats.silence_s))
        else:
            if message is not None:
                return message
            self.cut("it closed the connection")
        raise ConnectionError(self._why)

    def run(self, handle: Callable[[Any], None]) -> str:
        """Hand over what comes, until there is nothing more; why. After `live`."""
        try:
            while True:
                if not isinstance(message := self.next(), Beat):
                    handle(message)
        except ConnectionError:
            return self._why
        finally:
            self._beats.end()

    def patient(self, seconds: float) -> None:
        """Before `live`: wait for so long."""
        self._stream.limit(seconds)

    def live(self) -> None:
        """From now on both ends say that they live, and one that does not is gone."""
        self._stream.limit(self._beats.silence_s)
        self._beats.begin(lambda: self.say(Beat()))

    def cut(self, why: str) -> None:
        """Whoever reads or says is told that the other end is gone. Idempotent."""
        self._why = self._why or why
        self._stream.cut()

    def close(self) -> None:
        self._stream.cut()
        self._stream.close()


def _why(error: OSError, silence_s: float) -> str:
    silent = isinstance(error, TimeoutError)
    return f"nothing was heard or taken for {silence_s:g} s" if silent else str(error)


def pump(sock: socket.socket, link: NodeLink, channel: int) -> None:
    """Bytes of `sock` to the other machine, until one of them ends."""
    try:
        while body := sock.recv(CHUNK):
            link.data(channel, body)
    except OSError:
        pass


def differences(ours: Config, theirs: Config) -> str:
    """What another node has been told otherwise, of what is the same on all; "" where nothing is."""
    own = {"model": ("model", "tokenizer", "served_model_name", "chat_template",
                     "default_chat_template_kwargs", "download_dir", "seed", "generation_config",
                     "override_generation_config"),
           "device": ("threads",)}
    found = []
    for section in ("model", "kv", "schedule", "device"):
        a, b = getattr(ours, section), getattr(theirs, section)
        for name in a.__slots__:
            if name not in own.get(section, ()) and getattr(a, name) != getattr(b, name):
                found.append(f"--{name.replace('_', '-')} is {getattr(a, name)} on node 0 and "
                             f"{getattr(b, name)} on node {theirs.nodes.rank}")
    return "; ".join(found)

