"""What a fault of an engine does to one request's KV: wrong values, which nobody else may ever read.

The engine reports the request as damaged; a request that starts from its pages after that, or goes on with
them, gets wrong tokens, and the judge sees them. Those that name its pages at that moment are sound: they are
computed again, and must answer as if they were alone.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

from penstock.core.lifecycle import Phase
from penstock.core.plan import RequestId, Tier
from penstock.sim.ranks.executor import SimExecutor
from penstock.sim.world.view import Live, Sealed, View


def victim(view: View, rng: Random) -> RequestId | None:
    """Damage shows in results, so mostly it is somebody with a step in flight; of those, the phases
    that follow a row are met as often as all with a row."""
    live = [r for r in view.live if r.path or view.is_issued(r) or r.computed]
    if rng.random() < 0.9:
        live = [r for r in live if view.is_issued(r)] or live
    if rng.random() < 0.5:
        live = [r for r in live if r.row is None] or live
    return rng.choice(live).rid if live else None


def is_stale(view: View, r: Live) -> bool:
    """Whether what is reported now was seen in a step whose results of `r` count no more."""
    return 0 < r.invalid_through and view.retired <= r.invalid_through


def sharers(view: View, r: Live) -> list[Live]:
    """Other requests that name a page of those that are given up with `r`."""
    gone = distrusted(view, r)[:1]
    return [q for q in view.live if q is not r and any(sealed in q.path for sealed in gone)]


def strike(view: View, executor: SimExecutor, r: Live, rng: Random) -> Counter[str]:
    """`r` is about to be aborted as damaged: from some page on that nobody else names, its KV is wrong
    in every tier. Returns what there was to damage."""
    told = Counter({"damaged": 1})
    dropped, known = r.phase is Phase.DROPPED, path(view, r)
    late = view.overtaken()
    # Results of a request that was dropped count, so what they read must be right. Those of one that has
    # ended do not.
    others = {sealed for q in late if q is not r and q.phase is not Phase.DONE for sealed in view.sealed(q)}
    # What nobody finds any more may be read for somebody who has left it.
    others |= {sealed for sealed in known if view.is_banished(sealed) and any(
        copy.last_step > view.retired for copy in view.copies(sealed))}
    mine = range(min(r.origin.own_from, len(known)), len(known))      # what it may have computed itself
    own: Sequence[int] = [i for i in mine
                          if view.readers(known[i]) == int(not dropped) and known[i] not in others]
    shared = sharers(view, r) if view.cfg.role == "unified" and rng.random() < 0.5 else []
    if shared and not others:
        own = mine                             # theirs too: what they have is computed again
        told["damaged beside a sound one"] = len(shared)
    first = rng.choice([*own, len(known)])
    pages: set[tuple[Tier, int]] = set()
    for sealed in known[first:]:
        for copy in view.copies(sealed):
            pages.add((copy.tier, copy.page))
            told[f"damaged page in {copy.tier.value}"] += 1
            told["damaged page in flight"] += copy.is_moving
    told["damaged after its drop"] += dropped and bool(pages)
    for t, group in zip(r.tables, view.cfg.groups, strict=True):
        begin = first * view.cfg.page_size // (group.page_tokens or view.cfg.page_size)
        for tier, column in ((Tier.HBM, t.device), (Tier.DRAM, t.host)):
            pages |= {(tier, page.page) for page in column[begin:] if page is not None and page.node is None}
    executor.damage({r.rid, *(q.rid for q in shared), *(q.rid for q in late if q.phase is Phase.DONE)}, pages)
    return told


def path(view: View, r: Live) -> list[Sealed]:
    """The sealed pages of a request, also if it has been dropped."""
    return list(view.sealed(r)) if r.phase is Phase.DROPPED else r.path


def distrusted(view: View, r: Live) -> list[Sealed]:
    """The pages that no request may start from once `r` is found to be damaged: those that it may have
    computed, and if it has ever given up its KV all such that have its tokens."""
    if not r.kv_epoch:
        return r.path[r.origin.own_from:]
    return [] if r.path and view.is_banished(r.path[-1]) else list(view.sealed(r))[r.origin.own_from:]
