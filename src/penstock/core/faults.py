"""A request whose KV is not sound, and those that have read its pages.

Pages are shared once they are sealed, which may be before it is known that they are damaged. So a request
that names one is computed again, from pages of its own; and one that fails is computed again once if it
began with pages that it had not computed itself: the bad token may be another's.
"""
from __future__ import annotations

from penstock.core.lifecycle import Trigger
from penstock.core.plan import Outcome, Unstore
from penstock.core.request import Request
from penstock.core.state import CoreState


def damaged(core: CoreState, r: Request) -> None:
    """The executor saw that the KV of `r` is not sound: no request starts from its pages or goes on with
    them."""
    kv = core.kv
    if r.invalid_through and kv.retired <= r.invalid_through:
        return                                 # a step that read what has been given up since
    path = list(kv.tainted_by(r))
    if r.borrows and not r.retried:
        r.retried = True
        compute_again(core, r)
    else:
        core.end(r, Outcome.ABORT)
    kv.leave(all=True)
    if keys := kv.moves.invalidate(path):
        core.out.append(Unstore(keys))
    for q in list(core.live.values()):
        if q.path and q.path[0].banished:
            core.counters["computed_again"] += 1
            compute_again(core, q)


def compute_again(core: CoreState, r: Request) -> None:
    """Give up the KV of `r`, which is computed anew. Of steps in flight no result counts."""
    r.disown_steps()
    if r.grant is not None and r.pushed > r.grant.start:
        core.end(r, Outcome.LOST)              # the decode instance has some of it, and computes it
    elif (r.phase, Trigger.DROP) in core.edges:
        core.transition(r, Trigger.DROP)
