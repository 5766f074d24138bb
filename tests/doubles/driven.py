"""The loop of an engine process without the process: a real core, an executor, and what requests are told."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ranks
import torch
import where
from msgspec.structs import replace

from penstock.config.request.params import SamplingParams
from penstock.config.request.selection import Selection, attention_identity
from penstock.core.core import Core
from penstock.core.kv.pool import FREE
from penstock.core.plan import (
    Arrived,
    Event,
    Finished,
    Lookup,
    Moved,
    MoveId,
    RequestId,
    Retired,
    Row,
    Started,
    StepId,
    StepPlan,
    Token,
    Unstore,
    Used,
)
from penstock.core.settings import CoreConfig
from penstock.exec.executor import Executor
from penstock.exec.load.backends import parts_of
from penstock.exec.load.layout import caches_of
from penstock.kernels import registry
from penstock.kernels.platform import probe
from penstock.memory.lateness import Lateness
from penstock.model.base import CacheShape, Stage
from penstock.model.transformer import Transformer

PAGE = 4


def asked(top: Selection | None, params: SamplingParams, prompt: int, max_new: int,
          ) -> tuple[SamplingParams, dict[str, Any]]:
    """What a client tells of a request of so many tokens: with the engine's budget or its own
    `sparse_top_k`, and reading all if it is short."""
    selection = None if top is None else top.of(params, prompt, max_new)
    if top is not None:
        params = replace(params, sparse_top_k=0 if selection is None else selection.budget)
    return params, {"selects": selection is not None,
                    "attention": 0 if selection is None else attention_identity(selection)}


@functools.cache
def backends(ops: tuple[str, ...], backend: str | None = None) -> dict[str, registry.Choice]:
    """For the device of these tests: what it chooses, or `backend` of each that has it."""
    named = {op: backend for op in ops if backend in registry.OPS[op].names} if backend else {}
    assert named or not backend, f"no op has a back-end {backend}"
    return registry.choose(probe(where.DEVICE), named, ops)


@contextlib.contextmanager
def spoiling(ranks: Sequence[Any]) -> Iterator[None]:
    """On a device on a stream of its own: steps and loads wait for that from now on, it waits for nothing."""
    if where.DEVICE == "cpu":
        yield
        return
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        yield
    for stream in (torch.cuda.current_stream(), *(rank._mover._copy._streams[True] for rank in ranks)):
        stream.wait_stream(aside)


class Driven:
    """`begin`, `add`, and turns until `drain` is content."""

    def begin(self, cfg: CoreConfig, executor: Executor) -> None:
        self.core, self.ex = Core(cfg), executor
        self.got: dict[int, list[int]] = {}
        self.started: dict[int, Started] = {}
        self.ended: dict[int, Finished] = {}
        self.reads: dict[int, dict[str, int]] = {}
        self.inbox: list[Event] = []
        self.moved: list[Moved] = []
        self.plans: list[StepPlan] = []
        self._flying: set[MoveId] = set()
        self._waits: dict[StepId, tuple[MoveId, ...]] = {}      # of plans in flight

    @property
    def waited(self) -> int:
        """Plans that named loads."""
        return sum(bool(plan.waits) for plan in self.plans)

    def tell(self, rid: int, prompt: tuple[int, ...], max_new: int, params: SamplingParams,
             **more: Any) -> None:
        """A request arrives; `more` of `Arrived`."""
        self.ex.open(RequestId(rid), prompt, params, stop_ids=tuple(more.get("stop", ())))
        self.got[rid] = []
        self.inbox.append(Arrived(RequestId(rid), prompt, max_new, cached_max=params.cached_max, **more))

    def turn(self) -> bool:
        """Advance, submit, poll. False when nothing is left to do."""
        events, self.inbox = self.inbox, []
        while True:
            advance = self.core.advance(events)
            events = []
            for o in advance.outputs:
                match o:
                    case Token():
                        self.said(o)
                    case Started(rid):
                        self.started[rid] = o
                    case Finished(rid):
                        self.ended[rid] = o
                        self.reads[rid] = self.ex.kv_reads(rid) or {}
                        self.ex.close(rid)
                    case Lookup():
                        self.ex.storage.ask(o)
                    case Unstore(keys):
                        self.ex.storage.deny(keys)
                    case Used(keys):
                        self.ex.storage.used(keys)
            if (plan := advance.plan) is None:
                break
            self.plans.append(plan)
            self.ex.submit(plan)
            self._flying.update(move.id for move in plan.moves)
            self._waits[plan.step] = plan.waits
        self.core.check()
        self.poison()
        found = self.ex.poll(block=True)
        for event in found:
            if isinstance(event, Moved):
                self._flying.remove(event.id)
                self.moved.append(event)
            elif isinstance(event, Retired):
                assert self._flying.isdisjoint(self._waits.pop(event.step)), "told before what it waits for"
        self.inbox += found
        return bool(found)

    def said(self, token: Token) -> None:
        assert token.index == len(self.got[token.rid])
        self.got[token.rid].append(token.token)

    def poison(self) -> None:
        """Spoil what nobody may read."""

    def drain(self, turns: int = 5000) -> None:
        for _ in range(turns):
            if not self.turn():
                break
        assert set(self.ended) == set(self.got), "a request never ended"
        assert self.ex.stats()["executor_requests"] == 0
        held = self.core.stats()
        assert held["hbm_pages_in_use"] == held["moves_in_flight"] == 0

    def total(self, name: str) -> int:
        """A counter of the ranks, over layers."""
        return sum(int(v) for k, v in self.ex.stats().items() if k.startswith(name))


class InProcess(Driven):
    """Its ranks are stages of a model in this process; rows, and pages of each tier and group, have ids of
    their own."""

    def build(self, model: Callable[[Stage | None], Transformer], groups: Sequence[CacheShape], *,
              max_len: int, lateness: Lateness | None, selection: Selection | None = None,
              backend: str | None = None, attention: Any = None, layers: Sequence[int] = (),
              num_layers: int = 2, dtype: torch.dtype = torch.float32, page_size: int = PAGE,
              storage: Any = None, drafter: Any = None, **settings: Any) -> None:
        """It attends as an engine does whose requests select so. backend: of each op, None: what is chosen
        for the device; attention: another one. `settings` of the core; the rest as `ranks.front` takes it.
        Most prompts take more pages than one admission takes at once."""
        caches = caches_of(groups, page_size, dtype)
        cfg = CoreConfig(**{"page_size": page_size, "max_len": max_len, "hbm_base": 500, "dram_base": 500_000,
                            "row_base": 70, "group_base": 50_000, "groups": caches.groups, "take_pages": 3,
                            **settings})
        whole = model(None)
        more = () if selection is None else registry.SELECTING[whole.selector.score if selection.native else "bounds"]
        if whole.drafter == "eagle3":
            more = (*more, "paged_attention")
        parts = parts_of(whole, backends((*whole.spec.attention.ops, *more), backend), selection,
                         cfg.largest_hot)
        executor, self.device, self.host = ranks.front(
            model, attention or parts.attention, groups, caches, cfg, layers=layers, num_layers=num_layers,
            max_len=max_len, lateness=lateness, selects=parts, storage=storage,
            drafter=drafter)
        self.begin(cfg, executor)
        self.rank = executor._ranks[0]
        self.poison()

    def poison(self) -> None:
        """Nobody may read what is on a free list before it is written again, nor entries behind a window. No
        step in flight touches a free page, so a device spoils it beside them, at once: what is launched
        later, loads too, is behind that."""
        with spoiling(self.ex._ranks):
            spoilt = self._spoil()
        for g, group in enumerate(self.core.cfg.groups):
            if group.window and (page := spoilt.get((True, g))) is not None:
                self._leave_behind(g, group.window, page)

    def _spoil(self) -> dict[tuple[bool, int], Any]:
        """One page of each pool that was, by whether it is of the device and its group."""
        kv, spoilt = self.core.kv, {}
        for pools, spaces in ((self.device, kv.device), (self.host, kv.host)):
            for pool in pools:
                ledger = spaces[pool.group].pool
                arena, n = ledger.arena, ledger.per_slab
                free = [ledger.base + slab * n + i
                        for slab in (arena.free if arena else ()) for i in range(n)]
                for page in (*free, *ledger.units(FREE)):
                    pool.page(page).fill_(255 if pool.layout.dtype == torch.uint8 else float("nan"))
                    spoilt.setdefault((pools is self.device, pool.group), page)
        return spoilt

    def _leave_behind(self, g: int, window: int, page: Any) -> None:
        """Entries of this group that no query of a step in flight sees, nor of a later one, are this page."""
        flying = [plan for plan in self.plans[-4:] if plan.step in self._waits]
        least: dict[Row, int] = {}
        for plan in flying:
            for row, start in zip(plan.rows, plan.start, strict=True):
                start -= self.core.cfg.draft_tokens * len(flying)       # as far as what is out may be less
                least[row] = min(start, least.get(row, start))
        for rank in self.ex._ranks:
            table = rank._tables.groups[g]
            for row, start in least.items():
                first = max(0, start + 1 - window) // table.size
                table.device_RM[rank._tables.index(row), :first] = table._pools[0].index(page)
