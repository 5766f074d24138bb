"""The engine process: `python -m penstock.engine.process FD`, FD being one end of a socket pair.

Receives Hello, builds the engine, answers Ready or Failed, then runs the loop until Shutdown or
until the API process is gone. Exit codes: 0 asked to or orphaned, 2 configuration, 70 our bug or a dead rank.
"""
from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from penstock.config.base import collector
from penstock.config.base.errors import ConfigError, RankDied
from penstock.config.base.machine import address_limit, limit_libraries, why_no_memory
from penstock.config.settings.plain import from_plain
from penstock.config.settings.tree import Config
from penstock.config.streams.frames import FrameBuffer, ProtocolError
from penstock.core.lifecycle import Phase
from penstock.engine import wire
from penstock.engine.record import EventLog, write_flight, write_on_signal
from penstock.exec.waker import Waker

if TYPE_CHECKING:
    from penstock.engine.kv_events import KvPublisher
    from penstock.engine.loop import EngineLoop
    from penstock.engine.pd.router import Peers
    from penstock.exec.pipeline.workers import WorkerGroup

EXIT_CONFIG = 2
EXIT_NO_MEMORY, EXIT_BUG = 1, 70
READ_BYTES = 1 << 20
IDLE_S = 1.0                # nothing to do for so long: what could wait is begun
# A full collection once in 70 million objects. The core makes no cycles, but each page is a few objects
# that live long and that a full collection walks: 100 ms a time with 1,024 rows, where planning a step takes
# 1.3 ms; without it the slowest of 1,200 steps is 4 ms.
FULL = 10_000


class ApiLink:
    """The engine's end of the socket. A closed other end, at any moment, ends this process."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = FrameBuffer(wire.TO_ENGINE)
        threading.Thread(target=self._watch, daemon=True, name="penstock-watch").start()

    def _watch(self) -> None:
        # A thread, because the main one may be loading a model or waiting for a step when the API
        # process dies, and an orphan would hold memory and cores until then.
        poll = select.poll()
        poll.register(self._socket, getattr(select, "POLLRDHUP", 0))
        poll.poll()
        os._exit(0)

    def send(self, message: wire.FromEngine) -> None:
        """Blocks while the socket is full: the API process always reads."""
        with contextlib.suppress(ConnectionError):          # `_watch` ends the process
            self._socket.sendall(wire.FROM_ENGINE.frames(message))

    def receive(self, timeout_s: float | None, wakes: Waker | None = None) -> list[wire.ToEngine]:
        """Messages that have arrived; waits up to `timeout_s` (None: for ever) for the first, or for
        `wakes`, which is cleared.

        Raises ProtocolError. Exits when the other end is closed.
        """
        if timeout_s != 0:
            ready = select.poll()               # descriptors may be above what `select.select` takes
            for fd in (self._socket, *(() if wakes is None else (wakes,))):
                ready.register(fd, select.POLLIN)
            ready.poll(None if timeout_s is None else timeout_s * 1000)
        if wakes is not None:
            wakes.clear()
        try:
            data = self._socket.recv(READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except ConnectionError:
            data = b""
        if not data:
            os._exit(0)
        return self._reader.feed(data)


def run(engine: EngineParts, link: ApiLink) -> None:
    """Run until Shutdown. It waits in one place, for messages, the executor, the other engine of a pair and deadlines;
    steps that run in this thread are run between two looks at what has come."""
    loop, workers, peers = engine.loop, engine.workers, engine.peers
    turn_over, timelines = write_on_signal(loop.recorder), loop.timelines
    missing = "no connection yet" if peers is None else peers.missing
    begun, between = False, collector.BetweenTurns()
    while True:
        wait_s = loop.wait_s
        idle = not begun and wait_s is None and not loop.steps_in_flight
        if workers is not None and loop.steps_in_flight:
            wait_s = workers.timeout_s if wait_s is None else min(wait_s, workers.timeout_s)
        messages = link.receive(IDLE_S if idle else wait_s, engine.wakes)
        if idle and not messages:
            begun = True
            engine.begin()
        for message in messages:
            if isinstance(message, wire.Shutdown):
                return store_rest(engine, link, message.store_s) if message.store_s else None
            if (stats := loop.handle(message)) is not None:
                link.send(stats)
        if workers is not None:
            workers.watch()
        if chunks := loop.turn(block=loop.works_here):
            link.send(wire.Chunks(chunks))
        if timelines is not None and (ended := timelines.ended(chunks, loop.recorder.core.live)):
            link.send(wire.Timelines(ended))
        if peers is not None and peers.changed:
            missing = tell(peers, link, missing)
        turn_over()
        between.collect(idle=not loop.steps_in_flight)


def store_rest(engine: EngineParts, link: ApiLink, store_s: float) -> None:
    """Write the cached pages that wait for storage, for at most so many seconds. Requests that still run end first,
    and prompts of decode instances are refused."""
    loop, until = engine.loop, time.monotonic() + store_s
    loop.is_ending = True
    for rid in list(loop.recorder.core.live):
        loop.handle(wire.Abort(rid))
    began, left = loop.stats()["pages_to_store"], 0.0
    while (left_s := until - time.monotonic()) > 0:
        loop.turn(block=loop.works_here)
        now = loop.stats()
        left = now["pages_to_store"]
        if not (loop.moves_in_flight or loop.steps_in_flight) or now.get("storage_up") == 0:
            break                              # nothing is written, nor will it be
        wait_s = loop.wait_s
        link.receive(min(left_s, 1.0) if wait_s is None else min(left_s, wait_s), engine.wakes)
    if began or left:
        log(f"storage: {began - left:.0f} pages were written before the exit, {left:.0f} are left")


def tell(peers: Peers, link: ApiLink, missing: str) -> str:
    """Send news of the other instance to the API process, and log the reason if it is not `missing` any more.
    Returns the present reason."""
    peers.changed = False
    link.send(wire.PeerNews(peers.missing, peers.is_connected, peers.info))
    if peers.missing != missing:
        log(f"disaggregation: {peers.missing or 'connected'}")
    return peers.missing


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What a process runs. `workers`, `peers`, `publisher`: where there are several ranks, another end, KV events."""

    loop: EngineLoop
    ready: wire.EngineReady
    wakes: Waker
    workers: WorkerGroup | None
    peers: Peers | None
    publisher: KvPublisher | None
    begin: Callable[[], object]     # what neither ready nor the first requests shall wait for


