"""The agent of a node that is not the first: it owns that machine's ranks and their host pool, and says on.

It comes to node 0, starts what that says, carries bytes between it and the ranks, and is gone with either of
them. Decides nothing.
"""
from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NoReturn

from penstock.config.base import machine
from penstock.config.base.errors import ConfigError
from penstock.config.base.version import version
from penstock.config.settings.plain import from_plain, to_plain
from penstock.config.settings.tree import Config
from penstock.core.plan import Group, Tier
from penstock.exec.load.layout import Caches
from penstock.exec.load.weights import outline
from penstock.exec.pipeline import nodes
from penstock.exec.pipeline.local_launcher import LocalRanks, gpus_here
from penstock.exec.pipeline.nodes import EXECUTOR, NodeLink
from penstock.exec.step.links import nodes_of, of_config
from penstock.transfer.handshake import Stranger
from penstock.transfer.pages import PoolPages, Span
from penstock.transfer.streams import dial

EXIT_GONE, EXIT_CONFIG = 1, 2
DIAL_S = 0.5                    # between two tries


class Agent:
    """Of one node, from its first word to node 0 to the end of both."""

    def __init__(self, config: Config, log: Callable[[str], None], wanted: Callable[[], bool],
                 engine: int = 0) -> None:
        """wanted: whether it is still of use to come to node 0. engine: of which one of its engines."""
        self._config, self._log, self._wanted, self._engine = config, log, wanted, engine
        self._settings = nodes.settings_of(config)
        self._link: NodeLink | None = None
        self._ranks: LocalRanks | None = None
        self._own: list[Caches] = []
        self._pages = PoolPages([])
        self._asked = False

    def run(self, joined: Callable[[], object] = lambda: None) -> int:
        """The exit code: 0 as node 0 was asked to end, EXIT_GONE without it. joined: called when that has
        taken this one. Raises ConfigError: node 0 is not there or refuses, or settings are wrong."""
        try:
            link = self._link = self._come()
        except ConnectionError:
            return EXIT_GONE
        start = self._greet(link)
        joined()
        config = from_plain(start.config)
        mine = nodes_of(config)[self._config.nodes.rank]
        parts = of_config(config, start.num_layers)
        loaded = outline(config, lambda _: None)
        layout, node = loaded.layout, [parts[i] for i in mine]
        self._own = [layout.caches.stage(part, layout.groups, node) for part in node]
        ranks = self._ranks = LocalRanks(config, mine, self._engine)
        try:
            link.say(nodes.NodeStarted([process.pid for process in ranks.processes]))
            for i, sock in zip(mine, ranks.executor_ends, strict=True):
                self._spawn(self._of_rank, i, sock)
            for (i, slot), sock in ranks.outside.items():
                self._spawn(nodes.pump, sock, link, i * 4 + slot)
            why = link.run(self._handle)
        except ConnectionError as e:
            why = str(e)
        finally:
            ranks.close()
        if self._asked:
            return 0
        self._log(f"node 0 ({link.peer}) is gone: {why}")
        return EXIT_GONE

    def _come(self) -> NodeLink:
        """Node 0 may start later than this one. Raises ConnectionError when nobody waits for it any more."""
        until, told = time.monotonic() + self._config.device.step_timeout_s, ""
        while True:
            if not self._wanted():
                raise ConnectionError("no engine is left")
            try:
                return NodeLink(dial(self._settings), self._settings)
            except Stranger as e:
                why = f"node 0 at {self._settings.address}: {e}"
            except (OSError, UnicodeError) as e:
                why = f"no node 0 at {self._settings.address}: {e}"
            if why != told:
                self._log(why)
                told = why
            if time.monotonic() > until:
                raise ConfigError(f"{why}; nothing better in {self._config.device.step_timeout_s:g} s: start "
                                  "node 0, and give the same --dist-init-addr and key")
            time.sleep(DIAL_S)

    def _greet(self, link: NodeLink) -> nodes.Start:
        threads = self._config.device.threads or machine.probe().cores
        try:
            link.say(nodes.Join(version(), self._config.nodes.rank, to_plain(self._config),
                                nodes.weights_of(self._config), threads, link.host,
                                len(gpus_here(self._config, self._engine))))
            link.patient(self._config.device.step_timeout_s)        # until the others have come
            answer = link.next()
        except ConnectionError as e:
            raise ConfigError(f"node 0 at {self._settings.address} did not take this one: {e}; is "
                              "--cluster-key-file the same there?") from None
        if isinstance(answer, nodes.Refuse):
            raise ConfigError(answer.why)
        assert isinstance(answer, nodes.Start)
        link.live()
        self._log(f"node {self._config.nodes.rank}: part of the engine at {self._settings.address}")
        return answer

    def _spawn(self, body: Callable[..., None], *args: object) -> None:
        threading.Thread(target=body, args=args, daemon=True, name=f"penstock{body.__name__}").start()

    def _of_rank(self, rank: int, sock: socket.socket) -> None:
        """What it says, and then how it has ended."""
        assert self._link is not None and self._ranks is not None
        nodes.pump(sock, self._link, rank * 4 + EXECUTOR)
        code = self._ranks.processes[rank - self._ranks.mine.start].wait()
        try:
            self._link.say(nodes.Exited(rank, code))
        except ConnectionError:
            pass                                        # `run` hears of it

    def _handle(self, message: Any) -> None:
        ranks, link = self._ranks, self._link
        assert ranks is not None and link is not None
        match message:
            case nodes.Data(channel, body):
                rank, slot = divmod(channel, 4)
                _give(ranks.executor_ends[rank - ranks.mine.start] if slot == EXECUTOR else ranks.outside[rank, slot],
                      body)
            case nodes.ToAll(body):
                for sock in ranks.executor_ends:
                    _give(sock, body)
            case nodes.NodePools(core):
                self._pages = PoolPages([])             # or the ranks' memory would stay
                ranks.make_room(core, self._own)
            case nodes.Seen(core, handles):
                self._pages = PoolPages(ranks.seen(core, self._own, handles))
            case nodes.NodeStack(rank):
                ranks.processes[rank - ranks.mine.start].send_signal(signal.SIGUSR2)
            case nodes.Write(number, tier, group, layers, heads, spans, body):
                self._pages.write(Tier(tier), Group(group), range(layers[0], sum(layers)),
                                  [Span(*span) for span in spans], memoryview(body), range(heads[0], sum(heads)))
                link.say(nodes.NodeBytes(number))
            case nodes.Read(number, tier, group, layers, heads, spans):
                found = bytearray(self._size(group, layers[1] * heads[1] * sum(units for _, _, units in spans)))
                self._pages.read(Tier(tier), Group(group), range(layers[0], sum(layers)),
                                 [Span(*span) for span in spans], memoryview(found), range(heads[0], sum(heads)))
                link.say(nodes.NodeBytes(number, bytes(found)))
            case nodes.Bye():
                self._asked = True
            case _:
                raise AssertionError(f"{type(message).__name__} to an agent that runs")

    def _size(self, group: int, cells: int) -> int:
        """Bytes of so many units of a head of a layer."""
        whole = self._own[0].parts[group].whole
        return cells * whole.planes * whole.head_dim * whole.dtype.itemsize


