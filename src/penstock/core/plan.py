"""Messages that cross the core boundary: events in, a numbered plan and outputs out.

Standard library only; every type is immutable. Nothing else crosses: the simulator and the real
executor are driven by exactly these values, so a recorded run replays without a device.
What a step makes many of is a NamedTuple: a frozen dataclass takes two to four times as long to make.
Page lists carry the cache group they belong to; lengths in a plan are upper bounds, results are
ragged (0 to k tokens a row).

What a device knows of a row: for each cache group a table of pages, each with a device page, a host
page or both, and a hot buffer. A step writes a position to every copy of its page that the table
names, and reads it from the device page if there is one, else through the hot buffer from the host.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NewType, Protocol, TypeAlias

from penstock.core.pair.messages import Message

RequestId = NewType("RequestId", int)   # made by the server, never by a client
Row = NewType("Row", int)               # slot of a request in the device-resident tables
HbmPage = NewType("HbmPage", int)       # page of the device pool
DramPage = NewType("DramPage", int)     # page of the host pool
DiskPage = NewType("DiskPage", int)     # slot of the storage tier
Page: TypeAlias = HbmPage | DramPage | DiskPage    # whichever tier a Move names
StepId = NewType("StepId", int)         # dense, starts at 1; 0 means "before the first step"
MoveId = NewType("MoveId", int)
PeerId = NewType("PeerId", int)         # an engine of the other role: 0 .. `CoreConfig.peers` - 1
Group = NewType("Group", int)           # cache group: layers that share a page table
make = tuple.__new__    # of a NamedTuple: its own constructor is a Python function, and takes twice as long
ONE_PEER = PeerId(0)    # where there is one
NO_HBM, NO_DRAM = HbmPage(-1), DramPage(-1)        # table entry without a page in that tier


class Tier(Enum):
    __hash__ = object.__hash__   # members are singletons; ten times faster

    HBM = "hbm"
    DRAM = "dram"
    DISK = "disk"          # a local file, an object store, a remote KV store
    PEER = "peer"          # the other engine of a prefill/decode pair


class Outcome(Enum):
    """Why a request ended; the value is what users see as `finish_reason`."""

    STOP = "stop"          # stop token or stop string
    LENGTH = "length"      # max_tokens, context length, or the last page
    ABORT = "abort"        # the client went away or asked for it
    EXPIRED = "timeout"    # waited longer than its deadline
    REFUSED = "refused"    # can never fit; `Finished.reason` has the numbers
    SENT = "sent"          # a prefill engine has handed it over
    LOST = "lost"          # a prefill engine could not: its peer cancelled, went away, or a push failed
    WARMED = "warmed"      # what storage has of its prompt is in host memory: it asked for no more


# ---------------------------------------------------------------- events in
@dataclass(frozen=True, slots=True)
class Arrived:
    """A new request. `prompt` is non-empty, `max_new` >= 1, both checked by the server before."""

    rid: RequestId
    prompt: tuple[int, ...]
    max_new: int
    stop: frozenset[int] = frozenset()     # token ids that end it (and are emitted)
    min_new: int = 0                       # stop ids count only from this many tokens on
    namespace: int = 0                     # root of the prefix tree: tenant, salt, adapter; 64 bits
    priority: int = 0                      # lower is served first, as in vLLM
    leader: RequestId | None = None        # fork (`n` > 1): wait for this one's prompt, then share
    selects: bool = False                  # its decode reads a selection of its KV: it may go hosted
    attention: int = 0                     # identity of what its decode computes, if that differs
                                           # from a prefill of the same tokens; 0: it does not
    transfer: int = 0                      # names it to the other engine of a pair; 0: no other
    peer: PeerId = ONE_PEER                # which engine that is
    cached_max: int | None = None          # so many tokens at most are taken from what is cached: what lies
                                           # behind them is to be computed in any case
    drafts: int | None = None              # of a step, at most; None: as many as the engine takes
    session: int = 0                       # whose pages go first once it has ended; 0: none
    warms: bool = False                    # it ends when storage has been read: no token is computed
    retains: bool = False                  # from now on the pages of its session are to go last


NAME_BITS = 40      # of a session's number; those above are of its tenant


def key_of(session: int) -> int:
    """Return what the numbers of all sessions of one tenant have in common."""
    return session >> NAME_BITS


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """No request of this session follows: pages that no other has used are evicted first. An unknown number has no
    effect."""

    session: int


@dataclass(frozen=True, slots=True)
class RetentionEnded:
    """Pages of this session do not go last any more. An unknown number has no effect."""

    session: int


@dataclass(frozen=True, slots=True)
class Aborted:
    """The client went away. `damaged`: the executor saw that its KV is not sound, in the step that has just
    retired: no other request may start from it, and one that began with pages of others is computed again
    once instead, see `core.faults`."""

    rid: RequestId
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class Stopped:
    """The detokenizer found a stop string inside the first `count` output tokens. May come late."""

    rid: RequestId
    count: int


@dataclass(frozen=True, slots=True)
class Paused:
    """Policy (or a test) asks that `rid` give up its row for now."""

    rid: RequestId


@dataclass(frozen=True, slots=True)
class Dropped:
    """Policy (or a test) asks that `rid` give up its KV and recompute it later."""

    rid: RequestId


@dataclass(frozen=True, slots=True)
class Spilled:
    """Policy (or a test) asks that `rid` go on from host pages."""

    rid: RequestId


@dataclass(frozen=True, slots=True)
class Promoted:
    """Policy (or a test) asks that `rid` come back to device pages."""

    rid: RequestId


@dataclass(frozen=True, slots=True)
class Flushed:
    """Forget every cached page that no request holds."""


@dataclass(frozen=True, slots=True)
class Republish:
    """Readers of `Advance.cached` have missed some: clear it, and report all pages again, over several turns."""


@dataclass(frozen=True, slots=True)
class Expired:
    """A deadline passed: `rid` is still in the phase that `Entered` told of. A late one, from
    another visit, has no effect. QUEUED, and DROPPED before it ever had a row, end the request; FETCHING
    and RECEIVING go on without what is missing."""

    rid: RequestId
    phase: str
    visit: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured speeds: what fetching one page from storage and computing one token take."""

    disk_page_us: float
    prefill_token_us: float


