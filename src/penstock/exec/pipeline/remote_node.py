"""The other machines as node 0 sees them: who has come, their ranks as processes, their pages.

Owns the listening socket until all have come, then a stream to each. Decides nothing.
"""
from __future__ import annotations

import contextlib
import itertools
import math
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from torch import Tensor

from penstock.config.base.errors import ConfigError, RankDied
from penstock.config.base.version import version
from penstock.config.settings.plain import from_plain, to_plain
from penstock.config.settings.tree import Config
from penstock.core.plan import Group, Tier
from penstock.exec.load.layout import Caches
from penstock.exec.pipeline import nodes, wire
from penstock.exec.pipeline.local_launcher import LocalRanks, wires
from penstock.exec.pipeline.nodes import EXECUTOR, NodeLink
from penstock.memory.pool import PageLayout
from penstock.transfer.handshake import Stranger
from penstock.transfer.pages import PageBytes, PoolPages, Span
from penstock.transfer.streams import CONNECT_S, LinkSettings, listen, shut

HANDSHAKE_S = 2 * CONNECT_S     # of one caller, from the connection to its Join
CALLERS_MAX = 64                # that shake hands at once


class FarProcess:
    """A rank's process on another machine: what `subprocess.Popen` is for one here."""

    def __init__(self, node: RemoteNode, rank: int, pid: int) -> None:
        self._node, self._rank, self.pid = node, rank, pid
        self.returncode: int | None = None
        self._gone = threading.Event()

    def wait(self, timeout: float | None = None) -> int | None:
        if not self._gone.wait(timeout):
            raise subprocess.TimeoutExpired([f"rank {self._rank}"], timeout or 0.0)
        return self.returncode

    def ended(self, code: int | None) -> None:
        self.returncode = code
        self._gone.set()

    def kill(self) -> None:
        """It goes with its node's agent, and that with its stream."""
        self._node.link.cut("ended here")

    def send_signal(self, number: int) -> None:
        assert number == signal.SIGUSR2, "the only one that is passed on"
        with contextlib.suppress(ConnectionError):
            self._node.link.say(nodes.NodeStack(self._rank))


class FarChannel(wire.Channel[wire.FromRank]):
    """The executor's end of the way to a rank elsewhere: frames go over the node's stream, its own come here."""

    def __init__(self, node: RemoteNode, rank: int, here: socket.socket) -> None:
        super().__init__(here, wire.FROM_RANK)
        self._node, self._rank = node, rank

    def send(self, data: bytes | memoryview) -> None:
        self._node.link.data(self._rank * 4 + EXECUTOR, data)


class RemoteNode:
    """A machine beside this one, of which the agent has come."""

    def __init__(self, link: NodeLink, join: nodes.Join, mine: range, settings: Config) -> None:
        """settings: those of its ranks."""
        self.link, self.join, self.mine, self.settings = link, join, mine, settings
        self.lost = ""
        self.processes: list[FarProcess] = []
        self.channels: list[FarChannel] = []
        self._backs: list[socket.socket] = []        # behind the channels: where what ranks say is put
        self._started = threading.Event()
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Answer] = {}
        self._lock = threading.Lock()

    def start(self, start: nodes.Start, carry: Callable[[int, bytes], None], timeout_s: float) -> None:
        """Its ranks are being started when this returns. carry: bytes that came off the end of a link between
        ranks. Raises RankDied: the node is gone, or starts none."""
        for i in self.mine:
            here, back = socket.socketpair()
            self.channels.append(FarChannel(self, i, here))
            self._backs.append(back)
        self._carry = carry
        try:
            self.link.say(start)
        except ConnectionError as e:
            raise RankDied(f"node {self.join.node} ({self.link.peer}) is gone: {e}") from None
        self.link.live()
        threading.Thread(target=self._run, daemon=True, name=f"penstock-node-{self.join.node}").start()
        if not self._started.wait(timeout_s) or self.lost:
            raise RankDied(f"node {self.join.node} ({self.link.peer}) does not start its ranks: "
                              f"{self.lost or f'nothing in {timeout_s:g} s'}; see what it has printed")

    def _run(self) -> None:
        self.lost = self.link.run(self._handle) or "gone"
        for process, back in zip(self.processes, self._backs, strict=False):
            process.ended(process.returncode)
            back.close()
        with self._lock:
            asked, self._asked = list(self._asked.values()), {}
        for answer in asked:
            answer.came.set()
        self._started.set()

    def _handle(self, message: Any) -> None:
        match message:
            case nodes.NodeStarted(pids):
                self.processes = [FarProcess(self, i, pid) for i, pid in zip(self.mine, pids, strict=True)]
                self._started.set()
            case nodes.Data(channel, body):
                rank, slot = divmod(channel, 4)
                if slot == EXECUTOR:
                    self._backs[rank - self.mine.start].sendall(body)
                else:
                    self._carry(channel, body)
            case nodes.Exited(rank, code):
                self.processes[rank - self.mine.start].ended(code)
                shut(self._backs[rank - self.mine.start])
            case nodes.NodeBytes(number, body):
                with self._lock:
                    answer = self._asked.pop(number)
                answer.body = body
                answer.came.set()
            case _:
                raise AssertionError(f"{type(message).__name__} of an agent that runs")

    def ask(self, message: Callable[[int], nodes.Read | nodes.Write]) -> bytes:
        """The answer to a message with the number that it is given. Raises ConnectionError."""
        answer, number = _Answer(), next(self._numbers)
        with self._lock:
            self._asked[number] = answer
        if self.lost:
            raise ConnectionError(self.lost)
        self.link.say(message(number))
        answer.came.wait()
        if answer.body is None:
            raise ConnectionError(self.lost)
        return answer.body


