"""A step's new rows into every copy of their pages in Triton: device, host, hot unit and summary at once.

Host pages are pinned and written over the link. A unit's bounds are of its own keys: those of this call
are read where they come from, earlier ones from the page. Imported only where a CUDA device was asked for.

    T tokens of the step   P pages   K KV heads   C planes   G page size   H head dim   S units a page
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.kv.write_kv.spec import WriteAt
from penstock.kernels.triton.coded import floats_of
from penstock.kernels.triton.depend import early, follow
from penstock.kernels.types import fp8
from penstock.kernels.types.hot import HotLayer


@triton.jit
def _store_bound(bounds, scales, at, x, own, k, d, UP: tl.constexpr, FORMAT: tl.constexpr, DIM: tl.constexpr,
                DIM_PAD: tl.constexpr, HEADS_PAD: tl.constexpr):
    """f32 x [HEADS_PAD, DIM_PAD] to where `at` [HEADS_PAD, 1] says, rounded outward as in types/fp8.py; zero
    where it is not `own`."""
    if FORMAT == 0:
        tl.store(bounds + at + d, x.to(bounds.dtype.element_ty), mask=own)
    elif FORMAT == 1:
        bits = x.to(tl.int32, bitcast=True)
        whole = (bits + tl.where((x > 0) == UP, 0xffff, 0)) & -65536
        tl.store(bounds + at + d, whole.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=own)
    else:
        PART: tl.constexpr = DIM_PAD if DIM_PAD < 128 else 128
        BLOCKS: tl.constexpr = DIM_PAD // PART
        most = tl.max(tl.reshape(tl.abs(x), (HEADS_PAD, BLOCKS, PART)), 2)
        power = tl.maximum(((most.to(tl.int32, bitcast=True) + 0x1fffff) >> 23) - 8, 1)
        b = tl.arange(0, BLOCKS)[None, :]
        HAS: tl.constexpr = (DIM + 127) // 128
        tl.store(scales + (at + DIM) // 4 + b, (power << 23).to(tl.float32, bitcast=True),
                 mask=(tl.sum(own.to(tl.int32), 1) > 0)[:, None] & (b < HAS))
        over = tl.broadcast_to(((254 - power) << 23)[:, :, None], (HEADS_PAD, BLOCKS, PART))
        amount = tl.abs(x) * tl.reshape(over, (HEADS_PAD, DIM_PAD)).to(tl.float32, bitcast=True)
        away = tl.where((x > 0) == UP, 1, 0)
        floor = tl.where(amount < 0.015625, amount * 512, 0.0).to(tl.int32)
        small = floor + tl.where(floor.to(tl.float32) < amount * 512, away, 0)
        large = ((amount.to(tl.int32, bitcast=True) + away * 0xfffff) >> 20) - 960
        code = tl.where(amount < 0.015625, small, large)
        code = tl.where(amount <= 448.0, code, 0x7f) + tl.where(x < 0, 0x80, 0)
        tl.store(bounds + at + d, code.to(tl.uint8), mask=own)


@triton.jit
def _key(codes, words, at, d, own, KEY: tl.constexpr):
    """f32 of keys [HEADS_PAD, DIM_PAD], 0 where not `own`: KEY values of each in codes, which are also seen as f32 by
    `words`; 0: it has floats. at: where each head's begins, in the elements of `codes`."""
    if KEY == 0:
        x = tl.load(codes + at + d, mask=own, other=0.0).to(tl.float32)
    else:
        x = floats_of(codes, words, at, d, own, KEY)
    return x


