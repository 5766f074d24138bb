"""Seeded bugs of a prefill/decode pair: hunted with two engines and a bad network between them.

Each is a mistake that somebody made, in a peer or in a draft of ours. A wrong function stands in on
both engines; what it gets tells on which of them it matters.
"""
from __future__ import annotations

from collections.abc import Callable

from mutants.registry import Real, Wrong, instead_of
from penstock.core import retire
from penstock.core.core import Core
from penstock.core.kv import allocate
from penstock.core.kv.allocate import KVCache
from penstock.core.kv.listing import Trial
from penstock.core.kv.prefix_tree import Copy, TierGroup
from penstock.core.lifecycle import Phase, Trigger
from penstock.core.pair import protocol
from penstock.core.pair.bridge import Pairing
from penstock.core.pair.decode_side import DecodeSide, Receiving
from penstock.core.pair.messages import Cancel, Grant, Reason
from penstock.core.pair.prefill_side import PrefillSide, Sending, SendState
from penstock.core.plan import ONE_PEER, PeerLeft, Say
from penstock.core.policy import reclaim
from penstock.core.request import Request

# An engine dies while its writes fly, and is back before they have landed.
SLOW_WRITES = ",deaths=3,write=60,delay=0.1,patience=20"
# The connection breaks while the prefill engine has pushes to plan, and a full pipeline.
CUT_OFF = (",rows=1,cuts=20,deaths=0,keep=1,delay=0.1,hold=0,report=0,step=3,requests=14"
           ",prompt_max=20,step_tokens=4,span=20,hit_pages=512")
# Prompts are computed, dropped for others, and loaded when their grant comes.
LATE_GRANTS = (",delay=60,deaths=0,fail=0,requests=20,span=20,prompt_max=20,new_max=6,hbm_pages=28"
               ",dram_pages=400,hot_pages=0,page_size=1,prefix_cache=1,wait_pages=1000")


def wrong(owner: object, name: str, budget: int = 300, first: int = 0,
          more: str = "") -> Callable[[Wrong], Wrong]:
    return instead_of(owner, name, budget, first, mode="pair=1" + more)


# ---------------------------------------------------------------- rule 1: what frees pages
@wrong(KVCache, "unpin")
def granted_page_reused(real: Real, kv: KVCache, r: Request, space: TierGroup, copy: Copy) -> None:
    """The fence of a page does not name the grant that is open on it."""
    moves, r.moves = r.moves, {m for m in r.moves if m not in kv.moves.to_peer}
    real(kv, r, space, copy)
    r.moves = moves


@wrong(Core, "_expire")
def pages_released_by_timeout(real: Real, core: Core, r: Request) -> None:
    """The deadline of a request that receives ends its grant too."""
    real(core, r)
    if not core.pairs or not isinstance(side := core.pairs[ONE_PEER].side, DecodeSide):
        return
    if r.phase is Phase.DROPPED and (receiving := side.table.get(r.arrived.transfer)) is not None:
        _release(core.pairs[ONE_PEER], receiving)


def _release(pair: Pairing, receiving: Receiving) -> None:
    assert isinstance(pair.side, DecodeSide)
    pair.side._end(receiving, protocol.Landed(receiving.transfer, receiving.generation, False, Reason.LOST))
    pair._apply(pair.side._told())


@wrong(DecodeSide, "cancel")
def cancel_frees_at_once(real: Real, side: DecodeSide, transfer: int) -> list[protocol.Report]:
    """Pages of an aborted request are free while the peer does not even know of it."""
    if (receiving := side.table.get(transfer)) is not None and not receiving.closing:
        side.outbox.append(Cancel(transfer, receiving.generation))
        side._end(receiving, protocol.Landed(transfer, receiving.generation, False, Reason.CANCELLED))
        return side._told()
    out: list[protocol.Report] = real(side, transfer)
    return out


# ---------------------------------------------------------------- rule 2: what an ack says
@wrong(PrefillSide, "_end_if_idle")
def ack_before_the_last_write(real: Real, side: PrefillSide, s: Sending) -> None:
    """Drained is sent while pushes are in flight."""
    flying, s.flying = s.flying, 0 if s.state is SendState.DRAINING else s.flying
    real(side, s)
    s.flying = flying


@wrong(PrefillSide, "_grant")
def no_ack_for_an_unknown_transfer(real: Real, side: PrefillSide, m: Grant) -> None:
    """Pages stay in quarantine for ever."""
    if m.transfer in side.table:
        real(side, m)


@wrong(PrefillSide, "_cancel", 200)
def ack_for_what_goes_on(real: Real, side: PrefillSide, m: Cancel) -> None:
    """It is acked, and the request is not ended: its pushes begin later."""
    if (s := side.table.get(m.transfer)) is None or s.state is not SendState.PUSHING:
        real(side, m)
    elif not s.flying:
        side._drained(m.transfer, m.generation, Reason.CANCELLED)


@wrong(Pairing, "hear", more=SLOW_WRITES)
def requests_outlive_their_connection(real: Real, pair: Pairing, event: object) -> None:
    """The prefill engine does not hear that its peer has gone."""
    if not (isinstance(event, PeerLeft) and isinstance(pair.side, PrefillSide)):
        real(pair, event)
    else:
        pair.side.up = False


