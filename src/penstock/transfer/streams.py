"""The ordered stream between the ends of a pair: a Unix socket, TCP, or TLS over it.

Owns sockets, what may be listened on and how it is secured. One thread receives and one sends; any
thread may cut. Knows no frames.
"""
from __future__ import annotations

import contextlib
import hashlib
import io
import os
import socket
import ssl
import stat
import sys
import threading
from dataclasses import dataclass, field

from penstock.config.base.errors import ConfigError
from penstock.config.settings.refuse import is_public

KEY_BYTES_MIN = 16
SOCKET_BUFFER_BYTES = 4 << 20
CONNECT_S = 5.0                         # until a connection is one, and then until it is a pair's
_TLS_CHUNK = 1 << 18
_ONE_FD = socket.CMSG_SPACE(4)
_UNIX = "unix:"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """How one end of a pair reaches the other.

    address     unix:PATH, unix:@NAME of Linux's abstract sockets, which are no files, or HOST:PORT; port 0,
                of the end that listens, is any free one; empty, of the end that dials, until the address is set
    key         the secret of both ends
    tls_cert    of the end that listens: a PEM file with a certificate and its key. The end that dials
                needs none: which certificate it saw is part of what the key proves
    tls         with TLS; both ends say the same
    plaintext   without TLS though the other end may be on another machine
    silence_s   nothing arrives, or a frame is not taken, for as long: the connection is cut
    """

    role: str
    address: str
    listens: bool
    key: bytes = field(repr=False)
    tls: bool = False
    tls_cert: str = ""
    plaintext: bool = False
    silence_s: float = 10.0

    def check(self) -> None:
        """Raises ConfigError."""
        if len(self.key) < KEY_BYTES_MIN:
            raise ConfigError(f"the pair's key has {len(self.key)} bytes, not {KEY_BYTES_MIN} or more")
        if self.silence_s < 0.1:
            raise ConfigError(f"a pair hears nothing for {self.silence_s:g} s often: give 0.1 or more")
        path, host, _ = self.parts() if self.address else ("", "localhost", 0)
        if path and len(os.fsencode(path)) > 100:
            raise ConfigError(f"the path of a Unix socket has at most 100 bytes: {path}")
        if not (path or not is_public(host) or self.tls or self.plaintext):
            raise ConfigError(f"{self.address} can be reached from other machines: give the prefill instance "
                              "--cluster-tls-cert FILE and the decode instance --cluster-tls, or both "
                              "--cluster-insecure")
        if self.tls and self.plaintext:
            raise ConfigError("--cluster-insecure and TLS exclude each other")
        if self.tls and self.listens and not self.tls_cert:
            raise ConfigError("a prefill instance needs --cluster-tls-cert FILE: a PEM file with a "
                              "certificate and its key, e.g. by openssl req -x509 -newkey rsa:3072 -nodes")

    def parts(self) -> tuple[str, str, int]:
        """Path, host and port; a path, of a name that is no file after a zero, excludes the other two. Raises
        ConfigError."""
        if self.address.startswith(_UNIX):
            path = self.address.removeprefix(_UNIX)
            return "\0" + path[1:] if path.startswith("@") else path, "", 0
        host, colon, port = self.address.rpartition(":")
        if not (colon and host and port.isdecimal() and int(port) < 1 << 16):
            raise ConfigError(f"the address of a pair is unix:PATH or HOST:PORT, not {self.address!r}")
        return "", host.strip("[]"), int(port)


