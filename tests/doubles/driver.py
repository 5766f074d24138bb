"""A core that is driven by hand, one event at a time."""
from __future__ import annotations

from collections.abc import Sequence

from penstock.core.core import Core
from penstock.core.lifecycle import Phase
from penstock.core.plan import (
    Arrived,
    Event,
    Finished,
    Move,
    Moved,
    Outcome,
    Output,
    RequestId,
    Retired,
    StepPlan,
)
from penstock.core.settings import CoreConfig


class Driver:
    """A core with an executor that answers when told to; sampled tokens count 100, 101, ..."""

    def __init__(self, **settings: object) -> None:
        base: dict[str, object] = dict(page_size=4, rows=4, hbm_pages=16, step_tokens=64)
        self.core = Core(CoreConfig(**(base | settings)))  # type: ignore[arg-type]
        self.plans: list[StepPlan] = []
        self.moves: list[Move] = []      # grants too: nobody answers those
        self.out: list[Output] = []
        self.token = 100

    def tell(self, *events: Event) -> list[StepPlan]:
        """Apply events; returns the plans they led to."""
        new: list[StepPlan] = []
        batch: Sequence[Event] = events
        while True:
            advance = self.core.advance(batch)
            self.core.check()
            batch = ()
            self.out += advance.outputs
            if advance.plan is None:
                self.plans += new
                return new
            self.moves += advance.plan.moves
            new.append(advance.plan)
            if not advance.plan.rows:    # moves only: retires at once
                batch = (Retired(new.pop().step, ()),)

    def retire(self) -> list[StepPlan]:
        plan = self.plans.pop(0)
        tokens = []
        for sampled in plan.samples:
            if sampled:
                tokens.append((self.token,))
                self.token += 1
        return self.tell(Retired(plan.step, tuple(tokens)))

    def land(self, ok: bool = True) -> list[StepPlan]:
        return self.tell(Moved(self.moves.pop(0).id, ok))

    def run(self) -> None:
        while self.plans or self.moves:
            if self.plans:
                self.retire()
            else:
                self.land()

    def arrive(self, rid: int, prompt: Sequence[int], max_new: int = 4, **more: object) -> list[StepPlan]:
        return self.tell(Arrived(RequestId(rid), tuple(prompt), max_new, **more))  # type: ignore[arg-type]

    def phase(self, rid: int) -> Phase:
        return self.core.live[RequestId(rid)].phase

    def state(self, rid: int) -> str:
        return self.core.live[RequestId(rid)].state.name

    def finished(self) -> dict[int, Outcome]:
        return {o.rid: o.outcome for o in self.out if isinstance(o, Finished)}
