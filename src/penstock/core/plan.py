"""Messages that cross the core boundary: events in, a numbered plan and outputs out.

Standard library only; every type is immutable. Nothing else crosses: the simulator and the real
executor are driven by exactly these values, so a recorded run replays without a device.
Page lists carry the cache group they belong to; lengths in a plan are upper bounds, results are
ragged (0 to k tokens a row).
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol, TypeAlias

RequestId = NewType("RequestId", int)   # made by the server, never by a client
Row = NewType("Row", int)               # slot of a request in the device-resident tables
HbmPage = NewType("HbmPage", int)       # page of the device pool
DramPage = NewType("DramPage", int)     # page of the host pool
DiskPage = NewType("DiskPage", int)     # slot of the storage tier
Page: TypeAlias = HbmPage | DramPage | DiskPage    # whichever tier a Move names
StepId = NewType("StepId", int)         # dense, starts at 1; 0 means "before the first step"
MoveId = NewType("MoveId", int)
Group = NewType("Group", int)           # cache group: layers that share a page table


class Tier(Enum):
    HBM = "hbm"
    DRAM = "dram"
    DISK = "disk"          # a local file, an object store, a remote KV store


class Outcome(Enum):
    """Why a request ended; the value is what users see as `finish_reason`."""

    STOP = "stop"          # stop token or stop string
    LENGTH = "length"      # max_tokens, context length, or the last page
    ABORT = "abort"        # the client went away or asked for it
    EXPIRED = "timeout"    # waited longer than its deadline
    REFUSED = "refused"    # can never fit; `Finished.reason` has the numbers


# ---------------------------------------------------------------- events in
@dataclass(frozen=True, slots=True)
class Arrived:
    """A new request. `prompt` is non-empty, `max_new` >= 1, both checked by the server before."""

    rid: RequestId
    prompt: tuple[int, ...]
    max_new: int
    stop: frozenset[int] = frozenset()     # token ids that end it (and are emitted)
    min_new: int = 0                       # stop ids count only from this many tokens on
    namespace: int = 0                     # root of the prefix tree: tenant, salt, adapter
    priority: int = 0                      # lower is served first, as in vLLM
    leader: RequestId | None = None        # fork (`n` > 1): wait for this one's prompt, then share
    host_token: bool = False               # each step needs its last token on the host (a grammar)


@dataclass(frozen=True, slots=True)
class Aborted:
    """The client went away. `damaged`: the executor saw that its KV is not sound, so no other
    request may start from it."""

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
class Flushed:
    """Forget every cached page that no request holds."""


@dataclass(frozen=True, slots=True)
class Expired:
    """A deadline passed: `rid` is still in the phase that `Entered` told of. A late one, from
    another visit, has no effect. QUEUED ends the request; FETCHING goes on without the rest."""

    rid: RequestId
    phase: str
    visit: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured speeds: what fetching one page from storage and computing one token take."""

    disk_page_us: float
    prefill_token_us: float


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
    and its source is not read again."""

    id: MoveId
    ok: bool


Event: TypeAlias = (Arrived | Aborted | Stopped | Paused | Dropped | Flushed | Expired | Rates
                    | Retired | Moved)


# ---------------------------------------------------------------- plan out
@dataclass(frozen=True, slots=True)
class Bind:
    """(Re)initialise a row before this step: everything the device remembers about it is void."""

    row: Row
    rid: RequestId
    pages: tuple[tuple[HbmPage, ...], ...]    # page table of each cache group
    emitted: int                              # output tokens retired so far (sampling state)


@dataclass(frozen=True, slots=True)
class Grow:
    """Append pages to a row's page table before this step."""

    row: Row
    group: Group
    pages: tuple[HbmPage, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """Copy whole pages, or the first `tokens` tokens of them, between tiers of one node.

    Reads its source after step `after` has executed and answers with exactly one `Moved(id)`.
    `src_pages[i]` goes to `dst_pages[i]`; both sides have `len` >= 1 and the same length.
    """

    id: MoveId
    group: Group
    src: Tier
    src_pages: tuple[Page, ...]
    dst: Tier
    dst_pages: tuple[Page, ...]
    tokens: int                               # of all the pages together; the last may be partial
    after: StepId


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward step, struct-of-arrays: entry i of every column is the i-th batch row.

    A row whose first token is -1 starts where the device's own length says: `start` and `count` are
    upper bounds as long as results of earlier steps are out. Further tokens of -1 are drafts.
    A plan without rows carries binds, grows and moves only; it retires like any other.
    Order on the device: binds, grows, forward, moves (each not before its `after`).
    """

    step: StepId
    rows: tuple[Row, ...]
    rids: tuple[RequestId, ...]
    start: tuple[int, ...]          # first position computed
    count: tuple[int, ...]          # tokens computed, >= 1; decode is 1, and drafts if there are any
    samples: tuple[bool, ...]       # whether this row samples after its last position
    tokens: tuple[int, ...]         # flat input ids, sum(count); -1 = the row's last sampled token
    grows: tuple[Grow, ...]
    binds: tuple[Bind, ...]
    moves: tuple[Move, ...]


# ---------------------------------------------------------------- outputs
@dataclass(frozen=True, slots=True)
class Token:
    """`token` is output number `index` (0, 1, 2, ... without gap or repeat) of `rid`."""

    rid: RequestId
    index: int
    token: int


@dataclass(frozen=True, slots=True)
class Started:
    """`rid` was admitted. Cached tokens by tier it was found in; the rest is computed."""

    rid: RequestId
    hbm_tokens: int
    dram_tokens: int
    disk_tokens: int = 0


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


Output: TypeAlias = Token | Started | Entered | Finished


@dataclass(frozen=True, slots=True)
class Advance:
    plan: StepPlan | None
    outputs: tuple[Output, ...]


# ---------------------------------------------------------------- who executes plans
class Executor(Protocol):
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
