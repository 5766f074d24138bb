"""Inputs of write_kv: each token has any of the three copies, units are completed in one call or in several.

An output is everything that could have been written: both pools and the summaries.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from cases import DTYPES, Case, Workload
from cases.gather import host_memory
from cases.resolve import empty
from penstock.kernels.kv.write_kv import WriteAt, WriteKV
from penstock.kernels.types import fp8


def cases(device: str = "cpu") -> Iterator[Case]:
    for name, dtype in DTYPES:
        for planes, heads, dim, size, unit in ((2, 3, 20, 16, 8), (2, 2, 64, 12, 4), (1, 1, 41, 8, 1)):
            for chunk in (1, 5, 31):
                yield Case(f"{name}-{planes} x {heads} x {dim}-units of "
                           f"{unit}-{chunk} at once",
                           partial(_run, dtype, dtype, planes, heads, dim, size, unit, chunk, device), 0.0)
        for kept in (torch.uint8, torch.bfloat16):
            for dim in (20, 64, 256) if kept != dtype else ():
                yield Case(f"{name}-heads of {dim}-bounds as {kept}",
                           partial(_run, dtype, kept, 2, 3, dim, 16, 8, 31, device), 0.0)
    for kept in (torch.float32, torch.bfloat16, torch.uint8):
        for dim in (16, 64, 128, 256):
            for chunk in (1, 5, 31):
                yield Case(f"codes of {dim}-bounds as {kept}-{chunk} at once",
                           partial(_run, torch.uint8, kept, 2, 3, dim, 16, 8, chunk, device), 0.0)
    yield Case("rows of 656 bytes", partial(_bytes, device), 0.0)


def _run(dtype: torch.dtype, kept: torch.dtype, planes: int, heads: int, dim: int, size: int, unit: int,
         chunk: int, on: str, write_kv: WriteKV) -> Tensor:
    """Two rows of 62 tokens, `chunk` of each at once: pages on the device, on the host or on both, some
    units of what is on the host alone hot. Pools are the second of two layers'. kept: the type of bounds.
    dtype: of rows, uint8 for keys and values in codes."""
    generator = torch.Generator().manual_seed(size + chunk)
    length, rows = 62, 2
    pages = -(-length // size)
    coded = dtype == torch.uint8
    wide = fp8.head_width(dim) if coded else dim
    device = torch.full((3 * rows * pages, 2, heads, planes, size, wide), 3.0, dtype=dtype, device=on)
    host = host_memory(device.cpu().clone(), on)
    row = fp8.width(dim, dim) if kept == torch.uint8 else dim
    bounds = torch.full((rows * pages, 2, heads, 2, size // unit, row), 3.0, dtype=kept, device=on)
    where = torch.arange(rows * pages).view(rows, pages) % 3            # device, host, both
    ids = torch.randperm(rows * pages, generator=generator).view(rows, pages)
    device_RP, host_RP = ids.where(where != 1, -1), ids.flip(1).where(where != 0, -1)
    hot = empty(rows, heads, pages * size // unit, 4, size // unit, on)
    for row in range(rows):
        hot.page_RW[row] = torch.arange(4).int() + rows * pages + 4 * row
        for k in range(heads):
            units = [u for u in range(pages * size // unit) if where[row, u * unit // size] == 1]
            for slot, u in enumerate(units[k::2][:4 * size // unit]):
                hot.slot_RKM[row, k, u], hot.unit_RKS[row, k, slot] = slot, u
    x = torch.randn(planes, rows, length, heads + 1, dim, generator=generator)
    x[..., ::7] *= 1000                                     # what scales and roundings of bounds are about
    x[..., 1::7] /= 10000
    x = fp8.encode_heads(x).to(on) if coded else x.to(on, dtype)
    for first in range(0, length, chunk):
        at = torch.arange(first, min(first + chunk, length))
        device_T, host_T = (
            (table[:, at // size] * size + at % size).where(table[:, at // size] >= 0, -1).flatten()
            for table in (device_RP, host_RP))
        summaries = torch.arange(rows)[:, None] * pages * (size // unit) + at // unit
        step = WriteAt(device_T.to(on), host_T.to(on), summaries.flatten().to(on),
                       torch.arange(rows).repeat_interleave(len(at)).int().to(on),
                       at.repeat(rows).int().to(on), unit)
        write_kv([part[:, at, 1:].flatten(0, 1) for part in x], step, device[:, 1], host[:, 1], hot,
                 bounds[:, 1] if planes == 2 else None)
    return torch.cat([t.cpu().float().flatten() for t in (device, host, bounds)])


def _bytes(on: str, write_kv: WriteKV) -> Tensor:
    """MLA KV entries as bytes, to the device alone: no other tier, no summaries, one token without a slot."""
    device = torch.ones(3, 1, 1, 4, 656, dtype=torch.uint8, device=on)
    x = (torch.arange(5 * 656) % 251).to(torch.uint8).view(5, 1, 656).to(on)
    none, slots = torch.full((5,), -1, device=on), torch.tensor([9, -1, 3, 0, 7], device=on)
    write_kv([x], WriteAt(slots, none, none, none.int(), torch.arange(5, device=on).int(), 1), device)
    return device.float()


def workloads() -> Iterator[Workload]:
    """SmolLM2-135M's heads to all three places: one token, eight and a chunk."""
    for tokens in (1, 8, 512):
        yield Workload(f"{tokens} tokens, 3 heads of 64", partial(_prepare, tokens),
                       tokens * 3 * 2 * 64 * 4 * 4, 0, 12)


def _prepare(tokens: int, write_kv: WriteKV) -> Callable[[int], object]:
    device, host = (torch.zeros(12, 64, 3, 2, 16, 64) for _ in range(2))
    bounds, hot = torch.zeros(12, 64, 3, 2, 2, 64), empty(1, 3, 128, 8, 2)
    k, v = torch.randn(2, tokens, 3, 64).unbind()
    at = torch.arange(tokens)
    step = WriteAt(at, at, at // 8, torch.zeros(tokens).int(), at.int(), 8)
    return lambda layer: write_kv((k, v), step, device[layer], host[layer], hot, bounds[layer])
