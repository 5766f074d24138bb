"""One memory of two processes of a machine: what the prefill instance copies into it the decode instance finds there.

The prefill instance makes it and hands the file over with the Unix socket that joins them, so no other process has it.
Pages are in none of it: its holder can write into no page of the other instance (ADR 0034).
"""
from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import weakref

from penstock.memory.dram import mapped
from penstock.transfer.pages import PageBytes
from penstock.transfer.remote.carrier import BUFFER_BYTES, CarrierFault

_SIZE = BUFFER_BYTES + mmap.PAGESIZE                # behind the buffer, a name that both ends say
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NAME_BYTES = 16


class SharedBuffer:
    shared = True

    def __init__(self, pages: PageBytes, fd: int | None = None) -> None:
        """fd: of the end that is handed it, whose it is from now on. pages: of this end, whose devices are to
        reach it. Raises CarrierFault: there is no such memory."""
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self.fd = os.memfd_create("penstock-pair", flags) if fd is None else fd
        weakref.finalize(self, os.close, self.fd)
        try:
            if fd is None:
                os.ftruncate(self.fd, _SIZE)
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            elif os.fstat(fd).st_size != _SIZE or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise CarrierFault("the other end handed over another file")    # one that may end under us
            memory = mapped(self.fd, _SIZE)
        except (OSError, ValueError) as e:
            raise CarrierFault(f"no memory for both ends: {e}") from None
        whole = memoryview(memory.numpy())          # type: ignore[arg-type]
        self.buffer, self._name = whole[:BUFFER_BYTES], whole[BUFFER_BYTES:BUFFER_BYTES + _NAME_BYTES]
        if fd is None:
            self._name[:] = secrets.token_bytes(_NAME_BYTES)
        self.here = bytes(self._name)
        self._pinned = pages.pin(memory)

    def meet(self, there: bytes) -> None:
        if there != self.here:
            raise CarrierFault("the other end handed over another memory")

    def read(self, at: int, length: int, limit_s: float) -> memoryview:
        return self.buffer[at:at + length]

    def close(self) -> None:
        self._pinned = None             # the memory goes with its last view
