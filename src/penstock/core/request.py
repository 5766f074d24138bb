"""What the core knows of one request. Data only; `Core` decides and `Holdings` moves units."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.core.lifecycle import Phase
from penstock.core.plan import Arrived, DramPage, MoveId, RequestId, Row, StepId
from penstock.core.tree import Copy, Node


@dataclass(slots=True, eq=False)
class Request:
    """One request. `tokens` are known (prompt + retired outputs), positions below `settled` have KV
    from retired steps. With steps in flight, `computed` and `pending` are upper bounds: of positions
    with KV, and of tokens sampled but not known yet."""

    arrived: Arrived
    seq: int                                   # arrival order
    max_new: int                               # clipped to what can ever fit
    tokens: list[int]
    num_prompt: int
    phase: Phase = Phase.QUEUED
    computed: int = 0
    settled: int = 0
    pending: int = 0
    in_flight: int = 0                         # steps issued and not retired
    last_issue: StepId = StepId(0)
    life: int = 0                              # rises when KV is given up: late results are then tokens only
    bound: int = 0                             # pages the device knows of; 0 = (re)bind the row
    gave_way: int = 0                          # times it gave up its row or its KV
    started: bool = False                      # Started was sent
    visit: int = 0                             # phases entered so far: names one stay in a phase
    asked_storage: bool = False                # fetching is tried once
    loads: int = 0                             # pages of its path that were not on the device
    fetched: int = 0                           # pages that came from storage

    # Leases. `path` are its sealed pages in the tree; `table[i]` is the device copy of page i, the
    # path node's own or a private one; both are used while HBM is held.
    row: Row | None = None
    path: list[Node] = field(default_factory=list)
    table: list[Copy] = field(default_factory=list)
    reserve: list[DramPage] = field(default_factory=list)   # host pages taken at PAUSE, not used yet
    parked: list[Copy] = field(default_factory=list)        # host copies pinned while it waits
    is_parked: bool = False
    open_copy: DramPage | None = None          # host copy of its open page while paused
    moves: set[MoveId] = field(default_factory=set)         # flying copies of its open page

    @property
    def rid(self) -> RequestId:
        return self.arrived.rid

    @property
    def key(self) -> tuple[int, int]:
        """Order of service: smaller first."""
        return self.arrived.priority, self.seq

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def todo(self) -> int:
        """Positions that can be planned now: known or pending tokens without KV."""
        return len(self.tokens) + self.pending - self.computed

    def page_key(self, index: int, page_size: int) -> Sequence[int]:
        return tuple(self.tokens[index * page_size:(index + 1) * page_size])
