"""The ranks of an engine as processes, here and on other machines: spoken to, heard, dead together.

Owns what they have reported. A rank that dies or hangs, or whose machine is gone, is RankDied for whoever
waits; the ranks go when this process does. Decides nothing.
"""
from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import NoReturn

from penstock.config.base import machine
from penstock.config.base.errors import ConfigError, RankDied
from penstock.config.request.grammar import Grammar
from penstock.config.request.params import SamplingParams
from penstock.config.settings.plain import to_plain
from penstock.config.settings.tree import Config
from penstock.core.plan import Group, RequestId, Row, StepId, StepPlan
from penstock.core.settings import CoreConfig
from penstock.exec.executor import Executor
from penstock.exec.load.layout import Caches
from penstock.exec.pipeline import wire
from penstock.exec.pipeline.hangs import BEAT_S, RankStatus, Watch
from penstock.exec.pipeline.local_launcher import LocalRanks
from penstock.exec.pipeline.nodes import NodePools as Room
from penstock.exec.pipeline.nodes import Seen, ToAll
from penstock.exec.pipeline.remote_node import FarProcess, NodeHost, NodePages, Nodes, RemoteNode
from penstock.exec.sampling.grammar import COMPILED_MAX, NO_TOKENIZER, BadGrammar, Vocabulary
from penstock.exec.sampling.sampler import check_ids
from penstock.exec.step.links import nodes_of
from penstock.exec.worker import Report
from penstock.memory.storage import HostPages
from penstock.transfer.pages import PageBytes, PoolPages

LOADING_S = 60.0            # a rank that loads may be silent for so long at least: files may be slow
ENDING_S = 5.0             # a killed rank with much memory pinned or mapped takes so long to end
LOOK_S = 0.5                # between two looks at the others while one is waited for
STACK_S = 1.0               # what a rank that hangs has to print its stack
OVERLAPS = 8                # steps of the stage before that a step may overlap with