class _Answer:
    def __init__(self) -> None:
        self.came, self.body = threading.Event(), None  # type: threading.Event, bytes | None


class Callers:
    """Connections to node 0's listening socket while it waits: each has a thread, and one deadline for its
    whole handshake, so a silent or slow one delays no other. joined: links that have sent their Join."""

    def __init__(self, server: socket.socket, settings: LinkSettings,
                 log: Callable[[str], object]) -> None:
        self.joined: SimpleQueue[tuple[NodeLink, nodes.Join]] = SimpleQueue()
        self._server, self._settings, self._log = server, settings, log
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Timer] = {}       # that shake hands, the oldest first
        self._closed = False
        threading.Thread(target=self._accept, daemon=True, name="penstock-nodes").start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, address = self._server.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)                         # no descriptor is left
                continue
            timer = threading.Timer(HANDSHAKE_S, shut, (sock,))
            timer.daemon = True
            with self._lock:
                # A node takes milliseconds: of too many the oldest is none.
                for old in list(self._open)[:max(0, len(self._open) + 1 - CALLERS_MAX)]:
                    shut(old)
                self._open[sock] = timer
            timer.start()
            threading.Thread(target=self._greet, args=(sock, address[0]), daemon=True,
                             name="penstock-caller").start()

    def _greet(self, sock: socket.socket, peer: str) -> None:
        link = None
        try:
            link = NodeLink(sock, self._settings)
            join = link.next()
            if not isinstance(join, nodes.Join):
                raise Stranger(f"it begins with {type(join).__name__}")
        except (Stranger, OSError) as e:
            if link is not None:
                link.close()
            if not self._closed:
                self._log(f"nodes: {peer} is none: {e}")
        else:
            if self._open[sock].finished.is_set():      # the deadline has ended it just now
                link.close()
            else:
                self.joined.put((link, join))
        finally:
            with self._lock:
                self._open.pop(sock).cancel()

    def close(self) -> None:
        """Stop accepting, and end what still shakes hands."""
        self._closed = True
        shut(self._server)
        with self._lock:
            for sock in self._open:
                shut(sock)
        while not self.joined.empty():
            self.joined.get()[0].close()