@dataclass(frozen=True, slots=True)
class HotUse:
    """What steps up to `step` have selected since the last of these: for each row the request, units of its
    hosted groups, and how many of them no device page held. Late or absurd, it changes no token."""

    step: StepId
    rows: tuple[tuple[RequestId, int, int], ...]


@dataclass(frozen=True, slots=True)
class Retired:
    """`step` has executed on every rank. `tokens[i]` are the tokens of the i-th row of the plan that
    has `samples` set, in plan order: 0 to `count` of them for a decoding row, 0 or 1 after a prompt.
    The KV that counts ends before the last of them; with 0 the row's last input is computed again.
    """

    step: StepId
    tokens: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """No byte of Move `id` will move any more, on any rank. `ok` is False if its bytes are not
    all in place and verified: a failed copy to a lower tier is forgotten, a failed load is a miss
    and its source is not read again. Of its first `good` pages that is not so: they have arrived."""

    id: MoveId
    ok: bool
    good: int = 0


@dataclass(frozen=True, slots=True)
class Listed:
    """The one answer to a Lookup, in bounded time. `present[i]` has bit g set if storage has the page of its
    key i in cache group g; keys behind its end were not found."""

    rid: RequestId
    visit: int
    present: bytes


@dataclass(frozen=True, slots=True)
class Received:
    """A message from the other engine of a pair."""

    message: Message
    peer: PeerId = ONE_PEER


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """A connection to this peer was made. Requests that arrive from now on are known there too."""

    peer: PeerId = ONE_PEER


@dataclass(frozen=True, slots=True)
class PeerLeft:
    """The connection to this peer is closed and drained to its end: no write of it can land any more, and
    nothing that was said on it will be answered."""

    peer: PeerId = ONE_PEER


@dataclass(frozen=True, slots=True)
class Claimed:
    """Prefill role: a request that arrived for a peer that says nothing, so that it has waited with its KV,
    is now another one's."""

    rid: RequestId
    transfer: int
    peer: PeerId


