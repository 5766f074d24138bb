"""A recorded flight from the core's first event on, flown again: a fresh core must make the same plans."""
from __future__ import annotations

from collections.abc import Callable

from penstock.core.core import Core
from penstock.core.settings import CoreConfig
from penstock.replay.flight import Log, digest_as


def exact(log: Log, make: Callable[[CoreConfig], Core] = Core) -> tuple[bool, str]:
    """Whether a fresh core does what was recorded, and the line that says so."""
    core = make(log.cfg)
    for i, turn in enumerate(log.turns, 1):
        where = f"turn {i} of {len(log.turns)}"
        try:
            got = digest_as(turn, core.advance(turn.events))
            for _ in range(turn.idle):
                core.advance(())
        except Exception as error:     # the recorded engine may have died of just this
            if turn.returned:
                return False, f"{where} raised {type(error).__name__}: {error}; the recorded core went on"
            return True, f"{i - 1} turns with identical plans; {where} raised again: " + (
                f"{type(error).__name__}: {error}")
        if not turn.returned:
            return False, f"{where} did not return in the recorded core, and does here"
        if got != turn.digest:
            return False, f"{where} has another plan or other outputs than the recorded one"
    return True, f"exact: {len(log.turns)} turns, identical plans"
