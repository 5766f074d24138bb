"""From the device to the host: what pausing and staging copy down, and what failed copies take away."""
from __future__ import annotations

from collections.abc import Collection

from penstock.core.kv.claims import Claim
from penstock.core.kv.page_table import Column, enter_pinned, own, put
from penstock.core.kv.pages import Pages, Trial
from penstock.core.kv.prefix_tree import Copy, Node
from penstock.core.kv.sealing import write_through
from penstock.core.lifecycle import Phase
from penstock.core.plan import Tier
from penstock.core.request import Request


def reserve(kv: Pages, r: Request, phase: Phase) -> Trial:
    """Take the host pages that pausing or staging needs at most, for what has no host copy; or nothing.
    What the host has of a row that is being staged must stay there: it is pinned."""
    claim, staging = Claim(kv, r), phase is Phase.STAGING
    held, spare = list[tuple[Column, int, Copy]](), [list[Copy]() for _ in r.tables]
    for g, t in enumerate(r.tables):
        end = t.end(r.computed) if not staging else len(t.device) if t.hosted else 0
        for i in range(t.begin(r.computed), end):
            if own(t.host, i) is not None:
                continue
            node, find = kv.node(r, t, i), kv.take_host_copy if staging else kv.host_copy
            if node is None or (copy := find(node, g, own(t.device, i))) is None:
                spare[g].append(claim.want(Tier.DRAM, g))
            elif staging:
                held.append((t.host, i, claim.pin(copy)))
    if not (room := claim.commit()):
        return room
    for column, i, copy in held:
        enter_pinned(column, i, copy)
    for pages, copies in zip(r.reserve, spare, strict=True):
        pages += [copy.page for copy in copies]
    return True


def save_down(kv: Pages, r: Request, *, all_groups: bool) -> None:
    """No step of `r` is in flight: start the copies of all that the host lacks, and pin the rest.
    Pages that the reserve does not cover, or that the host has promised to others, stay on the device."""
    for g, t in enumerate(r.tables):
        if not (all_groups or t.hosted):
            continue
        # The open page goes first: what is sealed can stay behind, or be found again.
        last = t.end(r.computed) - 1
        if last >= 0 and kv.node(r, t, last) is None and own(t.host, last) is None and r.reserve[g]:
            put(t.host, last, Copy(r.reserve[g].pop()))
            source, target = t.device[last], t.host[last]
            assert source is not None and target is not None
            kv.moves.move_private(r, kv.device[g], source, kv.host[g], target,
                                     r.computed - last * t.unit)
        bare: list[Node] = []
        for i in range(t.begin(r.computed), last + 1):
            node, mine = kv.node(r, t, i), own(t.device, i)
            if node is None or own(t.host, i) is not None or (
                    kv.take_host_copy(node, g, mine) or kv.host[g] in node.copies):
                continue
            if kv.device[g] not in node.copies and mine is not None and not mine.partial:
                kv.tree.attach(node, kv.device[g], mine)      # the tree's was evicted: ours serves
            if node.ready(kv.device[g]):
                bare.append(node)
        if bare:
            write_through(kv, g, bare, r)
        if not all_groups:
            for i in range(last + 1, len(t.device)):              # nothing is in them yet
                if own(t.host, i) is None and r.reserve[g]:
                    put(t.host, i, Copy(r.reserve[g].pop()))
    kv.return_reserve(r)
    none = [0] * len(r.tables)
    for g, t in enumerate(r.tables):
        for i in range(t.begin(r.computed), t.end(r.computed) if all_groups or t.hosted else 0):
            node = kv.node(r, t, i)
            if node is not None and own(t.host, i) is None and (copy := node.good(kv.host[g])):
                was_loose = copy.loose is not None
                put(t.host, i, copy)
                if was_loose and own(t.device, i) is not None and kv.lacks(Tier.DRAM, none):
                    kv.drop_entry(r, g, t.host, i)                # it is promised to another


def save(kv: Pages, r: Request) -> None:
    """All steps of a paused request have retired: pin host copies, then let go of the device."""
    save_down(kv, r, all_groups=True)
    for g, t in enumerate(r.tables):           # the mirror of what its prompt would have left open
        for i in range(t.end(r.computed), len(t.host)):
            kv.drop_entry(r, g, t.host, i)
    r.is_saved = True
    let_go_of_device(kv, r)


def let_go_of_device(kv: Pages, r: Request) -> None:
    """A parked request keeps device pages that have no copy below, and those being copied."""
    r.is_saving, flying = False, kv.moves.flying
    for g, t in enumerate(r.tables):
        for i in range(len(t.device)):
            below = own(t.host, i)
            if t.begin(r.computed) <= i < t.end(r.computed) and (below is None or not below.ready):
                r.is_saving |= below is not None
                if below is not None and below.filled_by in flying:
                    flying[below.filled_by].savers[r] = None
            elif t.device[i] is not None:
                kv.drop_entry(r, g, t.device, i)


def is_staged(kv: Pages, r: Request) -> bool:
    """Every page of a row that is being staged is on the host."""
    return not r.moves and all(
        (copy := own(t.host, i)) is not None and copy.ready
        for t in r.tables if t.hosted for i in range(len(t.device)))


def is_coming(r: Request) -> bool:
    """Whether host pages of a row that is being staged are on their way, or none is missing."""
    hosted = [t for t in r.tables if t.hosted]
    return (any(c is not None and not c.ready for t in hosted for c in t.host)
            or all(own(t.host, i) is not None for t in hosted for i in range(len(t.device))))


def lose(kv: Pages, r: Request, lost: Collection[Copy]) -> bool:
    """Copies that nobody may read have gone. Whether `r` counts on one of them; if it only waits,
    it forgets them, and keeps what the device still has."""
    found = False
    for g, t in enumerate(r.tables):
        for column in (t.device, t.host):
            for i, copy in enumerate(column):
                if copy is None or copy not in lost:
                    continue
                found = True
                if r.row is None or r.phase is Phase.STAGING:
                    kv.drop_entry(r, g, column, i)
                    node = kv.node(r, t, i)
                    if (r.phase is Phase.PAUSED and column is t.host and node is not None
                            and node.ready(kv.device[g])):
                        if own(t.device, i) is None:
                            put(t.device, i, node.copies[kv.device[g]])
    return found
