"""One end of a pair for the life of an engine: connects, pairs, and does so again when a connection ends.

Each connection is an epoch and a `Session` of its own, with which the engine talks. What happens in the threads of
both reaches the engine's by `wake` and `events`.
"""
from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from penstock.config.base.errors import ConfigError
from penstock.transfer.events import Events, Unpaired
from penstock.transfer.facts import Facts
from penstock.transfer.handshake import Stranger, handshake
from penstock.transfer.landing import Counts
from penstock.transfer.messages import Greeting
from penstock.transfer.pages import PageBytes
from penstock.transfer.remote.carrier import Open
from penstock.transfer.session import Session
from penstock.transfer.streams import CONNECT_S, Connection, LinkSettings, dial, listen, secure, shut

HANDSHAKES_MAX = 8                      # at once: strangers cannot keep more threads, nor these long
RETRY_S = (0.05, 1.0)                   # between two calls of the end that dials: at first, at most


class PairLink:
    def __init__(self, settings: LinkSettings, facts: Facts, pages: PageBytes,
                 wake: Callable[[], None], *, beside: Sequence[PairLink] = (),
                 open_carrier: Open | None = None) -> None:
        """open_carrier: of a transport by which the decode instance READs. beside: of the end that listens, links
        that are not started: each is paired with one more of the engines that call here. Raises
        ConfigError."""
        settings.check()
        self._all = [self, *beside]
        self._theirs: list[bytes] = []              # engines at the other end of its connections
        self._settings, self._facts, self._pages = settings, facts, pages
        self.events, self._counts = Events(wake), Counts()
        self._open_carrier = open_carrier
        self._server: socket.socket | None = None
        self._lock = threading.Lock()
        self._running = threading.Lock()            # held by the thread of the session that runs
        self._session: Session | None = None
        self._engine = os.urandom(16)               # which one this is, to the other end
        self._streams: list[Connection | socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._newest = 0                            # epoch that was given out, or heard of
        self._words = ""
        self._closing = threading.Event()
        self._handshakes = threading.Semaphore(HANDSHAKES_MAX)
        self._unknown: dict[socket.socket, None] = {}       # whose handshakes these are, the oldest first
        self.address = settings.address

    def start(self) -> None:
        """Listen, or begin to dial. Raises ConfigError if that cannot be."""
        if self._settings.listens:
            self._server = listen(self._settings)
            if self._server.family != socket.AF_UNIX:
                host, port = self._server.getsockname()[:2]
                self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._spawn(self._accept if self._settings.listens else self._dial)

    def call(self, address: str) -> None:
        """Begin to dial `address`, or from now on that one. There is no connection. Raises ConfigError."""
        settings = replace(self._settings, address=address)
        settings.check()
        with self._lock:                                # what is met at the old one is not taken over
            self._settings, self.address, session = settings, address, self._session
        if session is not None:                         # no event has named that connection yet
            session.cut("cut", f"{address} is called instead")
        if not self._threads:
            self.start()

    # ------------------------------------------------------------ the loop's thread
    def stats(self) -> dict[str, float]:
        """By metric name."""
        c = self._counts
        return {"pair_connected": float(self._session is not None),
                "pair_connections_total": c.connections,
                "pair_sent_bytes_total": c.bytes_sent, "pair_received_bytes_total": c.bytes_received,
                "pair_send_seconds_total": c.send_seconds,
                "pair_sent_frames_total": c.frames_sent, "pair_received_frames_total": c.frames_received,
                "pair_stray_frames_total": c.strays,
                "pair_damaged_frames_total": c.damaged,
                **{f'pair_failures_total{{cause="{cause}"}}': n for cause, n in c.failures.copy().items()}}

    def close(self) -> None:
        """When it returns no thread writes or listens. Idempotent."""
        self._closing.set()
        with self._lock:
            session, streams = self._session, list(self._streams)
        if session is not None:
            session.cut("cut", "this engine ends")
        for end in [*streams, *([] if self._server is None else [self._server])]:
            end.cut() if isinstance(end, Connection) else shut(end)
        until = time.monotonic() + 2 * CONNECT_S
        # A transport's READ cannot be cut: it ends in a buffer that no page is in.
        if self._running.acquire(timeout=2 * CONNECT_S):
            self._running.release()
        # Again until there is none: the thread that accepts may have begun one more meanwhile.
        while (alive := [t for t in self._threads if t.is_alive()]) and time.monotonic() < until:
            alive[0].join(until - time.monotonic())
        if self._server is not None:
            self._server.close()

    # ------------------------------------------------------------ its threads
    def _spawn(self, run: Callable[[], object]) -> None:
        thread = threading.Thread(target=self._guard, args=(run,), daemon=True, name="penstock-pair")
        with self._lock:
            self._threads = [t for t in self._threads if t.is_alive()] + [thread]
            thread.start()

    def _guard(self, run: Callable[[], object]) -> None:
        try:
            run()
        except BaseException as e:      # our bug: handed over, not handled
            self.events.fail(e)

    def _accept(self) -> None:
        assert self._server is not None
        while not self._closing.is_set():
            try:
                sock, _ = self._server.accept()
            except OSError:                         # closing, or out of descriptors
                self._closing.wait(RETRY_S[0])
                continue
            self._begin(sock)
            self._spawn(partial(self._serve, sock))

    def _begin(self, sock: socket.socket) -> None:
        """Have a handshake for it. If there are too many the oldest ends, so that silent strangers
        do not block others: with the key one takes milliseconds."""
        if not self._handshakes.acquire(blocking=False):
            with self._lock:
                oldest = next(iter(self._unknown), None)
            if oldest is not None:
                shut(oldest)
            self._handshakes.acquire()
        with self._lock:
            self._unknown[sock] = None

    def _dial(self) -> None:
        wait = RETRY_S[0]
        while not self._closing.is_set():
            settings = self._settings
            try:
                sock = dial(settings)
            except (OSError, UnicodeError) as e:        # UnicodeError: a host that no name can be
                why = getattr(e, "strerror", None) or e
                self._tell(f"cannot connect to {settings.address}: {why}")
            else:
                self._begin(sock)
                with contextlib.suppress(OSError):
                    wait = RETRY_S[0] if self._serve(sock, settings) else wait
            self._closing.wait(wait)
            wait = min(2 * wait, RETRY_S[1])

    def _serve(self, sock: socket.socket, dialled: LinkSettings | None = None) -> bool:
        """A connection from its beginning to its end. False if it never was a pair's."""
        held: Connection | socket.socket = sock
        link: PairLink = self
        try:
            session = None
            with self._lock:
                self._streams.append(sock)
            if self._closing.is_set():          # and `close` may not have seen this one
                shut(sock)
            # Of all of it: a stranger who sends a byte now and then would keep a thread.
            limit = threading.Timer(CONNECT_S, shut, (sock,))
            limit.daemon = True
            limit.start()
            try:
                settings = self._settings
                if dialled is not None and settings is not dialled:
                    return False                # another end is called meanwhile
                stream = secure(sock, settings)
                with self._lock:
                    self._streams[self._streams.index(sock)] = held = stream
                link, session = self._pair(stream)
            except (Stranger, ConfigError) as e:
                self._refuse(str(e))
            except ssl.SSLError as e:
                self._refuse(f"no TLS with the other end, which may not speak it: {e.reason}")
            except OSError:
                self._counts.failed("handshake")
            finally:
                limit.cancel()
                with self._lock:
                    del self._unknown[sock]
                self._handshakes.release()
            if session is None:
                return False
            try:
                return link._take_over(session, settings)
            finally:
                link._leave(session.engine)
        finally:
            with self._lock:
                self._streams.remove(held)
            held.close()

    def _pair(self, stream: Connection) -> tuple[PairLink, Session]:
        """Whose it is, and what it is there, which `_leave` ends."""
        chosen: list[tuple[PairLink, bytes]] = []

        def choose(theirs: Greeting) -> int:
            with self._lock:
                link = (next((link for link in self._all if theirs.engine in link._theirs), None)
                        or next((link for link in self._all if not link._theirs), None))
                if link is None:
                    return 0            # each would take us from the other, in turns
                link._theirs.append(theirs.engine)
                chosen.append((link, theirs.engine))
                link._newest = max(link._newest, theirs.newest) + 1
                return link._newest

        def newest() -> int:
            return chosen[0][0]._newest if chosen else self._newest

        try:
            paired = handshake(stream, self._settings, self._facts, self._engine, newest, choose)
        except BaseException:
            for link, engine in chosen:
                link._leave(engine)
            raise
        link = chosen[0][0] if chosen else self
        return link, Session(stream, paired, link._facts, link._pages, link.events,
                             link._counts, self._settings.silence_s,
                             None if link._open_carrier is None else partial(link._open_carrier, stream.here))

    def _leave(self, engine: bytes) -> None:
        """A connection of its has ended."""
        if engine in self._theirs:      # not of the end that calls
            self._theirs.remove(engine)

    def _refuse(self, words: str) -> None:
        self._counts.failed("unpaired")
        self._tell(words)

    def _tell(self, words: str) -> None:
        with self._lock:
            is_logged, self._words = self._words == words, words
        if not is_logged:
            self.events.put(Unpaired(words))

    def _take_over(self, session: Session, settings: LinkSettings) -> bool:
        """Run it in place of any older one: an end that dials again knows that its old connection is over.
        settings: by which this end has dialled, if it has."""
        with self._lock:
            self._newest = max(self._newest, session.epoch)
            old, self._words = self._session, ""
        if old is not None and old.epoch < session.epoch:
            old.cut("replaced", "the other end has connected again")
        with self._running:
            with self._lock:
                elsewhere = not settings.listens and settings is not self._settings
                if self._closing.is_set() or elsewhere or session.epoch < self._newest:
                    return False
                self._session = session
            session.run()
            self._session = None
        return True
