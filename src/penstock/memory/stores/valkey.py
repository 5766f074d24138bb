"""Pages of KV in Valkey or Redis, an object a string: pnkv:v1:FINGERPRINT:KEY.GROUP.

What is evicted, and when, is the server's `maxmemory` and `maxmemory-policy`. Every command ends within
seconds: the client waits so long for an answer, and tries nothing twice.
"""
from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from penstock.config.base.storage_url import StorageUrl
from penstock.memory.stores.objects import (
    FORMAT,
    HEADER,
    LARGEST,
    Inventory,
    Object,
    Store,
    Verdict,
    examined,
    header_of,
    unpack,
)

CONNECT_S, ANSWER_S = 1.0, 2.0
WAVE = 128                  # keys that one request asks after


class Valkey(Store, Inventory):
    """The objects of one kind of engine on one server, and a list of all. Connects when it is first asked."""

    readers, writers, part = 4, 2, 16

    def __init__(self, url: StorageUrl, fingerprint: str, page_bytes: Sequence[int], *,
                 readonly: bool = False) -> None:
        """page_bytes: of a page of each cache group. Raises ImportError where there is no redis-py."""
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        where: dict[str, Any] = {"unix_socket_path": url.path} if url.host is None else {
            "host": url.host, "port": url.port or 6379}
        self._client = redis.Redis(db=url.database, username=url.user, password=url.password, **where,
                                   socket_connect_timeout=CONNECT_S, socket_timeout=ANSWER_S,
                                   retry=Retry(NoBackoff(), 0), max_connections=64)
        self._error = redis.RedisError
        self.readonly, self._sizes = readonly, tuple(page_bytes)
        self._prefix = f"pnkv:{FORMAT}:{fingerprint}:"

    def _name(self, key: bytes, group: int) -> str:
        return f"{self._prefix}{key.hex()}.{group}"

    def _ask(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The answers; None: there is something else than a string. Raises OSError."""
        try:
            with self._client.pipeline(transaction=False) as pipe:
                send: Callable[..., object] = pipe.execute_command
                for command in commands:
                    send(*command)
                found: list[Any] = pipe.execute(raise_on_error=False)
        except (self._error, ValueError) as e:
            raise _fault(e) from None
        for i, answer in enumerate(found):
            if isinstance(answer, Exception):
                if not str(answer).startswith("WRONGTYPE"):
                    raise _fault(answer)
                found[i] = None
        return found

    def check(self) -> str | None:
        [info] = self._ask([("INFO", "memory")])
        if not info.get("maxmemory"):
            return "the server has no maxmemory: set one, and a maxmemory-policy such as allkeys-lru"
        if info.get("maxmemory_policy") == "noeviction":
            return "the server's maxmemory-policy is noeviction: once it is full, nothing more is stored"
        return None

    def present(self, keys: Sequence[bytes]) -> Iterator[int]:
        num = len(self._sizes)
        for at in range(0, len(keys), WAVE):
            wave = keys[at:at + WAVE]
            found = self._ask([("STRLEN", self._name(key, group)) for key in wave for group in range(num)])
            for i in range(len(wave)):
                yield sum((found[i * num + group] == HEADER.size + size) << group
                          for group, size in enumerate(self._sizes))

    def get(self, keys: Sequence[bytes], group: int, pages: Sequence[memoryview]) -> Iterator[Verdict]:
        size = HEADER.size + self._sizes[group]
        # At most one byte more than there should be: no stored length is trusted.
        found = self._ask([("GETRANGE", self._name(key, group), 0, size) for key in keys]) if keys else []
        for key, page, data in zip(keys, pages, found, strict=True):
            if data == b"":
                yield Verdict.GONE
            else:
                yield Verdict.BAD if data is None else unpack(memoryview(data), key, group, page)

    def put(self, keys: Sequence[bytes], group: int, pages: Sequence[memoryview]) -> Iterator[int]:
        assert not self.readonly
        size = HEADER.size + self._sizes[group]
        there = self._ask([("STRLEN", self._name(key, group)) for key in keys])
        sets = [("SET", self._name(key, group), b"".join((header_of(key, group, page), page)))
                for key, page, found in zip(keys, pages, there, strict=True) if found != size]
        if sets:
            self._ask(sets)
        for found in there:
            yield 0 if found == size else size

    def used(self, keys: Sequence[bytes]) -> None:
        for at in range(0, len(keys), WAVE):
            self._ask([("TOUCH", *(self._name(key, group) for key in keys[at:at + WAVE]
                                   for group in range(len(self._sizes))))])

    def delete(self, keys: Sequence[bytes], group: int) -> None:
        if keys:
            self._ask([("DEL", *(self._name(key, group) for key in keys))])

    # ------------------------------------------------------------ for people
    def objects(self) -> Iterator[Object]:
        try:
            names: list[bytes] = []
            for name in self._client.scan_iter(match=f"pnkv:{FORMAT}:*", count=1000):
                names.append(name)
                if len(names) == WAVE:
                    yield from self._listed(names)
                    names = []
            yield from self._listed(names)
        except self._error as e:
            raise _fault(e) from None

    def _listed(self, names: Sequence[bytes]) -> Iterator[Object]:
        # Nothing here is a use: a length would be, so it is the memory that an object takes.
        found = self._ask([command for name in names
                           for command in (("MEMORY", "USAGE", name), ("TYPE", name))])
        for name, size, kind, idle_s in zip(names, found[::2], found[1::2], self._idle_s(names), strict=True):
            shown = name.decode("latin-1")
            if size and kind == b"string":
                yield Object(shown, shown.split(":")[2], size, time.time() - idle_s)

    def _idle_s(self, names: Sequence[bytes]) -> Sequence[int]:
        """Seconds since the use of each; 0 where the server counts uses instead."""
        try:
            return [found or 0 for found in self._ask([("OBJECT", "IDLETIME", name) for name in names])]
        except OSError:
            return [0] * len(names)

    def examine(self, o: Object) -> Verdict:
        [data] = self._ask([("GETRANGE", o.name.encode("latin-1"), 0, LARGEST)])
        digits, _, group = o.name.rpartition(":")[2].partition(".")
        return Verdict.GONE if data == b"" else examined(digits, group, memoryview(data or b""))

    def remove(self, objects: Sequence[Object]) -> None:
        for at in range(0, len(objects), WAVE):
            self._ask([("DEL", *(o.name.encode("latin-1") for o in objects[at:at + WAVE]))])

    def close(self) -> None:
        with contextlib.suppress(self._error):
            self._client.close()


def _fault(error: Exception) -> OSError:
    full = str(error).startswith(("OOM", "command not allowed when used memory"))
    late = isinstance(error, TimeoutError) or type(error).__name__ == "TimeoutError"
    code = errno.ENOSPC if full else errno.ETIMEDOUT if late else errno.EIO
    return OSError(code, f"{type(error).__name__}: {str(error)[:200]}")
