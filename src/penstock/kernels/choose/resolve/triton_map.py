"""Where chosen units are, in Triton: a program for each query and KV head looks them up and finds victims,
one behind the other those of a row that has several. With hot buffers that is a chain of counts over all
slots, which a block in CUDA C++ (`map_units.cu`) goes through faster, where there can be one.

Imported only where a CUDA device was asked for.

    B queries   K KV heads   C chosen units   R rows of the tables   P pages of a row   E entries
    M, S, W as in `penstock.kernels.types.hot`
"""
from __future__ import annotations

from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.c.device import Launch, launcher
from penstock.kernels.triton.depend import early, follow
from penstock.kernels.triton.lazy import alone
from penstock.kernels.triton.topn import cut_of, taken_of
from penstock.kernels.types.hot import HotLayer


@triton.jit
def clear_one(num):
    """A kernel of ours, as a fill of torch's would end what begins early."""
    follow()
    tl.store(num, 0)


@triton.jit
def _resolve_one(b, chosen, row, device, host, hot_slot, hot_unit, hot_stamp, hot_page, count, now, slot,
                victim, miss, num, device_row, host_row, CHOSEN, UNITS, SLOTS, HOT_PAGES,
                PAGE_UNITS: tl.constexpr, CHOSEN_PAD: tl.constexpr, SLOTS_PAD: tl.constexpr,
                PAGES_PAD: tl.constexpr, HOT: tl.constexpr):
    """Resolve query `b` for the head of this program."""
    head, heads = tl.program_id(0), tl.num_programs(0)
    at = (b * heads + head) * CHOSEN
    r = tl.load(row + b).to(tl.int64)
    step = tl.load(now)
    slot_of = hot_slot + (r * heads + head) * UNITS             # of each unit
    unit_of = hot_unit + (r * heads + head) * SLOTS             # in each slot
    stamp_of = hot_stamp + (r * heads + head) * SLOTS
    pages = hot_page + r * HOT_PAGES
    c = tl.arange(0, CHOSEN_PAD)
    unit = tl.load(chosen + at + c, mask=c < CHOSEN, other=-1)
    real = unit >= 0
    page = tl.load(device + r * device_row + unit // PAGE_UNITS, mask=real, other=-1)
    if HOT:
        # One program is all there is for a row and head: what can be on its way is, before it is needed.
        w = tl.arange(0, PAGES_PAD)
        s = tl.arange(0, SLOTS_PAD)
        has = tl.load(pages + w, mask=w < HOT_PAGES, other=-1) >= 0
        old = tl.load(unit_of + s, mask=s < SLOTS, other=-1)
        found = tl.load(slot_of + unit, mask=real, other=-1)
        source = tl.load(host + r * host_row + unit // PAGE_UNITS, mask=real, other=0)
        hit = (page < 0) & (found >= 0)
        absent = real & (page < 0) & (found < 0)
        absents = tl.sum(absent.to(tl.int32), 0)
        hot_at = tl.load(pages + found // PAGE_UNITS, mask=hit, other=-1) * PAGE_UNITS + found % PAGE_UNITS
        place = tl.where(hit, hot_at, page * PAGE_UNITS + unit % PAGE_UNITS)
        tl.store(stamp_of + found, step, mask=hit)
        evicted = absents * 0
        if absents > 0:
            first = tl.atomic_add(num, absents)
            i = tl.cumsum(absent.to(tl.int32), 0) - 1
            inside = s < tl.sum(has.to(tl.int32), 0) * PAGE_UNITS
            tl.debug_barrier()                      # what was hit has this step's stamp
            age = (step - tl.load(stamp_of + s, mask=inside, other=0)).to(tl.uint32, bitcast=True)
            key = tl.where(inside, tl.where(old < 0, 0xffffffff, age), 0)
            cut = cut_of(key, absents)
            taken = taken_of(key, cut, absents - tl.sum((key > cut).to(tl.int32), 0))
            tl.store(victim + at + tl.cumsum(taken.to(tl.int32), 0) - 1, s, mask=taken)
            gone = taken & (old >= 0)
            tl.store(slot_of + old, -1, mask=gone)
            evicted = tl.sum(gone.to(tl.int32), 0)
            tl.debug_barrier()                      # victims are listed
            into = tl.load(victim + at + i, mask=absent, other=0)
            tl.store(slot_of + unit, into, mask=absent)
            tl.store(unit_of + into, unit, mask=absent)
            tl.store(stamp_of + into, step, mask=absent)
            new = tl.load(pages + into // PAGE_UNITS, mask=absent, other=0) * PAGE_UNITS + into % PAGE_UNITS
            place = tl.where(absent, new, place)
            entry = miss + (first + i) * 3
            tl.store(entry, head, mask=absent)
            tl.store(entry + 1, source * PAGE_UNITS + unit % PAGE_UNITS, mask=absent)
            tl.store(entry + 2, new, mask=absent)
        tl.store(slot + at + c, tl.where(real, place, -1), mask=c < CHOSEN)
        e = tl.arange(0, 4)
        on_device = tl.sum((real & (page >= 0)).to(tl.int32), 0)
        hits = tl.sum(hit.to(tl.int32), 0)
        counted = tl.where(e == 0, on_device, tl.where(e == 1, hits, tl.where(e == 2, absents, evicted)))
        tl.atomic_add(count + (r * heads + head) * 4 + e, counted.to(tl.int64))
    else:
        tl.store(num, 0)
        tl.store(slot + at + c, tl.where(real, page * PAGE_UNITS + unit % PAGE_UNITS, -1), mask=c < CHOSEN)
        tl.atomic_add(count + (r * heads + head) * 4, tl.sum(real.to(tl.int32), 0).to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=["row", "turn", "now"])
def resolve_units(chosen, row, turn, device, host, hot_slot, hot_unit, hot_stamp, hot_page, count, now, slot,
                  victim, miss, num, device_row, host_row, CHOSEN, UNITS, SLOTS, HOT_PAGES,
                  PAGE_UNITS: tl.constexpr, CHOSEN_PAD: tl.constexpr, SLOTS_PAD: tl.constexpr,
                  PAGES_PAD: tl.constexpr, HOT: tl.constexpr, TURNS: tl.constexpr):
    """HOT: whether anything is ever missed. If not, all that is chosen is on the device. TURNS: whether there
    are some."""
    follow()
    b = tl.program_id(1)
    queries = tl.num_programs(1)
    if TURNS:
        if tl.load(turn + b) == 0:
            end = b + 1
            while tl.load(turn + end, mask=end < queries, other=0) > 0:
                end += 1
            for query in range(b, end):
                _resolve_one(query, chosen, row, device, host, hot_slot, hot_unit, hot_stamp, hot_page, count,
                            now, slot, victim, miss, num, device_row, host_row, CHOSEN, UNITS, SLOTS,
                            HOT_PAGES, PAGE_UNITS, CHOSEN_PAD, SLOTS_PAD, PAGES_PAD, HOT)
                tl.debug_barrier()                  # maps and stamps are as the next one finds them
    else:
        _resolve_one(b, chosen, row, device, host, hot_slot, hot_unit, hot_stamp, hot_page, count, now, slot,
                    victim, miss, num, device_row, host_row, CHOSEN, UNITS, SLOTS, HOT_PAGES, PAGE_UNITS,
                    CHOSEN_PAD, SLOTS_PAD, PAGES_PAD, HOT)


WARPS = 8
_MAP = Path(__file__).with_name("map_units.cu")


def _maps(chosen: int, slots: int, page_units: int, turns: bool) -> tuple[Launch | None, int]:
    """What does it in C++, where it can, and with how many threads."""
    threads = max(32, min(1024, triton.next_power_of_2(max(chosen, slots))))
    if not slots or chosen > 1 << 12 or slots > 1 << 13:
        return None, threads
    return launcher(_MAP, "map_units", THREADS=threads, CHOSEN=max(threads, triton.next_power_of_2(chosen)),
                    SLOTS=max(threads, triton.next_power_of_2(slots)), PAGE_UNITS=page_units,
                    TURNS=int(turns)), threads


def resolve(chosen_BKC: Tensor, row_B: Tensor, device_RP: Tensor, host_RP: Tensor, hot: HotLayer,
            now_1: Tensor, *, page_units: int,
            turn_B: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Implement `penstock.kernels.choose.resolve`. Capturable."""
    queries, heads, chosen = chosen_BKC.shape
    for tensor in (chosen_BKC, hot.slot_RKM, hot.unit_RKS, hot.stamp_RKS, hot.page_RW, hot.count_RKE):
        assert tensor.is_contiguous(), "state that is not dense"
    slot_BKC, victim_BKC = torch.empty_like(chosen_BKC), torch.empty_like(chosen_BKC)
    miss_E3 = chosen_BKC.new_empty((chosen_BKC.numel(), 3))
    slots, hot_pages = hot.unit_RKS.shape[2], hot.page_RW.shape[1]
    num_1 = chosen_BKC.new_empty(1)
    if hot_pages:
        clear_one[(1,)](num_1, num_warps=1, **early())
    turns = hot_pages > 0 and turn_B is not None
    launch, threads = _maps(chosen, slots, page_units, turns)
    if launch is not None:
        launch((heads, queries), threads, chosen_BKC, row_B, row_B if turn_B is None else turn_B, device_RP,
               host_RP, hot.slot_RKM, hot.unit_RKS, hot.stamp_RKS, hot.page_RW, hot.count_RKE, now_1,
               slot_BKC, miss_E3, num_1, device_RP.stride(0), host_RP.stride(0), chosen,
               hot.slot_RKM.shape[2], slots, hot_pages)
        return slot_BKC, miss_E3, num_1
    resolve_units[(heads, queries)](
        chosen_BKC, row_B, row_B if turn_B is None else turn_B, device_RP, host_RP, hot.slot_RKM,
        hot.unit_RKS, hot.stamp_RKS, hot.page_RW, hot.count_RKE, now_1, slot_BKC, victim_BKC, miss_E3,
        num_1, device_RP.stride(0), host_RP.stride(0), chosen, hot.slot_RKM.shape[2], slots, hot_pages,
        PAGE_UNITS=page_units, CHOSEN_PAD=triton.next_power_of_2(chosen),
        SLOTS_PAD=triton.next_power_of_2(max(1, slots)),
        PAGES_PAD=triton.next_power_of_2(max(1, hot_pages)), HOT=hot_pages > 0,
        TURNS=turns,
        num_warps=max(1, min(WARPS, triton.next_power_of_2(max(chosen, slots)) // 128)), **early())
    return slot_BKC, miss_E3, num_1


resolve_in_triton = alone(resolve)