def hello(link: ApiLink) -> Config:
    """The configuration that the API process sent. Raises ConfigError on another version."""
    messages: list[wire.ToEngine] = []
    try:
        while not messages:
            messages = link.receive(None)
    except ProtocolError as e:
        raise ConfigError(f"the engine speaks protocol version {wire.VERSION} and the API process another ({e}): "
                          "both must come from one installation") from e
    first = messages[0]
    if not isinstance(first, wire.Hello) or len(messages) > 1:
        raise ProtocolError("the first message is not Hello")
    if first.version != wire.VERSION:
        raise ConfigError(f"the engine speaks protocol version {wire.VERSION} and the API process "
                          f"{first.version}: both must come from one installation")
    return from_plain(first.config)


def build(config: Config, event_log: EventLog) -> EngineParts:
    """Load the model and put the loop together. Raises ConfigError."""
    limit_libraries(config.device.debug_cpu_isa)
    # Imported here: torch takes seconds, reads its limits then, and Hello must be checked before.
    from penstock.core.core import Core
    from penstock.core.policy.capacity import largest
    from penstock.engine.kv_events import KvPublisher, check_events, shown
    from penstock.engine.loop import EngineLoop
    from penstock.engine.pd.open import links_of, open_peers
    from penstock.engine.storing import Storing
    from penstock.engine.traces.timeline import Timelines
    from penstock.exec.sampling.grammar import proved
    from penstock.exec.start.build import build_engine
    from penstock.exec.start.store import check_storage
    from penstock.text.grammar.vocabulary import vocabulary_of

    links_of(config)                    # wrong addresses are refused before a model is loaded
    check_storage(config.kv)
    events = check_events(config.kv.kv_events_config)
    if config.model.grammar_backend == "llguidance" and (why := proved(lambda: vocabulary_of(config))):
        raise ConfigError(f"--grammar-backend llguidance: {why}")
    publisher = None if events is None else KvPublisher(events, log=log)        # its ports may be another's
    built = build_engine(config, log, vocabulary=lambda: vocabulary_of(config))
    peers = open_peers(config, built)
    storage = built.executor.storage
    info = built.info if peers is None else built.info | {"pair_address": peers.address}
    core_config = built.core_config
    if events is not None and publisher is not None:
        if all(group.reach for group in core_config.groups):
            raise ConfigError("--kv-events-config: every layer of this model keeps a part of its tokens only, so no "
                              "prefix of whole pages can be published: leave it out")
        core_config = replace(core_config, published_tiers=len(events.media))
        publisher.start(core_config.page_size, config.server.router_dialect, built.wakes.wake)
        for line in shown(events):
            log(line)
    loop = EngineLoop(Core(core_config), built.executor, vocab_size=built.vocab_size,
                      max_model_len=built.max_model_len, selection=built.selection,
                      event_log=event_log, check=config.debug.debug_check, peers=peers,
                      publisher=publisher,
                      timelines=None if config.server.otlp_traces_endpoint is None else Timelines(),
                      storing=None if storage is None else Storing(storage, config.kv.kv_storage_policy),
                      deadlines_s={Phase.RECEIVING.value: config.pair.kv_timeout_s},
                      room_s=config.pair.bootstrap_timeout_s if config.is_routed
                      and config.pair.disaggregation_mode == "prefill" else None)
    ready = wire.EngineReady(pid=os.getpid(), vocab_size=built.vocab_size, max_model_len=built.max_model_len,
                       info=info, selection=built.selection,
                       dense_len=min(built.max_model_len, largest(built.core_config, False) + 1))
    return EngineParts(loop=loop, ready=ready, wakes=built.wakes, workers=built.workers, peers=peers,
                  publisher=publisher, begin=built.grammars.begin if built.grammars is not None else lambda: None)


