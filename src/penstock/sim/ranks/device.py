"""One fake rank: page tables from binds and grows, memory of every tier, a forward that hashes.

Memory is addressed by page id only, as a real device's is: nothing here knows who owns a page.
Pages that the core has put back on a free list are filled with poison by the world. A hosted row
reads through its hot buffer, which is device memory too and may be stale like any other.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.core.plan import Bind, Move, RequestId, Row, StepPlan, Tier
from penstock.core.settings import CacheGroup
from penstock.sim.ranks.model import identity, kv_value, of_group, sample

DAMAGE = 9_000_003
_HBM, _DRAM = Tier.HBM, Tier.DRAM        # Python 3.11 takes 0.1 us to find a member of an Enum


@dataclass(frozen=True, slots=True)
class Identity:
    """What the device is told about a request beside the plan."""

    namespace: int
    seed: int
    attention: int
    num_prompt: int


@dataclass(slots=True)
class Column:
    """One cache group's table of one row: entry i is on the device, on the host or on both."""

    pages: list[int]
    host: list[int]
    hot: dict[int, int] = field(default_factory=dict)     # entry -> hot unit that holds it
    spare: list[int] = field(default_factory=list)        # hot units that hold nothing


@dataclass(slots=True)
class Bound:
    """Device-resident state of one row."""

    rid: RequestId
    columns: list[Column]             # of each group
    emitted: int
    length: int = 0                   # positions whose KV counts
    last: int | None = None           # token at position `length`: sampled, or given before


