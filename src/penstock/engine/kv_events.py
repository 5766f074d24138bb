"""KV events on the wire of vLLM and SGLang: msgpack over ZMQ, published by a thread, with a replay of the last ones.

Owns the messages, the sequence and the ring. What is cached comes from the core (`core.published`); a reader that has
missed more than the ring holds makes it publish all again. The engine never waits for a reader.
"""
from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from penstock.config.base.errors import ConfigError, install_hint
from penstock.config.settings.kv_events import MEDIA, KvEvents, host_of, kv_events, listens
from penstock.core.kv.prefix_tree import unpack
from penstock.core.plan import Cached, Event, Republish, StoredPages, Tier
from penstock.exec.waker import Waker

if TYPE_CHECKING:
    import zmq

TIERS = (Tier.HBM, Tier.DRAM, Tier.DISK)
SGLANG = {"CPU": "CPU_PINNED", "STORAGE": "DISK"}       # media that SGLang calls otherwise
AGAIN_S = 30.0              # between two times that all pages are published again
PORTION = 64                # batches of a replay that are sent at once
REST_MS = 2                 # after each portion
STALL_S = 1.0               # a client that reads nothing for so long gets no more
CLOSE_S = 0.5               # for what is queued at the end, and for what readers have not taken
REQUEST_BYTES_MAX = 1024    # of a part of what is received; a greeting may have a name of 255 bytes
END = (-1).to_bytes(8, "big", signed=True)
CLEARED = Cached(True, (), ())


class _Event(msgspec.Struct, frozen=True, tag_field="type", tag=True, kw_only=True):
    """A map, with the name of its class under `type`."""


class BlockStored(_Event, frozen=True, kw_only=True):
    """Consecutive pages; `parent_block_hash` is the page before the first. A prompt finds them in `medium`."""

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str
    lora_name: str | None = None


class BlockRemoved(_Event, frozen=True, kw_only=True):
    block_hashes: tuple[int, ...]
    medium: str


class AllBlocksCleared(_Event, frozen=True, kw_only=True):
    pass


class Encoder:
    """From what the core has published to the payload of one message.

    Pages of an API key or a `cache_salt` are left out: no field for a salt is in the schemas of all readers, and one
    that does not know it would send another tenant's prompt here."""

    def __init__(self, page_size: int, rank: int, dialect: str) -> None:
        """rank: of the engine. dialect: whose names media have, "sglang" or else vLLM's."""
        self._page_size, self._rank = page_size, rank
        names = SGLANG if dialect == "sglang" else {}
        self._media = {tier: names.get(medium, medium) for tier, medium in zip(TIERS, MEDIA, strict=True)}
        self._salted: dict[Tier, set[int]] = {tier: set() for tier in TIERS}        # hashes that were left out
        self._pack = msgspec.msgpack.Encoder().encode

    def events(self, cached: Cached) -> list[_Event]:
        """Return the events of one turn in the order in which they are applied; none, if all are left out."""
        events: list[_Event] = []
        if cached.cleared:
            events.append(AllBlocksCleared())
            for hidden in self._salted.values():
                hidden.clear()
        for stored in cached.stored:
            if stored.namespace:
                self._salted[stored.tier].update(stored.hashes)
            else:
                events.append(self._stored(stored))
        for tier, hashes in cached.removed:
            hidden = self._salted[tier]
            if public := tuple([page for page in hashes if page not in hidden]):
                events.append(BlockRemoved(block_hashes=public, medium=self._media[tier]))
            hidden.difference_update(hashes)
        return events

    def _stored(self, stored: StoredPages) -> BlockStored:
        return BlockStored(block_hashes=stored.hashes, parent_block_hash=stored.parent, block_size=self._page_size,
                           token_ids=[token for key in stored.keys for token in unpack(key)],
                           medium=self._media[stored.tier])

    def payload(self, events: Sequence[_Event], unix_s: float) -> bytes:
        return self._pack((unix_s, events, self._rank))


def check_events(text: str | None) -> KvEvents | None:
    """Return what to publish. Raises ConfigError where pyzmq is missing, before a model is loaded."""
    events = kv_events(text)
    if events is not None and importlib.util.find_spec("zmq") is None:
        raise ConfigError(f"--kv-events-config: pyzmq is not installed: {install_hint('events')}")
    return events


