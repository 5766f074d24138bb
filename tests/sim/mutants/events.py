"""Seeded bugs of KV events: a router knows of pages that are gone, or not of pages that are there."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mutants.registry import Real, instead_of, mutant, swapped
from penstock.core.core import Core
from penstock.core.kv.moves import FlyingMove, Moves
from penstock.core.kv.prefix_tree import Copy, Node, TierGroup, Tree
from penstock.core.plan import Advance, Event, StoredPages, Tier
from penstock.core.published import Published


def _silently(tree: Tree, touched: dict[Node, None] | None) -> None:
    """What was touched meanwhile is forgotten."""
    tree.touched = touched


@instead_of(Tree, "detach")
def eviction_not_published(real: Real, tree: Tree, node: Node, space: TierGroup) -> Copy:
    """A copy goes, and is not published as removed."""
    before = None if tree.touched is None else dict(tree.touched)
    copy: Copy = real(tree, node, space)
    _silently(tree, before)
    return copy


@instead_of(Tree, "banish")
def damage_not_published(real: Real, tree: Tree, node: Node) -> None:
    """Damaged pages stay published until they are evicted."""
    before = None if tree.touched is None else dict(tree.touched)
    real(tree, node)
    _silently(tree, before)


@instead_of(Moves, "finish")
def landing_not_published(real: Real, moves: Moves, flight: FlyingMove) -> None:
    """A copy that has arrived is not published, nor one that has failed withdrawn."""
    before = None if moves.tree.touched is None else dict(moves.tree.touched)
    real(moves, flight)
    _silently(moves.tree, before)


@instead_of(Tree, "flush")
def flush_not_published(real: Real, tree: Tree) -> None:
    """Pages that lookups do not find any more stay published until they are evicted."""
    before = tree.was_flushed
    real(tree)
    tree.was_flushed = before


@instead_of(Tree, "_look_serving", mode="model=3,prefix_cache=1")
def state_not_published(real: Real, tree: Tree, node: Node | None) -> None:
    """Pages after the last state serve no prompt, and stay published."""
    before = None if tree.touched is None else dict(tree.touched)
    real(tree, node)
    _silently(tree, before)


@mutant()
class PublishedBeforeItIsThere(Core):
    """A copy is published when the move that fills it is planned."""

    def advance(self, events: Sequence[Event]) -> Advance:
        with swapped(Published, "_found", _found_early):
            return super().advance(events)


def _found_early(real: Real, published: Published, node: Node) -> int:
    early = [copy for copy in node.copies.values() if not (copy.ready or copy.bad)]
    for copy in early:
        copy.ready = True
    found: int = real(published, node)
    for copy in early:
        copy.ready = False
    return found


@instead_of(Published, "_stored")
def child_published_before_its_parent(real: Real, published: Published,
                                      new: Iterable[tuple[Node, int]]) -> Iterator[StoredPages]:
    """An index drops a page whose parent it does not know."""
    yield from reversed(list(real(published, new)))


@instead_of(Published, "_removed")
def parent_removed_before_its_children(real: Real, published: Published, lost: Iterable[tuple[Node, int]],
                                       ) -> Iterator[tuple[Tier, tuple[int, ...]]]:
    """An index loses the pages that build on a removed one, and removes them twice."""
    for tier, hashes in real(published, lost):
        yield tier, hashes[::-1]


@instead_of(Published, "_look")
def withdrawn_without_its_children(real: Real, published: Published, node: Node, left: int) -> int:
    """A page goes from a tier, and those that build on it stay published there."""
    children, node.only, more, node.more = node.only, None, node.more, None
    now: int = real(published, node, left)
    node.only, node.more = children, more
    return now


@instead_of(Published, "_look")
def bound_of_a_turn_taken_for_the_end(real: Real, published: Published, node: Node, left: int) -> int:
    """Pages whose prefix is lost stay published where the turn may look at no more of them."""
    return max(0, real(published, node, left))
