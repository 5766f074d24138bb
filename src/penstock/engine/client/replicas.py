"""The engines behind one address, as one: who gets a prompt, and their numbers together.

Owns the choice. It knows of an engine's cache what it has sent there and what that has room for, so a
choice costs no message.
"""
from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from penstock.config.base import machine
from penstock.config.base.errors import RequestError
from penstock.config.request.params import SamplingParams
from penstock.config.settings.kv_events import with_rank
from penstock.config.settings.tree import Config
from penstock.engine.client.affinity import Load, SentPages, ServedSessions, least, pages_of
from penstock.engine.client.client import ChoiceStream, EngineClient, EngineDied
from penstock.engine.client.supervised import Kept, Traced
from penstock.engine.wire import NO_ORIGIN, BootstrapRoom, EngineReady, Origin

HASH_INLINE = 16_384        # tokens of a prompt that are hashed on the event loop, which takes about 1 ms
NOTED_INLINE = 4_096        # pages of a prompt that are noted in one turn of the event loop, in about .3 ms
# Of the engines' numbers, what is of the storage that they share, not of each.
SHARED = ("storage_up", "storage_bytes", "storage_bytes_max")


class Hashed(list[int]):
    """A prompt with the numbers of its pages, see `pages_of`."""

    pages: list[int]


class Member(Kept):
    """One of the engines, and what is known of its cache."""

    _of: EngineClient | None = None                     # whose cache `_pages` tells
    _pages: SentPages
    noted: Callable[[int, EngineClient, int], None]     # of `Engines`

    @property
    def ready(self) -> EngineReady:
        return self.engine.ready

    def known(self, name: str) -> int:
        """A number of its `ready.info`, 0 if it has not sent it."""
        return int(self.ready.info.get(name) or 0)

    @property
    def num_open(self) -> int:
        return self.engine.num_waiting + self.engine.num_running

    def cached(self, pages: Sequence[int]) -> int:
        """How many of them, from the first on, it has been sent and has kept, as far as is known."""
        return self._known().cached(pages)

    def sent(self, pages: Sequence[int]) -> None:
        """It has been sent a prompt of these. Those of a long one are noted over turns of the event loop: where
        it begins now, all from its end on later."""
        self._note(pages[:NOTED_INLINE])
        if len(pages) > NOTED_INLINE:
            self._note_before(len(pages), pages, self.engine)

    def _note_before(self, end: int, pages: Sequence[int], engine: EngineClient) -> None:
        def note() -> None:
            begin = max(0, end - NOTED_INLINE)
            if engine is self.engine:          # else it was started again meanwhile
                self._note(pages[begin:end])
                if begin:
                    self._note_before(begin, pages, engine)

        asyncio.get_running_loop().call_soon(note)

    def _note(self, pages: Sequence[int]) -> None:
        self._known().note(pages, self.known("hbm_pages") + self.known("dram_pages"))

    def _known(self) -> SentPages:
        if self._of is not self.engine:
            self._of, self._pages = self.engine, SentPages()
        return self._pages

    def submit(self, prompt: Sequence[int], params: SamplingParams, *, eos_ids: Sequence[int] = (),
               namespace: int = 0, room: BootstrapRoom | None = None,
               origin: Origin = NO_ORIGIN) -> list[ChoiceStream]:
        """See EngineClient.submit."""
        streams = self.engine.submit(prompt, params, eos_ids=eos_ids, namespace=namespace, room=room,
                                     origin=origin)
        self.noted(origin.session, self.engine, len(prompt))
        self.sent(prompt.pages if isinstance(prompt, Hashed) else
                  pages_of(prompt, namespace, self.known("page_size")))
        return streams

    def flush(self) -> None:
        """Forget cached pages that no request holds."""
        self._known().clear()
        self.engine.flush()


