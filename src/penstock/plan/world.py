"""One grid point: sessions, a router and engines in virtual time, and what came of it."""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from penstock.core.plan import Arrived, Finished, Outcome, Output, RequestId, SessionEnded, Started, Token
from penstock.engine.client.affinity import Load, SentPages, least, pages_of
from penstock.plan.engine import Clock, Link, Store, VirtualEngine
from penstock.plan.rates import Rates
from penstock.plan.shape import Planned
from penstock.plan.trace import Conversation, Seen, Session, Span, Text, Trace, Turn

Routing = Literal["affinity", "round-robin"]


@dataclass(slots=True, kw_only=True)
class Result:
    """What one grid point gave. Seconds and tokens of the trace, not divided by `scale`."""

    seconds: float = 0.0
    prompt_tokens: int = 0
    device_tokens: int = 0              # of the prompts, found there
    host_tokens: int = 0
    storage_tokens: int = 0
    largest_hits: float = 0.0           # share that a cache without a limit has
    output_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)       # between tokens of an answer
    num_requests: int = 0
    refused_tokens: list[int] = field(default_factory=list)     # of each prompt that no engine can serve
    swaps: int = 0                      # preempted, KV in host memory
    drops: int = 0                      # preempted, KV computed again
    spills: int = 0                     # went on from host memory
    promotions: int = 0                 # and came back
    device_busy: float = 0.0            # share of the time
    load_busy: float = 0.0              # of the link from host memory
    save_busy: float = 0.0              # of the link to it
    read_busy: float = 0.0              # of storage
    write_busy: float = 0.0
    load_bytes: float = 0.0
    save_bytes: float = 0.0

    @property
    def refused(self) -> int:
        return len(self.refused_tokens)

    @property
    def hits(self) -> float:
        cached = self.device_tokens + self.host_tokens + self.storage_tokens
        return cached / max(1, self.prompt_tokens)


@dataclass(slots=True)
class _Client:
    """A session that runs: its tokens, which turn is open, and where."""

    name: str
    session: Session
    talk: Conversation
    retains: bool                       # it asks for that, and ends with its last answer
    turn: int = 0
    engine: int = 0
    arrived: float = 0.0
    last: float = 0.0                   # when its last token came
    tokens: list[int] = field(default_factory=list)         # of the answer so far
    answer: tuple[int, ...] = ()
    num_prompt: int = 0