# ---------------------------------------------------------------- rules 3 and 5: notices and errors
@wrong(PrefillSide, "refuse")
def refusal_not_sent(real: Real, side: PrefillSide, transfer: int, reason: int) -> list[protocol.Report]:
    """The prefill engine ends a request, and says so to nobody."""
    return []


@wrong(PrefillSide, "push_ended")
def failed_push_forgotten(real: Real, side: PrefillSide, push: int, ok: bool) -> list[protocol.Report]:
    """The End says that all bytes are in place."""
    out: list[protocol.Report] = real(side, push, True)
    return out


# ---------------------------------------------------------------- rules 8 and 9: first tokens
@wrong(PrefillSide, "finish")
def slot_of_first_tokens_reused(real: Real, side: PrefillSide, transfer: int,
                                first: tuple[int, ...]) -> list[protocol.Report]:
    """What another generation left in its slot is sent."""
    slots: dict[int, tuple[int, ...]] = side.__dict__.setdefault("slots", {})
    out: list[protocol.Report] = real(side, transfer, slots.setdefault(transfer % 4, first))
    return out


@wrong(retire, "delivered")
def first_token_generated_again(real: Real, core: Core, r: Request, tokens: tuple[int, ...]) -> None:
    """It was streamed when it came, but decode begins with the prompt's last position."""
    real(core, r, tokens)
    if r.phase is Phase.RECEIVING and tokens:
        del r.outputs[-1:]
        r.computed = r.retired = r.num_prompt - 1


# ---------------------------------------------------------------- what is pushed, and when
@wrong(allocate, "missing", 240, more=LATE_GRANTS)
def page_pushed_while_its_load_flies(real: Real, r: Request) -> list[Copy] | None:
    """A prompt that was cached below is sent before it is there."""
    copies: list[Copy] | None = [] if r.phase is Phase.SENDING else real(r)
    return copies


@wrong(Pairing, "push")
def push_of_other_groups_forgotten(real: Real, pair: Pairing, r: Request, end: int) -> None:
    """Windows, snapshots and what the selector reads stay behind."""
    tables, r.tables = r.tables, r.tables[:1]
    real(pair, r, end)
    r.tables = tables


@wrong(Pairing, "push", 500, first=330, more=",again=0.9,turns=0.9")
def push_begins_at_a_whole_page(real: Real, pair: Pairing, r: Request, end: int) -> None:
    """A grant that begins inside a page of ours loses the rest of that page."""
    assert r.remote.grant is not None
    size = pair.core.cfg.page_size
    r.remote.pushed = min(-(-r.remote.pushed // size) * size, end - 1)
    real(pair, r, end)


@wrong(Pairing, "push")
def open_page_pushed_early(real: Real, pair: Pairing, r: Request, end: int) -> None:
    """What steps in flight have yet to write is sent with what they have written."""
    real(pair, r, max(end, min(r.computed, r.num_prompt - 1)))


@wrong(Pairing, "push")
def pushed_early_and_not_counted(real: Real, pair: Pairing, r: Request, end: int) -> None:
    """The end of a prompt is all that is sent behind its last step: what lies before it was not."""
    if end == r.num_prompt:
        real(pair, r, end)
    else:
        r.remote.pushed = end


@wrong(Core, "request_edge", first=130)
def dropped_while_its_pushes_fly(real: Real, core: Core, rid: int, trigger: Trigger) -> None:
    """A request whose pages are on their way gives them up."""
    r = core.live.get(rid)  # type: ignore[call-overload]
    if r is None:
        return
    pushed, r.remote.is_pushed = r.remote.is_pushed, False
    real(core, rid, trigger)
    r.remote.is_pushed = pushed


@wrong(reclaim, "_drop_sending")
def computed_without_a_grant_never_gives_way(real: Real, core: Core, but: Request | None) -> bool:
    """Pages that wait for the decode engine block those that it waits for."""
    return False


@wrong(Pairing, "_recall", first=200, more=CUT_OFF)
def push_begun_on_another_connection(real: Real, pair: Pairing, transfer: int = 0) -> None:
    """It was decided before the connection broke, and goes out with the next plan, on the next one."""


@wrong(Pairing, "flush", 120)
def grant_said_before_its_pages(real: Real, pair: Pairing) -> list[Say]:
    """It does not wait for the plan that has its Move."""
    out, pair.side.outbox = pair.side.outbox, []
    return [Say(what) for what in out]


# ---------------------------------------------------------------- the decode engine's own side
@wrong(DecodeSide, "cancel")
def cancel_forgotten(real: Real, side: DecodeSide, transfer: int) -> list[protocol.Report]:
    """A receiving request is aborted, and the prefill engine computes for nobody."""
    return []


@instead_of(Core, "transition", 300, mode="pair=1")
def row_of_a_delivered_request_not_bound(real: Real, core: Core, r: Request, *edge: object,
                                         **more: object) -> Trial:
    """The device keeps the page table of the row's previous tenant."""
    source = r.phase
    ok: Trial = real(core, r, *edge, **more)
    r.reported.bound = r.reported.bound or (bool(ok) and source is Phase.RECEIVING and r.row is not None)
    return ok


@wrong(DecodeSide, "left")
def pages_of_a_lost_connection_stay_away(real: Real, side: DecodeSide) -> list[protocol.Report]:
    """Nobody will say that they are written no more."""
    table, side.table = side.table, {}
    out: list[protocol.Report] = real(side)
    side.table = table
    return out
