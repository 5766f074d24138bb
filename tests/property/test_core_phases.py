"""A bare core, and whatever may happen to it in any order: every invariant after every event, and at the
end all requests finish and everything that was taken comes back."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.core.core import Core
from penstock.core.kv.prefix_tree import Node, unpack
from penstock.core.lifecycle import Phase, Trigger
from penstock.core.plan import (
    Aborted,
    Arrived,
    Dropped,
    Entered,
    Event,
    Expired,
    Finished,
    Flushed,
    Move,
    Moved,
    MoveId,
    Paused,
    Promoted,
    Rates,
    RequestId,
    Retired,
    Spilled,
    StepPlan,
    Stopped,
    Token,
)
from penstock.core.request import Request
from penstock.core.settings import CacheGroup, CoreConfig

FULL, SELECTOR = CacheGroup(name="full", page_bytes=0), CacheGroup(name="selector", page_bytes=0,
                                                                   selector=True, slab_pages=2)
WINDOW = CacheGroup(name="window", page_bytes=0, window=3, slab_pages=2)
SNAPSHOT = CacheGroup(name="snapshot", page_bytes=0, snapshot=True, page_tokens=4)
BASE = CoreConfig(page_size=2, rows=3, hbm_pages=7, dram_pages=6, hbm_base=1_000, dram_base=2_000,
                  row_base=3_000, disk_base=4_000, group_base=10_000)
CONFIGS = {
    "one group": replace(BASE, disk_pages=12),
    "sparse": replace(BASE, hot_pages=1, hot_pages_max=3, hbm_pages=9, dram_pages=10,
                      groups=(FULL, SELECTOR)),
    "four groups, sparse": replace(BASE, hot_pages=1, hot_pages_max=3, hbm_pages=24, dram_pages=16,
                                   disk_pages=16, groups=(
        replace(FULL, slab_pages=2), WINDOW, SNAPSHOT, replace(SELECTOR, slab_pages=4))),
}
# Few different prompts, so that they share pages.
PROMPT = st.tuples(st.sampled_from((0, 0, 1)), st.integers(1, 12)).map(lambda x: (x[0],) * x[1])
POKES = {Paused: Trigger.PAUSE, Dropped: Trigger.DROP, Spilled: Trigger.RELOCATE, Promoted: Trigger.RELOCATE,
         Aborted: Trigger.END}


def known(core: Core) -> dict[tuple[int, ...], Node]:
    """What the prefix tree has that anybody may find: pages by namespace and all tokens to their end."""
    pages: dict[tuple[int, ...], Node] = {}
    stack = [((namespace,), root) for namespace, root in core.kv.tree.roots.items() if namespace >= 0]
    while stack:
        tokens, node = stack.pop()
        if node.parent is not None:
            pages[tokens] = node
        stack += [((*tokens, *unpack(child.key)), child) for child in node.children.values()
                  if not core.kv.tree.is_flushed(child)]
    return pages


def served(core: Core, pages: Mapping[tuple[int, ...], Node], tokens: tuple[int, ...], stored: bool) -> int:
    """How many of `tokens`, a namespace before them, the tree has for every group: the longest prefix of
    whole pages that leaves one to compute, and of which each group has what the next position reads."""
    kv, size = core.kv, core.cfg.page_size

    def can_get(g: int, position: int) -> bool:
        node = pages.get(tokens[:1 + (position // size + 1) * size])
        if node is None:
            return False
        device, host = node.copies.get(kv.device[g]), node.copies.get(kv.host[g])
        below = host is not None and (host.ready or (stored and not host.bad))
        return (device is not None and not device.bad) or below or (
            stored and host is None and node.ready(kv.disk[g]))

    def reads(group: CacheGroup, end: int) -> range:
        return range(end - 1 if group.snapshot else max(0, end - group.window) if group.window else 0, end)

    return max(end for end in range(0, len(tokens) - 1, size) if not end or all(
        not (group.snapshot and end % group.page_tokens) and all(can_get(g, p) for p in reads(group, end))
        for g, group in enumerate(core.cfg.groups)))


class CoreMachine(RuleBasedStateMachine):
    """Plans wait in `plans`, copies in `moves`, until a rule lets them end as an executor may."""

    base = BASE

    @initialize(overlap=st.booleans(), pp_size=st.sampled_from((1, 1, 3)), drafts=st.sampled_from((0, 0, 2)),
                wait_pages=st.sampled_from((0, 1, 100)), budget=st.sampled_from((1, 3, 16)),
                cached=st.sampled_from((True, True, False)), always=st.booleans())
    def begin(self, overlap: bool, pp_size: int, drafts: int, wait_pages: int, budget: int,
              cached: bool, always: bool) -> None:
        self.core = Core(replace(
            self.base, overlap=overlap, pp_size=pp_size, draft_tokens=drafts, draft_positions=16,
            wait_pages=wait_pages, step_tokens=budget, prefix_cache=cached,
            always_hosted=always and self.base.sparse))
        self.plans: list[StepPlan] = []
        self.moves: dict[MoveId, Move] = {}
        self.got: dict[RequestId, int] = {}        # output tokens of those that have not finished
        self.entered: list[Entered] = []
        self.num = self.sampled = 0

    # ---------------------------------------------------------------- the loop
    def tell(self, *events: Event) -> None:
        """One turn of the loop: apply events, and take plans until there is none."""
        while True:
            advance = self.core.advance(events)
            self.core.check()
            for out in advance.outputs:
                if isinstance(out, Token):
                    assert out.index == self.got[out.rid], "a gap in a stream, or a repeat"
                    self.got[out.rid] += 1
                elif isinstance(out, Finished):
                    del self.got[out.rid]
                elif isinstance(out, Entered):
                    self.entered.append(out)
            if advance.plan is None:
                assert self.core.advance(()).plan is None, "it went to sleep with work to do"
                return
            self.plans.append(advance.plan)
            self.moves |= {move.id: move for move in advance.plan.moves}
            assert len(self.plans) <= self.core.cfg.depth
            events = ()

    def _results(self, plan: StepPlan, short: int) -> tuple[tuple[int, ...], ...]:
        rows = list[tuple[int, ...]]()
        for start, count, rid, samples in zip(plan.start, plan.count, plan.rids, plan.samples, strict=True):
            if samples:
                r = self.core.live.get(rid)
                decodes = r is not None and start + count > len(r.tokens)
                self.sampled += 1
                rows.append((self.sampled % 3,) * max(0, (count if decodes else 1) - short))
        return tuple(rows)

    # ---------------------------------------------------------------- requests
    @precondition(lambda self: len(self.got) < 6)
    @rule(prompt=PROMPT, max_new=st.integers(1, 16), selects=st.sampled_from((True, True, False)),
          kind=st.integers(0, 9), priority=st.sampled_from((0, 0, 0, 1)), data=st.data())
    def arrive(self, prompt: tuple[int, ...], max_new: int, selects: bool, kind: int, priority: int,
               data: st.DataObject) -> None:
        self.num += 1
        a = Arrived(RequestId(self.num), prompt, max_new, namespace=int(kind == 0), priority=priority,
                    stop=frozenset({2}) if kind == 1 else frozenset(), selects=selects,
                    attention=int(selects and kind in (3, 4)))
        if kind == 5 and self.got:
            leader = self.core.live[self._leader(data)].arrived
            a = replace(a, prompt=leader.prompt, leader=leader.rid, selects=leader.selects)
        self.got[a.rid] = 0
        self.tell(a)

    @precondition(lambda self: len(self.got) < 3)
    @rule(start=st.sampled_from((0, 1)), n=st.integers(5, 12))
    def again(self, start: int, n: int) -> None:
        """A prompt is served to the end, forgotten by the device and the host, and wanted again."""
        rid = RequestId(self.num + 1)
        for turn in range(2):
            self.num += 1
            self.got[RequestId(self.num)] = 0
            self.tell(Arrived(RequestId(self.num), (start,) * n, 2, selects=True))
            for _ in range(60):
                if turn or not (self.plans or self.moves) or (rid not in self.got and not self.moves):
                    break
                self.go_on(1)
            self.cached(9)

    def _leader(self, data: st.DataObject) -> RequestId:
        return data.draw(st.sampled_from(sorted(self.got)))

    @precondition(lambda self: self.got)
    @rule(data=st.data(), damaged=st.booleans())
    def poke(self, data: st.DataObject, damaged: bool) -> None:
        """Somebody outside wishes an edge, of any state that there is; a rare one as often as others."""
        live = self.core.live
        state = data.draw(st.sampled_from(sorted({r.state.name for r in live.values()})))
        rid = data.draw(st.sampled_from([rid for rid in sorted(live) if live[rid].state.name == state]))
        kinds = [kind for kind, trigger in POKES.items() if (live[rid].phase, trigger) in self.core.edges]
        kind = data.draw(st.sampled_from(kinds))
        self.tell(Aborted(rid, damaged) if kind is Aborted else kind(rid))
        again = damaged and rid in live and live[rid].origin.retried and not live[rid].path
        assert kind is not Aborted or rid not in self.got or again

    @rule(data=st.data(), kind=st.sampled_from(tuple(POKES)))
    def poke_anybody(self, data: st.DataObject, kind: type[Paused]) -> None:
        """Also who has ended, or never was."""
        self.tell(kind(RequestId(data.draw(st.integers(0, self.num + 1)))))

    @precondition(lambda self: any(self.got.values()))
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from([rid for rid, n in sorted(self.got.items()) if n]))
        self.tell(Stopped(rid, data.draw(st.integers(1, self.got[rid]))))
        assert rid not in self.got

    @rule(kind=st.integers(0, 9))
    def cached(self, kind: int) -> None:
        """Everything cached goes; or what is above storage, as pressure would do it; or rates change."""
        if kind == 0:
            self.tell(Flushed())
        elif kind == 1:
            self.tell(Rates(1_000.0, 10.0))
        elif kind == 2:
            self.tell(Rates(1.0, 10.0))
        else:
            for space in (*self.core.kv.device, *self.core.kv.host):
                self.core.kv.tree.evict(space, 1 << 30)
            self.tell()

    @precondition(lambda self: self._deadlines())
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        e = data.draw(st.sampled_from(self._deadlines()))
        r = self.core.live.get(e.rid)
        fresh = r is not None and (r.phase.value, r.visit) == (e.phase, e.visit)
        self.tell(Expired(e.rid, e.phase, e.visit))
        if fresh:
            assert r.visit > e.visit or r.phase is Phase.DONE or r.phase is Phase.RECEIVING, "it stays"

    def _deadlines(self) -> list[Entered]:
        """All that were ever announced, and those of the queue."""
        queued = [Entered(rid, Phase.QUEUED.value, 0) for rid in sorted(self.got)]
        return [*self.entered, *self.entered[-1:] * 5, *queued]

    @rule(data=st.data(), prompt=PROMPT, more=st.integers(0, 2), namespace=st.sampled_from((0, 0, 1)),
          stored=st.booleans())
    def match(self, data: st.DataObject, prompt: tuple[int, ...], more: int, namespace: int,
              stored: bool) -> None:
        """What a new prompt would be served, against a look at all that there is. The prompt extends a
        cached one, sometimes."""
        kv, pages = self.core.kv, known(self.core)
        plain = sorted(tokens for tokens in pages if min(tokens) >= 0)
        tokens = data.draw(st.sampled_from([*plain, (namespace, *prompt)])) + (2, 0)[:more]
        r = Request(Arrived(RequestId(0), tokens[1:], 1, namespace=tokens[0]), 0, 1, [],
                    len(tokens) - 1, kv.tables(), self.core.cfg.max_len)
        path, _ = kv.match(r, stored=stored)
        end = len(path) * self.core.cfg.page_size
        assert end == served(self.core, pages, tokens, stored)
        assert path == [pages[tokens[:1 + p]] for p in range(2, end + 1, 2)]

    # ---------------------------------------------------------------- the executor
    @precondition(lambda self: self.plans)
    @rule(short=st.sampled_from((0, 0, 0, 1, 2)), ok=st.sampled_from((True, True, False)))
    def retire(self, short: int, ok: bool) -> None:
        plan = self.plans.pop(0)
        waits = [Moved(self.moves.pop(move).id, ok) for move in plan.waits if move in self.moves]
        self.tell(*waits, Retired(plan.step, self._results(plan, short)))

    @precondition(lambda self: self._may_land())
    @rule(data=st.data(), ok=st.sampled_from((True, True, True, False)))
    def land(self, data: st.DataObject, ok: bool) -> None:
        self._land(data.draw(st.sampled_from(self._may_land())), ok)

    def _land(self, move: MoveId, ok: bool) -> None:
        del self.moves[move]
        self.tell(Moved(move, ok))

    def _may_land(self) -> list[MoveId]:
        """Copies may begin when the step that they follow has executed."""
        return [id for id, move in self.moves.items() if move.after <= self.core.kv.retired]

    @precondition(lambda self: self.plans or self.moves)
    @rule(n=st.integers(2, 25))
    def go_on(self, n: int) -> None:
        """Some undisturbed steps and copies."""
        for _ in range(n):
            if self.plans:
                self.retire(short=0, ok=True)
            elif self.moves:
                self._land(self._may_land()[0], True)

    # ---------------------------------------------------------------- what always holds
    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "core"):
            self.core.check()
            assert set(self.core.live) == set(self.got)

    def teardown(self) -> None:
        """Without further disturbance everybody ends, and all comes back."""
        if not hasattr(self, "core"):
            return
        left = 40 + sum(8 * (r.num_prompt + r.max_new) for r in self.core.live.values())
        while self.plans or self.moves:
            if self.plans:
                self.retire(short=0, ok=True)
                left -= 1
                assert left > 0, "starvation: too many steps"
            else:
                self._land(self._may_land()[0], True)
        assert not self.got, "stalled: nothing is under way, and somebody waits"
        self.tell(Flushed())
        while self.plans or self.moves:            # storing what was being written
            self.tell(*[Moved(move, True) for move in self.moves],
                      *[Retired(plan.step, ()) for plan in self.plans])
            self.plans, self.moves = [], {}
        while self.core.flushing:
            self.tell()
        self._nothing_left()

    def _nothing_left(self) -> None:
        kv = self.core.kv
        kv.drain()
        assert kv.rows.free == self.core.cfg.rows
        for arena in kv.arenas.values():
            for pool in arena.pools:
                assert not pool.held and not pool.in_limbo, f"{pool.name}: {pool.held}"
            assert len(arena.pools) == 1 or len(arena.free) == arena.slabs
        assert not list(kv.tree.nodes()) and not kv.moves.flying
        assert not (self.core.live or self.core.running or self.core.waiting)


@pytest.mark.parametrize("name", CONFIGS)
def test_no_order_of_events_breaks_an_invariant(name: str) -> None:
    machine = type("Machine", (CoreMachine,), {"base": CONFIGS[name]})
    run_state_machine_as_test(machine, settings=settings(
        max_examples=60, stateful_step_count=50))
