"""`--kv-events-config`: the fields of vLLM's KVEventsConfig, as JSON.

Owns what they mean here: whether events are on, and which address the engine with a number has.
"""
from __future__ import annotations

import re
from typing import Literal

import msgspec

EVENTS_FORM = ("a JSON object is needed with fields of vLLM's: enable_kv_cache_events, publisher (zmq or null), "
               "endpoint and replay_endpoint (tcp://HOST:PORT or ipc://PATH), buffer_steps, hwm, max_queue_size, "
               "topic; and media, the first of GPU, CPU, STORAGE")
_ENDPOINT = re.compile(r"ipc://.+|tcp://(\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
MEDIA = ("GPU", "CPU", "STORAGE")


class KvEvents(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Events that are published. Raises ValueError where msgspec takes a value and this has no use for it."""

    enable_kv_cache_events: bool | None = None
    publisher: Literal["zmq", "null"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000              # batches that can be replayed
    hwm: int = 100_000                      # batches that wait for a slow subscriber
    max_queue_size: int = 100_000           # turns of the engine that wait for the publishing thread
    topic: str = ""
    media: tuple[str, ...] = MEDIA[:2]
    data_parallel_rank: int = 0             # number of this engine: its ports are so much higher

    def __post_init__(self) -> None:
        if self.media != MEDIA[:max(1, len(self.media))]:
            raise ValueError("media")
        if min(self.buffer_steps, self.hwm, self.max_queue_size) < 1 or not 0 <= self.data_parallel_rank < 1 << 16:
            raise ValueError("a number")
        for rank in (0, self.data_parallel_rank):
            for endpoint in filter(None, (self.endpoint, self.replay_endpoint)):
                found = _ENDPOINT.fullmatch(endpoint)
                if found is None or not (found[2] is None or 0 < int(found[2]) + rank < 1 << 16):
                    raise ValueError("endpoint")

    @property
    def is_on(self) -> bool:
        """As vLLM has it, by `enable_kv_cache_events`; as SGLang, which has no such field, by `publisher`."""
        enabled = self.publisher == "zmq" if self.enable_kv_cache_events is None else self.enable_kv_cache_events
        return enabled and self.publisher != "null"

    def at(self, endpoint: str) -> str:
        """Return the address of this engine: the next port, or another path, for each rank."""
        rank = self.data_parallel_rank
        scheme, _, rest = endpoint.partition("://")
        if not rank or scheme == "ipc":
            return endpoint + (f"_dp{rank}" if rank else "")
        host, _, port = rest.rpartition(":")
        return f"{scheme}://{host}:{int(port) + rank}"


def kv_events(text: str | None) -> KvEvents | None:
    """Return what to publish; None: nothing. Raises ValueError for another text than EVENTS_FORM says."""
    if text is None:
        return None
    try:
        events = msgspec.json.decode(text, type=KvEvents)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise ValueError(str(e)) from None
    return events if events.is_on else None


def is_wrong(text: str | None) -> bool:
    """Whether `kv_events` raises."""
    try:
        kv_events(text)
    except ValueError:
        return True
    return False


def with_rank(text: str | None, rank: int) -> str | None:
    """Return the same settings for the engine with this number."""
    if text is None or is_wrong(text):
        return text
    old = msgspec.json.decode(text, type=KvEvents)
    return msgspec.json.encode(msgspec.structs.replace(old, data_parallel_rank=old.data_parallel_rank + rank)).decode()


def shown_events(text: str | None, page_size: int, engines: int) -> dict[str, object]:
    """Return `kv_events` of /server_info, in SGLang's words; empty: nothing is published."""
    if (events := kv_events(text)) is None:
        return {}

    def parts(endpoint: str | None) -> tuple[str | None, int | None]:
        found = _ENDPOINT.fullmatch(endpoint or "")
        return (None, None) if found is None or found[1] is None else (
            found[1], int(found[2]) + events.data_parallel_rank)

    host, port = parts(events.endpoint)
    return {"kv_events": {
        "publisher": "zmq", "endpoint": events.endpoint, "endpoint_host": host, "endpoint_port_base": port,
        "replay_endpoint": events.replay_endpoint, "replay_endpoint_port_base": parts(events.replay_endpoint)[1],
        "topic": events.topic, "block_size": page_size, "dp_size": engines}}
