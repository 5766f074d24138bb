"""The request lifecycle: phases, edges, and what each phase holds. Pure data, no behaviour.

Acquiring and releasing are derived from these tables in one place (`Core._go`), so a new edge cannot
forget a resource. A mode without a host tier is another table, not a branch.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    QUEUED = "queued"        # accepted, holds nothing
    FETCHING = "fetching"    # its known prefix is on its way from storage into host pages
    LOADING = "loading"      # has its row and pages; evicted or cached KV is on its way to the device
    PREFILL = "prefill"      # known tokens being computed in chunks
    RESIDENT = "resident"    # decoding with all KV on the device
    PAUSED = "paused"        # gave up its row; KV in host pages, resumes without recompute
    DROPPED = "dropped"      # gave up its KV; known tokens will be recomputed
    DONE = "done"            # terminal, whatever the cause


class Trigger(Enum):
    FETCH = "fetch"
    ADMIT = "admit"
    LANDED = "landed"        # every page it waits for is on the device
    PREFILLED = "prefilled"  # the step that samples its next token is issued
    PAUSE = "pause"
    DROP = "drop"
    RESUME = "resume"
    END = "end"              # stop, length, abort, refusal: legal from every live phase


class Lease(Enum):
    ROW = "row"              # slot in the device-resident tables
    HBM = "hbm"              # device pages, shared through the prefix tree or private
    DRAM = "dram"            # host pages that must not be evicted


class IllegalTransition(AssertionError):
    """A (phase, trigger) pair that the tables do not have: our bug."""


@dataclass(frozen=True, slots=True)
class Mode:
    """What shapes the tables."""

    host: bool               # a host tier exists
    disk: bool = False       # a storage tier exists


P, T, L = Phase, Trigger, Lease

# Phases whose requests have a row, hence may appear in a plan or become one soon.
ACTIVE = (P.LOADING, P.PREFILL, P.RESIDENT)
# Phases whose requests wait for admission, in one queue.
WAITING = (P.QUEUED, P.FETCHING, P.PAUSED, P.DROPPED)


def edges(mode: Mode) -> Mapping[tuple[Phase, Trigger], Phase]:
    """Every legal edge. All ways in lead through LOADING, which takes no time if nothing is to load."""
    table = {
        (P.QUEUED, T.ADMIT): P.LOADING,
        (P.LOADING, T.LANDED): P.PREFILL,
        (P.PREFILL, T.PREFILLED): P.RESIDENT,
        (P.LOADING, T.DROP): P.DROPPED,      # a load failed: that KV is a miss
        (P.PREFILL, T.DROP): P.DROPPED,
        (P.RESIDENT, T.DROP): P.DROPPED,
        (P.DROPPED, T.RESUME): P.LOADING,
    }
    if mode.host:
        table |= {
            (P.PREFILL, T.PAUSE): P.PAUSED,
            (P.RESIDENT, T.PAUSE): P.PAUSED,
            (P.PAUSED, T.RESUME): P.LOADING,
            (P.PAUSED, T.DROP): P.DROPPED,   # a victim too, so it cannot hoard pages
        }
    if mode.disk:
        table |= {
            (P.QUEUED, T.FETCH): P.FETCHING,
            (P.FETCHING, T.ADMIT): P.LOADING,
            (P.FETCHING, T.DROP): P.DROPPED,  # too late, or a victim: the prompt is computed
        }
    live = {p for p, _ in table} | set(table.values())
    return table | {(p, T.END): P.DONE for p in P if p in live}


def holds(mode: Mode) -> Mapping[Phase, tuple[Lease, ...]]:
    """What a request must hold in a phase."""
    return {
        P.QUEUED: (),
        P.FETCHING: (L.DRAM,),
        P.LOADING: (L.ROW, L.HBM),
        P.PREFILL: (L.ROW, L.HBM),
        P.RESIDENT: (L.ROW, L.HBM),
        P.PAUSED: (L.DRAM,) if mode.host else (),
        P.DROPPED: (),
        P.DONE: (),
    }


def may_hold(mode: Mode) -> Mapping[Phase, tuple[Lease, ...]]:
    """What a request may also hold: kept on the way in, given up when the phase is left or sooner."""
    # A paused request's device pages stay until its steps have retired and its copies have landed.
    return {p: (L.HBM,) if p is P.PAUSED and mode.host else () for p in P}