@dataclass(slots=True)
class Device:
    page_size: int
    groups: tuple[CacheGroup, ...]
    who: dict[RequestId, Identity]
    busy: dict[Tier, set[int]]        # pages that a step or a copy may touch; empty: any
    shy: float = 0.0                  # chance that a row returns fewer tokens than it may
    undo: int = 1                     # states that are kept in case a draft was wrong
    max_len: int = 1 << 20            # tokens of the longest request: page tables are no longer
    memory: dict[Tier, list[dict[int, list[int]]]] = field(init=False)
    units: list[int] = field(init=False)           # positions of a page, of each group
    reaches: list[int] = field(init=False)         # positions that a step reads, of each group
    rows: dict[Row, Bound] = field(init=False, default_factory=dict)
    done: int = field(init=False, default=0)       # last executed step
    use: dict[RequestId, tuple[int, int]] = field(init=False, default_factory=dict)   # pages: read, missed
    stats: Counter[str] = field(init=False, default_factory=Counter)
    _poison: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.memory = {tier: [{} for _ in self.groups] for tier in Tier}
        self.units = [group.page_tokens or self.page_size for group in self.groups]
        self.reaches = [group.reach for group in self.groups]

    # ---------------------------------------------------------------- memory
    def poison(self, tier: Tier, page: int) -> None:
        """Nobody may read this page again before it is written."""
        for group, memory in enumerate(self.memory[tier]):
            if page in memory:
                memory[page] = self._garbage(group)

    def damage(self, tier: Tier, page: int) -> None:
        """What this page holds is wrong, and alike on every rank."""
        for memory in self.memory[tier]:
            if page in memory:
                memory[page] = [hash((value, DAMAGE)) for value in memory[page]]

    def _garbage(self, group: int) -> list[int]:
        self._poison -= 1
        return [self._poison * 1_000_003 - i for i in range(self.units[group])]

    def page(self, tier: Tier, group: int, page: int) -> list[int]:
        memory = self.memory[tier][group]
        slots = memory.get(page)
        if slots is None:
            slots = memory[page] = self._garbage(group)
        return slots

    # ---------------------------------------------------------------- steps
    def execute(self, plan: StepPlan) -> tuple[tuple[int, ...], ...]:
        """Binds, grows, remaps, resizes, forward; the tokens of the rows that sample, in plan order."""
        assert plan.step == self.done + 1, f"step {plan.step} after {self.done}"
        for b in plan.binds:
            self._bind(b)
        for g in plan.grows:
            column = self.rows[g.row].columns[g.group]
            self._fits(g.row, g.group, g.index + len(g.pages))
            column.pages[g.index:] = g.pages
            column.host[g.index:] = g.host or (-1,) * len(g.pages)
        for y in plan.remaps:
            column = self.rows[y.row].columns[y.group]
            for i, page, below in zip(y.entries, y.device, y.host, strict=True):
                column.pages[i], column.host[i] = page, below
        for z in plan.resizes:
            column, pages = self.rows[z.row].columns[z.group], {h.page for h in z.pages}
            column.hot = {i: page for i, page in column.hot.items() if page in pages}
            column.hot |= {h.keeps: h.page for h in z.pages if h.keeps >= 0}
            column.spare = sorted(pages - set(column.hot.values()))
        out: list[tuple[int, ...]] = []
        at = 0
        for i, row in enumerate(plan.rows):
            n = plan.count[i]
            new = self._run(row, plan.start[i], plan.tokens[at:at + n], plan.samples[i], plan.step)
            at += n
            if plan.samples[i]:
                out.append(new)
        self.done = plan.step
        return tuple(out)

    def _run(self, row: Row, start: int, tokens: tuple[int, ...], samples: bool,
             step: int) -> tuple[int, ...]:
        """Known inputs, then drafts: as many as are right are kept, the others leave garbage."""
        bound = self.rows[row]
        if tokens[0] < 0:
            assert bound.last is not None, f"row {row}: no sampled token since its bind"
            assert bound.length <= start, f"row {row}: device is at {bound.length}, plan at {start}"
            start = bound.length
        given = [t for t in tokens if t >= 0] or [bound.last or 0]
        may = len(tokens) - len(given) + 1
        who = self.who[bound.rid]
        value = self._forward(row, start, given)
        bound.length, bound.last = start + len(given), given[-1]
        if not samples:
            return ()
        want = self._wanted(may, who.seed, bound.emitted, step)
        new: list[int] = []
        while len(new) < want:
            token = sample(value, bound.emitted + len(new), who.seed)
            new.append(token)
            if len(new) < want:
                value = self._forward(row, bound.length, [token])
                bound.length += 1
        if new:
            bound.last = new[-1]
        else:
            bound.length -= 1                     # the last input is computed again
        for p in range(bound.length + (not new), start + len(tokens)):
            self._spoil(row, p)                   # a draft that was wrong
        bound.emitted += len(new)
        return tuple(new)

    def _wanted(self, may: int, seed: int, emitted: int, step: int) -> int:
        """How many tokens come; the same on every rank."""
        dice = hash((seed, emitted, step)) % 1000
        if dice >= 1000 * self.shy:
            return may
        self.stats["fewer tokens than planned"] += dice % (may + 1) < may
        return dice % (may + 1)

    def _bind(self, b: Bind) -> None:
        assert len(b.pages) == len(self.groups), "a bind has a page table for each group"
        columns = []
        for g, pages in enumerate(b.pages):
            self._fits(b.row, g, len(pages))
            host: list[int] = list(b.host[g]) if b.host else [-1] * len(pages)
            assert len(host) == len(pages), "a host column is as long as the device's"
            hot = b.hot[g] if b.hot else ()
            columns.append(Column(list(pages), host, {h.keeps: h.page for h in hot if h.keeps >= 0},
                                  [h.page for h in hot if h.keeps < 0]))
        self.rows[b.row] = Bound(b.rid, columns, b.emitted)

    def _fits(self, row: Row, group: int, pages: int) -> None:
        """A page table has as many entries as the longest request needs, as `exec.step.tables` makes them."""
        entries = -(-self.max_len // self.units[group])
        assert pages <= entries, f"row {row}: {pages} pages in a table of {entries}"

    def _spoil(self, row: Row, p: int) -> None:
        for group, column in enumerate(self.rows[row].columns):
            if not self.groups[group].snapshot:
                self._write(column, group, p, -p)

    def _forward(self, row: Row, start: int, tokens: Sequence[int]) -> int:
        """Compute positions from `start` on: read what each group shows, write what it stores."""
        bound = self.rows[row]
        who = self.who[bound.rid]
        views, missed = [], self.stats["hot misses"]
        for group, column in enumerate(bound.columns):
            reach = self.reaches[group]
            views.append(self._read(column, group, max(0, start - reach) if reach else 0, start))
        if pages := sum([-(-start // self.page_size) for c in bound.columns if c.hot or c.spare]):
            read, before = self.use.get(bound.rid, (0, 0))
            self.use[bound.rid] = read + pages, before + self.stats["hot misses"] - missed
        value = 0
        for p, token in enumerate(tokens, start):
            value = kv_value(views, token, identity(who.namespace, who.attention,
                                                    decoded=p >= who.num_prompt))
            for group, column in enumerate(bound.columns):
                stored, view = of_group(value, group), views[group]
                self._write(column, group, p, stored)
                view.append(stored)
                if (reach := self.reaches[group]) and len(view) > reach:
                    del view[0]
        return value

    def _read(self, column: Column, group: int, begin: int, end: int) -> list[int]:
        """What a group stores of positions begin .. end - 1."""
        unit = self.units[group]
        values: list[int] = []
        first = begin // unit
        for i in range(first, -(-end // unit)):
            values += self._look(column, group, i)
        del values[end - first * unit:], values[:begin - first * unit]
        return values

    def _look(self, column: Column, group: int, i: int) -> list[int]:
        """Resident page, hot unit, host page: in this order."""
        assert i < len(column.pages), f"page {i} of {len(column.pages)}"
        if (page := column.pages[i]) >= 0:
            self._not_free(_HBM, page, "step")
            return self.page(_HBM, group, page)
        if i in column.hot:
            self.stats["hot hits"] += 1
            self._not_free(Tier.HBM, column.hot[i], "step")
            return self.page(Tier.HBM, group, column.hot[i])
        below = column.host[i]
        assert below >= 0, f"page {i} is nowhere"
        self.stats["hot misses"] += 1
        self._not_free(Tier.DRAM, below, "step")
        if not column.spare:
            oldest = next(iter(column.hot))
            column.spare.append(column.hot.pop(oldest))
        unit = column.hot[i] = column.spare.pop()
        self._not_free(Tier.HBM, unit, "step")
        slots = self.page(Tier.HBM, group, unit)
        slots[:] = self.page(Tier.DRAM, group, below)
        return slots

    def _write(self, column: Column, group: int, p: int, value: int) -> None:
        """To every copy of the page that the table names, and to its hot unit."""
        unit = self.units[group]
        i, at = divmod(p, unit)
        assert i < len(column.pages), f"{len(column.pages)} pages, position {p}"
        page, below = column.pages[i], column.host[i]
        assert page >= 0 or below >= 0, f"page {i} is nowhere"
        for tier, target in ((_HBM, page), (_DRAM, below), (_HBM, column.hot.get(i, -1))):
            if target >= 0:
                self._not_free(tier, target, "step")
                slots = self.page(tier, group, target)
                slots[at] = value
                if self.groups[group].snapshot:      # a state has no past, but what a draft may need
                    for old in (*range(at - self.undo), *range(at + 1, unit)):
                        slots[old] = -value - 1

    # ---------------------------------------------------------------- copies
    def _not_free(self, tier: Tier, page: int, what: str) -> None:
        if tier in self.busy:
            assert page in self.busy[tier], f"{what} touches a free {tier.value} page"

    def receive(self, move: Move, values: dict[int, int]) -> None:
        """A peer writes some positions into the pages that `move` has granted."""
        unit = self.units[move.group]
        for p, value in values.items():
            if 0 <= p - move.first < move.tokens:
                page = move.dst_pages[p // unit - move.first // unit]
                self._not_free(move.dst, page, "write of the peer")
                self.page(move.dst, move.group, page)[p % unit] = value

    def read(self, move: Move, good: int = -1) -> list[list[int]]:
        """What its pages hold; those behind the first `good` are not there."""
        for page in move.src_pages:
            self._not_free(move.src, page, "copy")
        pages = stored_as(move, move.src)
        found = [list(self.page(move.src, move.group, p)) for p in (pages if good < 0 else pages[:good])]
        return found + [self._garbage(move.group) for _ in pages[len(found):]]

    def write(self, move: Move, data: list[list[int]]) -> None:
        left, unit = move.tokens, self.units[move.group]
        for page in move.dst_pages:
            self._not_free(move.dst, page, "copy")
        for name, slots in zip(stored_as(move, move.dst), data, strict=True):
            n = min(left, unit)
            self.page(move.dst, move.group, name)[:n] = slots[:n]
            left -= n


def name_of(key: bytes, group: int) -> int:
    """A page of one cache group in a storage that knows it by its key: no slot has such a number."""
    return int.from_bytes(key) << 3 | group


def stored_as(move: Move, tier: Tier) -> Sequence[int]:
    """Under what its pages of one side are found: storage has names of its own, where the core gives any."""
    if tier is Tier.DISK and move.keys:
        return [name_of(key, move.group) for key in move.keys]
    return move.src_pages if tier is move.src else move.dst_pages
