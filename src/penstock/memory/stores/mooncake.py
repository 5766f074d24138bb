"""Pages of KV in a Mooncake Store: its master says where an object is, a client of its own has the memory.

That an object is there is a hint, and that one was put a promise for as long as there is room: the memory is
a process's, and what goes is the master's choice. A request is bounded in time by what `bound_mooncake` says.
Its client, while it is made, lets no other thread run, for a minute and a half if the master does not answer:
so a process of its own tries first.
"""
from __future__ import annotations

import contextlib
import ctypes
import errno
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config.base import child
from penstock.config.base.storage_url import StorageUrl, bound_mooncake
from penstock.memory.stores.objects import FORMAT, HEADER, Store, Verdict, header_of, unpack

CONNECT_S = 1.0
TRY_S = 5.0
BUFFER = 16 << 20           # bytes of the client's own memory
WAVE = 128                  # keys that one request asks after
PORT = 50051
_TRY = """
import os, sys
from mooncake.store import MooncakeDistributedStore
code = MooncakeDistributedStore().setup(sys.argv[1], "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", sys.argv[2])
os._exit(int(code != 0))
"""
# Its error codes.
_FULL, _TOO_SMALL, _NOT_READY, _MISSING = -200, -600, -703, -704


class MooncakeStore(Store):
    """The objects of one kind of engine. Connects when it is first asked."""

    readers, writers, part = 2, 1, 16

    def __init__(self, url: StorageUrl, fingerprint: str, page_bytes: Sequence[int], *,
                 readonly: bool = False) -> None:
        """page_bytes: of a page of each cache group. Raises ImportError where it, or a library that it
        needs, is not installed."""
        bound_mooncake()
        from mooncake import store

        assert url.host is not None
        self._made, self._master = store.MooncakeDistributedStore, (url.host, url.port or PORT)
        self._client: Any = None
        self._lock = threading.Lock()          # around the making of it
        self.readonly, self._sizes = readonly, tuple(page_bytes)
        self._prefix = f"pnkv:{FORMAT}:{fingerprint}:"
        _silence(store)

    def _connected(self) -> Any:
        """Raises OSError."""
        with self._lock:
            if self._client is None:
                with socket.create_connection(self._master, CONNECT_S) as probe:
                    own = probe.getsockname()[0]            # where others reach this machine
                host, port = self._master
                args = own, f"{host}:{port}"
                try:
                    child.run(_TRY, *args, seconds_max=TRY_S).check_returncode()
                except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
                    raise OSError(errno.ETIMEDOUT, "Mooncake's master does not answer") from None
                client = self._made()
                if code := client.setup(own, "P2PHANDSHAKE", 0, BUFFER, "tcp", "", args[1]):
                    raise _fault(code)
                self._client = client
            return self._client

    def _names(self, keys: Sequence[bytes], group: int) -> list[str]:
        return [f"{self._prefix}{key.hex()}.{group}" for key in keys]

    def present(self, keys: Sequence[bytes]) -> Iterator[int]:
        client = self._connected()
        for at in range(0, len(keys), WAVE):
            wave = keys[at:at + WAVE]
            found = [client.batch_is_exist(self._names(wave, group)) for group in range(len(self._sizes))]
            if code := next((code for codes in found for code in codes if code < 0), 0):
                raise _fault(code)
            for codes in zip(*found, strict=True):
                yield sum((code == 1) << group for group, code in enumerate(codes))

    def get(self, keys: Sequence[bytes], group: int, pages: Sequence[memoryview]) -> Iterator[Verdict]:
        if not keys:
            return
        size = HEADER.size + self._sizes[group]
        into = np.empty((len(keys), size), np.uint8)
        # It writes no more than there is room for, and tells the length.
        codes = self._connected().batch_get_into(self._names(keys, group), [row.ctypes.data for row in into],
                                                 [size] * len(keys))
        for key, page, data, code in zip(keys, pages, into, codes, strict=True):
            if code in (_MISSING, _NOT_READY):
                yield Verdict.GONE
            elif code < 0 and code != _TOO_SMALL:
                raise _fault(code)
            else:
                yield unpack(data.data, key, group, page) if code == size else Verdict.BAD

    def put(self, keys: Sequence[bytes], group: int, pages: Sequence[memoryview]) -> Iterator[int]:
        assert not self.readonly
        client, names, size = self._connected(), self._names(keys, group), HEADER.size + self._sizes[group]
        there = client.batch_is_exist(names)
        new = [i for i, code in enumerate(there) if code != 1]
        data = [np.frombuffer(b"".join((header_of(keys[i], group, pages[i]), pages[i])), np.uint8) for i in new]
        if new:
            codes = client.batch_put_from([names[i] for i in new], [row.ctypes.data for row in data],
                                          [size] * len(new))
            if code := next(filter(None, codes), 0):
                raise _fault(code)
        for code in there:
            yield 0 if code == 1 else size

    def used(self, keys: Sequence[bytes]) -> None:
        for _ in self.present(keys):           # the master takes a question for a use
            pass

    def delete(self, keys: Sequence[bytes], group: int) -> None:
        if keys:
            codes = self._connected().batch_remove(self._names(keys, group), force=True)
            if code := next((code for code in codes if code not in (0, _MISSING)), 0):
                raise _fault(code)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def _fault(code: int) -> OSError:
    return OSError(errno.ENOSPC if code == _FULL else errno.EIO, f"Mooncake's error {code}")


def _silence(store: Any) -> None:
    """Its library writes names of objects to standard error, and no setting of its own keeps it from that:
    only what ends the process is written."""
    for path in Path(store.__file__).parent.parent.glob("mooncake*.libs/libglog-*"):
        with contextlib.suppress(OSError, ValueError):
            ctypes.c_int.in_dll(ctypes.CDLL(str(path)), "_ZN3fLI17FLAGS_minloglevelE").value = 3