class Engines:
    """`--dp N`. One alone ends with its process, reported to `on_death`; several are each started again."""

    def __init__(self, config: Config, log: Callable[[str], None], on_death: Callable[[EngineDied], None], *,
                 fds: Sequence[int] = (), traced: Traced | None = None) -> None:
        """log: takes a line at a time. fds: as EngineClient has them. traced: see `Kept`."""
        count = config.device.dp
        # Numbers of requests are part of their seeds: alike questions have other answers on each engine.
        rids: Iterator[int] = itertools.count(1)
        self.members = [
            Member(_numbered(config, n), f"engine {n}" if count > 1 else "", log, fds=fds, rids=rids,
                   env=environment(config, n), traced=traced, on_death=on_death if count == 1 else None)
            for n in range(count)]
        self._sessions = ServedSessions()
        for member in self.members:
            member.noted = self._noted

    async def close(self, store_s: float = 0.0) -> None:
        """End all of them, see EngineClient.close. Idempotent."""
        await asyncio.gather(*(member.close(store_s) for member in self.members))

    # ------------------------------------------------------------ as one engine
    @property
    def ready(self) -> EngineReady:
        """What a request may ask of any of them."""
        first, *others = (member.ready for member in self.members)
        if not others:
            return first
        return msgspec.structs.replace(
            first, max_model_len=min(first.max_model_len, *(r.max_model_len for r in others)),
            dense_len=min(first.dense_len, *(r.dense_len for r in others)))

    @property
    def missing(self) -> str:
        """Which of several is not there, and why; "" if all are."""
        return "; ".join(f"engine {n}: {m.missing}" for n, m in enumerate(self.members) if m.missing)

    @property
    def num_waiting(self) -> int:
        return sum(member.engine.num_waiting for member in self.members)

    @property
    def num_running(self) -> int:
        return sum(member.engine.num_running for member in self.members)

    @property
    def peer_missing(self) -> str:
        """Why an engine of a pair is not there for them all, or ""."""
        return next((m.engine.peer_missing for m in self.members if m.engine.peer_missing), "")

    @property
    def peer_connected(self) -> bool:
        """Whether an engine that serves has one of the other end of a pair."""
        return any(m.engine.peer_connected for m in self.members if not m.missing)

    @property
    def peer_info(self) -> dict[str, str | int | float | bool | None]:
        return self.members[0].engine.peer_info

    def of(self, rank: int | None) -> Engines | Member:
        """The engine with this number, None: whichever is best for each prompt. Raises RequestError for a
        number that none has."""
        if rank is None:
            return self
        if not 0 <= rank < len(self.members):
            raise RequestError(f"data_parallel_rank is {rank}: this server has 0 to {len(self.members) - 1}",
                               "data_parallel_rank")
        return self.members[rank]

    async def hashed(self, prompt: list[int], namespace: int) -> list[int]:
        """The prompt for `submit` with the same namespace. The pages of a long prompt are hashed in a thread,
        because 1,000,000 tokens would stop the event loop for 70 ms."""
        if len(self.members) == 1 or len(prompt) <= HASH_INLINE:
            return prompt
        hashed = Hashed(prompt)
        hashed.pages = await asyncio.to_thread(pages_of, prompt, namespace, self.members[0].known("page_size"))
        return hashed

    def submit(self, prompt: Sequence[int], params: SamplingParams, *, eos_ids: Sequence[int] = (),
               namespace: int = 0, room: BootstrapRoom | None = None,
               origin: Origin = NO_ORIGIN) -> list[ChoiceStream]:
        """See EngineClient.submit."""
        if len(self.members) == 1:
            streams = self.members[0].engine.submit(prompt, params, eos_ids=eos_ids, namespace=namespace,
                                                    room=room, origin=origin)
            self._noted(origin.session, self.members[0].engine, len(prompt))
            return streams
        pages = prompt.pages if isinstance(prompt, Hashed) else \
            pages_of(prompt, namespace, self.members[0].known("page_size"))
        member = self._choose(len(prompt), pages, params.n)
        streams = member.engine.submit(prompt, params, eos_ids=eos_ids, namespace=namespace, room=room,
                                     origin=origin)
        self._noted(origin.session, member.engine, len(prompt))
        member.sent(pages)
        return streams

    def _choose(self, tokens: int, pages: Sequence[int], choices: int) -> Member:
        """Return the engine that has least to do for the request, see `affinity.least`."""
        there = [m for m in self.members if not m.missing] or self.members
        return there[least(tokens, choices, [
            Load(m.known("page_size") * m.cached(pages), m.num_open, m.known("max_num_seqs")) for m in there])]

    def flush(self) -> None:
        """Forget cached pages that no request holds, everywhere."""
        for member in self.members:
            member.flush()

    def of_session(self, session: int, *, ends: bool) -> bool:
        """Tell the engines that have served a session that it ends, or the last of them that it goes on soon. Returns
        whether there is one."""
        return self._tell(session, self._sessions.of(session, ends=ends), ends=ends)

    def _noted(self, session: int, engine: EngineClient, tokens: int) -> None:
        """A request of this session goes to `engine`; 0: it has no session. What is forgotten for it ends."""
        for lost, served in self._sessions.note(session, engine, tokens) if session else ():
            self._tell(lost, served, ends=True)

    def _tell(self, session: int, served: Sequence[object], *, ends: bool) -> bool:
        there = [m.engine for engine in served for m in self.members if m.engine is engine and not m.missing]
        for engine in there if ends else there[:1]:
            engine.of_session(session, ends=ends)
        return bool(there)

    async def stats(self) -> dict[str, float]:
        """Return the counters of all together. Raises EngineDied."""
        return together(await asyncio.gather(*(member.engine.stats() for member in self.members)))


async def start_all(members: Sequence[Kept]) -> None:
    """Start them together. Raises the ConfigError or EngineDied of the first that fails."""
    try:
        async with asyncio.TaskGroup() as group:
            for member in members:
                group.create_task(member.start())
    except ExceptionGroup as e:               # what one of them has to say is said once
        raise e.exceptions[0] from None


def together(numbers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The sums of what several engines tell of themselves, by metric name."""
    out: dict[str, float] = {}
    for values in numbers:
        for name, value in values.items():
            before = out.get(name, 0.0)
            out[name] = max(before, value) if name in SHARED else before + value
    return out


def environment(config: Config, n: int) -> dict[str, str] | None:
    """Return the environment of this engine's process, which sees the GPUs that it has; None: ours."""
    gpus = len(machine.probe().gpus)
    if config.device.device != "cuda" or config.num_engines == 1 or gpus < 2:
        return None
    return machine.of_gpus(config.gpus_of(n, gpus))


def _numbered(config: Config, n: int) -> Config:
    """Return the settings of the engine with this number: files that it writes are its own."""
    config = replace(config, nodes=config.nodes.of_engine(n),
                     kv=replace(config.kv, kv_events_config=with_rank(config.kv.kv_events_config, n)))
    log = config.debug.debug_event_log
    if log is None or config.device.dp == 1:
        return config
    return replace(config, debug=replace(config.debug, debug_event_log=f"{log}.{n}"))
