"""What a fault of an engine does to one request's KV: wrong values, which nobody else may ever read.

The engine aborts the request as damaged; whoever starts from its pages after that gets wrong tokens,
and the judge sees them. Pages that others name at that moment are left as they are: who named them goes on
with them. The judge knows them, and lets nobody else start from them.
"""
from __future__ import annotations

from collections import Counter
from random import Random

from penstock.core.core import Core
from penstock.core.lifecycle import Phase
from penstock.core.plan import RequestId, Tier
from penstock.core.request import Request
from penstock.core.tree import Node
from penstock.sim.executor import SimExecutor


def victim(core: Core, rng: Random) -> RequestId | None:
    """Damage shows in results, so mostly it is somebody with a step in flight; of those, the phases
    that follow a row are met as often as all with a row."""
    live = [r for r in core.live.values() if r.path or core.have.in_flight(r) or r.computed]
    if rng.random() < 0.9:
        live = [r for r in live if core.have.in_flight(r)] or live
    if rng.random() < 0.5:
        live = [r for r in live if r.row is None] or live
    return rng.choice(live).rid if live else None


def strike(core: Core, executor: SimExecutor, r: Request, rng: Random) -> Counter[str]:
    """`r` is about to be aborted as damaged: from some page on that nobody else names, its KV is wrong
    in every tier. Returns what there was to damage."""
    told = Counter({"damaged": 1})
    dropped, known = r.phase is Phase.DROPPED, path(core, r)
    late = [row for rows in core.in_flight.values() for row in rows if row.life != row.request.life]
    # Results of a request that was dropped count, so what they read must be right. Those of one that has
    # ended do not.
    others = {id(node) for row in late if row.request is not r and row.request.phase is not Phase.DONE
              for node in _named(core, row.request)}
    # What nobody finds any more may be read for somebody who has left it.
    others |= {id(node) for node in known if node.banished and any(
        copy.used > core.have.retired for copy in node.copies.values())}
    own = [i for i, node in enumerate(known) if node.refs == int(not dropped) and id(node) not in others]
    first = rng.choice([*own, len(known)])
    pages: set[tuple[Tier, int]] = set()
    for node in known[first:]:
        for space, copy in node.copies.items():
            pages.add((space.tier, copy.page))
            told[f"damaged page in {space.tier.value}"] += 1
            told["damaged page in flight"] += copy.moves > 0
    told["damaged after its drop"] += dropped and bool(pages)
    for t in r.tables:
        for tier, column in ((Tier.HBM, t.device), (Tier.DRAM, t.host)):
            pages |= {(tier, copy.page) for copy in column[first * core.cfg.page_size // t.unit:]
                      if copy is not None and copy.node is None}
    executor.damage({r.rid, *(row.request.rid for row in late if row.request.phase is Phase.DONE)}, pages)
    return told


def path(core: Core, r: Request) -> list[Node]:
    """The sealed pages of a request, also if it has been dropped."""
    return _named(core, r) if r.phase is Phase.DROPPED else r.path


def distrusted(core: Core, r: Request) -> list[Node]:
    """The pages that nobody may start from once `r` is found to be damaged: its own, and if it has ever
    given up its KV all that have its tokens, for those it may have computed. Where it goes on with pages
    that nobody finds any more, what is found now is not of its making."""
    lost_track = r.life and not (r.path and r.path[0].banished)
    return _named(core, r) if lost_track else r.path


def _named(core: Core, r: Request) -> list[Node]:
    """The sealed pages that have the tokens of a request."""
    size, path = core.cfg.page_size, list[Node]()
    node = core.have.tree.roots.get(r.arrived.namespace)
    while node is not None and (len(path) + 1) * size <= len(r.tokens):
        node = node.children.get(r.page_key(len(path), size))
        path += [] if node is None else [node]
    return path
