"""Seeded bugs of requests whose KV is damaged: somebody else starts from their pages."""
from __future__ import annotations

from penstock.core.copies import Copies
from penstock.core.holdings import Holdings
from penstock.core.plan import Tier
from penstock.core.request import Request
from penstock.core.tree import Node
from penstock.sim.mutants.registry import Real, instead_of

MODE = "damages=8,pair=0,prefix_cache=1"


@instead_of(Copies, "distrust", mode=MODE)
def damaged_pages_stay_cached(real: Real, copies: Copies, path: list[Node]) -> None:
    """A damaged request is aborted like any other: its pages wait for the next prefix hit."""


@instead_of(Copies, "distrust", mode=MODE)
def damage_shows_on_the_device_only(real: Real, copies: Copies, path: list[Node]) -> None:
    """What was written through is believed to be good."""
    for node in reversed(path):
        for space, copy in tuple(node.copies.items()):
            if not (space.tier is not Tier.HBM or node.refs or copy.moves or copy.pins):
                copies.tree.forget(node, space)


@instead_of(Copies, "distrust", mode=MODE)
def storage_keeps_what_was_damaged(real: Real, copies: Copies, path: list[Node]) -> None:
    """Only memory is cleaned."""
    kept = [(node, space, node.copies.pop(space)) for node in path for space in tuple(node.copies)
            if space.tier is Tier.DISK and not node.refs]
    for node, _, _ in kept:
        node.refs += 1                         # so that it outlives its other copies
    real(copies, path)
    for node, space, copy in kept:
        node.refs -= 1
        node.copies[space] = copy


@instead_of(Copies, "distrust", mode=MODE)
def damaged_copy_in_flight_lands_as_good(real: Real, copies: Copies, path: list[Node]) -> None:
    """Copies that fly are left alone, and nobody remembers why they should not serve."""
    real(copies, [node for node in path if not any(copy.moves for copy in node.copies.values())])


@instead_of(Copies, "distrust", mode=MODE)
def only_the_last_page_is_distrusted(real: Real, copies: Copies, path: list[Node]) -> None:
    """The damage is looked for where it showed."""
    real(copies, path[-1:])


@instead_of(Holdings, "named", mode=MODE)
def damage_that_shows_after_a_drop(real: Real, have: Holdings, r: Request) -> list[Node]:
    """A request that was dropped with a step in flight names no page any more."""
    return list(r.path)
