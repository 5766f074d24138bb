"""Seeded bugs of requests whose KV is damaged: somebody else starts from their pages."""
from __future__ import annotations

from penstock.core.kv.cache import KVCache
from penstock.core.kv.moves import Moves
from penstock.core.kv.prefix_tree import Node, Tree
from penstock.core.request import Request
from penstock.sim.mutants.registry import Real, instead_of

MODE = "damages=8,pair=0,prefix_cache=1"


@instead_of(Moves, "invalidate", mode=MODE)
def damaged_pages_stay_cached(real: Real, copies: Moves, path: list[Node]) -> None:
    """A damaged request is aborted like any other: its pages wait for the next prefix hit."""


@instead_of(Moves, "invalidate", mode=MODE)
def only_the_last_page_is_distrusted(real: Real, copies: Moves, path: list[Node]) -> None:
    """The damage is looked for where it showed."""
    real(copies, path[-1:])


@instead_of(Tree, "banish", mode=MODE)
def damaged_pages_that_others_name_are_found(real: Real, tree: Tree, node: Node) -> None:
    """As long as requests overlap that share a damaged prefix, it stays in the cache."""


@instead_of(KVCache, "tainted_by", mode=MODE)
def damage_that_shows_after_a_drop(real: Real, have: KVCache, r: Request) -> list[Node]:
    """A request that was dropped with a step in flight names no page any more."""
    return list(r.path)