class Nodes:
    """All machines beside this one."""

    def __init__(self, config: Config, ranges: list[range], log: Callable[[str], object]) -> None:
        """Returns when all have come. Raises ConfigError: not all do, or one is not of this engine."""
        settings = nodes.settings_of(config)
        self._config, self._ranges, self._weights = config, ranges, nodes.weights_of(config)
        self.all: list[RemoteNode] = []
        until, missing = time.monotonic() + config.device.step_timeout_s, set(range(1, len(ranges)))
        with listen(settings) as server, contextlib.closing(Callers(server, settings, log)) as callers:
            log(f"nodes: waiting at {settings.address} for {len(missing)} of {len(ranges)}")
            while missing:
                try:
                    link, join = callers.joined.get(timeout=max(0.01, until - time.monotonic()))
                    node = self._joined(link, join, missing)
                except Empty:
                    self.close()
                    absent = ", ".join(map(str, sorted(missing)))
                    raise ConfigError(
                        f"--nnodes {len(ranges)}: {len(ranges) - len(missing)} have come to "
                        f"{settings.address} in {config.device.step_timeout_s:g} s, not {absent}: start each "
                        "with its --node-rank") from None
                except ConfigError:
                    self.close()
                    raise
                missing.discard(node.join.node)
                self.all.append(node)
                log(f"nodes: {node.join.node} has come, from {node.link.peer}")
        self.all.sort(key=lambda node: node.join.node)

    def _joined(self, link: NodeLink, join: nodes.Join, missing: set[int]) -> RemoteNode:
        """The node that has come. Raises ConfigError, which the node receives as well."""
        theirs = from_plain(join.settings) if join.version == version() else self._config
        if join.version != version():
            why = f"penstock {version()} on node 0 and {join.version} on node {join.node}"
        elif theirs.nodes.num != len(self._ranges):
            why = f"--nnodes is {len(self._ranges)} on node 0 and {theirs.nodes.num} on node {join.node}"
        elif join.node not in missing:
            why = f"node {join.node} is here already" if 0 < join.node < len(self._ranges) else \
                f"there is no node {join.node} of {len(self._ranges)}"
        else:
            why = nodes.differences(self._config, theirs)
            if join.weights != self._weights:
                why = "; ".join(filter(None, [why, f"weights {self._weights} on node 0 and {join.weights} on "
                                              f"node {join.node}"]))
        if why:
            why += ": all nodes run the same command, of one version, each with its --node-rank"
            with contextlib.suppress(ConnectionError):
                link.say(nodes.Refuse(why))
            raise ConfigError(why)
        model = replace(self._config.model, model=theirs.model.model, tokenizer=theirs.model.tokenizer)
        return RemoteNode(link, join, self._ranges[join.node], replace(self._config, model=model))

    def start(self, num_layers: int, local: LocalRanks) -> None:
        """Their ranks are being started when this returns. Raises ConfigError."""
        device = self._config.device
        other: dict[tuple[int, int], tuple[int, int]] = {}
        for one, two in wires(device.pp, device.tp):
            other |= {one: two, two: one}

        def carry(channel: int, body: bytes) -> None:
            rank, slot = other[divmod(channel, 4)]
            with contextlib.suppress(OSError):              # who is gone is told of elsewhere
                if rank in local.mine:
                    local.outside[rank, slot].sendall(body)
                else:
                    self.of(rank).link.data(rank * 4 + slot, body)

        for node in self.all:
            node.start(nodes.Start(to_plain(node.settings), num_layers), carry, device.step_timeout_s)
        for (rank, slot), sock in local.outside.items():
            to, end = other[rank, slot]
            threading.Thread(target=nodes.pump, args=(sock, self.of(to).link, to * 4 + end), daemon=True,
                             name="penstock-pump").start()

    def of(self, rank: int) -> RemoteNode:
        return next(node for node in self.all if rank in node.mine)

    def close(self, *, asked: bool = False) -> None:
        """asked: as this engine was asked to. Idempotent."""
        for node in self.all:
            if asked:
                with contextlib.suppress(ConnectionError):
                    node.link.say(nodes.Bye())
            node.link.cut("ended here")


