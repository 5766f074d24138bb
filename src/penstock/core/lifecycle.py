"""The request lifecycle: phases, edges, and what each phase holds. Pure data, no behaviour.

Acquiring and releasing are derived from these tables in one place (`CoreState.transition`), so a new edge cannot
forget a resource. A mode without a tier is another table, not a branch. Where the KV of a request is, is beside its
phase: one that decodes goes on decoding while that changes.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Phase(Enum):
    __hash__ = object.__hash__    # members are singletons; ten times faster

    QUEUED = "queued"        # accepted, holds nothing
    FETCHING = "fetching"    # its known prefix is on its way from storage into host pages
    RECEIVING = "receiving"  # decode role: a prefill engine writes its KV into our pages
    LOADING = "loading"      # has its row and pages; evicted or cached KV is on its way to them
    PREFILL = "prefill"      # known tokens being computed in chunks
    SENDING = "sending"      # prefill role: its KV waits for pages of the decode engine, or is on its way
    DECODE = "decode"        # its outputs follow one from the other; where its KV is: `Place`
    PAUSED = "paused"        # gave up its row; KV in host pages, resumes without recompute
    DROPPED = "dropped"      # gave up its KV; known tokens will be recomputed
    DONE = "done"            # terminal, whatever the cause


class Trigger(Enum):
    __hash__ = object.__hash__

    FETCH = "fetch"
    RECEIVE = "receive"
    ADMIT = "admit"
    LANDED = "landed"        # every page it waits for is in place
    PREFILLED = "prefilled"  # the step that samples its next token is issued
    SENT = "sent"            # the decode engine has it all
    RELOCATE = "relocate"    # its KV goes on to another place, or has come there
    PAUSE = "pause"
    DROP = "drop"
    RESUME = "resume"
    END = "end"              # stop, length, abort, refusal: legal from every live phase


# Those that lead to a row.
WAYS_IN = frozenset((Trigger.ADMIT, Trigger.RESUME))
# Those that say where the KV of the request will be. Any other leaves it where it is.
PLACED = WAYS_IN | {Trigger.RECEIVE, Trigger.RELOCATE}


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
    """Where the KV of a request is. Decided on the way in, changed by RELOCATE; never changes a token."""

    __hash__ = object.__hash__

    DEVICE = "device"
    TO_HOST = "to_host"      # it waits until the host has all of it, and its steps read it there
    HOST = "host"            # its steps read it there, through a hot buffer
    TO_DEVICE = "to_device"  # its steps read on the host what is still being loaded

    def __init__(self, value: str) -> None:
        self.on_host = value in ("host", "to_device")   # what its steps read, and where it grows


# Where KV may go from where it is. On the way to the host a copy may fail, and loads may lose their pages to others.
WAYS = {Place.DEVICE: (Place.TO_HOST,), Place.TO_HOST: (Place.HOST, Place.DEVICE),
        Place.HOST: (Place.TO_DEVICE,), Place.TO_DEVICE: (Place.DEVICE, Place.HOST)}


class State(NamedTuple):
    """The phase of a request and the place of its KV, which is on its way only in DECODE."""

    phase: Phase
    place: Place

    @property
    def name(self) -> str:
        """For people, and for tables of what was seen."""
        return f"{self.phase.value}.{self.place.value}" if self.phase is Phase.DECODE else self.phase.value


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
ACTIVE = (P.LOADING, P.PREFILL, P.DECODE)
# Phases whose requests have none.
WAITING = (P.QUEUED, P.FETCHING, P.RECEIVING, P.SENDING, P.PAUSED, P.DROPPED)
# Of these, those that wait for a row; RECEIVING does when all has come.
LINE = (P.QUEUED, P.FETCHING, P.PAUSED, P.DROPPED)


def edges(mode: Mode) -> Mapping[tuple[Phase, Trigger], Phase]:
    """Every legal edge. All ways in lead through LOADING, which takes no time if nothing is to load."""
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
    table |= _sending() if mode.role is Role.PREFILL else _decoding(mode)
    if mode.role is Role.DECODE:
        table |= _receiving(mode)
    live = ({p for p, _ in table} | set(table.values())) - {P.DONE}
    return table | {(p, T.END): P.DONE for p in P if p in live}


def _decoding(mode: Mode) -> dict[tuple[Phase, Trigger], Phase]:
    table = {(P.PREFILL, T.PREFILLED): P.DECODE, (P.DECODE, T.DROP): P.DROPPED}
    if mode.host:
        table[P.DECODE, T.PAUSE] = P.PAUSED
    if mode.sparse:
        table[P.DECODE, T.RELOCATE] = P.DECODE
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
    return table


def changes(mode: Mode) -> Iterator[tuple[State, Trigger, State]]:
    """Every legal change of a request, with where its KV is."""
    found = [State(P.QUEUED, Place.DEVICE)]
    for source in found:
        for (phase, trigger), target in edges(mode).items():
            if phase is not source.phase:
                continue
            places: tuple[Place, ...] = (settled(source.place),)
            if trigger is T.RELOCATE:
                places = WAYS[source.place]
            elif trigger in PLACED:
                places = (Place.DEVICE, Place.HOST)[:1 + mode.sparse]
            for place in places:
                if (there := State(target, place)) not in found:
                    found.append(there)
                yield source, trigger, there


def settled(place: Place) -> Place:
    """Where KV is that goes no further."""
    return Place.HOST if place.on_host else Place.DEVICE


LeaseTable = Mapping[State, tuple[Lease, ...]]


def holds(mode: Mode) -> LeaseTable:
    """What a request must hold in a phase, with its KV where it is."""
    none: tuple[Lease, ...] = ()
    parked = (L.DRAM,) if mode.host else none
    idle = {P.QUEUED: none, P.FETCHING: (L.DRAM,), P.PAUSED: parked, P.DROPPED: none, P.DONE: none}
    device = {p: (L.ROW, L.HBM, L.DEVICE_ONLY) for p in ACTIVE} | idle
    host = {p: (L.ROW, L.HOT, L.DEVICE_ONLY, L.DRAM) for p in ACTIVE} | idle
    device |= {p: (L.HBM, L.DEVICE_ONLY) for p in (P.RECEIVING, P.SENDING)}
    host |= {p: (L.DRAM, L.DEVICE_ONLY) for p in (P.RECEIVING, P.SENDING)}
    return {State(p, place): leases[p] for place, leases in ((Place.DEVICE, device), (Place.HOST, host)) for p in P} | {
        State(P.DECODE, Place.TO_HOST): (*device[P.DECODE], L.DRAM),
        State(P.DECODE, Place.TO_DEVICE): (*host[P.DECODE], L.HBM)}


def may_hold(mode: Mode) -> LeaseTable:
    """What a request may also hold: kept on the way in, given up when the phase is left or sooner."""
    may: dict[State, tuple[Lease, ...]] = {State(p, q): () for p in P for q in Place}
    if mode.host:
        # A paused request's device pages stay until its steps have retired and its copies have landed.
        may |= {State(P.PAUSED, q): (L.HBM, L.DEVICE_ONLY) for q in Place}
    if mode.sparse:
        # Steps store what stays open to device and host alike where the host has room: a spill is then
        # free. A row in host pages keeps device pages until somebody needs them.
        may |= {State(p, Place.DEVICE): (L.DRAM,) for p in ACTIVE}
        may |= {State(p, Place.HOST): (L.HBM,) for p in ACTIVE}
    # What it shares with others stays where they have it.
    may |= {State(P.RECEIVING, Place.DEVICE): (L.DRAM,), State(P.RECEIVING, Place.HOST): (L.HBM,)}
    return may
