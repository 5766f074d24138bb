"""Which rows run in the next step, and the plan that says so.

Decode and prefill share one token budget: decoding rows first, then prompts in chunks, oldest first, then drafts.
Of what the decoding rows leave, short prompts that arrived after a long one take up to a quarter, see `_ahead`.
Most rows of most steps do what they did in the step before, one position further. Such a row is
`unchanged_until`: it is counted on without a look, up to the position where its pages or its output end.
Whatever else could matter to it (a phase, a page given up) sets `unchanged_until` to 0.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

from penstock.core.kv.listing import Shortage
from penstock.core.kv.page_table import own
from penstock.core.kv.prefix_tree import Copy
from penstock.core.lifecycle import Phase, Place, Trigger
from penstock.core.plan import (
    Bind,
    DramPage,
    Group,
    Grow,
    HbmPage,
    Hot,
    HotResize,
    MoveId,
    Remap,
    RequestId,
    StepId,
    StepPlan,
    make,
)
from penstock.core.policy import reclaim
from penstock.core.request import Request, ScheduledRow
from penstock.core.state import Columns, CoreState

_DECODE = Phase.DECODE       # Python 3.11 takes 0.1 us to find a member of an Enum
# A short prompt behind a long one, see `_ahead`.
SHARE = 1 / 4                # of the tokens that decoding rows leave of a step
LONG_STEPS = 2               # that a long prompt fills, at least
SHORT_PART = 1 / 20          # of the long one that a short prompt has, at most
PATIENCE_STEPS = 8


def plan(core: CoreState) -> StepPlan | None:
    """The next step, or None if the pipeline is full or there is nothing to do."""
    kv = core.kv
    if kv.issued - kv.retired >= core.cfg.depth:
        return None
    step = StepId(kv.issued + 1)
    chosen, budget = _decoding(core, step)
    prompts, budget = _prompts(core, chosen, budget)
    if core.cfg.draft_tokens:
        _draft(core, chosen, budget)
    chosen += prompts
    if not chosen:
        core.columns.clear()                   # they keep requests that have ended
    if not chosen and not kv.moves.has_planned:
        return None
    result = _issue(core, step, chosen)
    for row in prompts:
        if row.last:
            core.transition(row.request, Trigger.PREFILLED)
    return result


# ---------------------------------------------------------------- which rows
def _decoding(core: CoreState, step: StepId) -> tuple[list[ScheduledRow], int]:
    """The rows that decode, and what is left of the budget. With several stages they take turns, each row
    once in as many steps; but a lone row does not wait for steps that nobody issues: its next one goes out
    behind the one in flight, whose token the first stage waits for. So do as few rows as `pp_together` says, all
    of them at once."""
    behind, turn, decode = core.kv.retired + core.cfg.overlap, step - core.cfg.pp_size, core.by_phase[Phase.DECODE]
    if core.cfg.pp_size > 1 and len(decode) <= core.cfg.pp_together:
        if any([r.last_issue > behind for r in decode]):
            return [], core.cfg.step_tokens         # they go on in one step, once that has retired
        return _of_turn(core, behind, 1)
    chosen, budget = _of_turn(core, turn, core.cfg.pp_size)
    return _of_turn(core, behind, core.cfg.pp_size) if not chosen and behind > turn else (chosen, budget)


def _of_turn(core: CoreState, free: int, turns: int) -> tuple[list[ScheduledRow], int]:
    """Of the rows whose last step is not later than `free`, one in so many turns."""
    chosen: list[ScheduledRow] = []
    taken = reclaim.PlannedRows(core, chosen)
    budget, looked, left = core.cfg.step_tokens, 0, len(core.running)
    if turns > 1:
        left = -((len(core.by_place[Place.TO_HOST]) - len(core.by_phase[Phase.DECODE])) // turns)
    for r in list(core.running):
        if not (budget and left):
            break
        if r.computed < r.unchanged_until:
            if r.last_issue <= free:
                assert r.issued is not None
                chosen.append(r.issued)
                budget -= 1
                left -= 1
            continue
        looked += 1
        if not r.decodes or r.last_issue > free or not _may_decode(r):
            continue
        if r.computed == r.capacity and not (grown := core.kv.grow(r, r.computed + 1)):
            reclaim.for_growth(core, r, grown.tier, taken)
            if not r.decodes or not core.kv.grow(r, r.computed + 1):
                continue
        chosen.append(r.issued or _row(r, 1))
        budget -= 1
        left -= 1
    core.counters["rows_looked_at"] += looked
    return chosen, budget


def _prompts(core: CoreState, decoding: list[ScheduledRow], budget: int) -> tuple[list[ScheduledRow], int]:
    """Chunks of prompts, and what they leave of the budget."""
    chosen: list[ScheduledRow] = []
    taken = reclaim.PlannedRows(core, decoding, chosen)
    prompts = [r for r in core.transient if r.phase is Phase.PREFILL and r.todo] if budget else []
    ahead = _ahead(core, prompts, budget)
    budget -= sum(ahead.values())
    for r in prompts:
        budget += ahead.get(r.rid, 0)
        if budget and r.phase is Phase.PREFILL:          # an older one may have taken its pages
            had = r.capacity
            n = _chunk(core, r, min(budget, _wanted(core, r)), budget, r.rid in ahead or not chosen, taken)
            if not n:
                core.taken_early += r.capacity > had
            else:
                last = n == r.todo
                samples = last and not (core.prefills_only and r.num_output)
                assert r.row is not None
                chosen.append(ScheduledRow(r, r.row, r.kv_epoch, n, int(samples), last))
                budget -= n
    return chosen, budget


def _ahead(core: CoreState, prompts: list[Request], budget: int) -> dict[RequestId, int]:
    """Tokens of `budget` that are kept for short prompts behind a long one, by request: ADR 0082.

    A prompt is long if it fills more than `LONG_STEPS` steps. A later prompt is short if it has at most
    `SHORT_PART` of the tokens of the longest before it, so that it hardly delays that one. Short prompts
    share `SHARE` of the budget, those with the fewest tokens first, but one that has got nothing in
    `PATIENCE_STEPS` steps goes before them. The other tokens go to all prompts in order, so none takes
    more than a third longer than in order alone.
    """
    short: list[Request] = []
    longest, long = 0, LONG_STEPS * core.cfg.step_tokens
    for r in prompts if len(prompts) > 1 else ():
        todo = r.todo
        if longest > long and todo <= SHORT_PART * longest:
            short.append(r)
        longest = max(longest, todo)
    ahead: dict[RequestId, int] = {}
    share = most = int(SHARE * budget)
    short.sort(key=lambda r: (0 if r.setbacks.passed_over >= PATIENCE_STEPS else r.todo, *r.key))
    for r in short:
        n = min(share, _wanted(core, r))
        if n and n >= min(most, _least(core, r)):
            ahead[r.rid] = n
            share -= n
        else:
            r.setbacks.passed_over += 1
    return ahead


def _wanted(core: CoreState, r: Request) -> int:
    """Of what is left of a prompt. What is pushed to the other engine goes while the next chunk is computed,
    so chunks become half as long each towards the end: little is left to send behind the last."""
    last = core.cfg.last_tokens
    return r.todo if not last or r.todo <= last else max(last, r.todo // 2)


def _may_decode(r: Request) -> bool:
    ahead = r.num_tokens + r.num_placeholders
    return r.computed < ahead < r.num_prompt + r.max_new


def _draft(core: CoreState, decoding: list[ScheduledRow], budget: int) -> None:
    """Let rows that decode compute as many positions behind their first as they have drafts, pages and `budget`."""
    for i, row in enumerate(decoding):
        if (r := row.request).drafts:
            decoding[i] = _row(r, _width(core, r, 1 + budget))
            budget -= decoding[i].width - 1


def _width(core: CoreState, r: Request, most: int) -> int:
    """Positions that a decoding row computes: one, and drafts as far as everything allows."""
    left = r.num_prompt + r.max_new - r.num_tokens - r.num_placeholders
    width = min(1 + r.drafts, most, left)
    while r.computed + width > r.capacity:
        if not core.kv.grow(r, r.capacity + 1):          # drafts are worth no victim
            return r.capacity - r.computed
    return width


def _row(r: Request, width: int) -> ScheduledRow:
    assert r.row is not None
    if r.issued is None or r.issued.width != width:
        r.issued = ScheduledRow(r, r.row, r.kv_epoch, width, width)
    return r.issued


def _least(core: CoreState, r: Request) -> int:
    """Tokens of a prompt to the next multiple of `chunk_multiple`, or to its end."""
    multiple = core.cfg.chunk_multiple
    return min(r.todo, multiple - r.computed % multiple)


def _chunk(core: CoreState, r: Request, n: int, budget: int, anywhere: bool, taken: reclaim.PlannedRows) -> int:
    """How much of a prompt is computed: `n` tokens, to a multiple of `chunk_multiple` or to its end, as far as it has
    pages. It gets those of windows here, and what it was promised. anywhere: it is cut anywhere if `budget` has no
    room to a multiple, else it waits. It is too where pages are short and none will come by themselves."""
    multiple, todo, least = core.cfg.chunk_multiple, r.computed + r.todo, r.computed + _least(core, r)
    if least - r.computed > budget:
        if not anywhere:
            return 0
        multiple, least = 1, r.computed + 1
    end = max(least, _cut(r.computed + n, todo, multiple))
    grown: Literal[True] | Shortage = True
    if any(r.held.reserved):
        core.kv.grow(r, end)                   # all at once, if it can
    while r.capacity < end and (grown := core.kv.grow(r, r.capacity + 1)):
        pass
    while r.capacity < least:
        assert not grown
        if r.capacity > r.computed and not reclaim.reserved_will_come(core, grown.tier, taken):
            multiple = 1                       # somebody would give way for pages that it can do without, or it itself
            break
        reclaim.for_growth(core, r, grown.tier, taken)
        if r.phase is not Phase.PREFILL or not core.kv.grow(r, r.capacity + 1):
            return 0
        while r.capacity < least and (grown := core.kv.grow(r, r.capacity + 1)):
            pass
    return _cut(min(end, r.capacity), todo, multiple) - r.computed


def _cut(end: int, todo: int, multiple: int) -> int:
    """Return where a chunk ends that may end at `end`, of a prompt that ends at `todo`."""
    return end if end == todo else end - end % multiple


# ---------------------------------------------------------------- the plan
def _hbm(column: Sequence[Copy | None]) -> tuple[HbmPage, ...]:
    return cast("tuple[HbmPage, ...]", tuple([c.page if c is not None else -1 for c in column]))


def _dram(column: Sequence[Copy | None], length: int) -> tuple[DramPage, ...]:
    pages = [c.page if c is not None else -1 for c in column]
    return cast("tuple[DramPage, ...]", tuple(pages + [-1] * (length - len(pages))))


def _bind(r: Request) -> Bind:
    """All that the device must know of a row."""
    assert r.row is not None
    host: tuple[tuple[DramPage, ...], ...] = ()
    hot: tuple[tuple[Hot, ...], ...] = ()
    if any(t.host for t in r.tables):
        host = tuple(_dram(t.host, len(t.device)) for t in r.tables)
    if r.place.on_host:
        hot = tuple(tuple(Hot(HbmPage(c.page)) for c in t.hot) for t in r.tables)
    columns = tuple((*pages, *_hbm(t.device[len(pages):]))       # a look at each of 65,536 takes 12 ms
                    for t, pages in zip(r.tables, r.take_prefix(), strict=True))
    bind = Bind(r.row, r.rid, columns, r.num_output, host, hot)
    for g, t in enumerate(r.tables):
        r.reported.lengths[g] = len(t.device)
        r.reported.remapped[g] = {}
    r.reported.bound, r.hot.is_resized, r.hot.has_ended = True, False, False
    return bind


def _readable(r: Request, column: Sequence[Copy | None]) -> Sequence[Copy | None]:
    """A row in host pages does not wait for those of the device: what is not there is read from the host."""
    return column if not r.place.on_host else [c if c is not None and c.ready else None for c in column]


def _grows(r: Request) -> list[Grow]:
    grows: list[Grow] = []
    assert r.row is not None
    reported = r.reported.lengths
    for g, t in enumerate(r.tables):
        device, at = t.device, reported[g]
        if (end := len(device)) > at:
            host = _dram(t.host[at:], end - at) if len(t.host) > at else ()
            new = _readable(r, device[at:]) if r.promotion.loading else device[at:]
            grows.append(make(Grow, (r.row, g, at, _hbm(new), host)))
            reported[g] = end
    return grows


def _remaps(r: Request) -> list[Remap]:
    out: list[Remap] = []
    for g, (t, entries) in enumerate(zip(r.tables, r.reported.remapped, strict=True)):
        if entries:
            assert r.row is not None
            out.append(Remap(r.row, Group(g), tuple(entries),
                             _hbm(_readable(r, [own(t.device, i) for i in entries])),
                             _dram([own(t.host, i) for i in entries], len(entries))))
            r.reported.remapped[g] = {}
    return out


def _resizes(r: Request) -> list[HotResize]:
    out: list[HotResize] = []
    assert r.row is not None
    for g, t in enumerate(r.tables):
        if t.hosted:
            now = tuple([Hot(HbmPage(c.page), t.kept.get(c.page, -1)) for c in t.hot])
            wants = ((),) * r.hot.has_ended + (now,) * (now != () or not r.hot.has_ended)
            out += [HotResize(r.row, Group(g), pages) for pages in wants]
            t.kept = {}
    r.hot.is_resized = r.hot.has_ended = False
    return out


class _News:
    """What the device is told before a step runs."""

    __slots__ = ("binds", "grows", "remaps", "resizes", "waits")

    def __init__(self) -> None:
        self.binds: list[Bind] = []
        self.grows: list[Grow] = []
        self.remaps: list[Remap] = []
        self.resizes: list[HotResize] = []
        self.waits: dict[MoveId, None] = {}

    def of(self, core: CoreState, r: Request) -> None:
        if not r.reported.bound:
            self.binds.append(_bind(r))
        elif r.capacity != r.reported.capacity:
            self.grows += _grows(r)
        r.reported.capacity = r.capacity
        if any(r.reported.remapped):
            self.remaps += _remaps(r)
        if r.hot.is_resized:
            self.resizes += _resizes(r)
        if r.step_depends_on:
            r.step_depends_on = [m for m in r.step_depends_on if m in core.kv.moves.flying]
            self.waits.update(dict.fromkeys(r.step_depends_on))


def _issue(core: CoreState, step: StepId, chosen: list[ScheduledRow]) -> StepPlan:
    kv, news, looked = core.kv, _News(), 0
    start: list[int] = []
    tokens: list[int] = []
    for row in chosen:
        r = row.request
        at = r.computed
        start.append(at)
        if at < r.unchanged_until:
            tokens.append(-1)
            r.computed = at + 1
            r.num_placeholders += 1
            r.last_issue = step
            continue
        looked += 1
        news.of(core, r)
        if r.phase is _DECODE:
            tokens += [-1] * row.count         # the device has sampled it; what follows are drafts
        else:
            known = r.between(at, at + row.count)
            tokens += known
            tokens += [-1] * (row.count - len(known))
        r.computed += row.count
        r.num_placeholders += row.width
        r.last_issue = step
        r.unchanged_until = unchanged_until(r)
    core.counters["rows_looked_at"] += looked
    kv.issued = step
    core.in_flight[step] = chosen
    rows, rids, count, samples = _columns(core, step, chosen)
    return StepPlan(
        step=step, rows=rows, rids=rids, start=tuple(start), count=count, samples=samples,
        tokens=tuple(tokens), grows=tuple(news.grows), binds=tuple(news.binds),
        moves=kv.moves.take_planned(), remaps=tuple(news.remaps), waits=tuple(news.waits),
        resizes=tuple(news.resizes))


def _columns(core: CoreState, step: StepId, chosen: list[ScheduledRow]) -> Columns:
    """What is the same in each step of the same rows. With several stages their batches take turns."""
    turn = step % core.cfg.pp_size
    known = core.columns.get(turn)
    if known is None or known[0] != chosen:
        columns = (tuple(c.row for c in chosen), tuple(c.request.rid for c in chosen),
                   tuple(c.count for c in chosen), tuple(c.samples for c in chosen))
        core.columns[turn] = known = chosen, columns
    return known[1]


# ---------------------------------------------------------------- what needs no look
def unchanged_until(r: Request) -> int:
    """Up to which position `r` decodes one token a step and nothing else happens to its row. Drafts
    and loads to wait for need a look each step."""
    if (r.drafts or r.step_depends_on or r.issued is None
            or r.phase is not _DECODE or r.num_tokens + r.num_placeholders != r.computed + 1):
        return 0
    return min(r.capacity, r.num_prompt + r.max_new - 1)


def append_until(core: CoreState, r: Request) -> int:
    """Up to which retired position a result of `r` is one more token: no page is full, no end is
    reached. Stop tokens are looked for."""
    if r.drafts or r.phase is not _DECODE or r.num_tokens != r.retired + 1 or r.forks:
        return 0
    return min((len(r.path) + 1) * core.cfg.page_size - 1, r.num_prompt + r.max_new - 2)


def check(core: CoreState) -> None:
    """Whether all that is not looked at is as it was when it was. Raises AssertionError."""
    for r in core.live.values():
        if r.computed < r.unchanged_until:
            assert r.decodes and r.reported.bound and not any(r.reported.remapped), r.rid
            assert not r.hot.is_resized, r.rid
            assert r.unchanged_until == unchanged_until(r) and r.capacity == r.reported.capacity, r.rid
            assert r.issued is not None and (r.issued.row, r.issued.kv_epoch) == (r.row, r.kv_epoch), r.rid
        if r.retired < r.append_until:
            assert r.append_until == append_until(core, r), r.rid
