"""The flight recorder: the last turns of one core, as references to what went in and came out.

Always on, so a turn costs it a few appends and no formatting. Owns the ring and nothing else: what may
leave the process is `redact`'s decision, files and text are made elsewhere.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.core.lifecycle import Phase, State, Trigger
from penstock.core.plan import (
    Advance,
    Arrived,
    Event,
    Output,
    RequestId,
    Retired,
    StepId,
    StepPlan,
    Token,
)
from penstock.core.request import Request
from penstock.core.settings import CoreConfig
from penstock.core.state import Watcher

RING = 512                # turns
TOKENS_MAX = 1 << 22      # of prompts and ended requests that only the ring keeps alive: about 150 MB
WHOLE_ROWS = 32           # plans of so many rows are kept whole, see `without_columns`

Edge = tuple[RequestId, State, Trigger, State]


class RecordedCore(Protocol):
    """What is read of `Core`."""

    cfg: CoreConfig
    live: dict[RequestId, Request]
    watchers: list[Watcher]


@dataclass(frozen=True, slots=True)
class OneTokenRetired:
    """A large Retired with one token a row."""

    step: StepId
    tokens: list[int]


@dataclass(slots=True, eq=False)
class RecordedTurn:
    """One `advance`. `plan` may be brief."""

    kept: list[Event | OneTokenRetired]
    plan: StepPlan | None = None
    outputs: tuple[Output, ...] = ()       # but for tokens
    num_tokens: int = 0                    # of these
    counted: dict[tuple[StepId, RequestId], int] = field(default_factory=dict)   # see `Watcher.counted`
    edges: list[Edge] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)       # nobody else has them any more
    idle: int = 0              # calls without events that followed, and in which nothing happened
    tokens: int = 0            # kept alive by this turn

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(Retired(e.step, tuple((token,) for token in e.tokens)) if isinstance(e, OneTokenRetired) else e
                     for e in self.kept)


def _brief(event: Retired) -> Event | OneTokenRetired:
    try:
        return OneTokenRetired(event.step, [token for (token,) in event.tokens])
    except ValueError:                         # a row has none, or several
        return event


def without_columns(plan: StepPlan, columns: StepPlan) -> StepPlan:
    """`plan` without positions and input ids; the columns that are equal are those of `columns`."""
    return StepPlan(plan.step, columns.rows, columns.rids, (), columns.count, columns.samples, (),
                    plan.grows, plan.binds, plan.moves, plan.remaps, plan.waits, plan.resizes)


class Recorder(Watcher):
    """Told of each turn of the core: `begin(events)` before `core.advance(events)`, and `end` with its answer.

    Make it together with the core: it is `complete` as long as no turn has left the ring.
    """

    def __init__(self, core: RecordedCore, turns: int = RING, tokens_max: int = TOKENS_MAX,
                 whole_rows: int = WHOLE_ROWS) -> None:
        assert not core.live, "the recorder must see a core from its first event on"
        self.core = core
        self.turns: deque[RecordedTurn] = deque()
        self.now: RecordedTurn | None = None           # the turn in progress, or the one that did not return
        self.lost = 0                          # turns that have left the ring
        self._turns_max, self._tokens_max, self._whole_rows = turns, tokens_max, whole_rows
        self._tokens = 0
        self._last: StepPlan | None = None     # the last plan, as it was kept
        core.watchers.append(self)

    @property
    def complete(self) -> bool:
        return self.lost == 0

    def begin(self, events: Sequence[Event]) -> None:
        """The core is about to advance. While it works, and for ever if it raises, `now` is this turn."""
        self.now = RecordedTurn(list(events))

    def end(self, answer: Advance) -> None:
        """The core's answer to the events of the turn that has begun."""
        turn = self.now
        assert turn is not None
        if turn.kept or answer.plan is not None or answer.outputs or turn.edges or not self.turns:
            self._keep(turn, answer)
        else:
            self.turns[-1].idle += 1           # half of all calls: the loop asks until there is no plan
        self.now = None

    def _keep(self, turn: RecordedTurn, answer: Advance) -> None:
        # A Token a row and step, kept until the ring has gone round, costs the core 3 % of its speed:
        # the next ones then lie in memory that no cache has. So `_slim` and `_brief`.
        num_brief, outputs = 0, answer.outputs      # results that are kept briefly
        for at, event in enumerate(turn.kept):
            if type(event) is Arrived:
                turn.tokens += len(event.prompt)
            elif type(event) is Retired and len(event.tokens) > self._whole_rows:
                turn.kept[at] = brief = _brief(event)
                num_brief += len(event.tokens) if brief is not event else 0
        if num_brief != len(outputs) or turn.counted or (outputs and type(outputs[-1]) is not Token):
            turn.outputs = tuple([out for out in outputs if type(out) is not Token])
        turn.num_tokens = len(outputs) - len(turn.outputs)
        if turn.ended:
            turn.tokens += sum([r.num_tokens for r in turn.ended])
        if answer.plan is not None:
            turn.plan = self._last = self._slim(answer.plan)
        self._tokens += turn.tokens
        self.turns.append(turn)
        while len(self.turns) > self._turns_max or (
                self._tokens > self._tokens_max and len(self.turns) > 1):
            self._tokens -= self.turns.popleft().tokens
            self.lost += 1

    def _slim(self, plan: StepPlan) -> StepPlan:
        """A large decode step of the same rows as the last shares that one's columns, and is brief."""
        last, n = self._last, len(plan.rows)
        if (last is None or n <= self._whole_rows or len(plan.tokens) != n or plan.rids != last.rids
                or plan.rows != last.rows or plan.samples != last.samples or plan.count != last.count):
            return plan
        return without_columns(plan, last)

    def counted(self, r: Request, step: StepId, tokens: int) -> None:
        if self.now is not None:
            self.now.counted[step, r.rid] = tokens

    def taken(self, r: Request, source: State, trigger: Trigger) -> None:
        if self.now is not None:
            self.now.edges.append((r.rid, source, trigger, r.state))
            if r.phase is Phase.DONE:
                self.now.ended.append(r)