@triton.jit(do_not_specialize_on_alignment=["device_T", "host_T", "bounds_T", "row_T", "position_T"])
def write_tokens(x0, x1, device, host, words0, device_words, host_words, bounds, scales, device_T, host_T,
                 bounds_T, row_T, position_T, hot_slot, hot_page, x_token, x_head, d_page, d_head, d_plane,
                 h_page, h_head, h_plane, b_page, b_head, b_plane, UNITS, HOT_PAGES, HEADS: tl.constexpr,
                 HEADS_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SIZE: tl.constexpr,
                 UNIT: tl.constexpr, SUMMARIES: tl.constexpr, PLANES: tl.constexpr, HOT: tl.constexpr,
                 VECTOR: tl.constexpr, FORMAT: tl.constexpr, KEY: tl.constexpr):
    """One token. SUMMARIES: units of a page of summaries, 0 if there are none; VECTOR elements of each, in a
    FORMAT of types/fp8.py; `scales` are they as f32. KEY: as of `_key`, of which the `words` are as f32.

    A condition that is one for the block goes into a mask by `where`: Triton 3.9 interpreted takes no `&`.
    """
    follow()
    t = tl.program_id(0).to(tl.int64)
    on_device, on_host = tl.load(device_T + t), tl.load(host_T + t)
    row, position = tl.load(row_T + t).to(tl.int64), tl.load(position_T + t)
    k = tl.arange(0, HEADS_PAD)[:, None]
    d = tl.arange(0, DIM_PAD)[None, :]
    own = (k < HEADS) & (d < DIM)
    at_x = k * x_head + d
    at_device = on_device // SIZE * d_page + k * d_head + on_device % SIZE * DIM + d
    at_host = on_host // SIZE * h_page + k * h_head + on_host % SIZE * DIM + d
    if HOT:
        known = tl.where(row >= 0, k < HEADS, False)
        slot = tl.load(hot_slot + (row * HEADS + k) * UNITS + position // UNIT, mask=known, other=-1)
        of_page: tl.constexpr = SIZE // UNIT
        page = tl.load(hot_page + row * HOT_PAGES + slot // of_page, mask=slot >= 0, other=0).to(tl.int64)
        at_hot = page * d_page + k * d_head + (slot % of_page * UNIT + position % UNIT) * DIM + d
    for plane in tl.static_range(PLANES):
        x = tl.load((x0 if plane == 0 else x1) + t * x_token + at_x, mask=own)
        tl.store(device + plane * d_plane + at_device, x, mask=tl.where(on_device >= 0, own, False))
        tl.store(host + plane * h_plane + at_host, x, mask=tl.where(on_host >= 0, own, False))
        if HOT:
            tl.store(device + plane * d_plane + at_hot, x, mask=own & (slot >= 0))
    if SUMMARIES > 0:
        summary = tl.load(bounds_T + t)
        if (summary >= 0) & ((position + 1) % UNIT == 0):
            values: tl.constexpr = KEY if KEY > 0 else DIM
            valued = (k < HEADS) & (d < values)
            low = _key(x0, words0, t * x_token + k * x_head, d, valued, KEY)
            high = low
            for j in range(1, UNIT):
                before = tl.maximum(t - j, 0)
                slot_device, slot_host = tl.load(device_T + before), tl.load(host_T + before)
                mine = (t >= j) & tl.where(on_device >= 0, slot_device == on_device - j,
                                           slot_host == on_host - j)
                here, there = tl.where(mine, valued, False), tl.where(mine, False, valued)
                near, far = tl.where(on_device >= 0, there, False), tl.where(on_device < 0, there, False)
                new = _key(x0, words0, before * x_token + k * x_head, d, here, KEY)
                y = _key(device, device_words, on_device // SIZE * d_page + k * d_head + (on_device % SIZE - j) * DIM,
                         d, near, KEY)
                z = _key(host, host_words, on_host // SIZE * h_page + k * h_head + (on_host % SIZE - j) * DIM,
                         d, far, KEY)
                key = tl.where(mine, new, tl.where(on_device >= 0, y, z))
                low, high = tl.minimum(low, key), tl.maximum(high, key)
            at = summary // SUMMARIES * b_page + k * b_head + summary % SUMMARIES * VECTOR
            low, high = tl.where(valued, low, 0.0), tl.where(valued, high, 0.0)
            _store_bound(bounds, scales, at, low, valued, k, d, False, FORMAT, values, DIM_PAD, HEADS_PAD)
            _store_bound(bounds, scales, at + b_plane, high, valued, k, d, True, FORMAT, values, DIM_PAD, HEADS_PAD)


def write_kv(values: Sequence[Tensor], at: WriteAt, device_PKCGH: Tensor, host_PKCGH: Tensor | None = None,
             hot: HotLayer | None = None, bounds_PK2SH: Tensor | None = None) -> None:
    """Implement `penstock.kernels.kv.write_kv`. Host pages are pinned. Capturable."""
    x0, x1 = values[0], values[-1]
    tokens, heads, dim = x0.shape
    _, _, planes, size, _ = device_PKCGH.shape
    assert len(values) == planes <= 2, f"{len(values)} planes of new rows"
    assert x0.stride() == x1.stride() and x0.stride(2) == 1, "new rows must lie alike and be dense"
    host = device_PKCGH if host_PKCGH is None else host_PKCGH
    bounds = device_PKCGH if bounds_PK2SH is None else bounds_PK2SH
    for pool in (device_PKCGH, host):
        assert pool.stride(4) == 1 and pool.stride(3) == dim, "tokens of a page must be dense"
    assert bounds.stride(4) == 1 and bounds.stride(3) == bounds.shape[4], "units of a page must be dense"
    codes = bounds_PK2SH is not None and device_PKCGH.dtype == torch.uint8
    words = [pool.view(torch.float32) if codes else pool for pool in (x0, device_PKCGH, host)]
    form = fp8.SAME if bounds_PK2SH is None else fp8.format_of_bounds(bounds, device_PKCGH)
    if form == fp8.FP8:
        assert not any(stride % 4 for stride in bounds.stride()[:4]), f"scales behind {dim} codes"
        scales = bounds.view(torch.float32)
    else:
        scales = bounds
    slots, pages = (at.row_T, at.row_T) if hot is None else (hot.slot_RKM, hot.page_RW)
    assert slots.is_contiguous() and pages.is_contiguous(), "state that is not dense"
    write_tokens[(tokens,)](
        x0, x1, device_PKCGH, host, *words, bounds, scales, at.device_T, at.host_T, at.bounds_T, at.row_T,
        at.position_T, slots, pages, x0.stride(0), x0.stride(1), *device_PKCGH.stride()[:3],
        *host.stride()[:3], *bounds.stride()[:3], slots.shape[-1], pages.shape[-1], HEADS=heads,
        HEADS_PAD=triton.next_power_of_2(heads), DIM=dim, DIM_PAD=triton.next_power_of_2(dim), SIZE=size,
        UNIT=at.unit, SUMMARIES=0 if bounds_PK2SH is None else bounds.shape[3], PLANES=planes,
        HOT=hot is not None, VECTOR=bounds.shape[4], FORMAT=form,
        KEY=fp8.head_dim_of(dim) if codes else 0, num_warps=4, **early())
