"""The host pool. The memory is mapped, not touched: the pool is usable at once and a page costs
resident memory only after its first write."""
from __future__ import annotations

import mmap
import weakref

import torch
from torch import Tensor

from penstock.core.plan import Group, Tier
from penstock.memory.pool import ONE_GROUP, BlockPool, PageLayout


def allocate(nbytes: int, *, pinned: bool = False) -> Tensor:
    """uint8 [nbytes] of anonymous memory of this process, zero. `pinned`: a CUDA device copies from and to
    it, and reads it, at the speed of the link; every page is resident then, which takes 0.6 s a GiB.

    Raises RuntimeError where it cannot be pinned.
    """
    assert nbytes >= 1, "a host pool without memory"
    mapped = mmap.mmap(-1, nbytes)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    if pinned:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), nbytes, 0))
        weakref.finalize(mapped, runtime.cudaHostUnregister, memory.data_ptr())
    return memory


def mapped(fd: int, nbytes: int) -> Tensor:
    """uint8 [nbytes] of a file of memory, shared with every process that maps it."""
    return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)


class DramPool(BlockPool):
    """Pages in the host's memory."""

    tier = Tier.DRAM

    def __init__(self, layout: PageLayout, num_pages: int, *, base: int = 0,
                 group: Group = ONE_GROUP, memory: Tensor | None = None,
                 page_stride: int | None = None) -> None:
        """`memory` and `page_stride` of a slab; without them it allocates what it needs."""
        stride = layout.page_bytes if page_stride is None else page_stride
        if memory is None:
            memory = allocate(num_pages * stride)
        super().__init__(layout, num_pages, memory, stride, base, group)