def log(line: str) -> None:
    """In one piece, also where nothing is buffered: ranks write there too."""
    print(f"{line}\n", end="", file=sys.stderr, flush=True)


def main(argv: list[str]) -> NoReturn:
    # A Ctrl-C goes to every process of the terminal, and supervisors signal whole groups: the API
    # process decides when this one ends, after running requests have drained.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)        # a closed terminal
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)       # until there is something to write
    link = ApiLink(socket.socket(fileno=int(argv[0])))
    try:
        config = hello(link)
        if limit := address_limit():
            log(f"warning: {limit}: the KV is sized by that, not by the machine's memory")
        event_log = EventLog(config.debug.debug_event_log)
        engine = build(config, event_log)
    except ConfigError as e:
        link.send(wire.Failed(str(e)))
        sys.exit(EXIT_CONFIG)
    except RankDied as e:
        log(f"engine: the start failed: {e}")
        sys.exit(EXIT_BUG)
    except Exception as e:
        if (why := why_no_memory(e)) is None:
            raise
        log(f"engine: the start failed: {why}")
        os._exit(EXIT_NO_MEMORY)                    # at once: to end threads may need memory as well
    collector.spare(FULL)
    log(wire.LOADED)
    link.send(engine.ready)
    try:
        run(engine, link)
    except Exception as e:                          # around the loop: leave evidence, then die
        path = "nothing could be written"
        try:
            path = f"penstock sim --print {write_flight(engine.loop.recorder, e)}"
        finally:
            traceback.print_exc()                   # of both, if writing failed as well
            log(f"engine: died; the last turns: {path}")
            _end_ranks(engine)
            os._exit(EXIT_BUG)
    event_log.close()
    if engine.publisher is not None:
        engine.publisher.close()
    _end_ranks(engine, asked=True)
    os._exit(0)                                     # no thread of ours has anything to save


def _end_ranks(engine: EngineParts, *, asked: bool = False) -> None:
    """A rank that hangs does not see that its socket has closed."""
    if engine.workers is not None:
        engine.workers.close(asked=asked)


if __name__ == "__main__":
    main(sys.argv[1:])
