"""What a planner knows, and what those who decide for it may ask of it.

Policies, the schedule and the seam to a peer are given this, and need to know no more of `Core`.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

from penstock.core import lifecycle
from penstock.core.kv.allocate import KVCache
from penstock.core.kv.pages import NONE_LEFT, Headroom, Trial
from penstock.core.lifecycle import Mode, Role, Trigger
from penstock.core.plan import Outcome, Output, Rates, RequestId, Row, StepId
from penstock.core.request import Request, ScheduledRow
from penstock.core.settings import CoreConfig

Columns: TypeAlias = tuple[tuple[Row, ...], tuple[RequestId, ...], tuple[int, ...], tuple[bool, ...]]


class CoreState(ABC):
    """One engine's requests and their pages."""

    def __init__(self, cfg: CoreConfig) -> None:
        role = Role(cfg.role)
        mode = Mode(host=cfg.dram_pages > 0, disk=cfg.disk_pages > 0, sparse=cfg.sparse, role=role)
        self.cfg = cfg
        self.edges = lifecycle.edges(mode)
        self.holds = lifecycle.holds(mode)
        self.may_hold = lifecycle.may_hold(mode)
        self.kv = KVCache(cfg)
        self.live: dict[RequestId, Request] = {}
        self.running: list[Request] = []       # phases with a row, in order of service
        self.waiting: list[Request] = []       # phases without, in order of service
        self.runnable: list[Request] = []      # of those waiting, who waits for a row
        self.transient: list[Request] = []     # of those running, who may take an edge by itself
        self.saving: list[Request] = []        # of those waiting, who has something to do meanwhile
        self.prefetch_queue: list[Request] = []  # of those queued, whom storage was not asked for
        self.in_flight: dict[StepId, list[ScheduledRow]] = {}
        self.columns: dict[int, tuple[list[ScheduledRow], Columns]] = {}  # of the last plans
        self.edges_taken = 0
        self.counters: dict[str, int] = dict.fromkeys(
            ("pauses", "drops", "spills", "promotions", "prefix_queries", "prefix_hbm_hits",
             "prefix_dram_hits", "prefix_disk_hits", "prefix_cut", "prefix_recomputed", "failed_moves",
             "rows_looked_at"), 0)
        self.rates: Rates | None = None        # None: not measured yet
        self.answers = 0                       # requests that have ended with some output,
        self.answered = 0                      # and tokens of it
        self.prefills_only = role is Role.PREFILL
        self.last_revoke_step = StepId(0)      # when a grant was last given up for its pages,
        self.revoke_pending = False            # and whether since the last event
        self.out: list[Output] = []

    @abstractmethod
    def transition(self, r: Request, trigger: Trigger, headroom: Headroom = NONE_LEFT) -> Trial:
        """Change the phase; or change nothing, and return what was lacking, which is false."""

    @abstractmethod
    def spill(self, r: Request) -> Trial:
        """Let a resident row go on from host pages: at once, if they are complete."""

    @abstractmethod
    def end(self, r: Request, outcome: Outcome) -> None:
        """It has ended, whatever its phase."""

    @abstractmethod
    def delivered(self, r: Request, tokens: tuple[int, ...]) -> None:
        """Decode role: a prefill engine has computed the prompt, and its KV is in our pages."""

    @abstractmethod
    def sent(self, r: Request) -> None:
        """Prefill role: the decode engine has it all."""

    @abstractmethod
    def update_runnable(self, r: Request) -> None:
        """Keep the line of those who wait for a row in step with what has changed about one of them."""

    @abstractmethod
    def release_forks(self, r: Request) -> None:
        """`r` has begun to answer, or never will: its forks wait no more."""