Event: TypeAlias = (Arrived | Aborted | Stopped | Paused | Dropped | Spilled | Promoted | Flushed | Republish
                    | Expired | Rates | HotUse | Retired | Moved | Listed | Received | PeerJoined | PeerLeft
                    | Claimed | SessionEnded | RetentionEnded)


# ---------------------------------------------------------------- plan out
@dataclass(frozen=True, slots=True)
class Hot:
    """One unit of a row's hot buffer: device memory for one page. `keeps` is the table entry whose
    content it holds already (it was that entry's device page until now), or -1."""

    page: HbmPage
    keeps: int = -1


@dataclass(frozen=True, slots=True)
class Bind:
    """(Re)initialise a row before this step: everything the device remembers about it is void.

    `pages[g][i]` and `host[g][i]` are the copies of page i of cache group g; `host` and `hot` are
    empty where no page of the row is on the host. Every step that has had the row, or the request, has
    retired: with several stages the last one samples into it when the first one is steps ahead.
    """

    row: Row
    rid: RequestId
    pages: tuple[tuple[HbmPage, ...], ...]
    emitted: int                              # output tokens retired so far (sampling state)
    host: tuple[tuple[DramPage, ...], ...] = ()
    hot: tuple[tuple[Hot, ...], ...] = ()     # of each group


class Grow(NamedTuple):
    """Append pages to a row's page table before this step: entry `index` and those behind it. `host` is
    empty or as long. What is appended ends the table, so a device needs no mirror of its length."""

    row: Row
    group: Group
    index: int               # type: ignore[assignment]  # not the method of a tuple
    pages: tuple[HbmPage, ...]
    host: tuple[DramPage, ...] = ()


@dataclass(frozen=True, slots=True)
class Remap:
    """Table entries of a row that is bound have these copies from this step on, each as long as `entries`;
    NO_HBM, NO_DRAM: none there. All loads of a device page have landed. What is hot stays hot."""

    row: Row
    group: Group
    entries: tuple[int, ...]
    device: tuple[HbmPage, ...]
    host: tuple[DramPage, ...]


@dataclass(frozen=True, slots=True)
class HotResize:
    """The hot buffer of a row that is bound has these pages from this step on. It is longer or shorter by
    its end: what stays at its index keeps its content, what comes is empty, what goes is forgotten. Where
    there was none, what comes may hold an entry already (`keeps`); with no pages there is none any more."""

    row: Row
    group: Group
    pages: tuple[Hot, ...]


