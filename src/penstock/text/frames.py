"""Frames between this process and those that it keeps aside: a length, then JSON. Standard library only."""
from __future__ import annotations

import contextlib
import json
import resource
import socket
import sys
from collections.abc import Callable
from typing import Any

LENGTH_BYTES = 4


def send(link: socket.socket, value: Any) -> None:
    body = json.dumps(value).encode()
    link.sendall(len(body).to_bytes(LENGTH_BYTES, "little") + body)


def receive(link: socket.socket, bytes_max: int = 1 << 28) -> Any:
    """The next value. Raises EOFError when the other side has closed, ValueError for nonsense."""
    length = int.from_bytes(_exactly(link, LENGTH_BYTES), "little")
    if length > bytes_max:
        raise ValueError(f"frame of {length} bytes")
    return json.loads(_exactly(link, length))


def _exactly(link: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = link.recv(min(count - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def within_hard(limit: int, most: int) -> int:
    """`most`, or the hard limit of this process if that is lower: raising it is not allowed."""
    hard = resource.getrlimit(limit)[1]
    return most if hard == resource.RLIM_INFINITY else min(most, hard)


def serve(answers: Callable[[socket.socket], object], memory_bytes: int) -> None:
    """The main of a process aside, whose command line is the descriptor of its socket: `answers` until the
    other side has closed, with so much memory at most."""
    for limit, most in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CORE, 0)):
        most = within_hard(limit, most)
        resource.setrlimit(limit, (most, most))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        answers(socket.socket(fileno=int(sys.argv[1])))
