"""Memory of the API process over many equal streamed chats, with an engine that only echoes.

    python bench/api_memory.py --requests 100000 --every 5000

Prints anonymous resident memory (KiB) as requests end, and at last the bytes a request: the slope of a line
through those after a tenth of the requests, so that the start's growth is left out.
"""
from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

FAKE = Path(__file__).parents[1] / "tests" / "e2e" / "http_fake.py"
BODY = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8,
                   "stream": True}).encode()
REQUEST = (b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
           b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
END = b"0\r\n\r\n"              # of a chunked answer


def anonymous_kib(pid: int) -> int:
    return int(re.search(r"^RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1])


def client(address: tuple[str, int], count: int, done: list[int]) -> None:
    """`count` chats over one connection. done: gets a number for each."""
    with socket.create_connection(address, 120) as link:
        for _ in range(count):
            link.sendall(REQUEST)
            seen = b""
            while not seen.endswith(END):
                part = link.recv(65536)
                assert part, "the server closed the connection"
                seen += part
            assert seen.startswith(b"HTTP/1.1 200 ") and b"[DONE]" in seen, seen[:300]
            done.append(1)


def slope(points: list[tuple[int, int]]) -> float:
    """Bytes a request of a line through (requests, KiB)."""
    x, y = (sum(column) / len(points) for column in zip(*points, strict=True))
    across = sum((a - x) ** 2 for a, _ in points)
    return 1024 * sum((a - x) * (b - y) for a, b in points) / across if across else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=5_000, help="requests between two lines")
    parser.add_argument("--clients", type=int, default=8, help="connections, each with one request at a time")
    args = parser.parse_args()
    server = subprocess.Popen([sys.executable, str(FAKE), "fake", "--port", "0"], stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True)
    try:
        host, port = re.search(r"ready on http://([\d.]+):(\d+)", server.stdout.readline()).groups()
        done: list[int] = []
        each = args.requests // args.clients
        threads = [threading.Thread(target=client, args=((host, int(port)), each, done), daemon=True)
                   for _ in range(args.clients)]
        for thread in threads:
            thread.start()
        points: list[tuple[int, int]] = []
        began = time.monotonic()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.02)
            if len(done) >= args.every * (len(points) + 1):
                points.append((len(done), anonymous_kib(server.pid)))
                took = time.monotonic() - began
                print(f"{points[-1][0]:>9} requests  {points[-1][1]:>8} KiB  {took:6.0f} s", flush=True)
        late = [point for point in points if point[0] >= args.requests / 10]
        if len(done) < each * args.clients:
            sys.exit("a client failed")
        if len(late) > 1:
            print(f"{slope(late):.1f} bytes a request from {late[0][0]} requests on; memory at the end is "
                  f"{late[-1][1] / late[0][1]:.3f} of that then")
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
