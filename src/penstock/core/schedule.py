"""Which rows run in the next step, and the plan that says so.

Decode and prefill share one token budget: decoding rows first, then prompts in chunks, oldest first.
"""
from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.core import room
from penstock.core.holdings import ONLY
from penstock.core.lifecycle import Phase, Trigger
from penstock.core.plan import Bind, Grow, HbmPage, StepId, StepPlan
from penstock.core.request import Request

if TYPE_CHECKING:
    from penstock.core.core import Core


@dataclass(frozen=True, slots=True)
class Issued:
    """One row of a step in flight."""

    request: Request
    life: int            # the request's, when the step was issued
    start: int
    end: int             # positions below may have KV once the step has retired
    width: int           # tokens it may return at most; 0: it does not sample

    @property
    def samples(self) -> bool:
        return self.width > 0


def insert(queue: list[Request], r: Request) -> None:
    """Put a request into its place in the order of service."""
    bisect.insort(queue, r, key=lambda q: q.key)


def plan(core: Core) -> StepPlan | None:
    """The next step, or None if the pipeline is full or there is nothing to do."""
    have = core.have
    if have.issued - have.retired >= core.cfg.depth:
        return None
    step = StepId(have.issued + 1)
    chosen = _choose(core, step)
    if not chosen and not have.outbox:
        return None
    result = _issue(core, step, chosen)
    for row in chosen:
        if row.samples and row.request.phase is Phase.PREFILL:
            core._go(row.request, Trigger.PREFILLED)
    return result


def _choose(core: Core, step: StepId) -> list[Issued]:
    chosen: list[Issued] = []
    taken: list[Request] = []
    budget, g = core.cfg.step_tokens, core.cfg.page_size
    for r in list(core.running):
        if budget == 0:
            return chosen
        if r.phase is not Phase.RESIDENT or not _may_decode(core, r, step):
            continue
        if r.computed == len(r.table) * g and not core.have.grow(r):
            room.for_growth(core, r, taken)
            if r.phase is not Phase.RESIDENT or not core.have.grow(r):
                continue
        width = _width(core, r, budget)
        chosen.append(Issued(r, r.life, r.computed, r.computed + width, width))
        taken.append(r)
        budget -= width
    for r in core.running:
        if r.phase is Phase.PREFILL and budget and r.todo:
            n = min(budget, r.todo)
            chosen.append(Issued(r, r.life, r.computed, r.computed + n, int(n == r.todo)))
            budget -= n
    return chosen


def _may_decode(core: Core, r: Request, step: StepId) -> bool:
    ahead = len(r.tokens) + r.pending
    # Cadence counts steps, but a lone row must not wait for steps that nobody issues.
    return (r.computed < ahead < r.num_prompt + r.max_new
            and not (r.arrived.host_token and r.pending)
            and (r.last_issue <= core.have.retired or step - r.last_issue >= core.cfg.pp_size))


def _width(core: Core, r: Request, budget: int) -> int:
    """Positions that a decoding row computes: one, and drafts as far as everything allows."""
    if not core.cfg.draft_tokens:
        return 1
    left = r.num_prompt + r.max_new - len(r.tokens) - r.pending
    width = min(1 + core.cfg.draft_tokens, budget, left)
    while r.computed + width > len(r.table) * core.cfg.page_size:
        if not core.have.grow(r):          # drafts are worth no victim
            return len(r.table) * core.cfg.page_size - r.computed
    return width


def _issue(core: Core, step: StepId, chosen: list[Issued]) -> StepPlan:
    have, tokens = core.have, list[int]()
    binds: list[Bind] = []
    grows: list[Grow] = []
    for row in chosen:
        r = row.request
        assert r.row is not None
        if r.bound == 0:
            pages = tuple(HbmPage(c.page) for c in r.table)
            binds.append(Bind(r.row, r.rid, (pages,), r.num_output))
        elif len(r.table) > r.bound:
            grows.append(Grow(r.row, ONLY, tuple(HbmPage(c.page) for c in r.table[r.bound:])))
        r.bound = len(r.table)
        known = r.tokens[row.start:row.end]
        # -1: sampled by a step that has not retired, or a draft
        tokens += known + [-1] * (row.end - row.start - len(known))
        r.computed = row.end
        r.in_flight += 1
        r.pending += row.width
        r.last_issue = step
    have.issued = step
    core.in_flight[step] = chosen
    moves, have.outbox = tuple(have.outbox), []
    rows = [c.request for c in chosen]
    return StepPlan(
        step=step, rows=tuple(r.row for r in rows if r.row is not None),
        rids=tuple(r.rid for r in rows), start=tuple(c.start for c in chosen),
        count=tuple(c.end - c.start for c in chosen), samples=tuple(c.samples for c in chosen),
        tokens=tuple(tokens), grows=tuple(grows), binds=tuple(binds), moves=moves)