def shown(events: KvEvents) -> list[str]:
    """Return what the log says of the endpoints: who connects to whom, and who can read the tokens of prompts."""
    way = "listens at" if listens(events.endpoint) else "connects to a subscriber at"
    lines = [f"KV events: the engine {way} {events.at(events.endpoint)}"]
    if events.replay_endpoint is not None:
        lines.append(f"KV events: the engine listens for replay requests at {events.at(events.replay_endpoint)}")
    return lines + [
        f"warning: KV events: other machines can connect to {endpoint}, or get what is sent there, without a key "
        "or encryption, and events have the token ids of prompts and answers: let only the router reach it"
        for endpoint in filter(None, (events.endpoint, events.replay_endpoint)) if not _is_local(endpoint)]


def _is_local(endpoint: str) -> bool:
    host = host_of(endpoint)
    try:
        return host in ("", "localhost") or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(slots=True)
class _Answer:
    """Batches from `next` to before `end` that a subscriber has requested; it has until `until` to read more."""

    client: bytes
    next: int
    end: int
    until: float


class KvPublisher:
    """The sockets of one engine, and the thread that has them."""

    def __init__(self, events: KvEvents, *, log: Callable[[str], None],
                 unix: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic) -> None:
        """log: takes a line at a time, from any thread. Raises ConfigError if an endpoint cannot be had."""
        import zmq
        self._zmq, self._events, self._log, self._unix, self._clock = zmq, events, log, unix, clock
        self._topic = events.topic.encode()
        self._queue = deque[Cached]()
        self._waker, self._closing = Waker(), False
        # A number that is lower than before the engine was started again would be taken for old news.
        self._next = int(unix() * 1e6)
        self._ring: dict[int, bytes] = {}       # the last payloads, by number
        self._answer: _Answer | None = None
        self._is_lost = False                   # readers know nothing until all pages are published again
        self._wants_all, self._asked_at = False, -AGAIN_S
        self._is_off = self._fails = self._has_failed = False   # _fails: since the last batch that was published
        self.num_batches = self.num_republished = 0
        self._context = zmq.Context(io_threads=1)
        self._out = self._open(zmq.PUB, events.endpoint, events.hwm)
        self._replies = None if events.replay_endpoint is None else self._open(
            zmq.ROUTER, events.replay_endpoint, 2 * PORTION, binds=True)

    def start(self, page_size: int, dialect: str, wake: Callable[[], None]) -> None:
        """Publish from now on. dialect: see Encoder. wake: makes the engine's loop look at `news`."""
        self._encoder, self._wake = Encoder(page_size, self._events.data_parallel_rank, dialect), wake
        self._thread = threading.Thread(target=self._run, daemon=True, name="penstock-events")
        self._thread.start()

    def _open(self, kind: int, endpoint: str, hwm: int, binds: bool = False) -> zmq.Socket[bytes]:
        """Return a socket that is bound to the endpoint of this engine, or connected where a subscriber listens."""
        at, socket = self._events.at(endpoint), self._context.socket(kind)
        socket.setsockopt(self._zmq.LINGER, 0)
        socket.setsockopt(self._zmq.IPV6, "[" in at)
        socket.setsockopt(self._zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
        if kind == self._zmq.ROUTER:
            socket.setsockopt(self._zmq.ROUTER_MANDATORY, 1)       # else what a client does not read is dropped unseen
        socket.set_hwm(hwm)
        try:
            if binds or listens(endpoint):
                socket.bind(at)
            else:
                socket.connect(at)
        except self._zmq.ZMQError as e:
            self._context.destroy(linger=0)    # else its end waits for the socket, for ever
            raise ConfigError(f"--kv-events-config: {at}: {e.strerror}: give another endpoint") from None
        return socket

    # ------------------------------------------------------------ the engine's thread
    def put(self, cached: Cached) -> None:
        """Publish this, soon. Never waits."""
        if self._is_off:
            return
        if cached.cleared:
            self._is_lost = self._wants_all = False
        elif self._is_lost:
            return
        elif len(self._queue) >= self._events.max_queue_size:
            self._queue.clear()
            self._is_lost = self._wants_all = True
            cached = CLEARED
        self._queue.append(cached)
        self._waker.wake()

    @property
    def wait_s(self) -> float | None:
        """Until `news` has some; None: when `wake` is called."""
        return max(0.0, self._asked_at + AGAIN_S - self._clock()) if self._wants_all else None

    def news(self) -> Sequence[Event]:
        """Return what the core is to hear: all pages are to be published again, now and then at most."""
        if not self._wants_all or self._clock() < self._asked_at + AGAIN_S:
            return ()
        self._wants_all, self._asked_at = False, self._clock()
        self.num_republished += 1
        return (Republish(),)

    def stats(self) -> dict[str, float]:
        return {"kv_event_batches_total": float(self.num_batches),
                "kv_events_republished_total": float(self.num_republished)}

    def close(self) -> None:
        """End the thread and its sockets, with what is queued sent as far as readers take it within CLOSE_S. A thread
        that takes longer keeps its sockets. Idempotent."""
        self._closing = True
        self._waker.wake()
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._context.destroy(linger=int(1000 * CLOSE_S))

    # ------------------------------------------------------------ the thread
    def _run(self) -> None:
        while not self._is_off:
            try:
                return self._serve()
            except Exception as e:
                self._fail(e)

    def _fail(self, error: Exception) -> None:
        """After a batch that could not be published, all pages are published again; after a second one without a batch
        between them, nothing is any more."""
        self._is_off = self._fails
        if self._is_off or not self._has_failed:
            self._log(f"KV events: {type(error).__name__}: {error}: " + (
                "they are off until the engine is started again" if self._is_off else "all pages are published again"))
        self._fails = self._has_failed = True
        self._queue.clear()
        if not self._is_off:
            self._queue.append(CLEARED)
            self._is_lost = self._wants_all = True
            self._waker.wake()
            self._wake()

    def _serve(self) -> None:
        waker, both = self._zmq.Poller(), self._zmq.Poller()
        for source in filter(None, (self._waker, self._replies)):
            both.register(source, self._zmq.POLLIN)
        waker.register(self._waker, self._zmq.POLLIN)
        rests = False
        while not self._closing or self._queue:
            # Requests take no more than a share of the engine's time, and delay no event by more than a portion.
            if rests:
                waker.poll(REST_MS)
            else:
                both.poll()
            self._waker.clear()
            while (cached := self._take()) is not None:
                self._publish(cached)
            rests = self._replies is not None and self._replay(self._replies)

    def _take(self) -> Cached | None:
        with contextlib.suppress(IndexError):       # none is there, or the engine's thread clears the queue meanwhile
            return self._queue.popleft()
        return None

    def _publish(self, cached: Cached) -> None:
        events = self._encoder.events(cached)
        if not events:
            return
        payload = self._encoder.payload(events, self._unix())
        self._out.send_multipart((self._topic, self._next.to_bytes(8, "big"), payload))
        self._ring[self._next] = payload
        self._ring.pop(self._next - self._events.buffer_steps, None)
        self._next += 1
        self.num_batches += 1
        self._fails = False

    def _replay(self, socket: zmq.Socket[bytes]) -> bool:
        """Answer the next one who has missed something, or send a portion more. Returns whether there was a request;
        one of another form than `client, "", number` has no answer."""
        if self._answer is None:
            if not socket.poll(0):
                return False
            request = socket.recv_multipart()
            if len(request) == 3 and len(request[2]) == 8:
                self._answer = _Answer(request[0], int.from_bytes(request[2], "big"), self._next,
                                       self._clock() + STALL_S)
        if self._answer is not None:
            self._send_portion(socket, self._answer)
        return True

    def _send_portion(self, socket: zmq.Socket[bytes], answer: _Answer) -> None:
        oldest = self._next - len(self._ring)
        if answer.next < oldest and len(self._ring) == self._events.buffer_steps:
            self._wants_all = True
            self._wake()
        answer.next = max(answer.next, oldest)
        try:
            for number in range(answer.next, min(answer.next + PORTION, answer.end)):
                socket.send_multipart((answer.client, b"", self._topic, number.to_bytes(8, "big"), self._ring[number]),
                                      self._zmq.NOBLOCK)
                answer.next, answer.until = number + 1, self._clock() + STALL_S
            if answer.next >= answer.end:
                socket.send_multipart((answer.client, b"", b"", END, b""), self._zmq.NOBLOCK)
                self._answer = None
        except self._zmq.ZMQError as e:
            if not isinstance(e, self._zmq.Again) or self._clock() >= answer.until:
                self._answer = None             # the client has gone, or does not read
