"""Mooncake's transfer engine over TCP: the two find each other without a server, by its P2PHANDSHAKE.

An engine listens at a port of its own, on the address by which the other end knows this machine.
"""
from __future__ import annotations

import contextlib
from typing import Any

from mooncake.engine import TransferEngine

from penstock.transfer.remote.carrier import BUFFER_BYTES, CarrierFault, buffer_of


class Mooncake:
    shared = False

    def __init__(self, host: str) -> None:
        self.buffer, self._address = buffer_of(BUFFER_BYTES)
        self._engine: Any = TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
            raise CarrierFault(f"Mooncake's transfer engine does not start on {host}")
        if self._engine.register_memory(self._address, BUFFER_BYTES):
            raise CarrierFault("Mooncake's transfer engine does not take a buffer")
        at = f"[{host}]" if ":" in host else host
        self.here = self._address.to_bytes(8, "little") + f"{at}:{self._engine.get_rpc_port()}".encode()
        self._there, self._base = "", 0

    def meet(self, there: bytes) -> None:
        self._base, self._there = int.from_bytes(there[:8], "little"), there[8:].decode(errors="replace")

    def read(self, at: int, length: int, limit_s: float) -> memoryview:
        # Its own time limits end it: there is no way to ask one for less.
        try:
            code = self._engine.transfer_sync_read(self._there, self._address, self._base + at, length)
        except Exception as e:
            raise CarrierFault(f"Mooncake: {type(e).__name__}") from None
        if code:
            raise CarrierFault(f"Mooncake: the copy failed ({code})")
        return self.buffer[:length]

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._engine.unregister_memory(self._address)
        self._engine = None             # it listens as long as it is there
