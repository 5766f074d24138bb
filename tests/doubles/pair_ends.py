"""Ends of a pair without engines: pools with known bytes, a link, and what it has told so far."""
from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from penstock.core.pair.messages import End as Over
from penstock.core.pair.messages import Grant
from penstock.core.plan import DramPage, Group, HbmPage, Move, MoveId, StepId, Tier
from penstock.memory.dram import DramPool
from penstock.memory.hbm import HbmPool
from penstock.memory.pool import PageLayout, PoolPart
from penstock.transfer.events import Down, LinkEvent, PeerMessage, Pushed, Up
from penstock.transfer.facts import Facts, group_facts
from penstock.transfer.link import PairLink
from penstock.transfer.messages import Said
from penstock.transfer.pages import PoolPages
from penstock.transfer.remote.carrier import Open
from penstock.transfer.session import Session
from penstock.transfer.streams import LinkSettings

KEY = bytes(range(32))
KV, BOUNDS = Group(0), Group(1)
LAYERS = (5, 4)                     # of the two groups
UNITS = (1, 4)
PAGES = 12                          # of each pool
WAIT_S = 60.0                       # a hang, not slowness


def layouts(page_size: int) -> list[PageLayout]:
    return [PageLayout(num_layers=n, num_kv_heads=2, page_size=page_size, head_dim=4, unit=unit,
                       dtype=torch.bfloat16 if unit == 1 else torch.float32)
            for n, unit in zip(LAYERS, UNITS, strict=True)]


def cells(group: int, units: range) -> torch.Tensor:
    """[L, K, C, units, H] of a request: each element says where it belongs, in 16 bits."""
    layout = layouts(8)[group]
    shape = (layout.num_layers, 2, 2, len(units), 4)
    layer, head, plane, unit, dim = torch.meshgrid(
        *(torch.arange(n) for n in shape), indexing="ij")
    value = ((layer * 2 + head) * 2 + plane) * 4 + dim + 101 * (unit + units.start) + 7919 * group
    return (value % 251).to(layout.dtype)


class Pools:
    """Device and host pools of both groups, each stage with its own."""

    def __init__(self, page_size: int, stages: Sequence[Sequence[int]]) -> None:
        """stages[g][s]: layers of group g on stage s."""
        self.page_size, self.layouts = page_size, layouts(page_size)
        self.stages = [[cls(replace(layout, num_layers=split[s]), PAGES, base=base + g * 100, group=Group(g),
                            part=PoolPart(layout, sum(split[:s])))
                        for g, (layout, split) in enumerate(zip(self.layouts, stages, strict=True))
                        if split[s]
                        for cls, base in ((HbmPool, 1000), (DramPool, 5000))]
                       for s in range(len(stages[0]))]
        for pool in self.every():
            pool.pages.view(torch.uint8).fill_(0xEE)

    def every(self):
        return [pool for pools in self.stages for pool in pools]

    def page(self, tier: Tier, group: Group, n: int) -> int:
        return {Tier.HBM: 1000, Tier.DRAM: 5000}[tier] + group * 100 + n

    def of(self, tier: Tier, group: Group):
        """In the order of their stages."""
        return [p for p in self.every() if (p.tier, p.group) == (tier, group)]

    def fill(self, tier: Tier, group: Group, pages: Sequence[int], first: int) -> None:
        """As if a request had its positions from `first` on in these pages."""
        size = self.layouts[group].page_size // self.layouts[group].unit
        for i, page in enumerate(pages):
            begin = first // UNITS[group] + i * size
            whole = cells(group, range(begin, begin + size))
            at = 0
            for pool in self.of(tier, group):
                pool.page(page).copy_(whole[at:at + pool.layout.num_layers])
                at += pool.layout.num_layers

    def facts(self, role: str, stages: Sequence[Sequence[int]], must: dict[str, str]) -> Facts:
        return Facts(role, must, [group_facts(name, layout) for name, layout in
                                  zip(("kv", "bounds"), self.layouts, strict=True)],
                     [list(s) for s in stages], {"engine": role})


