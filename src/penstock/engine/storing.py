"""What the loop has to do with storage: asking it, and how long a request may wait for what it has.

Measures what reading a page and computing a token take. Owns no thread: `memory.storage` has those.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from penstock.config.settings.tree import StoragePolicy
from penstock.core.plan import Lookup, Output, Rates, StepId, StepPlan, Unstore, Used

if TYPE_CHECKING:
    from penstock.memory.storage import Storage

TELL_S = 1.0                # between two Rates
FORGET_S = 30.0             # after which a slow store is tried again
GAIN = 2.0                  # reading must be so many times faster than computing to be waited for
SHARE = 5 / 8               # of the time to compute a prompt, that it waits at most,
LEAST_S, UNKNOWN_S, MOST_S = 0.25, 2.0, 60.0    # but so long always, if that is not known, and never longer


class Storing:
    """The KV storage of one engine."""

    def __init__(self, storage: Storage, policy: StoragePolicy = "timeout",
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._storage, self._policy, self._clock = storage, policy, clock
        self._sent: dict[StepId, tuple[float, int]] = {}      # when, and tokens of prompts
        self._last = 0.0                                    # when a step retired last
        self._token_s = 0.0                                 # of prompts; 0: not known
        self._told, self._told_at = (0.0, 0.0), 0.0
        self._read_at, self._objects = clock(), 0.0

    def ask(self, outputs: Sequence[Output]) -> None:
        """Before the plan that came with them is executed: nothing damaged may be read by it."""
        for output in outputs:
            if isinstance(output, Lookup):
                self._storage.ask(output)
            elif isinstance(output, Unstore):
                self._storage.deny(output.keys)
            elif isinstance(output, Used):
                self._storage.used(output.keys)

    def submitted(self, plan: StepPlan) -> None:
        prompts = sum([n for n in plan.count if n > 1])
        self._sent[plan.step] = self._clock(), prompts

    def retired(self, step: StepId) -> None:
        (sent, tokens), now = self._sent.pop(step), self._clock()
        if tokens:
            token_s = (now - max(sent, self._last)) / tokens
            self._token_s = token_s if not self._token_s else 0.8 * self._token_s + 0.2 * token_s
        self._last = now

    def rates(self) -> Rates | None:
        """What the core should know of speeds, if that is news."""
        now = self._clock()
        if self._policy != "timeout" or now < self._told_at + TELL_S or not self._token_s:
            return None
        if (objects := self._storage.num_read) != self._objects:
            self._read_at, self._objects = now, objects
        page_s = self._storage.page_s if now < self._read_at + FORGET_S else 0.0
        new = GAIN * page_s * 1e6, self._token_s * 1e6
        if all(abs(a - b) <= 0.2 * b for a, b in zip(new, self._told, strict=True)):
            return None
        self._told, self._told_at = new, now
        return Rates(*new)

    def patience_s(self, num_prompt: int) -> float:
        """How long a request waits for pages of its prompt to be read."""
        if self._policy == "wait_complete":
            return MOST_S
        compute_s = num_prompt * self._token_s
        return min(MOST_S, max(LEAST_S, SHARE * compute_s)) if compute_s else UNKNOWN_S