class NodePages:
    """`transfer.pages.PageBytes` over the pools of all machines: of those of others a call goes there and
    back."""

    def __init__(self, whole: Caches, parts: Sequence[tuple[RemoteNode | None, Caches]], local: PoolPages) -> None:
        """parts: of each machine, in order, the caches of its first rank; None: this one, with `local`."""
        self._whole, self._parts, self._local = whole, parts, local

    def read(self, tier: Tier, group: Group, layers: range, spans: Sequence[Span], out: memoryview,
             heads: range | None = None) -> None:
        wanted = self._wanted(group, heads)
        for some, dense in self._messages(group, layers, spans, out, wanted):
            done = 0
            for node, own, here, at_heads in self._having(group, layers, wanted):
                if at_heads.stop <= done:
                    continue
                parts = [whole[:, at_heads] for whole in dense]
                if node is None:
                    found: bytes | bytearray = bytearray(sum(part.size for part in parts))
                    self._local.read(tier, group, own, some, memoryview(found), here)
                else:
                    found = node.ask(lambda number, own=own, here=here, some=some: nodes.Read(  # type: ignore[misc]
                        number, tier.value, group, (own.start, len(own)), (here.start, len(here)),
                        list(map(tuple, some))))
                at = 0
                for part in parts:
                    part[...] = np.frombuffer(found, np.uint8, part.size, at).reshape(part.shape)
                    at += part.size
                done = at_heads.stop

    def write(self, tier: Tier, group: Group, layers: range, spans: Sequence[Span], data: memoryview,
              heads: range | None = None) -> None:
        wanted = self._wanted(group, heads)
        for some, dense in self._messages(group, layers, spans, data, wanted):
            for node, own, here, at_heads in self._having(group, layers, wanted):
                body = b"".join(whole[:, at_heads].tobytes() for whole in dense)
                if node is None:
                    self._local.write(tier, group, own, some, memoryview(body), here)
                else:
                    node.ask(lambda number, own=own, here=here, some=some, body=body:  # type: ignore[misc]
                             nodes.Write(number, tier.value, group, (own.start, len(own)), (here.start, len(here)),
                                         list(map(tuple, some)), body))

    def pin(self, memory: Tensor) -> object:
        return self._local.pin(memory)

    def _wanted(self, group: Group, heads: range | None) -> range:
        return range(self._whole.layouts[group].num_kv_heads) if heads is None else heads

    def _messages(self, group: Group, layers: range, spans: Sequence[Span], data: memoryview, heads: range) \
            -> Iterator[tuple[list[Span], list[np.ndarray[Any, Any]]]]:
        """Spans that go in one message, at least one, and where `data` has each: uint8 [layers, K, C, units, B]."""
        layout, at, whole = self._whole.layouts[group], 0, np.frombuffer(data, dtype=np.uint8)
        some: list[Span] = []
        dense: list[np.ndarray[Any, Any]] = []
        for span in spans:
            shape = (len(layers), len(heads), layout.planes, span.units,
                     layout.head_dim * layout.dtype.itemsize)
            size = math.prod(shape)
            if some and sum(part.size for part in dense) + size > nodes.CHUNK:
                yield some, dense
                some, dense = [], []
            some.append(span)
            dense.append(whole[at:at + size].reshape(shape))
            at += size
        if some:
            yield some, dense

    def _having(self, group: Group, layers: range, heads: range) \
            -> Iterator[tuple[RemoteNode | None, range, range, slice]]:
        """Each machine that has some of these heads of these layers: both as it counts them, and where its heads are
        among these."""
        for node, caches in self._parts:
            own, (layer, head) = caches.parts[group].whole, caches.origins[group]
            if layer <= layers.start and layers.stop <= layer + own.num_layers:
                begin, end = max(head, heads.start), min(head + own.num_kv_heads, heads.stop)
                if begin < end:
                    yield (node, range(layers.start - layer, layers.stop - layer), range(begin - head, end - head),
                           slice(begin - heads.start, end - heads.start))


class NodeHost:
    """Whole host pages of one cache group on all machines, for `memory.storage.Storage`."""

    def __init__(self, layout: PageLayout, group: Group, pages: PageBytes, spans: Sequence[range]) -> None:
        """spans: the layers of each stage."""
        self.layout, self._group, self._pages, self._spans = layout, group, pages, spans

    def room(self, page: int) -> memoryview:
        return memoryview(bytearray(self.layout.page_bytes))

    def bytes_of(self, page: int) -> memoryview:
        found = self.room(page)
        for layers, at in self._pieces():
            self._pages.read(Tier.DRAM, self._group, layers, [Span(page, 0, self.layout.shape[3])], found[at])
        return found

    def placed(self, page: int, room: memoryview) -> None:
        for layers, at in self._pieces():
            self._pages.write(Tier.DRAM, self._group, layers, [Span(page, 0, self.layout.shape[3])], room[at])

    def _pieces(self) -> Iterator[tuple[range, slice]]:
        layout = self.layout
        each = layout.page_bytes // layout.num_layers
        at_once = max(1, nodes.CHUNK // each)
        for span in self._spans:
            for layer in range(span.start, span.stop, at_once):
                n = min(at_once, span.stop - layer)
                yield range(layer, layer + n), slice(layer * each, (layer + n) * each)
