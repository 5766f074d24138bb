"""The sum of a small tensor over the GPUs of one machine, each of which writes into the others' memory.

Imported only where a CUDA device was asked for. Who maps that memory is `exec`'s business.

    R ranks

Every rank has an inbox, which all others map, cleared before the first sum:

    flags   i64 [R, PROGRAMS]       by who wrote: the number of the newest sum that this program has put here
    data    [2, R, ROOM bytes]      by the number's parity and who wrote

A sum is one launch on each rank, one after the other on one stream. A program keeps its part of x in
registers, writes it to all others, then its number; waits for theirs; and adds in the order of ranks, so that
all have the same bits. Two parities need no second wait: who sees another's sum n + 1 begin knows that its
sum n has ended, which read what n + 2 is written over.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.depend import early, follow

PROGRAMS = 64
ROOM = 1 << 20                  # bytes of x at most: of more NCCL's way is as fast
_LEAST = 1024                   # elements of a program


@triton.jit
def add_ranks(x, inboxes, count, num, RANK: tl.constexpr, RANKS: tl.constexpr, PROGRAMS: tl.constexpr,
              DATA: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK elements of x become the sum. inboxes, count: as of `add`; DATA: elements of x in front of an
    inbox's data, ROOM: in one of its places."""
    follow()
    p, programs = tl.program_id(0), tl.num_programs(0)
    kind: tl.constexpr = x.dtype.element_ty
    at = p * BLOCK + tl.arange(0, BLOCK)
    own = at < num
    number, looks = tl.load(count + p) + 1, tl.load(count + PROGRAMS)
    half = (number % 2).to(tl.int32)
    v = tl.load(x + at, mask=own, other=0.0)
    for r in tl.static_range(RANKS):
        if r != RANK:
            inbox = tl.multiple_of(tl.load(inboxes + r).to(tl.pointer_type(kind)), 16)
            tl.store(inbox + DATA + (half * RANKS + RANK) * ROOM + at, v, mask=own)
    tl.debug_barrier()
    for r in tl.static_range(RANKS):
        if r != RANK:
            flags = tl.load(inboxes + r).to(tl.pointer_type(tl.int64))
            tl.atomic_xchg(flags + RANK * PROGRAMS + p, number, sem="release", scope="sys")
    mine = tl.load(inboxes + RANK).to(tl.pointer_type(tl.int64))
    for r in tl.static_range(RANKS):
        if r != RANK:
            flag, left = mine + r * PROGRAMS + p, looks
            while (tl.atomic_add(flag, 0, sem="acquire", scope="sys") < number) & (left > 0):
                left -= 1
    tl.debug_barrier()
    inbox = tl.multiple_of(tl.load(inboxes + RANK).to(tl.pointer_type(kind)), 16)
    acc = tl.zeros([BLOCK], tl.float32)
    for r in tl.static_range(RANKS):
        if r == RANK:
            acc += v.to(tl.float32)
        else:
            acc += tl.load(inbox + DATA + (half * RANKS + r) * ROOM + at, mask=own, other=0.0,
                           cache_modifier=".cg").to(tl.float32)
    tl.store(x + at, acc.to(kind), mask=own)
    each = p + tl.arange(0, PROGRAMS) * programs            # and of programs that this sum does without
    tl.store(count + each, tl.zeros([PROGRAMS], tl.int64) + number, mask=each < PROGRAMS)


def inbox_bytes(ranks: int) -> int:
    return 8 * ranks * PROGRAMS + 2 * ranks * ROOM


def counts(looks: int, device: str = "cuda") -> Tensor:
    """`add`'s, before the first sum."""
    return torch.tensor([0] * PROGRAMS + [looks], device=device)


def takes(x: Tensor) -> bool:
    return x.nbytes <= ROOM and x.is_contiguous()


def add(x: Tensor, inboxes_R: Tensor, count: Tensor, rank: int) -> None:
    """x, f32|bf16, that `takes` takes, becomes the sum; all ranks call it alike. Capturable.

    inboxes_R   i64, addresses as this rank sees them
    count       i64 [PROGRAMS + 1]: sums so far, and how often a program looks for another's number before it
                adds what is not there
    """
    num, ranks = x.numel(), len(inboxes_R)
    block = max(_LEAST, triton.next_power_of_2(triton.cdiv(num, PROGRAMS)))
    add_ranks[(triton.cdiv(num, block),)](
        x, inboxes_R, count, num, RANK=rank, RANKS=ranks, PROGRAMS=PROGRAMS,
        DATA=8 * ranks * PROGRAMS // x.itemsize, ROOM=ROOM // x.itemsize, BLOCK=block,
        num_warps=max(4, min(16, block // 256)), **early())
