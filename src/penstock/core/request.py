"""What the core knows of one request. Data only; `Core` decides and `KVCache` moves units."""
from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.core.kv.page_table import PageTable
from penstock.core.kv.prefix_tree import Copy, Node, pack
from penstock.core.lifecycle import Phase, Place, State
from penstock.core.pair.protocol import Granted
from penstock.core.plan import Arrived, HbmPage, MoveId, RequestId, Row, StepId, Tier
from penstock.core.policy.sessions import SHARED, Session

_DECODE, _TO_HOST = Phase.DECODE, Place.TO_HOST       # Python 3.11 takes 0.1 us to find a member of an Enum
MISSED = 0.2                # of what a hosted row selects, until a HotUse says how much
PREEMPTIONS_MAX = 3         # times that a request gives way at most
FAILED_SAVES_MAX = 3        # copies to the host that fail again and again help nobody


@dataclass(slots=True, eq=False)
class ScheduledRow:
    """One row of a step in flight. A row that decodes as many tokens as before is the same object."""

    request: Request
    row: Row
    kv_epoch: int                              # the request's, when the step was issued
    count: int                                 # positions computed, at most
    width: int                                 # tokens it may return at most; 0: it does not sample
    last: bool = False                         # the end of what is known: decoding follows

    @property
    def samples(self) -> bool:
        return self.width > 0


@dataclass(slots=True, eq=False)
class HotBuffer:
    """Its hot buffer: pages in each hosted group, and what is known of how it reads through them."""

    least: int = 0                             # pages at least,
    most: int = 0                              # and at most, while pages lie idle;
    drafts: int = 0                            # so many its drafts need: they go when nothing cached is left
    missed: float = MISSED                     # of what its steps select, the part that no device page has
    has_news: bool = False                     # a HotUse has said so, since its size changed
    is_resized: bool = False                   # the device was not told of that yet,
    has_ended: bool = False                    # and may know of a buffer that it had before


@dataclass(slots=True, eq=False)
class FromStorage:
    """What storage is asked for, before it has a row."""

    keys: tuple[bytes, ...] = ()               # of its pages behind the first `first`: it waits for the answer
    first: int = -1
    is_due: bool = False                       # storage was not asked for it yet
    has_more: bool = False                     # while it fetches: not all of its pages are asked for
    next_missing: list[tuple[int, Node]] | None = None  # while it fetches: the first page, and its
                                               # group, that has not come; empty: all have; None: look
    fetched: int = 0                           # pages that came from there


@dataclass(slots=True, eq=False)
class Saving:
    """What it keeps while it waits."""

    is_done: bool = False                      # all of that is pinned
    is_copying: bool = False                   # some of it is still being copied
    at: tuple[int, int] | None = None          # so far, group and entry, its pages are saved to the host,
    unsaved: list[tuple[int, int]] = field(default_factory=list)  # but for those that are still being copied
    may_lack: bool = False                     # since it was paused, an entry has lost both its pages


@dataclass(slots=True, eq=False)
class Promotion:
    """On its way from host pages to the device."""

    loading: list[tuple[int, int]] = field(default_factory=list)  # group and entry of pages not in place
    reload_at: int | None = None               # entries below have device pages; None: all
    undone_at: int = -1                        # step before which it gave up a promotion


@dataclass(slots=True, eq=False)
class Remote:
    """The part of a remote instance in it."""

    grant: Granted | None = None               # prefill role: pages wait at the decode engine
    is_asked: bool = False                     # decode role: the other engine works for it, without a grant
    delivered: int = 0                         # decode role: positions that the other engine computed
    pushed: int = 0                            # prefill role: positions below it are on their way there,
    is_pushed: bool = False                    # and all of them


@dataclass(slots=True, eq=False)
class Reported:
    """What the device knows of its row. What has changed since, the next plan tells."""

    bound: bool = False                        # it has the row
    capacity: int = 0                          # positions that it has pages for
    lengths: list[int] = field(default_factory=list)    # per group: entries it knows of
    remapped: list[dict[int, None]] = field(default_factory=list)    # per group: entries with other copies now


@dataclass(slots=True, eq=False)
class Origin:
    """Who has computed its pages, for when one is found damaged."""

    shares_pages: bool = False                 # it began with pages that it may not have computed itself
    own_from: int = 1 << 60                    # pages behind so many of its path it may have computed itself
    retried: bool = False                      # it has failed, and is computed again without what is cached;
    doubted: list[Node] = field(default_factory=list)  # the pages that it had begun with


@dataclass(slots=True, eq=False)
class Setbacks:
    """How often it was held up."""

    preemptions: int = 0                       # times it gave up its row or its KV
    forced: int = 0                            # times something from outside may have made it do so
    failed_saves: int = 0                      # times that copies to the host have failed it, in a row
    passed_over: int = 0                       # steps that had no token for its short prompt


