"""`--kv-events-config`: the fields of vLLM's KVEventsConfig, as JSON.

Owns what they mean here: whether events are on, and which address the engine with a number has.
"""
from __future__ import annotations

import ipaddress
import re
import socket
from typing import Annotated, Literal, TypeAlias

import msgspec

NUMBER_MAX = 1 << 24
EVENTS_FORM = ("a JSON object is needed with fields of vLLM's: enable_kv_cache_events, publisher (zmq or null), "
               "endpoint and replay_endpoint (tcp://HOST:PORT or ipc://PATH), buffer_steps, hwm, max_queue_size "
               f"(each 1 to {NUMBER_MAX}), topic; and media, the first of GPU, CPU, STORAGE")
PORTS_FORM = ("endpoint and replay_endpoint of each engine have the next ports: take ports that are at least as far "
              "apart as there are engines, such as 5557 and 5657, and at most 65535 for the last engine")
_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=NUMBER_MAX)]
_ENDPOINT = re.compile(r"ipc://.+|tcp://(\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
MEDIA = ("GPU", "CPU", "STORAGE")


class KvEvents(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Events that are published. Raises ValueError where msgspec takes a value and this has no use for it."""

    enable_kv_cache_events: bool | None = None
    publisher: Literal["zmq", "null"] | None = None
    endpoint: str = "tcp://127.0.0.1:5557"  # vLLM's default is open to other machines
    replay_endpoint: str | None = None
    buffer_steps: _Number = 10_000          # batches that can be replayed
    hwm: _Number = 100_000                  # batches that wait for a slow subscriber
    max_queue_size: _Number = 100_000       # turns of the engine that wait for the publishing thread
    topic: str = ""
    media: tuple[str, ...] = MEDIA[:2]
    data_parallel_rank: int = 0             # number of this engine: its ports are so much higher

    def __post_init__(self) -> None:
        if self.media != MEDIA[:max(1, len(self.media))]:
            raise ValueError("media")
        if not 0 <= self.data_parallel_rank < 1 << 16:
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

    def has_room(self, engines: int) -> bool:
        """Whether so many engines, this one and those after it, have ports and paths of their own."""
        both = map(_ENDPOINT.fullmatch, filter(None, (self.endpoint, self.replay_endpoint)))
        ports = [int(found[2]) for found in both if found is not None and found[2]]
        if any(port + self.data_parallel_rank + engines > 1 << 16 for port in ports):
            return False
        return not listens(self.endpoint) or (
            self.endpoint != self.replay_endpoint and (len(ports) < 2 or abs(ports[0] - ports[1]) >= engines))

    def at(self, endpoint: str) -> str:
        """Return the address of this engine: the next port, or another path, for each rank."""
        rank = self.data_parallel_rank
        scheme, _, rest = endpoint.partition("://")
        if not rank or scheme == "ipc":
            return endpoint + (f"_dp{rank}" if rank else "")
        host, _, port = rest.rpartition(":")
        return f"{scheme}://{host}:{int(port) + rank}"


def host_of(endpoint: str) -> str:
    """Return the host of a TCP endpoint, an IPv6 address without brackets; "": of a path."""
    found = _ENDPOINT.fullmatch(endpoint)
    return (found[1] or "").strip("[]") if found is not None else ""


def listens(endpoint: str) -> bool:
    """Whether the engine listens at this endpoint: a path, a wildcard or an IP address of this machine. At others,
    such as a name, a subscriber listens and the engine connects to it."""
    host = host_of(endpoint)
    if host in ("", "*"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    try:
        with socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as here:
            here.bind((host, 0))
    except OSError:
        return False
    return True


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
