"""Who watches a core: told of events and edges as they happen. A watcher takes no edge."""
from __future__ import annotations

from penstock.core.lifecycle import Phase, Trigger
from penstock.core.plan import Event
from penstock.core.request import Request


class Watcher:
    """Put it into `Core.watchers`. Each of these does nothing until it is overridden."""

    def event(self, event: Event) -> None:
        """It is about to be applied."""

    def applied(self, event: Event) -> None:
        """It has been, and no edge of the planner's own was taken since."""

    def edge(self, r: Request, trigger: Trigger) -> None:
        """It is asked for, and may be refused for want of pages."""

    def taken(self, r: Request, source: Phase, trigger: Trigger) -> None:
        """`r` has left `source` for the phase that it is in."""