class LinkEnd:
    """One end. `seen` has all its events; `wait` blocks until one of them is as asked."""

    def __init__(self, role: str, address: str, *, page_size: int = 8,
                 stages: Sequence[Sequence[int]] = ((5,), (4,)), key: bytes = KEY,
                 alter: Callable[[Facts], Facts] = lambda facts: facts, silence_s: float = 20.0,
                 beside: Sequence[PairLink] = (), starts: bool = True, open_carrier: Open | None = None,
                 **settings: object) -> None:
        """alter: what it says of itself. beside, open_carrier: as PairLink has them; those beside do not
        start."""
        self.pools = Pools(page_size, stages)
        self.news = threading.Condition()
        self.seen: list[LinkEvent] = []
        self._taken = 0
        self.link = PairLink(
            LinkSettings(role=role, address=address, listens=role == "prefill", key=key, silence_s=silence_s,
                         **settings),                                            # type: ignore[arg-type]
            alter(self.pools.facts(role, stages, {"weights": "abc"})),
            PoolPages(self.pools.stages), self._wake, beside=beside, open_carrier=open_carrier)
        self._moves = 0
        if starts:
            self.link.start()

    def _wake(self) -> None:
        with self.news:
            self.news.notify_all()

    def wait(self, what: Callable[[LinkEvent], bool] | type) -> LinkEvent:
        """The next event that is so, after those that were waited for before."""
        deadline = time.monotonic() + WAIT_S
        while True:
            with self.news:
                self.seen += self.link.events.collect()
                for i in range(self._taken, len(self.seen)):
                    event = self.seen[i]
                    if isinstance(event, what) if isinstance(what, type) else what(event):
                        self._taken = i + 1
                        return event
                assert time.monotonic() < deadline, f"waited for {what} and saw {self.seen[self._taken:]}"
                self.news.wait(0.5)

    def up(self) -> int:
        event = self.wait(Up)
        assert isinstance(event, Up)
        return event.session.epoch

    # ------------------------------------------------------------ the connection of an epoch that was up
    def session(self, epoch: int) -> Session:
        return next(e.session for e in self.seen if isinstance(e, Up) and e.session.epoch == epoch)

    @property
    def newest(self) -> Session:
        return next(e.session for e in reversed(self.seen) if isinstance(e, Up))

    def say(self, epoch: int, message: Said) -> None:
        self.session(epoch).say(message)

    def push(self, epoch: int, move: Move) -> None:
        self.session(epoch).push(move)

    def grant(self, epoch: int, move: Move) -> None:
        self.session(epoch).grant(move)

    def cut(self, epoch: int) -> None:
        self.session(epoch).cut()

    def stop(self, transfer: int, generation: int) -> None:
        self.newest.stop(transfer, generation)

    def revoke(self, transfer: int, generation: int) -> None:
        self.newest.revoke(transfer, generation)

    def unsent(self, transfer: int) -> int:
        return self.newest.unsent(transfer)

    def move(self, tier: Tier, group: Group, pages: Sequence[int], first: int, tokens: int, *, to_peer: bool,
             transfer: int = 1, generation: int = 1) -> Move:
        self._moves += 1
        made = tuple((HbmPage if tier is Tier.HBM else DramPage)(p) for p in pages)
        return Move(MoveId(self._moves), group, tier if to_peer else Tier.PEER, made if to_peer else (),
                    Tier.PEER if to_peer else tier, () if to_peer else made, tokens, StepId(0), first,
                    transfer, generation)


def pages_for(end: LinkEnd, tier: Tier, group: Group, first: int, tokens: int, skip: int = 0) -> list[int]:
    size = end.pools.page_size
    count = -(-(first + tokens) // size) - first // size
    return [end.pools.page(tier, group, skip + i) for i in range(count)]


def grant(decode: LinkEnd, epoch: int, tokens: int, *, start: int = 0, tier: Tier = Tier.DRAM,
          transfer: int = 1, generation: int = 1, skip: int = 0) -> dict[Group, list[int]]:
    """Pages for positions `start` to `tokens` - 1 in both groups; the summaries' are on the device."""
    given = {}
    for group, at in ((KV, tier), (BOUNDS, Tier.HBM)):
        given[group] = pages_for(decode, at, group, start, tokens - start, skip)
        decode.grant(epoch, decode.move(at, group, given[group], start, tokens - start, to_peer=False,
                                             transfer=transfer, generation=generation))
    return given


def push(prefill: LinkEnd, epoch: int, group: Group, first: int, tokens: int, *, tier: Tier = Tier.HBM,
         transfer: int = 1, generation: int = 1) -> Move:
    """From pages that hold what `cells` says."""
    size = prefill.pools.page_size
    begin = first // size * size
    pages = pages_for(prefill, tier, group, first, tokens)
    prefill.pools.fill(tier, group, pages, begin)
    move = prefill.move(tier, group, pages, first, tokens, to_peer=True, transfer=transfer,
                        generation=generation)
    prefill.push(epoch, move)
    return move


def check(decode: LinkEnd, given: dict[Group, list[int]], tokens: int, *, start: int = 0,
          tier: Tier = Tier.DRAM) -> None:
    """Every granted unit is what was sent, and every other byte of every pool is as it was."""
    want = Pools(decode.pools.page_size, ((5,), (4,)))
    for group, at in ((KV, tier), (BOUNDS, Tier.HBM)):
        unit, size = UNITS[group], decode.pools.page_size // UNITS[group]
        units = range(start // unit, tokens // unit)
        for i, page in enumerate(given[group]):
            here = range(units.start + i * size, min(units.stop, units.start + (i + 1) * size))
            if len(here) > 0:
                want.of(at, group)[0].page(page)[..., :len(here), :] = cells(group, here)
    for at in (Tier.HBM, Tier.DRAM):
        for group in (KV, BOUNDS):
            a, b = (torch.cat([p.pages for p in pools.of(at, group)], 1).view(torch.uint8)
                    for pools in (decode.pools, want))
            assert torch.equal(a, b), f"pages of {at} of group {group}"


def transfer_all(prefill: LinkEnd, decode: LinkEnd, epoch: int, tokens: int, *, start: int = 0,
                 tier: Tier = Tier.DRAM, transfer: int = 1, generation: int = 1, chunk: int = 0,
                 skip: int = 0) -> tuple[dict[Group, list[int]], PeerMessage]:
    """A whole transfer, in pushes of `chunk` tokens; returns the granted pages and what ended it."""
    given = grant(decode, epoch, tokens, start=start, tier=tier, transfer=transfer, generation=generation,
                  skip=skip)
    decode.say(epoch, Grant(transfer, generation, tokens, start=start))
    prefill.wait(lambda e: isinstance(e, PeerMessage) and isinstance(e.message, Grant))
    for at in range(start, tokens, chunk or tokens):
        for group in (KV, BOUNDS):
            push(prefill, epoch, group, at, min(chunk or tokens, tokens - at), transfer=transfer,
                 generation=generation)
            done = prefill.wait(lambda e: isinstance(e, Pushed))
            assert isinstance(done, Pushed)
            if not done.ok:
                prefill.wait(Down)
                break
    prefill.say(epoch, Over(transfer, generation, tokens, (7,)))
    heard = decode.wait(lambda e: isinstance(e, PeerMessage | Down))
    return given, heard  # type: ignore[return-value]