@dataclass(slots=True, eq=False)
class Found:
    """What of its tokens was cached."""

    hint: Sequence[Node] = ()                  # what was once matched: the tree may have lost it
    prefix: Sequence[list[HbmPage]] = ()       # of each group: pages on the device that its path begins with,
                                               # as it got its row; empty: look at the table
    arriving: list[tuple[bool, Copy]] = field(default_factory=list)    # of what it got with its row that which
                                               # is not in place yet, and whether it is on the host
    lost_by_group: Mapping[int, int] = field(default_factory=dict)  # pages behind it, by the group that lacks a part
    loads: int = 0                             # pages of its path that were not on the device


@dataclass(slots=True, eq=False)
class Held:
    """Pages that it has beside those of its tables."""

    reserve: list[list[int]]                   # per group: host pages not used yet
    reserved: list[int]                        # per group: pages that it is promised, and has not taken
    booked: tuple[Tier, list[int]] | None = None   # pages of each group promised to what goes on over turns


@dataclass(slots=True, eq=False)
class Request:
    """One request. Its tokens are known: the prompt, which all choices of it share, and retired outputs.
    Positions below `retired` have KV from retired steps. With steps in flight, `computed` and
    `num_placeholders` are upper bounds: of positions with KV, and of tokens sampled but not known yet."""

    arrived: Arrived
    seq: int                                   # arrival order
    max_new: int                               # clipped to what can ever fit
    outputs: list[int]                         # its tokens behind the prompt, of steps that have retired
    num_prompt: int
    tables: list[PageTable]                        # of each cache group
    compute_limit: int                         # positions that are computed at most
    may_host: bool = False                     # it selects, and host pages can hold it to its end
    drafts: int = 0                            # of a step in which it decodes, at most
    at_end: dict[tuple[Place, bool], tuple[list[int], list[int]]] = field(
        default_factory=dict)                  # pages, when asked for, also with the largest hot buffer
    phase: Phase = Phase.QUEUED
    place: Place = Place.DEVICE
    computed: int = 0
    retired: int = 0
    num_placeholders: int = 0
    last_issue: StepId = StepId(0)
    kv_epoch: int = 0                          # rises when KV is given up: late results are then tokens only
    invalid_through: StepId = StepId(0)        # results of steps up to this read what never came
    capacity: int = 0                          # positions that its tables have pages for
    started: bool = False                      # Started was sent
    visit: int = 0                             # phases entered so far: names one stay in a phase

    # What the planner need not look at, see `schedule`. Every change of phase ends it.
    issued: ScheduledRow | None = None         # its row of a step in which it decodes
    unchanged_until: int = 0                   # while `computed` is below, a step only counts on
    append_until: int = 0                      # while `retired` is below, a result only counts on

    blocked_on: list[Copy] = field(default_factory=list)  # its phase lasts until one of these is ready

    # Leases. `path` are its sealed pages in the tree.
    row: Row | None = None
    path: list[Node] = field(default_factory=list)
    is_runnable: bool = False                  # it waits for a row
    leader: Request | None = None              # a fork's, until that has begun to answer
    forks: list[Request] = field(default_factory=list)  # who waits for that
    read_to: int | None = None                 # it decodes from host pages, and has not unpinned all that it
                                               # reads on the device: entries below this; None: all
    session: Session = SHARED
    hot: HotBuffer = field(default_factory=HotBuffer)
    storage: FromStorage = field(default_factory=FromStorage)
    saving: Saving = field(default_factory=Saving)
    promotion: Promotion = field(default_factory=Promotion)
    remote: Remote = field(default_factory=Remote)
    reported: Reported = field(init=False)
    origin: Origin = field(default_factory=Origin)
    setbacks: Setbacks = field(default_factory=Setbacks)
    found: Found = field(default_factory=Found)
    held: Held = field(init=False)
    moves: set[MoveId] = field(default_factory=set)  # flying copies of its private pages
    step_depends_on: list[MoveId] = field(default_factory=list)  # loads that its next steps wait for

    rid: RequestId = field(init=False)         # of `arrived`: each result asks for it

    def __post_init__(self) -> None:
        self.rid = self.arrived.rid
        self.held = Held([[] for _ in self.tables], [0] * len(self.tables))
        self.reported = Reported(lengths=[0] * len(self.tables), remapped=[{} for _ in self.tables])

    # ---------------------------------------------------------------- what several modules tell it
    def begin(self) -> None:
        """It is in another phase: what was true of the last one is not any more."""
        self.visit += 1
        self.issued, self.unchanged_until, self.append_until = None, 0, 0
        self.blocked_on, self.storage.next_missing, self.storage.keys = [], None, ()
        if self.place is not Place.TO_DEVICE:
            self.promotion = Promotion(undone_at=self.promotion.undone_at)
        self.saving = Saving()

    def disown_steps(self) -> None:
        """No result of its steps in flight counts, through no fault of the planner."""
        self.invalid_through = self.last_issue
        self.setbacks.forced += 1

    def hint(self, nodes: Sequence[Node]) -> None:
        """The pages that its tokens begin with, as far as the tree has not lost them since."""
        self.found.hint = nodes

    def hand_over(self, tables: list[PageTable]) -> Request:
        """A request that has all pages of this one, which begins anew with empty tables."""
        other = self.part(self.tables, self.path)
        self.path, self.tables = [], tables
        return other

    def part(self, tables: list[PageTable], path: list[Node]) -> Request:
        """A request without a row that has these pages of this one, to give them up in later turns."""
        other = copy.copy(self)
        for name in PARTS:
            setattr(other, name, copy.copy(getattr(self, name)))
        other.tables, other.path, other.row, other.phase = tables, path, None, Phase.DROPPED
        other.moves, other.held = set(), Held([[] for _ in tables], self.held.reserved)
        return other

    @property
    def longest(self) -> int:
        """Entries of the longest device column of a hosted group."""
        return max([len(t.device) for t in self.tables if t.hosted], default=0)

    def restart(self, tokens: int) -> None:
        """So many of its tokens have KV, and no step in flight computes more."""
        self.computed = self.retired = tokens

    def take_prefix(self) -> Sequence[list[HbmPage]]:
        """Of each group the pages that need no look, once."""
        pages, self.found.prefix = self.found.prefix or [[] for _ in self.tables], ()
        return pages

    def follow(self, leader: Request) -> None:
        """It waits until `leader` has begun to answer."""
        self.leader, leader.append_until = leader, 0
        leader.forks.append(self)

    def resize(self) -> None:
        """Its hot buffer has another size, of which the device knows nothing yet."""
        self.hot.is_resized, self.hot.has_news, self.unchanged_until = self.reported.bound, False, 0

    def end_hot(self) -> None:
        """It has no hot buffer any more, of which the device may know."""
        self.hot.is_resized = self.hot.has_ended = self.reported.bound
        self.hot.drafts = 0

    def leave_row(self) -> None:
        self.row, self.reported.bound, self.found.prefix = None, False, ()

    def look(self) -> None:
        """Its row has news."""
        self.unchanged_until = 0

    # ---------------------------------------------------------------- what follows from the above
    @property
    def decodes(self) -> bool:
        """Whether steps take it that follow its prompt. It waits while its KV is on its way to the host."""
        return self.phase is _DECODE and self.place is not _TO_HOST

    @property
    def state(self) -> State:
        return State(self.phase, self.place)

    @property
    def key(self) -> tuple[int, int]:
        """Order of service: smaller first."""
        return self.arrived.priority, self.seq

    @property
    def num_hot(self) -> int:
        """Pages of its hot buffer, in each hosted group."""
        return max([len(t.hot) for t in self.tables])

    @property
    def hot_kept(self) -> int:
        """Of these, those that go last."""
        return max(self.hot.least, self.hot.drafts)

    @property
    def num_output(self) -> int:
        return len(self.outputs)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + len(self.outputs)

    @property
    def tokens(self) -> list[int]:
        """A copy of all of its tokens, which may be many: see `between`."""
        return [*self.arrived.prompt, *self.outputs]

    def between(self, start: int, end: int) -> Sequence[int]:
        """Its tokens from position `start` to `end`, as far as they are known."""
        n, prompt = self.num_prompt, self.arrived.prompt
        if end <= n:
            return prompt[start:end]
        return self.outputs[start - n:end - n] if start >= n else [*prompt[start:], *self.outputs[:end - n]]

    @property
    def todo(self) -> int:
        """Positions that can be planned now: known or pending tokens without KV."""
        return min(self.num_tokens + self.num_placeholders, self.compute_limit) - self.computed

    def page_key(self, index: int, page_size: int) -> Sequence[int]:
        """What names page `index` among its siblings: its tokens, and how they were computed where
        that is not what any prefill computes."""
        if self.arrived.attention and (index + 1) * page_size > self.num_prompt:
            return self.output_key(index, page_size, max(0, self.num_prompt - index * page_size))
        return pack(self.between(index * page_size, (index + 1) * page_size))

    @property
    def cached_max(self) -> int:
        """Tokens that it may take from what is cached."""
        if self.origin.retried:
            return 0
        return self.num_tokens if self.arrived.cached_max is None else self.arrived.cached_max

    def output_key(self, index: int, page_size: int, num_prompt: int) -> Sequence[int]:
        """The key of a page of which all but the first `num_prompt` tokens were decoded as this request
        selects: of that request, and for no prompt, which is computed with all of its KV."""
        tokens = self.between(index * page_size, (index + 1) * page_size)
        return pack((*tokens, -self.arrived.attention, -num_prompt))


# What `part` copies too.
PARTS = ("hot", "storage", "saving", "promotion", "remote", "reported", "origin", "setbacks", "found")
