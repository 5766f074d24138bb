"""What a fault of an engine does to one request's KV: wrong values, which nobody else may ever read.

The engine aborts the request as damaged; whoever starts from its pages after that gets wrong tokens,
and the judge sees them. Pages that others name at that moment are left as they are: who named them goes on
with them. The judge knows them, and lets nobody else start from them.
"""
from __future__ import annotations

from collections import Counter
from random import Random

from penstock.core.lifecycle import Phase
from penstock.core.plan import RequestId, Tier
from penstock.sim.executor import SimExecutor
from penstock.sim.view import Live, Sealed, View


def victim(view: View, rng: Random) -> RequestId | None:
    """Damage shows in results, so mostly it is somebody with a step in flight; of those, the phases
    that follow a row are met as often as all with a row."""
    live = [r for r in view.live if r.path or view.is_issued(r) or r.computed]
    if rng.random() < 0.9:
        live = [r for r in live if view.is_issued(r)] or live
    if rng.random() < 0.5:
        live = [r for r in live if r.row is None] or live
    return rng.choice(live).rid if live else None


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
    own = [i for i, sealed in enumerate(known)
           if view.readers(sealed) == int(not dropped) and sealed not in others]
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
    executor.damage({r.rid, *(q.rid for q in late if q.phase is Phase.DONE)}, pages)
    return told


def path(view: View, r: Live) -> list[Sealed]:
    """The sealed pages of a request, also if it has been dropped."""
    return list(view.sealed(r)) if r.phase is Phase.DROPPED else r.path


def distrusted(view: View, r: Live) -> list[Sealed]:
    """The pages that nobody may start from once `r` is found to be damaged: its own, and if it has ever
    given up its KV all that have its tokens, for those it may have computed. Where it goes on with pages
    that nobody finds any more, what is found now is not of its making."""
    lost_track = r.kv_epoch > 0 and not (r.path and view.is_banished(r.path[0]))
    return list(view.sealed(r)) if lost_track else r.path
