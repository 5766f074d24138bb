"""Pages of KV in a bucket of S3, or what speaks like it: PREFIX/v1/FINGERPRINT/KEY.GROUP.

Where the server is and who asks is the environment's, as with other tools: AWS_ENDPOINT_URL, AWS_REGION,
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY. What is removed, and when, is a rule of the bucket. A request ends
within seconds, and is made once.
"""
from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from penstock.config.base.errors import ConfigError
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

CONNECT_S, ANSWER_S = 1.0, 5.0
WAVES = 16, 64              # keys that are asked after at once, first and then

T = TypeVar("T")


class Bucket(Store, Inventory):
    """The objects of one kind of engine in a bucket, and a list of all. Connects when it is first asked."""

    readers, writers, part = 2, 1, 16       # 16 requests at once, of each thread

    def __init__(self, url: StorageUrl, fingerprint: str, page_bytes: Sequence[int], *,
                 readonly: bool = False) -> None:
        """page_bytes: of a page of each cache group. Raises ImportError where there is no obstore."""
        import obstore
        from obstore.store import S3Store

        assert url.host is not None
        self._obstore, self._error = obstore, obstore.exceptions.BaseError
        self._missing = FileNotFoundError, obstore.exceptions.NotFoundError
        try:
            self._bucket = S3Store(
                url.host, prefix=url.path.strip("/") or None,
                client_options={"connect_timeout": timedelta(seconds=CONNECT_S), "allow_http": True,
                                "timeout": timedelta(seconds=ANSWER_S)},
                retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=ANSWER_S)})
        except (self._error, ValueError) as e:
            raise ConfigError(f"--kv-storage {url.shown}: {_fault(e).strerror}: fix the prefix, or "
                              "AWS_... in the environment") from None
        self.readonly, self._sizes = readonly, tuple(page_bytes)
        self._prefix = f"{FORMAT}/{fingerprint}/"

    def _name(self, key: bytes, group: int) -> str:
        return f"{self._prefix}{key.hex()}.{group}"

    def _all(self, call: Callable[..., Awaitable[T]], *of: Sequence[Any]) -> list[T | None]:
        """What the calls give, all at once; None: there is no such object. Raises OSError."""
        async def one(*args: Any) -> T | None:
            try:
                return await call(*args)
            except self._missing:
                return None

        async def every() -> list[T | BaseException | None]:
            return await asyncio.gather(*map(one, *of), return_exceptions=True)

        found: list[T | None] = []
        for value in asyncio.run(every()):
            if isinstance(value, Exception):        # some of the client's have no base that it names
                raise _fault(value)
            if isinstance(value, BaseException):
                raise value
            found.append(value)
        return found

    def present(self, keys: Sequence[bytes]) -> Iterator[int]:
        at, num = 0, len(self._sizes)
        while at < len(keys):
            wave = keys[at:at + WAVES[at > 0]]
            names = [self._name(key, group) for key in wave for group in range(num)]
            found = self._all(partial(self._obstore.head_async, self._bucket), names)
            for i in range(len(wave)):
                heads = found[i * num:(i + 1) * num]
                yield sum((head is not None and head["size"] == HEADER.size + size) << group
                          for group, (head, size) in enumerate(zip(heads, self._sizes, strict=True)))
            at += len(wave)

    def get(self, keys: Sequence[bytes], group: int, pages: Sequence[memoryview]) -> Iterator[Verdict]:
        async def read(key: bytes) -> memoryview:
            found = await self._obstore.get_async(self._bucket, self._name(key, group))
            if found.meta["size"] != HEADER.size + self._sizes[group]:
                return memoryview(b"")         # checked before it is read
            return memoryview(await found.bytes_async())

        for key, page, data in zip(keys, pages, self._all(read, keys), strict=True):
            yield Verdict.GONE if data is None else unpack(data, key, group, page)

    def put(self, keys: Sequence[bytes], group: int, pages: Sequence[memoryview]) -> Iterator[int]:
        assert not self.readonly

        async def write(key: bytes, page: memoryview) -> int:
            data, name = b"".join((header_of(key, group, page), page)), self._name(key, group)
            try:
                await self._obstore.put_async(self._bucket, name, data, mode="create", use_multipart=False)
            except (FileExistsError, self._obstore.exceptions.AlreadyExistsError):
                return 0
            return len(data)

        for written in self._all(write, keys, pages):
            yield written or 0

    def delete(self, keys: Sequence[bytes], group: int) -> None:
        self._all(partial(self._obstore.delete_async, self._bucket), [self._name(key, group) for key in keys])

    def used(self, keys: Sequence[bytes]) -> None:
        """Nothing: a bucket's rules go by when an object was written."""

    # ------------------------------------------------------------ for people
    def objects(self) -> Iterator[Object]:
        try:
            for batch in self._obstore.list(self._bucket, prefix=f"{FORMAT}/"):
                for found in batch:
                    name = found["path"]
                    yield Object(name, name.split("/")[1], found["size"], found["last_modified"].timestamp())
        except self._error as e:
            raise _fault(e) from None

    def examine(self, o: Object) -> Verdict:
        async def read(name: str) -> memoryview:
            found = await self._obstore.get_async(self._bucket, name)
            small = found.meta["size"] <= LARGEST
            return memoryview(await found.bytes_async() if small else b"")

        [data] = self._all(read, [o.name])
        digits, _, group = o.name.rpartition("/")[2].partition(".")
        return Verdict.GONE if data is None else examined(digits, group, data)

    def remove(self, objects: Sequence[Object]) -> None:
        for at in range(0, len(objects), WAVES[1]):
            self._all(partial(self._obstore.delete_async, self._bucket),
                      [o.name for o in objects[at:at + WAVES[1]]])

    def close(self) -> None:
        """Nothing: the client's connections end by themselves."""


def _fault(error: Any) -> OSError:
    """In words without names of objects, which say what they hold."""
    words = re.sub(r"[0-9a-f]{16,}", "...", " ".join(str(error).split()))[:200]
    late = "timed out" in words or "timeout" in words.lower()
    return OSError(errno.ETIMEDOUT if late else errno.EIO, f"{type(error).__name__}: {words}")
