"""One fake rank: page tables from binds and grows, memory of two tiers, a forward that hashes.

Memory is addressed by page id only, as a real device's is: nothing here knows who owns a page.
Pages that the core has put back on a free list are filled with poison by the world.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.core.plan import Bind, Move, RequestId, Row, StepPlan, Tier
from penstock.sim.model import kv_value, sample


@dataclass(frozen=True, slots=True)
class Identity:
    """What the device is told about a request beside the plan: sampling seed and namespace."""

    namespace: int
    seed: int


@dataclass(slots=True)
class Bound:
    """Device-resident state of one row."""

    rid: RequestId
    pages: list[list[int]]            # of each group
    emitted: int
    length: int = 0                   # positions whose KV counts
    last: int | None = None           # token at position `length`: sampled, or given before


@dataclass(slots=True)
class Device:
    page_size: int
    num_groups: int
    who: dict[RequestId, Identity]
    free: dict[Tier, set[int]]        # pages that nobody may touch, kept by the world
    shy: float = 0.0                  # chance that a row returns fewer tokens than it may
    memory: dict[Tier, list[dict[int, list[int]]]] = field(init=False)
    rows: dict[Row, Bound] = field(init=False, default_factory=dict)
    done: int = field(init=False, default=0)       # last executed step
    _poison: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.memory = {tier: [{} for _ in range(self.num_groups)] for tier in Tier}

    # ---------------------------------------------------------------- memory
    def poison(self, tier: Tier, page: int) -> None:
        """Nobody may read this page again before it is written."""
        for group in self.memory[tier]:
            if page in group:
                group[page] = self._garbage()

    def _garbage(self) -> list[int]:
        self._poison -= 1
        return [self._poison * 1_000_003 - i for i in range(self.page_size)]

    def page(self, tier: Tier, group: int, page: int) -> list[int]:
        memory = self.memory[tier][group]
        slots = memory.get(page)
        if slots is None:
            slots = memory[page] = self._garbage()
        return slots

    # ---------------------------------------------------------------- steps
    def execute(self, plan: StepPlan) -> tuple[tuple[int, ...], ...]:
        """Binds, grows, forward; the tokens of the rows that sample, in plan order."""
        assert plan.step == self.done + 1, f"step {plan.step} after {self.done}"
        for b in plan.binds:
            self._bind(b)
        for g in plan.grows:
            self.rows[g.row].pages[g.group].extend(g.pages)
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
        return may if dice >= 1000 * self.shy else dice % (may + 1)

    def _bind(self, b: Bind) -> None:
        assert len(b.pages) == self.num_groups, "a bind has a page table for each group"
        self.rows[b.row] = Bound(b.rid, [list(pages) for pages in b.pages], b.emitted)

    def _spoil(self, row: Row, p: int) -> None:
        bound = self.rows[row]
        for group, pages in enumerate(bound.pages):
            assert len(pages) * self.page_size > p, f"row {row}: {len(pages)} pages, position {p}"
            self.page(Tier.HBM, group, pages[p // self.page_size])[p % self.page_size] = -p

    def _forward(self, row: Row, start: int, tokens: Sequence[int]) -> int:
        bound, size = self.rows[row], self.page_size
        namespace = self.who[bound.rid].namespace
        end = start + len(tokens)
        tables = []
        for group, pages in enumerate(bound.pages):
            assert len(pages) * size >= end, f"row {row}: {len(pages)} pages for {end} tokens"
            self._not_free(Tier.HBM, pages[:-(-end // size)], "step")
            tables.append([self.page(Tier.HBM, group, p) for p in pages[:-(-end // size)]])
        values = [v for slots in zip(*(self._flat(t, start) for t in tables), strict=True)
                  for v in slots]
        value = 0
        for p, token in enumerate(tokens, start):
            value = kv_value(values, token, namespace)
            for group, table in enumerate(tables):
                v = hash((value, group)) if group else value
                table[p // size][p % size] = v
                values.append(v)
        return value

    def _flat(self, pages: list[list[int]], length: int) -> list[int]:
        return [v for slots in pages for v in slots][:length]

    # ---------------------------------------------------------------- copies
    def _not_free(self, tier: Tier, pages: Sequence[int], what: str) -> None:
        assert self.free[tier].isdisjoint(pages), f"{what} touches a free {tier.value} page"

    def read(self, move: Move) -> list[list[int]]:
        self._not_free(move.src, move.src_pages, "copy")
        return [list(self.page(move.src, move.group, p)) for p in move.src_pages]

    def write(self, move: Move, data: list[list[int]]) -> None:
        self._not_free(move.dst, move.dst_pages, "copy")
        left = move.tokens
        for page, slots in zip(move.dst_pages, data, strict=True):
            n = min(left, self.page_size)
            self.page(move.dst, move.group, page)[:n] = slots[:n]
            left -= n