class Move(NamedTuple):
    """Copy whole pages, or the first `tokens` tokens of them, between tiers of one node.

    Between engines it names positions: `first` and the `tokens` from there on, which each side maps
    to its own pages. To PEER it is a push, whose `dst_pages` are empty. From PEER it is a grant, whose
    `src_pages` are empty: the pages may be written by the peer under this transfer and generation,
    and the core itself knows when that ends. Of one group there may be two, of a tier each: what comes goes
    into both, the second of which has whole pages only.

    Reads its source after step `after` has executed and answers with exactly one `Moved(id)`, not
    later than the `Retired` of a step that waits for it.
    Within a node `src_pages[i]` goes to `dst_pages[i]`; both have the same length, at least 1. A page of
    storage is found by `keys[i]`, which says what it holds; its slot only counts what the core remembers.
    """

    id: MoveId
    group: Group
    src: Tier
    src_pages: tuple[Page, ...]
    dst: Tier
    dst_pages: tuple[Page, ...]
    tokens: int                               # of all the pages together; the last may be partial
    after: StepId
    first: int = 0
    transfer: int = 0
    generation: int = 0
    peer: PeerId = ONE_PEER
    keys: tuple[bytes, ...] = ()              # see `CoreConfig.store_root`


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward step, struct-of-arrays: entry i of every column is the i-th batch row.

    A row that decodes carries no token: its tokens are -1, the first is its last sampled one and further
    ones are drafts. It starts where the device's own length says: `start` and `count` are upper bounds
    as long as results of earlier steps are out.
    A plan without rows carries binds, grows and moves only; it retires like any other.
    Order on the device: binds, grows, remaps, resizes, forward, moves (each not before its `after`).
    The forward reads what `waits` write: it may run a layer when its part of them is in place.
    """

    step: StepId
    rows: tuple[Row, ...]
    rids: tuple[RequestId, ...]
    start: tuple[int, ...]          # first position computed
    count: tuple[int, ...]          # tokens computed, >= 1; decode is 1, and drafts if there are any
    samples: tuple[bool, ...]       # whether this row samples after its last position
    tokens: tuple[int, ...]         # flat input ids, sum(count); -1: see above
    grows: tuple[Grow, ...]
    binds: tuple[Bind, ...]
    moves: tuple[Move, ...]
    remaps: tuple[Remap, ...] = ()
    waits: tuple[MoveId, ...] = ()  # loads of earlier plans or this one
    resizes: tuple[HotResize, ...] = ()


# ---------------------------------------------------------------- outputs
class Token(NamedTuple):
    """`token` is output number `index` (0, 1, 2, ... without gap or repeat) of `rid`."""

    rid: RequestId
    index: int               # type: ignore[assignment]  # not the method of a tuple
    token: int


@dataclass(frozen=True, slots=True)
class Started:
    """`rid` was admitted. Cached tokens by tier they were found in, and those whose KV the other
    engine of a pair has computed; the rest is computed."""

    rid: RequestId
    hbm_tokens: int
    dram_tokens: int
    disk_tokens: int = 0
    peer_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Entered:
    """`rid` has entered a phase that may have a deadline; `Expired` repeats phase and visit."""

    rid: RequestId
    phase: str
    visit: int


@dataclass(frozen=True, slots=True)
class Finished:
    rid: RequestId
    outcome: Outcome
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Say:
    """A message for the other engine of a pair.
    They go out after the plan of the same `Advance` was submitted, and in order."""

    what: Message
    peer: PeerId = ONE_PEER


@dataclass(frozen=True, slots=True)
class Lookup:
    """Which of these pages does storage have? `rid` waits for the one `Listed` that repeats `visit`."""

    rid: RequestId
    visit: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Unstore:
    """Pages of these keys are damaged: storage never shows them again, and takes none."""

    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Used:
    """A request has begun with the pages of these keys, from the first of its prompt: storage, which may have
    them too, was not asked, and would take them for old."""

    keys: tuple[bytes, ...]


Output: TypeAlias = Token | Started | Entered | Finished | Say | Lookup | Unstore | Used


class StoredPages(NamedTuple):
    """Consecutive full pages of one prefix that can be found in `tier` from now on.

    hashes   63 bits of each page and all before it; `parent` is that of the page before the first, None: there is none
    keys     of each page its token ids, as `prefix_tree.pack` writes them
    """

    tier: Tier
    namespace: int
    parent: int | None
    hashes: tuple[int, ...]
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Cached:
    """What has changed about cached pages, in this order: with `cleared` all are gone; `stored`, those that others
    build on first; `removed`, by tier, those that build on others first. So a page that goes from one tier to a faster
    one is at no time in neither, and what builds on it stays. No page of `removed` was overwritten before."""

    cleared: bool
    removed: tuple[tuple[Tier, tuple[int, ...]], ...]
    stored: tuple[StoredPages, ...]


@dataclass(frozen=True, slots=True)
class Advance:
    plan: StepPlan | None
    outputs: tuple[Output, ...]
    cached: Cached | None = None    # with `CoreConfig.published_tiers`, if there is news: comes before the plan


# ---------------------------------------------------------------- who executes plans
class PlanExecutor(Protocol):
    """What a plan is handed to: real ranks (`exec`) or fake ones (`sim`).

    Promises: plans execute in `step` order on every rank; each ends in exactly one `Retired`, each
    Move in exactly one `Moved`; `poll` returns them in completion order, `Retired` in step order.
    """

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan. Never blocks on the device."""
        ...

    def poll(self, *, block: bool) -> Sequence[Event]:
        """Events since the last call; with `block`, at least one unless nothing is in flight."""
        ...
