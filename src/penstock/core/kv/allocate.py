"""Who holds what: one acquire and one release for all leases of a request, and the way in.

`Core` says which phase a request enters; `KVCache` takes all that the phase requires or nothing, and gives
up what it does not allow, behind fences. The way in is one function, `enter`: the first admission, a resume
from host pages, a resume after a drop, a prefix hit in any tier, to device pages or to host pages.
"""
from __future__ import annotations

from collections.abc import Collection

from penstock.core.kv import claims, offload, prefetch, promote
from penstock.core.kv.claims import Claim, Entry, GroupAllocation, Load, mirror
from penstock.core.kv.listing import NO_ROW, UNDERWAY, PrefixMatch, SourceNotReady, Trial
from penstock.core.kv.page_table import enter_pinned, own, take_all, unpin
from penstock.core.kv.pages import NONE_LEFT, Headroom, Pages
from penstock.core.kv.pool import Fence
from penstock.core.kv.prefix_tree import Copy, Node
from penstock.core.lifecycle import Lease, Phase, Place, State
from penstock.core.plan import NO_HBM, HbmPage, Row, Tier
from penstock.core.request import FAILED_SAVES_MAX, Request


class KVCache(Pages):
    """Pages, rows and who has them. Every method keeps `check` true."""

    def acquire(self, r: Request, state: State, leases: Collection[Lease], headroom: Headroom = NONE_LEFT) -> Trial:
        """Make `r` hold what `state` requires, or change nothing. On the way in so much must be left over
        that those of `headroom`, who run, can grow."""
        phase, place = state
        if Lease.ROW in leases and r.row is None:
            return enter(self, r, place, headroom)
        if phase is Phase.PAUSED or place is Place.TO_HOST:
            return offload.reserve(self, r, spills=phase is Phase.DECODE)
        if phase is Phase.FETCHING:
            return prefetch.reserve(self, r)
        if phase is Phase.RECEIVING:
            return receive(self, r, place, headroom)
        if Lease.HOT in leases and not any(t.hot for t in r.tables):
            return promote.take_hot_buffer(self, r)
        if place is Place.TO_DEVICE:
            return promote.reload(self, r, headroom)
        return True

    def release(self, r: Request, leases: Collection[Lease]) -> None:
        """Give up all of these leases that `r` holds."""
        if Lease.HOT in leases and r.place.on_host and any(t.hot for t in r.tables):
            self.pin_resident(r)
        for lease in leases:
            if lease is Lease.ROW and r.row is not None:
                self.rows.release([r.row], Fence(r.last_issue))      # a promise of `Bind`
                r.leave_row()
                self.reserve_pages(r, r.place, r.held.reserved, -1)
            elif lease is Lease.HOT:
                self._free_hot_buffer(r)
            elif lease is Lease.DRAM:
                for g, t in enumerate(r.tables):
                    self.drop_column(r, g, t.host)
                self.return_reserve(r)
            elif lease in (Lease.HBM, Lease.DEVICE_ONLY):
                for g, t in enumerate(r.tables):
                    if t.hosted == (lease is Lease.HBM):
                        self.drop_column(r, g, t.device)

    def _free_hot_buffer(self, r: Request) -> None:
        if any(t.hot for t in r.tables):
            r.end_hot()
        if r in self.grown:
            self.grown.remove(r)
        for g, t in enumerate(r.tables):
            for copy in take_all(t.hot):
                self.unpin(r, self.device[g], copy)
            t.kept = {}

    grow = claims.grow       # what a row writes next


# ---------------------------------------------------------------- the way in
LONG = 8_192         # pages of a hit