class World:
    """`run` a trace once on `engines` engines like `planned`."""

    def __init__(self, trace: Trace, planned: Planned, rates: Rates, *, engines: int = 1,
                 routing: Routing = "affinity", storage_bytes: float = 0.0, scale: float = 1.0,
                 storage_share: float = 1.0) -> None:
        """scale: the lengths of `trace` and the pools of `planned` are divided by it already."""
        self._clock, self._routing, self._cfg, self._scale = Clock(), routing, planned.core, scale
        self._text, self._seen = Text(planned.vocab), Seen(planned.core.page_size)
        self._store = Store(storage_bytes / scale, rates, scale, storage_share) if storage_bytes else None
        self._engines = [VirtualEngine(planned, rates, self._clock, self._heard, self._token, store=self._store,
                                       scale=scale) for _ in range(engines)]
        self._sent = [SentPages() for _ in range(engines)]
        self._open = [0] * engines
        self._turns, self._rids = itertools.cycle(range(engines)), itertools.count(1)
        self._clients: dict[RequestId, _Client] = {}
        self._selects = planned.core.sparse
        self.result = Result()
        for n, session in enumerate(trace.sessions):
            retains = planned.core.retained_pages > 0 and len(session.turns) > 1
            client = _Client(str(n), session, Conversation(self._text), retains)
            self._next(client, session.start_s)

    def run(self) -> Result:
        """Raises AssertionError if a request never ends: a fault of the model or of the planner."""
        self._clock.run()
        assert not self._clients, f"{len(self._clients)} requests have not ended"
        for engine in self._engines:
            engine.core.check()
        return self._summed()

    # ---------------------------------------------------------------- sessions
    def _next(self, client: _Client, at: float) -> None:
        if client.turn < len(client.session.turns):
            turn = client.session.turns[client.turn]
            self._clock.at(at + turn.pause_s, lambda: self._arrive(client, turn))

    def _arrive(self, client: _Client, turn: Turn) -> None:
        rid, now = RequestId(next(self._rids)), self._clock.now
        prompt = client.talk.arrive(turn)
        self._seen.prompt(client.talk)
        client.engine = self._choose(prompt)
        client.answer = self._text.answer(Span(f"answer {client.name} {client.turn}", turn.output))
        client.arrived, client.num_prompt, client.tokens = now, len(prompt), []
        self._clients[rid] = client
        self._open[client.engine] += 1
        number = int(client.name) + 1 if client.retains else 0
        self._engines[client.engine].send(Arrived(rid, tuple(prompt), turn.output, selects=self._selects,
                                                  session=number, retains=client.retains))

    def _choose(self, prompt: Sequence[int]) -> int:
        if len(self._engines) == 1:
            return 0
        if self._routing == "round-robin":
            return next(self._turns)
        pages, cfg = pages_of(prompt, 0, self._cfg.page_size), self._cfg
        tokens = round(self._scale * cfg.page_size)         # of a page, as the router would count them
        chosen = least(round(self._scale * len(prompt)), 1, [Load(tokens * sent.cached(pages), num_open, cfg.rows)
                                        for sent, num_open in zip(self._sent, self._open, strict=True)])
        self._sent[chosen].note(pages, cfg.hbm_pages + cfg.dram_pages)
        return chosen

    def _token(self, rid: RequestId, position: int) -> int:
        client = self._clients.get(rid)
        at = -1 if client is None else position - client.num_prompt
        return client.answer[at] if client is not None and 0 <= at < len(client.answer) else 0

    def _heard(self, outputs: Sequence[Output]) -> None:
        result, now = self.result, self._clock.now
        for output in outputs:
            match output:
                case Token(rid, _, token):
                    client = self._clients[rid]
                    (result.gaps_s if client.tokens else result.ttft_s).append(
                        now - (client.last if client.tokens else client.arrived))
                    client.last = now
                    client.tokens.append(token)
                case Started(rid, device, host, storage):
                    result.prompt_tokens += self._clients[rid].num_prompt
                    result.device_tokens += device
                    result.host_tokens += host
                    result.storage_tokens += storage
                case Finished(rid, outcome):
                    self._ended(self._clients.pop(rid), outcome)

    def _ended(self, client: _Client, outcome: Outcome) -> None:
        self._open[client.engine] -= 1
        self.result.num_requests += 1
        if outcome is Outcome.REFUSED:
            self.result.refused_tokens.append(round(self._scale * client.num_prompt))
        self.result.output_tokens += len(client.tokens)
        client.talk.answer(client.tokens)
        self._seen.answered(client.talk)
        client.turn += 1
        if client.retains and client.turn == len(client.session.turns):
            for engine in self._engines:
                engine.send(SessionEnded(int(client.name) + 1))
        self._next(client, self._clock.now)

    # ---------------------------------------------------------------- the end
    def _summed(self) -> Result:
        result, scale, engines = self.result, self._scale, self._engines
        result.seconds, result.largest_hits = self._clock.now, self._seen.share
        for name in ("prompt_tokens", "device_tokens", "host_tokens", "storage_tokens", "output_tokens"):
            setattr(result, name, round(getattr(result, name) * scale))
        result.gaps_s = [gap / scale for gap in result.gaps_s]
        for engine in engines:
            counters = engine.core.counters
            result.swaps += counters["pauses"]
            result.drops += counters["drops"]
            result.spills += counters["spills"]
            result.promotions += counters["promotions"]
            result.load_bytes += engine.up.bytes * scale
            result.save_bytes += engine.down.bytes * scale
        took = max(result.seconds, 1e-9) * len(engines)
        result.device_busy = sum(engine.busy_s for engine in engines) / took
        result.load_busy, result.save_busy = (_busy([getattr(engine, side) for engine in engines], took)
                                              for side in ("up", "down"))
        if self._store is not None:
            result.read_busy, result.write_busy = (_busy([link], took / len(engines)) for link in (
                self._store.reads, self._store.writes))
        return result


def _busy(links: Sequence[Link], seconds: float) -> float:
    return sum(link.busy_s for link in links) / seconds
