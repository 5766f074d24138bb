"""What a request that has begun does with its pages: sealing, growing, and moving between tiers.

Pausing and staging copy down what the host lacks; a spill turns device pages into the hot buffer; a
promotion brings pages back while the row goes on. Who does which of these is decided elsewhere.
"""
from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from penstock.core.ledger import Fence, Pool
from penstock.core.lifecycle import Phase, Place
from penstock.core.plan import StepId, Tier
from penstock.core.request import Request, Table
from penstock.core.tree import Copy, Node, Space, Tree

if TYPE_CHECKING:
    from penstock.core.holdings import Holdings

_HOST, _HBM, _DRAM = Place.HOST, Tier.HBM, Tier.DRAM    # Python 3.11 takes 0.1 us to find a member of an Enum
_PROMOTING, _STAGING = Phase.PROMOTING, Phase.STAGING


def own(column: list[Copy | None], i: int) -> Copy | None:
    return column[i] if i < len(column) else None


def put(column: list[Copy | None], i: int, copy: Copy) -> None:
    """Enter a pinned copy. Columns are as long as their last entry."""
    copy.pins += 1
    column += [None] * (i + 1 - len(column))
    column[i] = copy


# ---------------------------------------------------------------- sealing and write-through
def seal(have: Holdings, r: Request) -> None:
    """Move pages whose tokens have all retired from the request into the tree."""
    size, first, path, tree = have.cfg.page_size, len(r.path), r.path, have.tree
    known = min(r.settled, len(r.tokens)) // size
    for i in range(first, known):
        parent = path[-1] if path else tree.root(r.arrived.namespace)
        node = tree.child(parent, r.page_key(i, size))
        tree.use(node)
        path.append(node)
    lower = have.cfg.dram_pages > 0
    store: list[tuple[int, Node]] = []         # in this way: list[...]() takes twenty times as long
    for g, t in enumerate(r.tables):
        new: list[Node] = []
        device, host, unit = have.device[g], have.host[g], t.unit
        for i in range(first * size // unit, known * size // unit):
            node = path[(i + 1) * unit // size - 1]
            there, up = node.copies, t.device[i] if i < len(t.device) else None
            if not lower:
                _offer(have, r, g, i, node, up, None)
                continue
            down = t.host[i] if i < len(t.host) else None
            # What storage is still to bring has been computed here: a read that hangs keeps it from nobody.
            known_below = False
            if host in there:
                mine = up or down
                known_below = have.below(node, g, None if mine is None or mine.partial else mine) is not None
            _offer(have, r, g, i, node, up, down)
            if host not in there and node.ready(device):
                new.append(node)
            elif not known_below and node.ready(host):
                store.append((g, node))            # written there at the source: no copy will end
        if new:
            write_through(have, g, new, r)
        if t.reach:
            leave_behind(have, r, g, t)
    if store and have.cfg.disk_pages and have.cfg.prefix_cache:
        have.copies.store(store)
    if lower and any(have.late):
        _catch_up(have)


def _offer(have: Holdings, r: Request, g: int, i: int, node: Node,
           up: Copy | None, down: Copy | None) -> None:
    """The copies of a page that was just sealed serve others, where the tree has none."""
    if up is not None:
        _share(have.tree, node, have.device[g], up)
    if down is not None:
        _share(have.tree, node, have.host[g], down)
        if r.place is not _HOST and r.phase is not _STAGING:
            drop_entry(have, r, g, r.tables[g].host, i)      # the host copy is the tree's now, or a twin
        elif up is not None and not up.ready and r.phase is _PROMOTING:
            _load(have, r, g, [(i, node)])


def _share(tree: Tree, node: Node, space: Space, copy: Copy) -> None:
    if (copy.node is None and not copy.partial and space not in node.copies
            and (copy.ready or copy.filling)):
        tree.attach(node, space, copy)


def write_through(have: Holdings, g: int, nodes: list[Node], r: Request) -> None:
    """Copy sealed pages to the host, as far as there is room; reserved pages are used first. The rest is
    copied when the next pages are sealed, if there is room then."""
    todo: list[Node] = []
    host, reserve = have.host[g], r.reserve[g]
    pool, attach = host.pool, have.tree.attach
    if (n := len(nodes) - len(reserve)) > 1:
        have.room(Tier.DRAM, [n * k for k in have.one(g)])     # evicts in one go; what that gives is taken
    for i, node in enumerate(nodes):
        if not (reserve or pool.free or have.room(Tier.DRAM, have.one(g))):
            have.late[g] += nodes[i:]
            break
        attach(node, host, Copy(reserve.pop() if reserve else pool.acquire(1)[0], None, False))
        todo.append(node)
    have.copies.save(todo, have.device[g], host)


def _catch_up(have: Holdings) -> None:
    """Save pages that were sealed when the host was full, or what is sealed behind them serves nobody."""
    for late, device, host in zip(have.late, have.device, have.host, strict=True):
        todo: list[Node] = []
        while late and (host.pool.free or have.room(Tier.DRAM, have.one(host.group))):
            node = late.popleft()
            if node.ready(device) and host not in node.copies and not node.banished:
                have.tree.attach(node, host, Copy(host.pool.acquire(1)[0], ready=False))
                todo.append(node)
        have.copies.save(todo, device, host)


def leave_behind(have: Holdings, r: Request, g: int, t: Table) -> None:
    """The window has moved on: pages that no step will read again are given up."""
    begin = min(t.begin(r.settled), len(t.device))
    if begin <= t.first:
        return
    for i in range(t.first, begin):
        for column in (t.device, t.host):
            if own(column, i) is not None:
                drop_entry(have, r, g, column, i)
    t.first = begin


def drop_entry(have: Holdings, r: Request, g: int, column: list[Copy | None], i: int) -> None:
    """Give up one page of a column."""
    copy, column[i] = column[i], None
    space = have.device[g] if column is r.tables[g].device else have.host[g]
    if copy is not None:
        have.unpin(r, space, copy)


# ---------------------------------------------------------------- growing
def grow(have: Holdings, r: Request, upto: int) -> bool:
    """Pages for positions below `upto`, in every group, or nothing."""
    host, promoting = r.place is _HOST, r.phase is _PROMOTING
    hbm, dram, new_up, new_down = [0] * len(r.tables), [0] * len(r.tables), 0, 0
    for g, t in enumerate(r.tables):
        on_host = host and t.hosted
        n = -(-upto // t.unit) - len(t.host if on_host else t.device)
        if n <= 0:
            continue
        if on_host:
            dram[g] = n
            if n > (free := have.host[g].pool.free):
                new_down += n - free
        if promoting or not on_host:
            hbm[g] = n
            if n > (free := have.device[g].pool.free):
                new_up += n - free
    # Where each new page could have a slab of its own, nobody need count slabs. A single pool has none.
    if (new_up > len(have.arenas[_HBM].free) or new_down > len(have.arenas[_DRAM].free)) and not (
            have.room(_HBM, hbm) and have.room(_DRAM, dram)):
        return False
    for g, t in enumerate(r.tables):
        if up := hbm[g]:
            _extend(have.device[g].pool, t.device, up)
        if down := dram[g]:
            _extend(have.host[g].pool, t.host, down)
            if not up:
                t.device += [None] * (len(t.host) - len(t.device))
        elif up and r.may_host and not host:
            _twin(have, r, g, t, up)
    r.capacity = have.covered(r, r.place)
    return True


def _extend(pool: Pool, column: list[Copy | None], n: int) -> None:
    last = column[-1] if column else None
    for page in pool.acquire(n, None if last is None else last.page):
        column.append(Copy(page, None, True, 1))


def _twin(have: Holdings, r: Request, g: int, t: Table, n: int) -> None:
    """Where a decoding row may spill, its new pages are on the host from their first token on: that is
    where they go when they are sealed, so it is worth evicting what is cached there."""
    if not (t.hosted and r.phase is Phase.RESIDENT):
        return
    for i in range(len(t.device) - n, len(t.device)):
        twin(have, g, t, i)


def twin(have: Holdings, g: int, t: Table, i: int) -> None:
    """A host page for entry i, which no step has written yet, if there is room."""
    pool = have.host[g].pool
    if pool.free or have.room(_DRAM, have.one(g)):
        put(t.host, i, Copy(pool.acquire(1)[0]))


def drop_twins(have: Holdings, r: Request) -> bool:
    """Give up the host pages of a row that is on the device: a spill will have to copy."""
    if r.place is _HOST or r.phase is _STAGING or not any([any(t.host) for t in r.tables]):
        return False
    for g, t in enumerate(r.tables):
        for i in range(len(t.host)):
            if t.host[i] is not None:
                drop_entry(have, r, g, t.host, i)
        t.host.clear()
    r.moved, r.steady = r.bound, 0             # its steps write them until it is bound again
    return True


# ---------------------------------------------------------------- to the host: PAUSED, STAGING
def unsaved(have: Holdings, r: Request, phase: Phase) -> list[int]:
    """Host pages of each group that pausing or staging needs at most: for what has no host copy."""
    want, staging = [0] * len(r.tables), phase is Phase.STAGING
    for g, t in enumerate(r.tables):
        if staging and not t.hosted:
            continue
        for i in range(t.begin(r.computed), len(t.device) if staging else t.end(r.computed)):
            node = have.node(r, t, i)
            want[g] += own(t.host, i) is None and (
                node is None or have.below(node, g, own(t.device, i)) is None)
    return want


def reserve(have: Holdings, r: Request, phase: Phase) -> bool:
    """Take the host pages that pausing or staging may need. False: nothing has changed."""
    want = unsaved(have, r, phase)
    pinned = _pin_host(have, r) if phase is Phase.STAGING else []
    if not have.room(Tier.DRAM, want):
        for g, i in pinned:
            drop_entry(have, r, g, r.tables[g].host, i)
        return False
    for g, n in enumerate(want):
        r.reserve[g] += have.host[g].pool.acquire(n)
    return True


def _pin_host(have: Holdings, r: Request) -> list[tuple[int, int]]:
    """What the host has of a row that is being staged must stay there: the group and entry of each page."""
    pinned: list[tuple[int, int]] = []
    for g, t in enumerate(r.tables):
        for i in range(len(t.device) if t.hosted else 0):
            node = have.node(r, t, i)
            if own(t.host, i) is None and node is not None and (
                    copy := have.below(node, g, own(t.device, i))):
                put(t.host, i, copy)
                pinned.append((g, i))
    return pinned


def copy_down(have: Holdings, r: Request, *, all_groups: bool) -> None:
    """No step of `r` is in flight: start the copies of all that the host lacks, and pin the rest.
    Pages that the reserve does not cover stay on the device."""
    for g, t in enumerate(r.tables):
        if not (all_groups or t.hosted):
            continue
        # The open page goes first: what is sealed can stay behind, or be found again.
        last = t.end(r.computed) - 1
        if last >= 0 and have.node(r, t, last) is None and own(t.host, last) is None and r.reserve[g]:
            put(t.host, last, Copy(r.reserve[g].pop()))
            source, target = t.device[last], t.host[last]
            assert source is not None and target is not None
            have.copies.move_private(r, have.device[g], source, have.host[g], target,
                                     r.computed - last * t.unit)
        bare: list[Node] = []
        for i in range(t.begin(r.computed), last + 1):
            node, mine = have.node(r, t, i), own(t.device, i)
            if node is None or own(t.host, i) is not None or (
                    have.below(node, g, mine) or have.host[g] in node.copies):
                continue
            if have.device[g] not in node.copies and mine is not None and not mine.partial:
                have.tree.attach(node, have.device[g], mine)      # its twin was evicted: ours serves
            if node.ready(have.device[g]):
                bare.append(node)
        if bare:
            write_through(have, g, bare, r)
        for i in range(t.begin(r.computed), last + 1):
            node = have.node(r, t, i)
            if node is not None and own(t.host, i) is None and (copy := node.good(have.host[g])):
                put(t.host, i, copy)
        if not all_groups:
            for i in range(last + 1, len(t.device)):              # nothing is in them yet
                if own(t.host, i) is None and r.reserve[g]:
                    put(t.host, i, Copy(r.reserve[g].pop()))
    return_reserve(have, r)


def return_reserve(have: Holdings, r: Request) -> None:
    for g, pages in enumerate(r.reserve):
        have.host[g].pool.release(pages, Fence(StepId(0)))
        r.reserve[g] = []


def park(have: Holdings, r: Request) -> None:
    """All steps of a paused request have retired: pin host copies, then let go of the device."""
    copy_down(have, r, all_groups=True)
    for g, t in enumerate(r.tables):           # the twin of what its prompt would have left open
        for i in range(t.end(r.computed), len(t.host)):
            drop_entry(have, r, g, t.host, i)
    r.is_parked = True
    let_go_of_device(have, r)


def let_go_of_device(have: Holdings, r: Request) -> None:
    """A parked request keeps device pages that have no copy below, and those being copied."""
    r.settling = False
    for g, t in enumerate(r.tables):
        for i in range(len(t.device)):
            below = own(t.host, i)
            if t.begin(r.computed) <= i < t.end(r.computed) and (below is None or not below.ready):
                r.settling |= below is not None
            elif t.device[i] is not None:
                drop_entry(have, r, g, t.device, i)


def is_staged(have: Holdings, r: Request) -> bool:
    """Every page of a row that is being staged is on the host."""
    return not r.moves and all(
        (copy := own(t.host, i)) is not None and copy.ready
        for t in r.tables if t.hosted for i in range(len(t.device)))


# ---------------------------------------------------------------- hosted, and back
def heat(have: Holdings, r: Request) -> bool:
    """The hot buffer of a row that was resident: its own last pages, content and all."""
    want = [0] * len(r.tables)
    keep: dict[int, list[int]] = {}
    for g, t in enumerate(r.tables):
        if t.hosted:
            mine = [i for i, c in enumerate(t.device) if c is not None and c.pins == 1 and not c.moves]
            keep[g] = mine[-r.hot:]
            want[g] = r.hot - len(keep[g])
    if not have.room(Tier.HBM, want):
        return False
    for g, entries in keep.items():
        t = r.tables[g]
        for i in entries:
            copy, t.device[i] = t.device[i], None
            assert copy is not None
            if copy.node is not None:
                del copy.node.copies[have.device[g]]
                copy.node = None
            t.hot.append(copy)
            t.kept[copy.page] = i
        t.hot += [Copy(page, pins=1) for page in have.device[g].pool.acquire(want[g])]
    have.lend(r)
    return True


def reload(have: Holdings, r: Request, spare: int) -> bool:
    """Device pages for everything that a hosted row has on the host, and the loads of what is
    sealed. The open page follows when it is sealed; pages begun from now on are on both sides."""
    have.lent.remove(r)                        # what it has already is no loan any more
    want = [sum(c is None for c in t.device) if t.hosted else 0 for t in r.tables]
    for g, t in enumerate(r.tables):
        for i in range(len(t.device) if want[g] else 0):
            node = have.node(r, t, i)
            if t.device[i] is None and node is not None and (copy := node.good(have.device[g])):
                put(t.device, i, copy)
                want[g] -= 1
    if not have.room(Tier.HBM, have.with_spare(Tier.HBM, want, spare)):
        have.lend(r)
        return False
    for g, t in enumerate(r.tables):
        if pages := have.device[g].pool.acquire(want[g])[::-1]:
            new = [i for i, copy in enumerate(t.device) if copy is None]
            for i in new:
                put(t.device, i, Copy(pages.pop(), ready=False))
            _load(have, r, g, [(i, node) for i in new if (node := have.node(r, t, i)) is not None])
    return True


def is_reloaded(r: Request) -> bool:
    """Every page of a row that is being promoted is on the device."""
    return not r.moves and all(c is not None and c.ready
                               for t in r.tables if t.hosted for c in t.device)


def stop_reload(have: Holdings, r: Request) -> None:
    """A promotion is given up: pages that are in place stay as a loan, the others go."""
    for g, t in enumerate(r.tables):
        for i, copy in enumerate(t.device if t.hosted else ()):
            if copy is not None and not (copy.ready and i < r.told[g] and have.node(r, t, i)):
                drop_entry(have, r, g, t.device, i)
                if i < r.told[g]:
                    r.yielded[g].append(i)
    have.lend(r)


def leave_host(have: Holdings, r: Request) -> None:
    """A row that has come back to the device keeps only the host twins of what is not sealed."""
    for g, t in enumerate(r.tables):
        for i in range(len(t.host)):
            if t.host[i] is not None and (not t.hosted or have.node(r, t, i) is not None):
                drop_entry(have, r, g, t.host, i)


def _load(have: Holdings, r: Request, g: int, entries: list[tuple[int, Node]]) -> None:
    """Fill device pages that a promotion has reserved, of pages that are sealed: all in one Move."""
    t, up, down = r.tables[g], have.device[g], have.host[g]
    pairs: list[tuple[Copy, Copy]] = []
    private = False
    for i, node in entries:
        source, target = t.host[i], t.device[i]
        assert source is not None and target is not None
        if target.filling:
            continue
        if up not in node.copies:
            have.tree.attach(node, up, target)
        private |= node.copies[up] is not target or node.copies.get(down) is not source
        target.ready = False
        pairs.append((source, target))
    have.copies.move_sealed(pairs, down, up, r if private else None)


# ---------------------------------------------------------------- waiting, and losing
def missing(r: Request) -> list[Copy] | None:
    """Device pages that are still being loaded; None if something else is not in place either."""
    out: list[Copy] = []
    for t in r.tables:
        if not all(c is None or c.ready for c in t.host):
            return None
        if r.place is Place.DEVICE or not t.hosted:
            out += [c for c in t.device if c is not None and not c.ready]
    return out


def last_missing(columns: Iterable[list[Copy | None]]) -> list[Copy]:
    """One page that is not in place, if any: as long as it is not, they are not all."""
    for column in columns:
        for copy in reversed(column):          # pages come in order: it is among the last
            if copy is not None and not copy.ready:
                return [copy]
    return []


def is_coming(r: Request) -> bool:
    """Whether host pages of a row that is being staged are on their way, or none is missing."""
    hosted = [t for t in r.tables if t.hosted]
    return (any(c is not None and not c.ready for t in hosted for c in t.host)
            or all(own(t.host, i) is not None for t in hosted for i in range(len(t.device))))


def lose(have: Holdings, r: Request, lost: Collection[Copy]) -> bool:
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
                    drop_entry(have, r, g, column, i)
                    node = have.node(r, t, i)
                    if (r.phase is Phase.PAUSED and column is t.host and node is not None
                            and node.ready(have.device[g])):
                        if own(t.device, i) is None:
                            put(t.device, i, node.copies[have.device[g]])
    return found
