"""Pages of KV in Valkey or Redis, an object a string: pnkv:v1:FINGERPRINT:KEY.GROUP.

What is evicted, and when, is the server's `maxmemory` and `maxmemory-policy`. Every command ends within
seconds: the client waits so long for an answer, and tries nothing twice.
"""
from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from penstock.config.base.storage_url import StorageUrl
from penstock.memory.stores.objects import FORMAT, HEADER, Store, Verdict, sealed, unpack

CONNECT_S, ANSWER_S = 1.0, 2.0
WAVE = 128                  # keys that one request asks after


class Valkey(Store):
    """The objects of one kind of engine on one server. Connects when it is first asked."""

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
        # At most one byte more than there should be: nobody's length is believed.
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
        sets = [("SET", self._name(key, group), b"".join((sealed(key, group, page), page)))
                for key, page, found in zip(keys, pages, there, strict=True) if found != size]
        if sets:
            self._ask(sets)
        for found in there:
            yield 0 if found == size else size

    def delete(self, keys: Sequence[bytes], group: int) -> None:
        if keys:
            self._ask([("DEL", *(self._name(key, group) for key in keys))])

    def names(self) -> Iterator[tuple[str, int]]:
        """Of all engines: names and bytes of what is there, for people. Raises OSError."""
        try:
            for name in self._client.scan_iter(match="pnkv:*", count=1000):
                yield name.decode(errors="replace"), int(self._client.strlen(name))
        except self._error as e:
            raise _fault(e) from None

    def close(self) -> None:
        with contextlib.suppress(self._error):
            self._client.close()


def _fault(error: Exception) -> OSError:
    full = str(error).startswith(("OOM", "command not allowed when used memory"))
    return OSError(errno.ENOSPC if full else errno.EIO, f"{type(error).__name__}: {str(error)[:200]}")
