"""Frames between this process and those that it keeps aside: a length, then JSON. Standard library only."""
from __future__ import annotations

import json
import socket
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
