"""Stands between the two ends of a pair and does to their bytes what networks do: waits, cuts, flips.

Faults are of a direction and a connection: "out" is from the end that dials to the one that listens.
"""
from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """at          byte of the direction from which on, or at which, it happens
    cut         close both directions there
    flip        one bit of this byte
    delay_s     before each of its reads is handed on
    hold        hand on nothing more, and keep the connection open
    connection  number of the connection, from 0; None: each
    """

    way: str = "in"
    at: int = 0
    cut: bool = False
    flip: bool = False
    delay_s: float = 0.0
    hold: bool = False
    connection: int | None = 0


def _open(address: str) -> tuple[socket.socket, object]:
    if address.startswith("unix:"):
        return socket.socket(socket.AF_UNIX), address.removeprefix("unix:")
    host, _, port = address.rpartition(":")
    return socket.socket(), (host, int(port))


class Proxy:
    """`address` leads to `target`. Counts the bytes of each connection and way in `passed`."""

    def __init__(self, target: str, faults: tuple[Fault, ...] = (), address: str = "127.0.0.1:0") -> None:
        self.faults = faults
        self.passed: dict[tuple[int, str], int] = {}
        self._target = target
        self._server, at = _open(address)
        self._server.bind(at)
        self._server.listen()
        name = self._server.getsockname()
        self.address = address if isinstance(name, str) else f"{name[0]}:{name[1]}"
        self._sockets: list[socket.socket] = []
        self._held = threading.Event()
        self.connections = 0
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Every connection there is."""
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._held.set()
        self.cut()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            server, at = _open(self._target)
            try:
                server.connect(at)
            except OSError:
                client.close()
                continue
            n, self.connections = self.connections, self.connections + 1
            self._sockets += [client, server]
            for way, a, b in (("out", client, server), ("in", server, client)):
                threading.Thread(target=self._pump, args=(n, way, a, b), daemon=True).start()

    def _pump(self, n: int, way: str, a: socket.socket, b: socket.socket) -> None:
        faults = [f for f in self.faults if f.way == way and f.connection in (None, n)]
        at = 0
        with contextlib.suppress(OSError):
            while data := bytearray(a.recv(1 << 16)):
                ends = False
                for fault in faults:
                    if fault.delay_s and at + len(data) > fault.at:
                        time.sleep(fault.delay_s)
                    if fault.flip and at <= fault.at < at + len(data):
                        data[fault.at - at] ^= 1 << fault.at % 8
                    if (fault.cut or fault.hold) and at + len(data) > fault.at:
                        del data[max(0, fault.at - at):]
                        ends = True
                b.sendall(data)
                at += len(data)
                self.passed[n, way] = at
                if ends and any(f.hold for f in faults):
                    self._held.wait()
                if ends:
                    break
        for sock in (a, b):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
