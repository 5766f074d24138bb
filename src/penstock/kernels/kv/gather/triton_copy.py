"""Units out of pinned host memory in Triton: threads read over the link what the list names.

A fixed grid walks the list, whose length only the device knows, so a captured graph serves any batch.
Runs are copied in the widest words that every address allows. Imported only where there is a device.

    P pages   K KV heads   C planes   G page size   H row width   E entries of the list
"""
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.depend import early, follow, wait


@triton.jit
def _copy(host, pool, miss, entry, ok, h_page, h_head, h_plane, p_page, p_head, p_plane,
          WORDS, HOST_UNITS: tl.constexpr, POOL_UNITS: tl.constexpr, PLANES: tl.constexpr,
          WORDS_PAD: tl.constexpr, ANYWHERE: tl.constexpr):
    """Each of the entries' lines: a plane of a unit. ANYWHERE: of words of 8 bytes, lines that begin anywhere
    in the 128 bytes that the link brings at once: what threads read side by side ends where these do."""
    plane = (entry % PLANES).to(tl.int64)
    at = miss + entry // PLANES * 3
    head = tl.load(at, mask=ok, other=0).to(tl.int64)
    source = tl.load(at + 1, mask=ok, other=0)
    target = tl.load(at + 2, mask=ok, other=0)
    w = tl.arange(0, WORDS_PAD)[None, :]
    src = ((source // HOST_UNITS).to(tl.int64) * h_page + head * h_head + plane * h_plane
           + (source % HOST_UNITS) * WORDS)
    dst = ((target // POOL_UNITS).to(tl.int64) * p_page + head * p_head + plane * p_plane
           + (target % POOL_UNITS) * WORDS)
    if ANYWHERE:
        w -= ((host.to(tl.int64, bitcast=True) // 8 + src) % 16)[:, None]
    own = ok[:, None] & (w >= 0) & (w < WORDS)
    x = tl.load(host + src[:, None] + w, mask=own)
    tl.store(pool + dst[:, None] + w, x, mask=own)


@triton.jit(do_not_specialize=["entries"])
def copy_units(host, pool, miss, num, entries, h_page, h_head, h_plane, p_page, p_head, p_plane, WORDS,
               WORD: tl.constexpr, HOST_UNITS: tl.constexpr, POOL_UNITS: tl.constexpr, PLANES: tl.constexpr,
               WORDS_PAD: tl.constexpr, LINES: tl.constexpr, ANYWHERE: tl.constexpr, BESIDE: tl.constexpr):
    """Lines of the list in turns of LINES a program. Strides are in words of WORD."""
    if BESIDE:
        wait()              # what follows would stand where others could run
    else:
        follow()
    host = host.to(tl.pointer_type(WORD), bitcast=True)
    pool = pool.to(tl.pointer_type(WORD), bitcast=True)
    first = tl.program_id(0) * LINES
    step = tl.num_programs(0) * LINES
    lines = tl.load(num) * PLANES
    i = first + tl.arange(0, LINES)
    # The first turn reads its entries while the length is still on its way.
    _copy(host, pool, miss, tl.minimum(i, entries * PLANES - 1), i < lines, h_page, h_head, h_plane, p_page,
          p_head, p_plane, WORDS, HOST_UNITS, POOL_UNITS, PLANES, WORDS_PAD, ANYWHERE)
    for start in range(first + step, lines, step):
        i = start + tl.arange(0, LINES)
        _copy(host, pool, miss, i, i < lines, h_page, h_head, h_plane, p_page, p_head, p_plane, WORDS,
              HOST_UNITS, POOL_UNITS, PLANES, WORDS_PAD, ANYWHERE)


_WORDS = ((8, tl.int64), (4, tl.int32), (2, tl.int16), (1, tl.int8))
GRID, BESIDE = 132, 32           # programs; so few fill the link, too, where nothing takes their memory
_LINE_BYTES = 16 << 10          # in flight a program: four to sixteen lines, measured on an H200


def gather(host_PKCGH: Tensor, pool_PKCGH: Tensor, miss_E3: Tensor, num_1: Tensor, *, unit: int,
           beside: bool = False) -> None:
    """Implement `penstock.kernels.kv.gather`. The host's pages are pinned. Capturable."""
    itemsize, planes = host_PKCGH.element_size(), host_PKCGH.shape[2]
    run = unit * host_PKCGH.shape[4] * itemsize
    strides = [tensor.stride(d) * itemsize for tensor in (host_PKCGH, pool_PKCGH) for d in (0, 1, 2)]
    addresses = [host_PKCGH.data_ptr(), pool_PKCGH.data_ptr()]
    wide, word = next((n, kind) for n, kind in _WORDS if all(x % n == 0 for x in (run, *strides, *addresses)))
    lines = max(4, min(16, _LINE_BYTES // triton.next_power_of_2(run)))
    anywhere = wide == 8 and any(x % 128 for x in (run, *strides[:3], addresses[0]))
    copy_units[(BESIDE if beside else GRID,)](
        host_PKCGH, pool_PKCGH, miss_E3, num_1, miss_E3.shape[0], *[x // wide for x in strides], run // wide,
        WORD=word, HOST_UNITS=host_PKCGH.shape[3] // unit, POOL_UNITS=pool_PKCGH.shape[3] // unit,
        PLANES=planes, WORDS_PAD=triton.next_power_of_2(run // wide + 15 * anywhere), LINES=lines,
        ANYWHERE=anywhere, BESIDE=beside, num_warps=4, **early())
