"""Inputs of resolve: rows on the device, on the host and mixed; steps one after the other, so that maps,
stamps and evictions of one are the input of the next.

An output is all that is left: slots, the list in order, maps, stamps and counts.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from cases import Case, Workload
from penstock.kernels.choose.resolve import Resolve
from penstock.kernels.types.hot import HotLayer


def cases(device: str = "cpu") -> Iterator[Case]:
    for page_units in (1, 2, 8):
        for share in (0.0, 0.4, 1.0):
            yield Case(f"{page_units} units a page, {share:.0%} on the device",
                       partial(_run, page_units, share, 0, device), 0.0)
    yield Case("200 units at once", partial(_run, 32, 0.2, 0, device, chosen=200), 0.0)
    yield Case("several queries of a row", partial(_run, 2, 0.3, 0, device, hot_pages=30, turns=3), 0.0)
    yield Case("many queries of a row", partial(_run, 16, 0.0, 0, device, hot_pages=32, chosen=100, turns=4),
               0.0)
    yield Case("stamps that wrap", partial(_run, 2, 0.1, 2 ** 31 - 3, device), 0.0)
    yield Case("no row has hot units", partial(_run, 2, 1.0, 0, device, hot_pages=0), 0.0)


def empty(rows: int, heads: int, units: int, hot_pages: int, page_units: int,
          device: str = "cpu") -> HotLayer:
    """A state in which nothing is hot and no row has hot pages."""
    slots = hot_pages * page_units
    return HotLayer(torch.full((rows, heads, units), -1, dtype=torch.int32, device=device),
                    torch.full((rows, heads, slots), -1, dtype=torch.int32, device=device),
                    torch.zeros(rows, heads, slots, dtype=torch.int32, device=device),
                    torch.full((rows, hot_pages), -1, dtype=torch.int32, device=device),
                    torch.zeros(rows, heads, 4, dtype=torch.int64, device=device))


def _run(page_units: int, share: float, first: int, device_name: str, resolve: Resolve, *,
         hot_pages: int = 14, chosen: int = 11, turns: int = 1) -> Tensor:
    """Eight steps over three of four rows, whose hot buffers differ; `chosen` units in each of `turns`."""
    rows, heads, pages, often = 4, 3, 40, chosen * 8 // 11
    generator = torch.Generator().manual_seed(page_units)
    ids = torch.randperm(2 * rows * pages + 160, generator=generator).int()
    device, host, spare = ids[:rows * pages], ids[rows * pages:2 * rows * pages], ids[-160:]
    device = device.where(torch.rand(rows * pages, generator=generator) < share, -1).view(rows, pages)
    units = pages * page_units
    hot = empty(rows, heads, units if hot_pages else 0, hot_pages, page_units, device_name)
    device_RP, host_RP = device.to(device_name), host.view(rows, pages).to(device_name)
    for row in range(rows if hot_pages else 0):
        held = -(-(chosen * turns + row) // page_units)
        hot.page_RW[row, :held] = spare[row * 40:][:held] if page_units > 1 else torch.arange(held)
    left: list[Tensor] = []
    for step in range(8):
        row_B = torch.randperm(rows, generator=generator)[:3].repeat_interleave(turns).int()
        turn_B = torch.arange(turns, dtype=torch.int32).repeat(3).to(device_name)
        # Most of what is chosen comes back: the first third of the units is drawn often.
        chosen_BKC = torch.stack([torch.stack([
            torch.cat((torch.randperm(units // 3, generator=generator)[:often].sort().values,
                       (torch.randperm(units - units // 3, generator=generator)[:chosen - often].sort().values
                        + units // 3))) for _ in range(heads)]) for _ in range(3 * turns)]).int()
        if step % 2:
            chosen_BKC[0, :, chosen * 2 // 3:] = -1
        now = torch.tensor([first + step], dtype=torch.int64).to(torch.int32)
        slot, miss, num = resolve(chosen_BKC.to(device_name), row_B.to(device_name), device_RP, host_RP,
                                  hot, now.to(device_name), page_units=page_units,
                                  turn_B=turn_B if turns > 1 else None)
        listed = miss[:int(num)].tolist()
        left += [slot.flatten().cpu(), torch.tensor([len(listed)], dtype=torch.int32),
                 torch.tensor(sorted(listed), dtype=torch.int32).flatten()]
    left += [t.flatten().cpu() for t in (hot.slot_RKM, hot.unit_RKS, hot.stamp_RKS.sign(), hot.count_RKE)]
    return torch.cat([t.long() for t in left]).int()


def workloads() -> Iterator[Workload]:
    """64 units of 750 for each of three heads; nearly all of them hot."""
    for rows in (1, 8):
        yield Workload(f"{rows} x 3 x 64 of 750", partial(_prepare, rows), rows * 3 * 64 * 16, 0, 1)


def _prepare(rows: int, resolve: Resolve) -> Callable[[int], object]:
    hot = empty(rows, 3, 750, 40, 2)
    hot.page_RW.copy_(torch.arange(rows * 40).view(rows, 40))
    host, device = torch.zeros(rows, 375, dtype=torch.int32), torch.full((rows, 375), -1,
                                                                         dtype=torch.int32)
    choices = [torch.randperm(80)[:64].sort().values.int().expand(rows, 3, 64).contiguous()
               for _ in range(16)]
    row, now = torch.arange(rows, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)

    def call(_: int) -> object:
        now.add_(1)
        return resolve(choices[int(now) % 16], row, device, host, hot, now, page_units=2)
    return call
