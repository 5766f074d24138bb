"""A router's end of KV events: a subscriber that decodes them as vLLM and SGLang do, and knows what is cached where."""
from __future__ import annotations

import random
import time
from collections.abc import Sequence

import msgspec
import zmq

WAIT_S = 60


def conversations(seed: int, num: int) -> list[list[int]]:
    """Prompts of which many go on from an earlier one, or from a part of it."""
    rng, said = random.Random(seed), [[]]
    while len(said) <= num:
        base = rng.choice(said[-8:])
        more = [rng.randrange(97) for _ in range(rng.randint(5, 90))]
        said.append([*base[:rng.choice((len(base), 64))], *more][:300])
    return said[1:]


class Tagged(msgspec.Struct, tag_field="type", tag=True, forbid_unknown_fields=True):
    """As in vLLM's and SGLang's `kv_events`: a map that names its class. Unknown fields drop the whole batch there."""


class BlockStored(Tagged):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(Tagged):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Tagged):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(Batch).decode


class Index:
    """What one engine has cached: blocks by medium, found by their tokens and those before them."""

    def __init__(self) -> None:
        self.media: dict[str, set[int]] = {}
        self._by_tokens: dict[tuple[int | None, tuple[int, ...]], int] = {}

    def apply(self, batch: Batch) -> None:
        for event in batch.events:
            match event:
                case AllBlocksCleared():
                    self.media.clear()
                case BlockRemoved():
                    for block in event.block_hashes:
                        self.media[event.medium].remove(block)
                case BlockStored():
                    parent, size = event.parent_block_hash, event.block_size
                    assert len(event.token_ids) == size * len(event.block_hashes)
                    assert parent is None or any(parent in blocks for blocks in self.media.values())
                    for i, block in enumerate(event.block_hashes):
                        tokens = tuple(event.token_ids[i * size:(i + 1) * size])
                        self._by_tokens[parent, tokens] = parent = block
                        self.media.setdefault(event.medium, set()).add(block)

    def cached(self, prompt: Sequence[int], size: int) -> int:
        """Tokens of this prompt that an engine which has these blocks need not compute; the last one always is."""
        parent, known = None, 0
        while (known + 1) * size < len(prompt):
            parent = self._by_tokens.get((parent, tuple(prompt[known * size:(known + 1) * size])))
            if parent is None or not any(parent in blocks for blocks in self.media.values()):
                break
            known += 1
        return known * size


class Subscriber:
    """One engine's events, from before it is started to after its end."""

    def __init__(self, endpoint: str, replay: str | None = None, topic: str = "") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(endpoint)
        self._replay = replay
        self.index, self.next, self.batches = Index(), 0, list[Batch]()
        self.first = 0                         # number of the first batch of this engine
        self.topics: set[bytes] = set()

    def connected(self) -> None:
        """Until an engine that runs will send to this: what it sent before is lost without a replay."""
        assert self._monitor.poll(1000 * WAIT_S), "no engine publishes there"
        time.sleep(0.2)                        # it has the subscription after the handshake

    def poll(self, timeout_s: float = 0.0) -> int:
        """Apply what has come; a gap is filled by a replay. Returns how many messages there were."""
        num = 0
        while self._socket.poll(1000 * timeout_s if not num else 0):
            topic, number, payload = self._socket.recv_multipart()
            self.topics.add(topic)
            self._take(int.from_bytes(number, "big"), payload)
            num += 1
        return num

    def _take(self, number: int, payload: bytes) -> None:
        if number < self.next:
            return                             # an index takes it for old news
        if self._replay is not None and number != self.next:
            for seq, again in self.replayed(self.next):
                if self.next <= seq < number:
                    self._apply(seq, again)
        assert number == self.next or not self.next or self._replay is None or not self.first, "a gap"
        self._apply(number, payload)

    def _apply(self, number: int, payload: bytes) -> None:
        batch = decode(payload)
        self.first = self.first or number
        self.next = number + 1
        self.batches.append(batch)
        self.index.apply(batch)

    def replayed(self, start: int) -> list[tuple[int, bytes]]:
        """What the engine still has from this number on."""
        socket = self._context.socket(zmq.DEALER)
        socket.connect(self._replay)
        socket.send_multipart((b"", start.to_bytes(8, "big")))
        found = []
        while True:
            assert socket.poll(1000 * WAIT_S), "no answer to a replay"
            empty, _, number, payload = socket.recv_multipart()
            assert empty == b""
            if number == (-1).to_bytes(8, "big", signed=True):
                socket.close(0)
                return found
            found.append((int.from_bytes(number, "big"), payload))

    def meet(self, cause) -> None:
        """Until this is connected: news that `cause` makes have come. Those before are replayed."""
        before = self.next
        self.until(lambda: cause() and self.poll(0.2) and self.next > before)

    def until(self, condition) -> None:
        """Poll until `condition()`."""
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, "no such news"
            self.poll(0.05)

    def close(self) -> None:
        self._context.destroy(0)