class Connection(io.RawIOBase):
    """One connection. `binding` is the digest of the TLS certificate, empty without TLS."""

    binding = b""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        self.hands = sock.family == socket.AF_UNIX          # whether a file can be handed over
        self._fd = -1                                       # that was, by the other end
        self.limit(CONNECT_S)

    @property
    def here(self) -> str:
        """The address of this machine that the other end sees."""
        return "127.0.0.1" if self._socket.family == socket.AF_UNIX else str(self._socket.getsockname()[0])

    def limit(self, seconds: float) -> None:
        """A read that gets nothing, or a `sendall` that is not done, after so long raises TimeoutError."""
        self._socket.settimeout(seconds)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:          # type: ignore[override]
        if not self.hands:
            return self._socket.recv_into(buffer)
        n, found, _, _ = self._socket.recvmsg_into([buffer], _ONE_FD, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in found:
            if (level, kind, len(data)) == (socket.SOL_SOCKET, socket.SCM_RIGHTS, 4):
                self._drop_fd()                             # a stranger keeps no more than one open
                self._fd = int.from_bytes(data, sys.byteorder)
        return n

    def take_fd(self) -> int:
        """The file that the other end has handed over, the caller's from now on; -1: none."""
        found, self._fd = self._fd, -1
        return found

    def _drop_fd(self) -> None:
        if (fd := self.take_fd()) >= 0:
            os.close(fd)

    def sendall(self, data: bytes | memoryview) -> None:
        self._socket.sendall(data)

    def hand(self, data: bytes, fd: int) -> None:
        """`sendall`, and the file with the first of it."""
        sent = socket.send_fds(self._socket, [data], [fd])
        self._socket.sendall(memoryview(data)[sent:])

    def cut(self) -> None:
        """Readers and writers get the end of the stream or an OSError. Idempotent."""
        shut(self._socket)

    def close(self) -> None:
        self._socket.close()
        self._drop_fd()
        super().close()


class TlsStream(Connection):
    """TLS in memory over the socket: the library's own sockets cannot be read and written at once."""

    def __init__(self, sock: socket.socket, settings: LinkSettings) -> None:
        """Shakes hands. Raises OSError."""
        super().__init__(sock)
        self.hands = False
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if settings.listens else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if settings.listens:
            context.num_tickets = 0
            context.load_cert_chain(settings.tls_cert)
        else:
            # The shared key proves the certificate, whose digest is in `binding`.
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=settings.listens)
        self._lock = threading.Lock()
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                self._feed()
            except ssl.SSLError:
                self._flush()                               # tell the other end why
                raise
        self._flush()
        certificate = read_certificate(settings.tls_cert) if settings.listens else self._peer_certificate()
        self.binding = hashlib.sha256(certificate).digest()

    def _peer_certificate(self) -> bytes:
        certificate = self._tls.getpeercert(binary_form=True)
        assert certificate is not None, "TLS 1.3 servers show one"
        return certificate

    def readinto(self, buffer: memoryview) -> int:          # type: ignore[override]
        while True:
            with self._lock:
                try:
                    return self._tls.read(len(buffer), buffer)      # type: ignore[return-value]
                except ssl.SSLWantReadError:
                    pass
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    return 0            # frames say themselves whether one was cut off
            self._feed()

    def sendall(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for at in range(0, len(view), _TLS_CHUNK):
            with self._lock:
                self._tls.write(view[at:at + _TLS_CHUNK])
            self._flush()

    def _feed(self) -> None:
        data = self._socket.recv(1 << 16)
        with self._lock:
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()

    def _flush(self) -> None:
        with self._lock:
            data = self._outgoing.read()
        if data:
            self._socket.sendall(data)


def shut(sock: socket.socket) -> None:
    """A call that waits in it returns, with nothing or an OSError. Idempotent."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def listen(settings: LinkSettings) -> socket.socket:
    """Raises ConfigError if the address cannot be listened on, or the certificate is not one."""
    if settings.tls:
        read_certificate(settings.tls_cert)
    path, host, port = settings.parts()
    try:
        if not path:
            return socket.create_server((host, port), family=_family(host))
        server = socket.socket(socket.AF_UNIX)
        if path.startswith("\0"):
            server.bind(path)
            server.listen()
            return server
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                with socket.socket(socket.AF_UNIX) as probe:
                    if probe.connect_ex(path) == 0:
                        raise ConfigError(f"cannot listen on {settings.address}: somebody does already")
                os.unlink(path)                             # of an engine before this one
        server.bind(path)
        os.chmod(path, 0o600)
        server.listen()
        return server
    except (OSError, UnicodeError) as e:
        whom = "the other nodes" if settings.role == "node" else "the other engine"
        raise ConfigError(f"cannot listen on {settings.address} for {whom}: {e}") from e


def dial(settings: LinkSettings) -> socket.socket:
    """Raises OSError, and UnicodeError for a host that cannot be one."""
    path, host, port = settings.parts()
    if not path:
        return socket.create_connection((host, port), CONNECT_S)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(CONNECT_S)
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock


def secure(sock: socket.socket, settings: LinkSettings) -> Connection:
    """Raises OSError. The socket belongs to the stream, or is closed."""
    try:
        return TlsStream(sock, settings) if settings.tls else Connection(sock)
    except BaseException:
        sock.close()
        raise


def read_certificate(path: str, flag: str = "--cluster-tls-cert") -> bytes:
    """The first certificate of a PEM file, in DER. Raises ConfigError."""
    try:
        with open(path, encoding="ascii") as file:
            text = file.read()
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(path)
        begin = text.index("-----BEGIN CERTIFICATE-----")
        end = text.index("-----END CERTIFICATE-----", begin) + len("-----END CERTIFICATE-----")
        return ssl.PEM_cert_to_DER_cert(text[begin:end] + "\n")
    except (OSError, ValueError) as e:
        raise ConfigError(f"{flag} {path}: no PEM file with a certificate and its key: {e}") from e


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
