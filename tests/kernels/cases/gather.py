"""Inputs of gather: every row of 1 to 4,096 bytes, odd alignments, pages of different sizes, and units.

An output is the whole destination, so a byte that was lost, or written beside, shows.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from cases import Case, Workload
from penstock.kernels.kv.gather import Gather


def cases(device: str = "cpu") -> Iterator[Case]:
    yield Case("every row size from 1 to 4,096 bytes", partial(_sizes, range(1, 4097), device), 0.0)
    yield Case("an 8-byte tail: 1 to 7 bytes more than a multiple of 8, at any alignment",
               partial(_tails, device), 0.0)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        for shape, unit in (((3, 2, 16, 64), 8), ((1, 1, 4, 656), 1), ((2, 2, 3, 5), 3)):
            name = f"{str(dtype).removeprefix('torch.')}-{shape}-units of {unit}"
            yield Case(name, partial(_units, dtype, shape, unit, 40, device), 0.0)
    yield Case("an empty list", partial(_units, torch.float32, (3, 2, 16, 64), 8, 0, device), 0.0)


def host_memory(values: Tensor, device: str) -> Tensor:
    """`values` in the host memory that kernels of `device` read: pinned beside another device."""
    return values if device == "cpu" else values.pin_memory()


def _one(gather: Gather, width: int, offset: int, device: str) -> Tensor:
    """Row 1 of the host to row 0 of a pool of three, `offset` bytes from where memory is aligned."""
    host = host_memory((torch.arange(3 * width + 16) % 251 + 1).to(torch.uint8), device)
    pool = torch.zeros(len(host), dtype=torch.uint8, device=device)
    a, b = (memory[offset:offset + 3 * width].view(1, 1, 1, 3, width) for memory in (host, pool))
    gather(a, b, torch.tensor([[0, 1, 0]], dtype=torch.int32, device=device),
           torch.ones(1, dtype=torch.int32, device=device), unit=1)
    return pool


def _sizes(widths: range, device: str, gather: Gather) -> Tensor:
    """Sums weighted by place of what each size leaves: a lost or misplaced byte changes its sum."""
    sums = []
    for width in widths:
        pool = _one(gather, width, width % 16, device).double()
        sums.append((pool * torch.arange(1, len(pool) + 1, device=device)).sum())
    return torch.stack(sums)


def _tails(device: str, gather: Gather) -> Tensor:
    return torch.cat([_one(gather, 8 * body + tail, offset, device).int() for body in (0, 1, 4, 16)
                      for tail in range(1, 8) for offset in range(16)])


def _units(dtype: torch.dtype, shape: tuple[int, int, int, int], unit: int, entries: int,
           device: str, gather: Gather) -> Tensor:
    """The second of three layers, into pages half as long where that is possible; 3 entries too many."""
    heads, planes, size, width = shape
    pool_size = size // 2 if size % (2 * unit) == 0 else size
    generator = torch.Generator().manual_seed(size)
    host = host_memory(torch.randint(0, 256, (9, 3, *shape), generator=generator).to(dtype), device)
    pool = torch.ones(40, 3, heads, planes, pool_size, width, dtype=dtype, device=device)
    of_host, of_pool = size // unit, pool_size // unit
    places = torch.randperm(heads * 40 * of_pool, generator=generator)[:entries + 3]
    miss = torch.stack((places % heads,
                        torch.randint(0, 9 * of_host, (len(places),), generator=generator),
                        places // heads), 1).int()
    num = torch.tensor([min(entries, len(places))], dtype=torch.int32)
    gather(host[:, 1], pool[:, 1], miss.to(device), num.to(device), unit=unit)
    return pool.float()


def workloads() -> Iterator[Workload]:
    """Rows of the latent models' sizes and units of SmolLM2-135M in float32, 512 entries."""
    for name, shape, unit in (("656 B rows", (1, 1, 16, 656), 1), ("1,152 B rows", (1, 1, 16, 1152), 1),
                              ("units of 2 x 2 KiB", (3, 2, 16, 256), 8)):
        num_bytes = 512 * 2 * shape[1] * unit * shape[3]
        yield Workload(name, partial(_prepare, shape, unit), num_bytes, 0, 4)


def _prepare(shape: tuple[int, int, int, int], unit: int, gather: Gather) -> Callable[[int], object]:
    host = torch.ones(4, 1024, *shape, dtype=torch.uint8)
    pool = torch.zeros(4, 512, *shape, dtype=torch.uint8)
    of_page = shape[2] // unit
    miss = torch.stack((torch.randint(0, shape[0], (512,)), torch.randperm(1024 * of_page)[:512],
                        torch.randperm(512 * of_page)[:512]), 1).int()
    num = torch.tensor([512], dtype=torch.int32)
    return lambda layer: gather(host[layer], pool[layer], miss, num, unit=unit)