def _give(sock: socket.socket, body: bytes) -> None:
    try:
        sock.sendall(body)
    except OSError:
        pass                            # it has died: `_of_rank` tells how


def run_agent(config: Config) -> NoReturn:
    """Until node 0 is gone; ends this process. Raises ConfigError."""
    def log(line: str) -> None:
        print(f"penstock: {line}", file=sys.stderr, flush=True)

    asked = 0

    def on_signal(number: int, _: object) -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            raise KeyboardInterrupt
        log("node 0 says when this one ends; interrupt again to exit at once")

    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_IGN:      # as `nohup` and scripts ask for
            continue
        signal.signal(number, on_signal)
    code = Agent(config, log, lambda: True).run() if config.num_engines == 1 else _Several(config, log).run()
    os._exit(code)          # a thread of ours that wakes while the interpreter ends would end it with SIGABRT


class _Several:
    """An agent for each engine of node 0. An engine that died is started again there, and comes to have its
    ranks here again, as long as there is another one; without any this process ends."""

    def __init__(self, config: Config, log: Callable[[str], None]) -> None:
        self._config, self._log = config, log
        self._num = config.num_engines
        self._with = set(range(self._num))          # engines that are there, or may still come
        self._codes: SimpleQueue[int] = SimpleQueue()

    def run(self) -> int:
        """0 if node 0 was asked to end, else the exit code of a failure."""
        for n in range(self._num):
            threading.Thread(target=self._keep, args=(n,), daemon=True, name=f"penstock-agent-{n}").start()
        codes = [self._codes.get() for _ in range(self._num)]
        return 0 if 0 in codes else max(codes)

    def _keep(self, n: int) -> None:
        config, code = replace(self._config, nodes=self._config.nodes.of_engine(n)), EXIT_GONE
        first = True
        while first or self._with:
            agent = Agent(config, self._log, (lambda: True) if first else (lambda: bool(self._with)), n)
            first = False
            try:
                code = agent.run(lambda: self._with.add(n))
            except ConfigError as e:
                self._log(f"error: engine {n}: {e}")
                code = EXIT_CONFIG
            self._with.discard(n)
            if code != EXIT_GONE:
                break
        self._codes.put(code)