def enter(kv: Pages, r: Request, place: Place, headroom: Headroom) -> Trial:
    """Give `r` a row and all the pages that its known tokens need in `place`, or change nothing. Of what is
    still to be computed it takes the first pages now; the others are promised to it."""
    if not kv.rows.free:
        return NO_ROW
    found, is_old = None, r in kv.entering
    if r.phase in (Phase.QUEUED, Phase.DROPPED):
        if (entry := _name(kv, r, place)) is None:
            return UNDERWAY
        found = entry.found
        r.found.lost_by_group = entry.lost_by_group
        r.restart(len(r.path) * kv.cfg.page_size)
    else:
        if r.phase is Phase.FETCHING:
            found = _find(kv, r)
            if place is Place.HOST and r.setbacks.failed_saves >= FAILED_SAVES_MAX:
                kv.forget_path(r)            # computed in host pages, nothing is to be copied
                r.restart(0)
        if (entry := _resume(kv, r, place)) is None:
            return UNDERWAY
    if promote.load_some(kv, r, entry, headroom):
        kv.entering[r] = entry
        return UNDERWAY
    claim, parts, loaded = entry.claim, entry.parts, entry.loaded.ljust(len(r.path), b"\0")
    for g, part in enumerate(parts):
        _allocate_group(kv, r, g, place, claim, part)
    claim.reserve_pages(place, [w.reserved_pages for w in parts])
    if (early := _not_ready(parts)) is not None:
        return claim.refuse(early)
    if not (room := claim.commit(headroom)):
        if is_old and not kv.rows.num_held:    # some of what it would load may be on the device since (sim seed 15594)
            return enter(kv, r, place, headroom)
        room.found = found
        room.want = [n + w.reserved_pages * ((place is Place.HOST and t.hosted) == (room.tier is Tier.DRAM))
                     for n, w, t in zip(room.want, parts, r.tables, strict=True)]
        return room
    for w in parts if not claim.has_optional else ():
        if w.buffer:
            w.up = [None] * len(w.up)
    r.row = Row(kv.rows.acquire(1)[0])
    if len(r.path) > LONG:
        kv.may_start, kv.spent = False, claim
    for node in [node for g, w in enumerate(parts) for node in _take(kv, r, g, w)]:
        loaded[node.depth - 1] = 1
    r.found.loads = loaded.count(1)
    r.capacity = kv.covered(r, place)
    r.found.prefix = [w.pages for w in parts]
    r.found.arriving = [late for w in parts for late in (*w.late, *[(False, f.target) for f in w.loads],
                                                  *[(True, f.target) for f in w.saves])]
    if place is Place.HOST:
        kv.make_evictable(r)
    elif r.may_host and kv.cfg.role != "prefill":
        for g, t in enumerate(r.tables):       # what a prompt leaves open must be there if it is to spill
            if t.hosted and t.end(r.computed) < len(t.device) and not r.held.reserved[g]:
                mirror(kv, g, t, len(t.device) - 1)
    return True


def _resume(kv: Pages, r: Request, place: Place) -> Entry | None:
    """Pin what a request that was saved, fetched or received needs of what it has, as far as this turn allows.
    None: the next turn goes on."""
    entry = kv.entering.get(r)
    assert entry is None or isinstance(entry, Entry)
    if entry is None or entry.place is not place:
        kv.abandon(r)
        claim = Claim(kv, r)
        entry = Entry(place, [], claim.needed, claim.optional, claim=claim, parts=[GroupAllocation() for _ in r.tables])
    if r.phase is Phase.PAUSED:
        kv.entering[r] = entry
        for g, part in enumerate(entry.parts):
            at, most = len(part.up), kv.hits_most
            ended = _have(kv, r, g, place, entry.claim, part, most)
            kv.hits_left -= len(part.up) - at
            if not ended:
                return None
        del kv.entering[r]
    return entry


def _name(kv: Pages, r: Request, place: Place) -> Entry | None:
    """Match, name and pin what is cached of a request that has nothing yet, as far as this turn allows. None:
    the next turn goes on."""
    before = kv.hits_left
    entry = kv.entering.get(r)
    assert entry is None or isinstance(entry, Entry)
    if entry is not None and (entry.place is not place or (r.path and r.path[-1].banished)):
        kv.abandon(r)
        entry = None
    if entry is not None:
        entry.is_fresh = False
    else:
        size, claim = kv.cfg.page_size, Claim(kv, r, path=True)
        useful = min(r.num_tokens - 1, r.cached_max) // size
        entry = kv.entering[r] = Entry(
            place, list(r.found.hint[:useful]), claim.needed, claim.optional, claim=claim,
            parts=[GroupAllocation() for _ in r.tables])
        entry.is_hinted = bool(entry.nodes)
        if place is Place.HOST and r.setbacks.failed_saves >= FAILED_SAVES_MAX:
            entry.nodes, entry.found = [], PrefixMatch(None, 0, 0, {})  # nothing is to be copied
            entry.is_fresh = True
    while entry.found or _match(kv, r, entry):
        if not _pin(kv, r, entry):
            if r not in kv.entering:           # it ends earlier than what was named
                return _name(kv, r, place)
            if entry.found:
                return None
        elif entry.is_fresh or (entry.lost_by_group and entry.again and kv.rows.num_held):
            if not entry.is_fresh and kv.refuses(r, r.path) is not None:
                entry.found = None             # what a group keeps of it has gone since: it ends earlier
                continue
            if len(r.path) > LONG and before - kv.hits_left > kv.cfg.hit_pages // 4 and kv.rows.num_held:
                return None                    # it has had its part of this turn: the rest is a turn's too
            break
        else:                                  # the tree may know more by now
            entry.again, entry.lost_by_group, entry.end, entry.found = bool(entry.lost_by_group), {}, None, None
    else:
        return None
    del kv.entering[r]
    r.hint(())
    return entry


