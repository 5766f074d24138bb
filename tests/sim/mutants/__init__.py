"""Seeded bugs of the core, each switchable by name. The simulator must catch every one;
`python tests/sim/hunt.py` runs them by hand.

A mutant is a Core with a wrong method, or one that calls a wrong function of another module.
Each is a mistake that somebody made: in a peer, in a draft of this core, or in its simulator. Two that
belong to no core are elsewhere: a deadline on the wall clock in `tests/tidy`, as the core has no clock,
and a rank that goes its own way in `tests/sim/test_sim_parts.py`.
"""
from __future__ import annotations

from collections.abc import Iterable

from mutants import events, flow, groups, hosted, memory, pair, policy, sessions, storage
from mutants.registry import BUDGET, COUNTER, MODE, MUTANTS, Stale
from penstock.sim.programs.sweeps import sweep
from penstock.sim.programs.waste import findings

__all__ = ["BUDGET", "COMMAND", "COUNTER", "MODE", "MUTANTS", "events", "flow", "groups", "hosted", "hunt", "memory",
           "pair", "policy", "sessions", "storage"]


COMMAND = "python tests/sim/hunt.py {}"
CRASHES = ("TypeError", "AttributeError", "NameError", "ImportError")      # of a bug that is none any more


def hunt(name: str, seeds: Iterable[int], *, blind: bool = False) -> tuple[int, str | None]:
    """Seeds until `name` was caught, and the line that replays it; None if it was not. A seed in
    which the real core fails too says nothing."""
    runs, command = 0, COMMAND.format(name) + " --blind" * blind
    if name in COUNTER:
        found = findings(MUTANTS[name], (COUNTER[name],), command)
        return 10, found[0] if found else None
    for runs, seed in enumerate(seeds, 1):
        report = sweep((seed,), MODE[name], MUTANTS[name], blind=blind, command=command)
        if report.failures and any(f"# {crash}:" in report.failures[0] for crash in CRASHES):
            raise Stale(f"{name} only crashes: {report.failures[0]}")
        if report.failures and not sweep((seed,), MODE[name], blind=blind).failures:
            return runs, report.failures[0]
    return runs, None
