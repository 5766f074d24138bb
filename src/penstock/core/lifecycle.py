"""The request lifecycle: phases, edges, and what each phase holds. Pure data, no behaviour.

Acquiring and releasing are derived from these tables in one place (`Core.transition`), so a new edge cannot
forget a resource. A mode without a tier is another table, not a branch.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    __hash__ = object.__hash__    # members are singletons; ten times faster

    QUEUED = "queued"        # accepted, holds nothing
    FETCHING = "fetching"    # its known prefix is on its way from storage into host pages
    RECEIVING = "receiving"  # decode role: a prefill engine writes its KV into our pages
    LOADING = "loading"      # has its row and pages; evicted or cached KV is on its way to them
    PREFILL = "prefill"      # known tokens being computed in chunks
    SENDING = "sending"      # prefill role: its KV waits for pages of the decode engine, or is on its way
    STAGING = "staging"      # must go on hosted, and its host copies are not complete
    RESIDENT = "resident"    # decoding with all KV on the device
    HOSTED = "hosted"        # decoding with KV in host pages, through a hot buffer
    PROMOTING = "promoting"  # decodes hosted while its pages load
    PAUSED = "paused"        # gave up its row; KV in host pages, resumes without recompute
    DROPPED = "dropped"      # gave up its KV; known tokens will be recomputed
    DONE = "done"            # terminal, whatever the cause


class Trigger(Enum):
    __hash__ = object.__hash__

    FETCH = "fetch"
    RECEIVE = "receive"      # into device pages
    RECEIVE_HOST = "receive_host"    # into host pages
    ADMIT = "admit"          # to device pages
    ADMIT_HOST = "admit_host"        # to host pages
    LANDED = "landed"        # every page it waits for is in place
    PREFILLED = "prefilled"  # the step that samples its next token is issued
    PREFILLED_HOST = "prefilled_host"    # the same of a prompt that was computed in host pages
    SENT = "sent"            # the decode engine has it all
    SPILL = "spill"
    STAY = "stay"            # a copy to the host has failed: it stays on the device
    PROMOTE = "promote"
    PAUSE = "pause"
    DROP = "drop"
    RESUME = "resume"        # to device pages
    RESUME_HOST = "resume_host"
    END = "end"              # stop, length, abort, refusal: legal from every live phase


# Those that lead to a row.
WAYS_IN = frozenset((Trigger.ADMIT, Trigger.ADMIT_HOST, Trigger.RESUME, Trigger.RESUME_HOST))


class Lease(Enum):
    __hash__ = object.__hash__

    ROW = "row"              # slot in the device-resident tables
    HBM = "hbm"              # device pages of the groups that a hosted row has on the host
    DEVICE_ONLY = "device_only"      # device pages of the other groups: selector state, windows, snapshots
    HOT = "hot"              # hot buffer
    DRAM = "dram"            # host pages that must not be evicted


class Role(Enum):
    """What an engine does with a request."""

    __hash__ = object.__hash__

    UNIFIED = "unified"      # all of it
    PREFILL = "prefill"      # computes prompts, and hands their KV to a decode engine
    DECODE = "decode"        # decodes what a prefill engine has computed; computes it itself if that fails


class Place(Enum):
    """Where the KV of a request that has a row lives. Decided on the way in, changed by SPILL and
    PROMOTE; never changes a token."""

    __hash__ = object.__hash__

    DEVICE = "device"
    HOST = "host"


_TO_HOST = frozenset((Trigger.ADMIT_HOST, Trigger.RESUME_HOST, Trigger.RECEIVE_HOST, Trigger.PREFILLED_HOST))
_TO_DEVICE = frozenset((Trigger.ADMIT, Trigger.RESUME, Trigger.RECEIVE))
_LANDED = {Phase.STAGING: Place.HOST, Phase.PROMOTING: Place.DEVICE}


def place_after(phase: Phase, trigger: Trigger, place: Place) -> Place:
    """Where the KV of a request lives once it has taken an edge."""
    if trigger in _TO_HOST:
        return Place.HOST
    if trigger in _TO_DEVICE:
        return Place.DEVICE
    return _LANDED.get(phase, place) if trigger is Trigger.LANDED else place


class IllegalTransition(AssertionError):
    """A (phase, trigger) pair that the tables do not have: our bug."""


@dataclass(frozen=True, slots=True)
class Mode:
    """What shapes the tables."""

    host: bool               # a host tier exists
    disk: bool = False       # a storage tier exists
    sparse: bool = False     # rows may decode from host pages
    role: Role = Role.UNIFIED


P, T, L = Phase, Trigger, Lease

# Phases whose requests have a row, hence may appear in a plan or become one soon.
ACTIVE = (P.LOADING, P.PREFILL, P.STAGING, P.RESIDENT, P.HOSTED, P.PROMOTING)
# Phases whose rows decode.
DECODING = (P.RESIDENT, P.HOSTED, P.PROMOTING)
# Of these, those that read host pages.
ON_HOST = (P.HOSTED, P.PROMOTING)
# Active phases that may end without a result or an event that names their request.
BUSY = (P.LOADING, P.PREFILL, P.STAGING, P.PROMOTING)
# Phases whose requests have none.
WAITING = (P.QUEUED, P.FETCHING, P.RECEIVING, P.SENDING, P.PAUSED, P.DROPPED)
# Of these, those that wait for a row; RECEIVING does when all has come.
LINE = (P.QUEUED, P.FETCHING, P.PAUSED, P.DROPPED)


def edges(mode: Mode) -> Mapping[tuple[Phase, Trigger], Phase]:
    """Every legal edge. All ways in lead through LOADING, which takes no time if nothing is to load;
    every way from device pages to host pages leads through STAGING, which takes no time either if
    the copies are there."""
    table = {
        (P.QUEUED, T.ADMIT): P.LOADING,
        (P.LOADING, T.LANDED): P.PREFILL,
        (P.LOADING, T.DROP): P.DROPPED,      # a load failed: that KV is a miss
        (P.PREFILL, T.DROP): P.DROPPED,
        (P.DROPPED, T.RESUME): P.LOADING,
    }
    if mode.host:
        table |= {
            (P.PREFILL, T.PAUSE): P.PAUSED,
            (P.PAUSED, T.RESUME): P.LOADING,
            (P.PAUSED, T.DROP): P.DROPPED,   # a victim too, so it cannot hoard pages
        }
    if mode.disk:
        table |= {
            (P.QUEUED, T.FETCH): P.FETCHING,
            (P.FETCHING, T.ADMIT): P.LOADING,
            (P.FETCHING, T.DROP): P.DROPPED,  # too late, or a victim: the prompt is computed
        }
    if mode.sparse:
        table |= {(P.QUEUED, T.ADMIT_HOST): P.LOADING, (P.PAUSED, T.RESUME_HOST): P.LOADING,
                  (P.DROPPED, T.RESUME_HOST): P.LOADING}
    if mode.sparse and mode.disk:
        table[P.FETCHING, T.ADMIT_HOST] = P.LOADING
    table |= _sending() if mode.role is Role.PREFILL else _decoding(mode)
    if mode.role is Role.DECODE:
        table |= _receiving(mode)
    live = ({p for p, _ in table} | set(table.values())) - {P.DONE}
    return table | {(p, T.END): P.DONE for p in P if p in live}


def _decoding(mode: Mode) -> dict[tuple[Phase, Trigger], Phase]:
    table = {(P.PREFILL, T.PREFILLED): P.RESIDENT, (P.RESIDENT, T.DROP): P.DROPPED}
    if mode.host:
        table[P.RESIDENT, T.PAUSE] = P.PAUSED
    if mode.sparse:
        table |= {
            (P.PREFILL, T.PREFILLED_HOST): P.HOSTED,    # it was computed in host pages: nothing to copy
            (P.RESIDENT, T.SPILL): P.STAGING,
            (P.STAGING, T.LANDED): P.HOSTED,
            (P.STAGING, T.STAY): P.RESIDENT,
            (P.HOSTED, T.PROMOTE): P.PROMOTING,
            (P.PROMOTING, T.LANDED): P.RESIDENT,
            (P.PROMOTING, T.SPILL): P.HOSTED,
        }
        for phase in (P.STAGING, P.HOSTED, P.PROMOTING):
            table |= {(phase, T.PAUSE): P.PAUSED, (phase, T.DROP): P.DROPPED}
    return table


def _sending() -> dict[tuple[Phase, Trigger], Phase]:
    return {
        (P.PREFILL, T.PREFILLED): P.SENDING,
        (P.SENDING, T.SENT): P.DONE,
        (P.SENDING, T.DROP): P.DROPPED,      # it has no grant, and its pages are needed
    }


def _receiving(mode: Mode) -> dict[tuple[Phase, Trigger], Phase]:
    table = {
        (P.QUEUED, T.RECEIVE): P.RECEIVING,
        (P.RECEIVING, T.ADMIT): P.LOADING,
        (P.RECEIVING, T.DROP): P.DROPPED,    # the prefill engine failed: computed here
    }
    if mode.disk:
        table[P.FETCHING, T.RECEIVE] = P.RECEIVING       # what storage has need not be sent
    if mode.sparse:
        table |= {(P.QUEUED, T.RECEIVE_HOST): P.RECEIVING, (P.RECEIVING, T.ADMIT_HOST): P.LOADING}
    if mode.sparse and mode.disk:
        table[P.FETCHING, T.RECEIVE_HOST] = P.RECEIVING
    return table


LeaseTable = Mapping[tuple[Phase, Place], tuple[Lease, ...]]


def holds(mode: Mode) -> LeaseTable:
    """What a request must hold in a phase, with its KV in one place or the other."""
    none: tuple[Lease, ...] = ()
    parked = (L.DRAM,) if mode.host else none
    device: dict[Phase, tuple[Lease, ...]] = {p: (L.ROW, L.HBM, L.DEVICE_ONLY) for p in ACTIVE}
    host: dict[Phase, tuple[Lease, ...]] = {p: (L.ROW, L.HOT, L.DEVICE_ONLY, L.DRAM) for p in ACTIVE}
    device[P.STAGING] = (L.ROW, L.HBM, L.DEVICE_ONLY, L.DRAM)
    host[P.PROMOTING] = (L.ROW, L.HOT, L.HBM, L.DEVICE_ONLY, L.DRAM)
    for place in (device, host):
        place |= {P.QUEUED: none, P.FETCHING: (L.DRAM,), P.PAUSED: parked, P.DROPPED: none,
                  P.DONE: none}
    device |= {P.RECEIVING: (L.HBM, L.DEVICE_ONLY), P.SENDING: (L.HBM, L.DEVICE_ONLY)}
    host |= {P.RECEIVING: (L.DRAM, L.DEVICE_ONLY), P.SENDING: (L.DRAM, L.DEVICE_ONLY)}
    return {(p, place): leases[p]
            for place, leases in ((Place.DEVICE, device), (Place.HOST, host)) for p in P}


def may_hold(mode: Mode) -> LeaseTable:
    """What a request may also hold: kept on the way in, given up when the phase is left or sooner."""
    may: dict[tuple[Phase, Place], tuple[Lease, ...]] = {(p, q): () for p in P for q in Place}
    if mode.host:
        # A paused request's device pages stay until its steps have retired and its copies have landed.
        may |= {(P.PAUSED, q): (L.HBM, L.DEVICE_ONLY) for q in Place}
    if mode.sparse:
        # Steps store what stays open to device and host alike where the host has room: SPILL is then
        # free. A row in host pages keeps device pages until somebody needs them.
        may |= {(p, Place.DEVICE): (L.DRAM,) for p in (P.LOADING, P.PREFILL, P.RESIDENT)}
        may |= {(p, Place.HOST): (L.HBM,) for p in (P.LOADING, P.PREFILL, P.HOSTED)}
    # What it shares with others stays where they have it.
    may |= {(P.RECEIVING, Place.DEVICE): (L.DRAM,), (P.RECEIVING, Place.HOST): (L.HBM,)}
    return may
