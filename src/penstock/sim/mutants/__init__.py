"""Seeded bugs of the core, each switchable by name. The simulator must catch every one.

A mutant is a Core whose methods, or whose pools', tree's or holdings', are replaced by wrong ones.
Each is a mistake that somebody made: in a peer, in a draft of this core, or in its simulator.
"""
from __future__ import annotations

from collections.abc import Iterable

from penstock.sim.mutants import flow, memory, storage
from penstock.sim.mutants.registry import BUDGET, MUTANTS
from penstock.sim.programs import sweep

__all__ = ["BUDGET", "MUTANTS", "flow", "hunt", "memory", "storage"]


def hunt(name: str, seeds: Iterable[int], *, blind: bool = False) -> tuple[int, str | None]:
    """Seeds until `name` was caught, and the line that replays it; None if it was not."""
    report = sweep(seeds, make=MUTANTS[name], blind=blind, first_only=True,
                   extra=f" --mutant {name}")
    return report.runs, report.failures[0] if report.failures else None
