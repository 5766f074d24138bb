"""KV events on the wire of vLLM and SGLang: msgpack over ZMQ, published by a thread, with a replay of the last ones.

Owns the messages, the sequence and the ring. What is cached comes from the core (`core.published`); a reader that has
missed more than the ring holds makes it publish all again. The engine never waits for a reader.
"""
from __future__ import annotations

import importlib.util
import ipaddress
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from penstock.config.base.errors import ConfigError, install_hint
from penstock.config.settings.kv_events import MEDIA, KvEvents, kv_events
from penstock.core.kv.prefix_tree import unpack
from penstock.core.plan import Cached, Event, Republish, StoredPages, Tier
from penstock.exec.waker import Waker

if TYPE_CHECKING:
    import zmq

TIERS = (Tier.HBM, Tier.DRAM, Tier.DISK)
SGLANG = {"CPU": "CPU_PINNED", "STORAGE": "DISK"}       # media that SGLang calls otherwise
AGAIN_S = 30.0              # between two times that all pages are published again
END = (-1).to_bytes(8, "big", signed=True)


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
    cache_salt: str | msgspec.UnsetType = msgspec.UNSET


class BlockRemoved(_Event, frozen=True, kw_only=True):
    block_hashes: tuple[int, ...]
    medium: str


class AllBlocksCleared(_Event, frozen=True, kw_only=True):
    pass


class Encoder:
    """From what the core has published to the payload of one message."""

    def __init__(self, page_size: int, rank: int, dialect: str) -> None:
        """rank: of the engine. dialect: whose names media have, "sglang" or else vLLM's."""
        self._page_size, self._rank = page_size, rank
        names = SGLANG if dialect == "sglang" else {}
        self._media = {tier: names.get(medium, medium) for tier, medium in zip(TIERS, MEDIA, strict=True)}
        self._pack = msgspec.msgpack.Encoder().encode

    def events(self, cached: Cached) -> list[_Event]:
        """Return the events of one turn in the order in which they are applied."""
        return [*([AllBlocksCleared()] if cached.cleared else []),
                *[BlockRemoved(block_hashes=hashes, medium=self._media[tier]) for tier, hashes in cached.removed],
                *map(self._stored, cached.stored)]

    def _stored(self, stored: StoredPages) -> BlockStored:
        # Pages of a tenant or a salt have a name that no client sends: a router finds none of them for anyone else.
        salt = f"{stored.namespace:016x}" if stored.namespace else msgspec.UNSET
        return BlockStored(block_hashes=stored.hashes, parent_block_hash=stored.parent, block_size=self._page_size,
                           token_ids=[token for key in stored.keys for token in unpack(key)],
                           medium=self._media[stored.tier], cache_salt=salt)

    def payload(self, cached: Cached, unix_s: float) -> bytes:
        return self._pack((unix_s, self.events(cached), self._rank))


def check_events(text: str | None) -> KvEvents | None:
    """Return what to publish. Raises ConfigError where pyzmq is missing, before a model is loaded."""
    events = kv_events(text)
    if events is not None and importlib.util.find_spec("zmq") is None:
        raise ConfigError(f"--kv-events-config: pyzmq is not installed: {install_hint('events')}")
    return events


def warning(events: KvEvents) -> str:
    """Return who reads the tokens of prompts, if those are not on this machine alone."""
    for endpoint in filter(None, (events.endpoint, events.replay_endpoint)):
        host = endpoint.partition("://")[2].rpartition(":")[0].strip("[]")
        try:
            local = endpoint.startswith("ipc:") or host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            local = False
        if not local:
            return (f"KV events: {endpoint} is open to other machines, without a key or encryption, and events have "
                    "the token ids of all prompts and answers: let only the router reach it")
    return ""


class KvPublisher:
    """The sockets of one engine, and the thread that has them."""

    def __init__(self, events: KvEvents, page_size: int, dialect: str, wake: Callable[[], None], *,
                 unix: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic) -> None:
        """wake: makes the engine's loop look at `news`. Raises ConfigError if an endpoint cannot be had."""
        import zmq
        self._zmq, self._events, self._wake, self._unix, self._clock = zmq, events, wake, unix, clock
        self._encoder = Encoder(page_size, events.data_parallel_rank, dialect)
        self._queue = deque[Cached]()
        self._waker, self._closing = Waker(), False
        # A number that is lower than before the engine was started again would be taken for old news.
        self._next = int(unix() * 1e6)
        self._ring = deque[tuple[int, bytes]](maxlen=events.buffer_steps)
        self._is_lost = False                   # the queue was full: readers know nothing until all is published again
        self._wants_all, self._asked_at = False, -AGAIN_S
        self.num_batches = self.num_republished = 0
        self._context = zmq.Context(io_threads=1)
        self._out = self._open(zmq.PUB, events.endpoint, events.hwm)
        self._replies = None if events.replay_endpoint is None else self._open(
            zmq.ROUTER, events.replay_endpoint, 2 * events.buffer_steps, binds=True)
        self._thread = threading.Thread(target=self._run, daemon=True, name="penstock-events")
        self._thread.start()

    def _open(self, kind: int, endpoint: str, hwm: int, binds: bool = False) -> zmq.Socket[bytes]:
        """As in vLLM, an endpoint with a wildcard is bound, another one is of a subscriber that listens."""
        at, socket = self._events.at(endpoint), self._context.socket(kind)
        socket.setsockopt(self._zmq.LINGER, 0)
        socket.setsockopt(self._zmq.IPV6, "[" in at)
        socket.set_hwm(hwm)
        try:
            if binds or "*" in at or "::" in at or at.startswith("ipc:"):
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
        if cached.cleared:
            self._is_lost = self._wants_all = False
        elif self._is_lost:
            return
        elif len(self._queue) >= self._events.max_queue_size:
            self._queue.clear()
            self._is_lost = self._wants_all = True
            cached = Cached(True, (), ())
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
        """End the thread and its sockets, with what is queued sent as far as readers take it. Idempotent."""
        self._closing = True
        self._waker.wake()
        self._thread.join()
        self._context.destroy(linger=0)

    # ------------------------------------------------------------ the thread
    def _run(self) -> None:
        poller = self._zmq.Poller()
        for source in filter(None, (self._waker, self._replies)):
            poller.register(source, self._zmq.POLLIN)
        while True:
            poller.poll()
            self._waker.clear()
            while self._queue:
                self._publish(self._queue.popleft())
            if self._replies is not None:
                self._replay(self._replies)
            if self._closing and not self._queue:
                return

    def _publish(self, cached: Cached) -> None:
        payload = self._encoder.payload(cached, self._unix())
        self._ring.append((self._next, payload))
        self._out.send_multipart((self._events.topic.encode(), self._next.to_bytes(8, "big"), payload))
        self._next += 1
        self.num_batches += 1

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        """Answer those who have missed something; of another form than `client, "", number` is no answer."""
        while socket.poll(0):
            request = socket.recv_multipart()
            if len(request) != 3 or len(request[2]) != 8:
                continue
            client, start = request[0], int.from_bytes(request[2], "big")
            topic = self._events.topic.encode()
            for number, payload in self._ring:
                if number >= start:
                    socket.send_multipart((client, b"", topic, number.to_bytes(8, "big"), payload))
            socket.send_multipart((client, b"", b"", END, b""))
            if len(self._ring) == self._ring.maxlen and start < self._ring[0][0]:
                self._wants_all = True
                self._wake()