def _match(kv: Pages, r: Request, entry: Entry) -> bool:
    """Find the end of what is cached. False: the turn's share is used up."""
    nodes = entry.nodes
    if entry.end is None:
        n = len(nodes)
        ended = kv.extend(r, nodes, most=kv.hits_most)
        kv.hits_left -= len(nodes) - n
        if not ended:
            return False
        entry.end, entry.is_fresh = (nodes[-1] if nodes else None, len(nodes)), True
    if entry.found is None:
        n = len(nodes)
        ended = kv.cut_back(r, nodes, entry.lost_by_group, most=kv.hits_most)
        kv.hits_left -= n - len(nodes)
        if not ended:
            return False
        if entry.lost_by_group and entry.is_hinted:  # by pages that the tree may have lost, or made anew
            entry.is_hinted, entry.lost_by_group, entry.end = False, {}, None
            del nodes[len(r.path):]
            return _match(kv, r, entry)
        last, known = entry.end
        entry.found = PrefixMatch(last, known, known - len(nodes), entry.lost_by_group)
    return True


def _pin(kv: Pages, r: Request, entry: Entry) -> bool:
    """Name what was matched, and pin the copies that it needs, page by page. False: the turn's share is used
    up; or the tree has lost some since, and what is left is to be matched again."""
    nodes, path, at = entry.nodes, r.path, len(r.path)
    if at > len(nodes):
        kv.abandon(r)                          # it ends earlier now
        return False
    last = path[-1] if path else kv.tree.roots.get(r.arrived.namespace)
    whole = [g for g, t in enumerate(r.tables) if not t.reach]
    device = kv.device[whole[0]] if len(whole) == 1 else None
    parts = [(g, entry.parts[g], entry.place is Place.HOST and r.tables[g].hosted) for g in whole]
    flushed, pin = kv.tree.flushed, entry.claim.pin
    for i in range(at, min(len(nodes), at + kv.hits_most)):
        node = nodes[i]
        up = node.find(device) if device is not None else None
        if (node.parent is not last or node.banished or node.last_used <= flushed or node.first is None
                or ((up is None or up.flags) and not all([kv.is_reachable(node, g) for g in whole]))):
            del nodes[i:]
            entry.end, entry.found, entry.lost_by_group = None, None, {}
            break
        path.append(node)
        for g, part, hosted in parts:          # pinned first: then it has no place in an order of eviction
            copy = up or node.find(kv.device[g])
            if copy is None and not hosted:    # then the host has it
                source, target = node.copy_in(kv.host[g]), entry.claim.want(Tier.HBM, g)
                part.loads.append(Load(i, node, pin(source), target, len(entry.pins) - 1))
                part.up.append(target)
                part.pages.append(NO_HBM)
            elif copy is None or copy.flags or not copy.ready or hosted:
                _page(kv, r, g, i, node, part, entry.claim, entry.place)
            else:
                part.up.append(pin(copy))
                part.pages.append(HbmPage(copy.page))
        kv.tree.ref(node)
        last = node
    kv.hits_left -= len(path) - at
    return entry.found is not None and len(path) == len(nodes)