class WorkerProcess:
    """`executor.WorkerHandle` over a socket. `began` and `ended` of its newest steps are kept for utilisation."""

    def __init__(self, workers: WorkerGroup, index: int, channel: wire.Channel[wire.FromRank],
                 process: subprocess.Popen[bytes] | FarProcess) -> None:
        self.index, self.process, self._workers = index, process, workers
        self._channel = channel
        self._reports: SimpleQueue[wire.Reports] = SimpleQueue()
        self._answers: SimpleQueue[wire.FromRank | None] = SimpleQueue()
        self._counters: dict[str, float] = {}       # as it has last told
        self._compiled = OrderedDict[Grammar, bool]()       # that it was asked to compile: whether it has
        self.heard = RankStatus()
        self.died, self.hangs = False, ""           # hangs: why it is taken for dead
        self.refused = ""                           # why it does not start
        self.memory = b""                           # `wire.Ready.memory`
        self.use: dict[str, int] = {}               # `wire.Ready.use`
        self.uncaptured = ""                        # `wire.Ready.uncaptured`
        self.queued: deque[float] = deque()         # when each plan was sent that is not reported yet
        self.steps: deque[tuple[float, float]] = deque(maxlen=OVERLAPS)
        self.busy = self.overlap = 0.0              # seconds
        self.first = 0.0
        threading.Thread(target=self._listen, daemon=True, name=f"penstock-rank-{index}").start()

    def _listen(self) -> None:
        while (message := self._channel.receive()) is not None:
            self.heard.messages += 1
            match message:
                case wire.RankBeat(number, whom, step):
                    self.heard.wait, self.heard.step = (number, whom), step
                case wire.Reports():
                    self._reports.put(message)
                    self._workers.tell()
                case wire.Compiled(grammar):
                    self._compiled[grammar] = True
                    self._workers.tell()
                case wire.Counters(values):
                    self._counters = values
                case wire.RendezvousKey():
                    for other in self._workers.beside(self):
                        with contextlib.suppress(RankDied):         # whoever waits for that one hears it
                            other.send(wire.TO_RANK.frames(message))
                case _:
                    if isinstance(message, wire.Loading):
                        self._workers.loading_at = time.monotonic()
                    elif isinstance(message, wire.StageRefused):
                        self.refused = message.message
                    self._answers.put(message)
        self.died = True
        self._answers.put(None)
        self._workers.tell()

    # ------------------------------------------------------------ WorkerHandle
    def open(self, rid: RequestId, prompt: tuple[int, ...], params: SamplingParams, *, choice: int,
             stop_ids: tuple[int, ...]) -> None:
        check_ids(prompt, params, self._workers.vocab_size)
        self.send(wire.TO_RANK.frames(wire.Open(rid, list(prompt), params, choice, list(stop_ids))))

    def compiled(self, grammar: Grammar) -> bool:
        done = self._compiled.get(grammar)
        if done is None:
            self._compiled[grammar] = done = False
            self.send(wire.TO_RANK.frames(wire.Compile(grammar)))
            ended = [g for g, one in self._compiled.items() if one]
            # Forgotten here before it is there.
            for old in ended[:max(0, len(self._compiled) - COMPILED_MAX // 2)]:
                del self._compiled[old]
        self._compiled.move_to_end(grammar)
        return done

    def close(self, rid: RequestId) -> None:
        self.send(wire.TO_RANK.frames(wire.Close(rid)))

    def given(self, rid: RequestId, tokens: Sequence[int]) -> None:
        self.send(wire.TO_RANK.frames(wire.Given(rid, list(tokens))))

    def checked(self, step: StepId, right: Mapping[Row, int]) -> None:
        self.send(wire.TO_RANK.frames(wire.Checked(step, list(right), list(right.values()))))

    def start(self, plan: StepPlan) -> None:
        self.queued.append(time.monotonic())
        self._workers.hand(self, plan)

    def collect(self, *, block: bool) -> list[Report]:
        assert not block, "the group waits for all ranks together"
        found: list[Report] = []
        with contextlib.suppress(Empty):
            while True:
                reports = self._reports.get_nowait()
                found += [*reports.stepped, *reports.moved]
                if reports.stepped:
                    self.queued.popleft()
                    self._workers.computed(self, reports.began, reports.ended)
        if not found and self.died:
            self._workers.fail(self)
        return found

    def stats(self) -> dict[str, float]:
        stage = f'{{stage="{self._workers.stage_of(self)}"}}'
        since = time.monotonic() - self.first if self.first else 0.0
        return {**self._counters, f"stage_busy_seconds_total{stage}": self.busy,
                f"stage_overlap_seconds_total{stage}": self.overlap, f"stage_seconds_total{stage}": since}

    # ------------------------------------------------------------ messages
    def send(self, frame: bytes) -> None:
        try:
            self._channel.send(frame)
        except ConnectionError:
            self._workers.fail(self)

    def cut(self) -> None:
        """Whoever waits for it, or sends, finds it gone."""
        self._channel.cut()

    def answer(self, timeout_s: float) -> wire.FromRank:
        """What it reports next. Raises ConfigError when a rank refuses, RankDied when one is gone, or when none has
        logged a line (Loading) for `timeout_s`: while they start they wait for each other."""
        asked_at, workers = time.monotonic(), self._workers
        message: wire.FromRank | None = wire.Loading()
        while isinstance(message, wire.Loading):
            try:
                message = self._answers.get(timeout=LOOK_S)
            except Empty:
                for rank in workers.ranks:
                    if rank.refused:
                        raise ConfigError(rank.refused) from None
                    if rank.died:
                        workers.fail(rank)
                if time.monotonic() - max(asked_at, workers.loading_at) >= timeout_s:
                    # It may wait for another: who has plans and does not report is named.
                    workers.hang([rank for rank in workers.ranks if rank.queued] or [self], timeout_s)
        if message is None:
            self._workers.fail(self)
        if isinstance(message, wire.StageRefused):
            raise ConfigError(message.message)
        return message


class WorkerGroup:
    """All ranks of an engine."""

    def __init__(self, config: Config, num_layers: int, own: Sequence[Caches], wake: Callable[[], None],
                 log: Callable[[str], object] = print) -> None:
        """Starts a process for each TP rank of each stage, which begins to load; on several machines once all
        have come. own: what each has of the model's caches. wake: called in other threads whenever a rank has
        reported or died. `places`: of each rank its machine and its GPU there; none on CPUs. Raises
        ConfigError: a machine does not come, or is not of this engine."""
        self._wake, self._news_at, self.loading_at = wake, 0.0, 0.0
        self.news: SimpleQueue[None] = SimpleQueue()
        self.vocab_size = 0                         # known before the first request
        self.timeout_s = config.device.step_timeout_s
        self._watch = Watch(config.device.num_ranks, config.cluster.rank_silence_s, self.timeout_s)
        self._watched = False
        self._closed = threading.Event()
        self._encoded: tuple[StepPlan | None, bytes] = None, b""
        self._tp_size, self.own, self.num_layers = config.device.tp, own, num_layers
        self.ranges = nodes_of(config)
        self.ranks: list[WorkerProcess] = []
        self._nodes = Nodes(config, self.ranges, log) if len(self.ranges) > 1 else None
        self._local = LocalRanks(config, self.ranges[0])
        self.places = [(0, gpu) for gpu in self._local.gpus]
        for node in () if self._nodes is None else self._nodes.all:
            self.places += [(node.join.node, at % node.join.gpus) for at in range(len(node.mine))
                            if node.join.gpus]
        self.alone = len(set(self.places)) == config.device.num_ranks
        self.captures = self.alone and config.device.cuda_graphs
        for sock, process in zip(self._local.executor_ends, self._local.processes, strict=True):
            self.ranks.append(WorkerProcess(self, len(self.ranks), wire.Channel(sock, wire.FROM_RANK), process))
        if self._nodes is not None:
            try:
                self._nodes.start(num_layers, self._local)
            except BaseException:
                self.close()
                raise
            for node in self._nodes.all:
                for channel, far in zip(node.channels, node.processes, strict=True):
                    self.ranks.append(WorkerProcess(self, len(self.ranks), channel, far))
        for rank in self.ranks:
            at = self._node(rank)
            settings, cores, host = config, config.device.threads or machine.probe().cores, machine.LOOPBACK
            if at is not None:
                settings, cores = at.settings, at.join.threads
            if self._nodes is not None and len(self.ranges) > config.device.pp:
                host = self._nodes.all[0].link.host if at is None else at.join.host
            mine = next(ranks for ranks in self.ranges if rank.index in ranks)
            rank.send(wire.TO_RANK.frames(wire.Begin(to_plain(settings), rank.index, num_layers,
                                             max(1, cores // len(mine)), host, self.alone)))

    def _node(self, rank: WorkerProcess) -> RemoteNode | None:
        """The machine that it is on, if that is not this one."""
        return None if rank.index in self.ranges[0] or self._nodes is None else self._nodes.of(rank.index)

    def executor(self, page_size: int = 0) -> Executor:
        """page_size: as there."""
        return Executor(self.ranks, self.wait, tp_size=self._tp_size, page_size=page_size)

    def loaded(self, want: dict[str, str]) -> list[wire.Loaded]:
        """Wait until every rank has its weights. Raises ConfigError: one is not of this engine; RankDied:
        one has not got on for as long as a hang takes."""
        found, limit = [], max(self.timeout_s, LOADING_S)
        for rank in self.ranks:
            message = rank.answer(limit)
            assert isinstance(message, wire.Loaded)
            check_identity(rank.index, message.identity, want)
            found.append(message)
        return found

    def vocabulary(self, of: Callable[[], Vocabulary | None], tp_size: int) -> None:
        """Tell the TP ranks of the last stage, which sample. Before `pools`."""
        try:
            found = of()
            words = wire.Words("", [], NO_TOKENIZER) if found is None else wire.Words(
                found.tokenizer, list(found.eos_ids), "")
        except BadGrammar as why:
            words = wire.Words("", [], str(why))
        for rank in self.ranks[-tp_size:]:
            rank.send(wire.TO_RANK.frames(words))

    def pools(self, core: CoreConfig, *, capture: bool = False, serves: bool = False) -> None:
        """Every rank has pools of these sizes when this returns; with `capture` it has captured its steps.
        serves: they are those of requests."""
        self._local.make_room(core, self.own)
        for node in () if self._nodes is None else self._nodes.all:
            with contextlib.suppress(ConnectionError):          # its ranks are dead, as the next line finds
                node.link.say(Room(core))
        for rank in self.ranks:
            rank.send(wire.TO_RANK.frames(wire.Pools(core, capture, serves)))
        for rank in self.ranks:
            message = rank.answer(self.timeout_s)
            assert isinstance(message, wire.Ready)
            rank.memory, rank.use, rank.uncaptured = message.memory, message.use, message.uncaptured
        if not self._watched:                       # while it loads, a library may hold a rank's interpreter
            self._watched = True
            threading.Thread(target=self._look, daemon=True, name="penstock-watch").start()

    def serves(self) -> None:
        """All that they do at the start is done, and they have seen their longest step."""
        self._watch.serves()

    def measured(self) -> list[wire.RankMemory]:
        """Of each rank on a GPU, one after the other, what its steps so far have taken; or all at once with
        what they capture, which TP ranks do together."""
        found = []
        if self.captures:
            for rank in self.ranks:
                rank.send(wire.TO_RANK.frames(wire.Measure(True)))
        for rank in self.ranks:
            if not self.captures:
                rank.send(wire.TO_RANK.frames(wire.Measure()))
            message = rank.answer(self.timeout_s)
            assert isinstance(message, wire.RankMemory)
            found.append(message)
        return found

    def seen(self, core: CoreConfig, whole: Caches) -> PageBytes:
        """Pages of all ranks: on the host, and of an engine of a pair on their devices."""
        here, handles = len(self.ranges[0]), [rank.memory for rank in self.ranks]
        local = PoolPages(self._local.seen(core, self.own[:here], handles[:here]))
        if self._nodes is None:
            return local
        for node in self._nodes.all:
            with contextlib.suppress(ConnectionError):          # whoever reads hears of it
                node.link.say(Seen(core, handles[node.mine.start:node.mine.stop]))
        return NodePages(whole, [(None, self.own[0]), *((node, self.own[node.mine.start])
                                                        for node in self._nodes.all)], local)

    def host_pages(self, core: CoreConfig, whole: Caches) -> Sequence[HostPages]:
        """Whole pages of the host pool, by cache group; none without one."""
        if not core.dram_pages:
            return []
        if self._nodes is None:
            return whole.host_pools(core, self._local.host(whole.host_bytes(core)))
        pages, found = self.seen(core, whole), []
        for g, layout in enumerate(whole.layouts):
            spans = {(own.origins[g][0] + own.parts[g].layer, own.layouts[g].num_layers) for own in self.own}
            found.append(NodeHost(layout, Group(g), pages, [range(a, a + n) for a, n in sorted(spans) if n]))
        return found

    def hand(self, rank: WorkerProcess, plan: StepPlan) -> None:
        """To a rank here, or once to all of another machine, with the first of them."""
        at = self._node(rank)
        if at is None:
            rank.send(self.encoded(plan))
        elif rank.index == at.mine.start:
            try:
                at.link.say(ToAll(self.encoded(plan)))
            except ConnectionError:
                self.fail(rank)

    def encoded(self, plan: StepPlan) -> bytes:
        """Encoded once, for whichever rank asks first."""
        if self._encoded[0] is not plan:
            self._encoded = plan, wire.TO_RANK.frames(wire.Plan(plan))
        return self._encoded[1]

    def wait(self) -> None:
        """Until a rank has reported or died. Raises RankDied when none has for as long as a hang takes."""
        try:
            self.news.get(timeout=self.timeout_s)
        except Empty:
            self.hang([rank for rank in self.ranks if rank.queued] or self.ranks, self.timeout_s)

    def watch(self) -> None:
        """For who waits elsewhere: raises RankDied when plans wait and none was reported for as long as a
        hang takes."""
        now, sent = time.monotonic(), [rank.queued[-1] for rank in self.ranks if rank.queued]
        while not self.news.empty():
            self.news.get_nowait()
            self._news_at = now
        if sent and now - max(self._news_at, *sent) > self.timeout_s:
            self.hang([rank for rank in self.ranks if rank.queued], self.timeout_s)

    def _look(self) -> None:
        """Whether all live and get on, until one does not: it is then gone for whoever waits or sends."""
        while not self._closed.wait(BEAT_S):
            hung, why = self._watch.look([rank.heard for rank in self.ranks])
            if any(rank.died for rank in self.ranks):
                return                              # and is heard of
            if hung:
                self._stacks([self.ranks[i] for i in hung], why)
                for i in hung:
                    self.ranks[i].hangs = f"hangs: {why}"
                for i in hung:
                    self.ranks[i].cut()
                return

    def _stacks(self, hung: Sequence[WorkerProcess], why: str) -> None:
        """To stderr."""
        for rank in hung:
            print(f"rank {rank.index}: {why}; its stack:", file=sys.stderr, flush=True)
            rank.process.send_signal(signal.SIGUSR2)
        time.sleep(STACK_S)

    def hang(self, hung: Sequence[WorkerProcess], silent_s: float) -> NoReturn:
        """These have said nothing for so long: their stacks go to stderr. Raises RankDied."""
        self._stacks(hung, f"no report for {silent_s:g} s")
        names = ", ".join(str(rank.index) for rank in hung)
        raise RankDied(f"rank {names} hangs: no report for {silent_s:g} s") from None

    def beside(self, rank: WorkerProcess) -> list[WorkerProcess]:
        """The other TP ranks of its stage."""
        first = rank.index // self._tp_size * self._tp_size
        return [one for one in self.ranks[first:first + self._tp_size] if one is not rank]

    def stage_of(self, rank: WorkerProcess) -> int:
        return rank.index // self._tp_size

    def computed(self, rank: WorkerProcess, began: float, ended: float) -> None:
        """Seconds of a step, and those of them in which the stage before computed as well."""
        rank.first = rank.first or began
        rank.busy += ended - began
        rank.steps.append((began, ended))
        n = self._tp_size
        for one in (rank.index, rank.index + n):            # whichever of two reports last finds the other
            if n <= one < len(self.ranks):
                other = self.ranks[one - n if one == rank.index else one]
                self.ranks[one].overlap += sum(
                    max(0.0, min(ended, b) - max(began, a)) for a, b in other.steps)

    def tell(self) -> None:
        """A rank has reported, or has gone."""
        self.news.put(None)
        self._wake()

    def fail(self, rank: WorkerProcess) -> NoReturn:
        """Raises RankDied, with what is known of its end."""
        rank = next((one for one in self.ranks if one.hangs), rank)     # the others hear of that one's end
        if rank.hangs:
            raise RankDied(f"rank {rank.index} (process {rank.process.pid}) {rank.hangs}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(ENDING_S)
        at = self._node(rank)
        where = "" if at is None else f" of node {at.join.node}, {at.link.peer}"
        code = rank.process.returncode
        how = (f"is gone with its node: {at.lost}" if at is not None and at.lost and code is None else
               "closed its connection" if code is None else
               f"was killed by signal {-code}" if code < 0 else f"exited with code {code}")
        raise RankDied(f"rank {rank.index} (process {rank.process.pid}{where}) {how}")

    def close(self, *, asked: bool = False) -> None:
        """End every rank, and wait for those here. asked: as the engine was asked to. Idempotent."""
        self._closed.set()
        if self._nodes is not None:
            self._nodes.close(asked=asked)
        self._local.close()


def check_identity(index: int, have: dict[str, str], want: dict[str, str]) -> None:
    """Raises ConfigError with both values of the first difference."""
    for name, value in want.items():
        if have.get(name) != value:
            raise ConfigError(f"rank {index} has {name} {have.get(name)!r} and the engine {value!r}: all "
                              "ranks must come from one installation and one checkpoint")
