"""A request whose KV is not sound, and those that have read its pages.

Pages are shared once they are sealed, which may be before it is known that they are damaged. So a request
that names one is computed again, from pages of its own. Pages that a request found when it began are not
given up with it: it is computed once more without them, and only if that succeeds they were at fault.
"""
from __future__ import annotations

from penstock.core.kv.prefix_tree import Node
from penstock.core.lifecycle import Phase, Trigger
from penstock.core.plan import Outcome, Unstore
from penstock.core.request import Request
from penstock.core.state import CoreState


def damaged(core: CoreState, r: Request) -> None:
    """The executor saw that the KV of `r` is not sound: no request starts from the pages that it has
    computed, or goes on with them."""
    kv = core.kv
    if r.invalid_through and kv.retired <= r.invalid_through:
        return                                 # a step that read what has been given up since
    path = kv.tainted_by(r)
    found, own = path[:r.origin.own_from], path[r.origin.own_from:]
    if r.origin.shares_pages and not r.origin.retried:
        r.origin.retried, r.origin.doubted = True, found
        core.counters["computed_again"] += 1
        kv.abandon(r)                          # it waits, and has pinned what it is to begin without
        compute_again(core, r)
    else:
        core.end(r, Outcome.ABORT)
    for q in _naming(core, own[:1]):
        if q in kv.entering:                   # it has no row yet, and has read none of them
            kv.abandon(q)
            if q.phase is not Phase.PAUSED:
                continue
        core.counters["computed_again"] += 1
        compute_again(core, q)
    kv.free_gradually(all=True)
    _banish(core, own)                         # no request names them: they go at once


def _banish(core: CoreState, path: list[Node]) -> None:
    if keys := core.kv.moves.invalidate(path):
        core.out.append(Unstore(keys))


def _naming(core: CoreState, first: list[Node]) -> list[Request]:
    return [r for node in first for r in core.live.values() if r.path[node.depth - 1:node.depth] == [node]]


def succeeded(core: CoreState, r: Request) -> None:
    """A request that had failed is sound without the pages that it had begun with: no request finds them
    any more. One that names them goes on: it fails by itself, or they do it no harm."""
    path, r.origin.doubted = r.origin.doubted, []
    _banish(core, path)


def compute_again(core: CoreState, r: Request) -> None:
    """Give up the KV of `r`, which is computed anew. Of steps in flight no result counts."""
    r.disown_steps()
    if r.remote.grant is not None and r.remote.pushed > r.remote.grant.start:
        core.end(r, Outcome.LOST)              # the decode instance has some of it, and computes it
    elif (r.phase, Trigger.DROP) in core.edges:
        core.transition(r, Trigger.DROP)
