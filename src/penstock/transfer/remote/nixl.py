"""NIXL over UCX: READs by whatever joins the two machines, shared memory, TCP or RDMA.

Its agents keep nothing of a connection that has ended, so each connection has one of its own.
"""
from __future__ import annotations

import contextlib
import os
import secrets
import time
from typing import Any

from nixl._api import nixl_agent, nixl_agent_config

from penstock.transfer.remote.carrier import BUFFER_BYTES, CarrierFault, buffer_of

POLL_S = (20e-6, 1e-3)                  # between two looks at a copy: at first, at most
_UNENDED: list[object] = []             # buffers that a copy may still go to: kept for good


class Nixl:
    shared = False

    def __init__(self, _: str) -> None:
        self.buffer, self._address = buffer_of(BUFFER_BYTES)
        self._agent: Any = nixl_agent(f"penstock-{os.getpid()}-{secrets.token_hex(8)}",
                                      nixl_agent_config(backends=["UCX"]))
        self._registered = self._agent.register_memory([(self._address, BUFFER_BYTES, 0, "")], "DRAM")
        self.here = self._address.to_bytes(8, "little") + self._agent.get_agent_metadata()
        self._there, self._base = "", 0

    def meet(self, there: bytes) -> None:
        try:
            name = self._agent.add_remote_agent(there[8:])
        except Exception as e:          # its errors have no base of their own
            raise CarrierFault(f"NIXL does not know the other end: {type(e).__name__}") from None
        self._there = name.decode() if isinstance(name, bytes) else name
        self._base = int.from_bytes(there[:8], "little")

    def read(self, at: int, length: int, limit_s: float) -> memoryview:
        agent, until, wait_s = self._agent, time.monotonic() + limit_s, POLL_S[0]
        try:
            copy = agent.initialize_xfer(
                "READ", agent.get_xfer_descs([(self._address, length, 0)], "DRAM"),
                agent.get_xfer_descs([(self._base + at, length, 0)], "DRAM"), self._there, b"")
            state = agent.transfer(copy)
            while state not in ("DONE", "ERR"):
                if time.monotonic() > until:
                    _UNENDED.append((self.buffer, agent, copy))
                    raise TimeoutError
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, POLL_S[1])
                state = agent.check_xfer_state(copy)
            agent.release_xfer_handle(copy)
        except TimeoutError:
            raise
        except Exception as e:
            raise CarrierFault(f"NIXL: {type(e).__name__}") from None
        if state != "DONE":
            raise CarrierFault("NIXL: the copy failed")
        return self.buffer[:length]

    def close(self) -> None:
        with contextlib.suppress(Exception):
            if self._there:
                self._agent.remove_remote_agent(self._there)
            self._agent.deregister_memory(self._registered)