def receive(kv: Pages, r: Request, place: Place, headroom: Headroom) -> Trial:
    """Pages for the prompt of `r`, which another engine will write, or nothing. What is cached here is
    kept where it is; the rest begins at `retired`."""
    found, n = _find(kv, r), r.num_prompt
    parts, claim = list[GroupAllocation](), Claim(kv, r, path=True)
    for g, t in enumerate(r.tables):
        part, begin, new = GroupAllocation(), t.begin(n), max(r.retired // t.unit, t.begin(n))
        on_host = place is Place.HOST and t.hosted
        part.up, part.down = [None] * new, [None] * new
        for i in range(begin, new):
            node = kv.node(r, t, i)
            assert node is not None, f"request {r.rid}: page {i} of {t.group.name} is lost"
            column, copy = part.up, node.good(kv.device[g])
            if copy is None:
                column, copy = part.down, node.good(kv.host[g])
            assert copy is not None, f"request {r.rid}: page {i} of {t.group.name} is lost"
            column[i] = claim.pin(copy)
        column, tier = (part.down, Tier.DRAM) if on_host else (part.up, Tier.HBM)
        column += [claim.want(tier, g) for _ in range(t.end(n) - new)]
        parts.append(part)
    if not (room := claim.commit(headroom)):
        room.found = found
        return room
    r.found.loads = len({id(n) for g, w in enumerate(parts) for n in _take(kv, r, g, w)})
    return True


def _not_ready(parts: list[GroupAllocation]) -> SourceNotReady | None:
    """What is still being loaded cannot be copied on to the host yet: its load flies beside that copy."""
    return next((SourceNotReady(f.source) for w in parts for f in w.saves if not f.source.ready), None)


def _find(kv: Pages, r: Request) -> PrefixMatch:
    """Name what of the known tokens has KV somewhere, and set `computed`."""
    found = kv.name_path(r)
    r.found.lost_by_group = found.lost_by_group
    for g, t in enumerate(r.tables):
        for i, copy in enumerate(t.host):      # what it has fetched may have been banished since
            if copy is not None and copy.node is not None and copy.node.banished:
                kv.drop_entry(r, g, t.host, i)
    r.restart(len(r.path) * kv.cfg.page_size)
    return found


def _allocate_group(kv: Pages, r: Request, g: int, place: Place, claim: Claim, part: GroupAllocation) -> None:
    """What group g has of `r`, and what is still to be had, behind what its way has already."""
    t = r.tables[g]
    known, done = min(r.num_tokens, r.compute_limit), t.end(r.computed)
    # A window moves on: its pages are taken as they are needed. Of everything else so many are sure to come.
    end = t.end(r.computed + 1) if t.group.reach else min(t.end(known), done + kv.cfg.take_pages)
    part.reserved_pages = 0 if t.group.reach else t.end(known) - end
    hosted = place is Place.HOST and t.hosted
    _have(kv, r, g, place, claim, part, done)
    for _ in range(len(part.up), end):
        if hosted:
            part.down.append(claim.want(Tier.DRAM, g))
        part.up.append(None if hosted else claim.want(Tier.HBM, g))
    part.buffer = [claim.want(Tier.HBM, g) for _ in range(r.hot.least if hosted else 0)]


def _have(kv: Pages, r: Request, g: int, place: Place, claim: Claim, part: GroupAllocation, most: int) -> bool:
    """Up to `most` more of the pages of group g that have KV become its way's. Returns whether those are all."""
    t, at = r.tables[g], len(part.up)
    done = t.end(r.computed)
    if not at:
        at = t.begin(r.computed)
        part.up = [None] * at
        hosted = place is Place.HOST and t.hosted
        part.down, part.pages = [None] * (hosted * at), [NO_HBM] * (at * (not hosted))
    end = min(done, at + most)
    for i in range(at, end):
        if any([copy is not None and copy.node is None for copy in (own(t.device, i), own(t.host, i))]):
            part.own.append(i)
        _page(kv, r, g, i, kv.node(r, t, i), part, claim, place)
    return end == done


def _page(kv: Pages, r: Request, g: int, i: int, node: Node | None, part: GroupAllocation, claim: Claim,
          place: Place) -> None:
    """Page i of group g, which has KV, becomes the next of its way."""
    if place is Place.HOST and r.tables[g].hosted:
        part.down.append(_entry(kv, r, g, i, node, part, claim, host=True))
        copy = node.good(kv.device[g]) if node is not None else None
        part.up.append(claim.pin_optional(copy) if copy is not None and copy.ready else None)
    else:
        part.up.append(copy := _entry(kv, r, g, i, node, part, claim, host=False))
        part.pages.append(HbmPage(copy.page))


def _entry(kv: Pages, r: Request, g: int, i: int, node: Node | None, part: GroupAllocation, claim: Claim, *,
           host: bool) -> Copy:
    """Page i of group g where it is wanted, or a new one that is filled from the other side. The device
    may still be loading what is to be saved, see `_not_ready`."""
    t = r.tables[g]
    sides = (t.device, kv.device[g], part.loads), (t.host, kv.host[g], part.saves)
    column, space, fills = sides[host]
    below, other, _ = sides[not host]
    copy, source = own(column, i), own(below, i)
    detached = kv.moves.detached
    if host and copy is not None and copy.node is not None and copy.node is node:
        kv.take_host_copy(node, g, source)            # it has fetched it, and may have to let go of that
    if copy is None or copy in detached:
        copy = None if node is None else kv.take_host_copy(node, g, source) if host else node.good(space)
    if copy is not None:
        if not copy.ready:
            part.late.append((host, copy))
        return claim.pin(copy)
    if (source is None or source in detached) and node is not None:
        source = node.good(other)
    assert source is not None and (host or source.ready), f"request {r.rid}: page {i} of group {g} is lost"
    target = claim.want(Tier.DRAM if host else Tier.HBM, g)
    fills.append(Load(i, node, claim.pin(source), target, len(claim.needed) - 1))
    return target


def _take(kv: Pages, r: Request, g: int, part: GroupAllocation) -> list[Node]:
    """Start the copies, and let go of what `r` had before. Returns the pages of its path that the device does
    not have."""
    t = r.tables[g]
    for copy in part.buffer:
        enter_pinned(t.hot, len(t.hot), copy)
    _start(kv, r, g, part.loads, up=True)
    _start(kv, r, g, part.saves, up=False)
    t.first = t.begin(r.computed)
    for f in part.loads:
        part.pages[f.entry] = HbmPage(f.target.page)
    _let_go(kv, r, g, part, *t.replace(part.up, part.down))
    on_host = [n for i in range(len(part.down)) if own(part.up, i) is None
               and (n := kv.node(r, t, i)) is not None]
    return [*on_host, *(f.node for f in part.loads if f.node is not None)]


def _let_go(kv: Pages, r: Request, g: int, part: GroupAllocation, device: list[Copy | None],
            host: list[Copy | None]) -> None:
    """`r` has new columns: what it had before is unpinned. Of a long table what is the tree's goes later, and
    only its private pages, which a Move may read, go at once."""
    t, end = r.tables[g], max(len(device), len(host))
    late = end > kv.cfg.take_pages
    for i in [*part.own, *range(t.end(r.computed), end)] if late and not t.reach else range(end):
        for space, old, new in ((kv.device[g], device, t.device), (kv.host[g], host, t.host)):
            if (copy := own(old, i)) is None:
                continue
            if own(new, i) is copy:
                unpin(copy)
            elif not late or copy.node is None:
                kv.unpin(r, space, copy)
            else:
                continue
            old[i] = None
    if late:
        tables = kv.tables()
        tables[g].replace(device, host)
        kv.freeing.append(r.part(tables, []))


def _start(kv: Pages, r: Request, g: int, fills: list[Load], *, up: bool) -> None:
    """Begin to copy. A sealed page becomes the tree's copy, unless the tree has one meanwhile or its
    source is private."""
    src, dst = (kv.host[g], kv.device[g]) if up else (kv.device[g], kv.host[g])
    t = r.tables[g]
    nodes: list[Node] = []
    for f in fills:
        f.target.partial = f.source.partial
        if f.node is not None and f.node.find(dst) is None and not f.source.partial:
            f.target.ready = False
            kv.tree.attach(f.node, dst, f.target)
        if f.node is not None and f.target.node is f.node and f.node.find(src) is f.source:
            nodes.append(f.node)
        else:
            tokens = min(r.computed - f.entry * t.unit, t.unit)
            node = f.node if f.target.node is not None else None
            kv.moves.move_private(r, src, f.source, dst, f.target, tokens, node)
        unpin(f.source)
    kv.moves.move_nodes(nodes, src, dst)


# ---------------------------------------------------------------- until all is there
def missing(r: Request) -> list[Copy] | None:
    """Device pages that are still being loaded; None if something else is not in place either."""
    r.found.arriving = [(below, copy) for below, copy in r.found.arriving if not copy.ready]
    return None if any([below for below, _ in r.found.arriving]) else [copy for _, copy in r.found.arriving]
