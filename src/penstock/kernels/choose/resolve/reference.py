"""The definition of `resolve`: one query, head and unit at a time."""
from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.types.hot import DEVICE, EVICTIONS, HITS, MISSES, HotLayer

_FREE = 0xffffffff


def victims(hot: HotLayer, row: int, head: int, slots: int, now: int) -> list[int]:
    """Slots in the order in which they are given up; those used in step `now` are not among them."""
    unit, stamp = (t[row, head].tolist() for t in (hot.unit_RKS, hot.stamp_RKS))
    age = [_FREE if unit[s] < 0 else (now - stamp[s]) & _FREE for s in range(slots)]
    return sorted((s for s in range(slots) if age[s]), key=lambda s: (-age[s], s))


def resolve(chosen_BKC: Tensor, row_B: Tensor, device_RP: Tensor, host_RP: Tensor, hot: HotLayer,
            now_1: Tensor, *, page_units: int,
            turn_B: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    heads = chosen_BKC.shape[1]
    slot_BKC, now = torch.full_like(chosen_BKC, -1), int(now_1)
    misses: list[tuple[int, int, int]] = []
    for b, row in enumerate(row_B.tolist()):
        pages = hot.page_RW[row].tolist()
        slots = page_units * sum(page >= 0 for page in pages)

        def place(slot: int, pages: list[int] = pages) -> int:
            assert pages[slot // page_units] >= 0, "a unit is hot in a page that the row does not have"
            return pages[slot // page_units] * page_units + slot % page_units

        for k in range(heads):
            absent: list[tuple[int, int]] = []
            for c, unit in enumerate(chosen_BKC[b, k].tolist()):
                if unit < 0:
                    continue
                page = int(device_RP[row, unit // page_units])
                slot = int(hot.slot_RKM[row, k, unit]) if pages and page < 0 else -1
                if page >= 0:
                    slot_BKC[b, k, c] = page * page_units + unit % page_units
                    hot.count_RKE[row, k, DEVICE] += 1
                elif slot >= 0:
                    slot_BKC[b, k, c] = place(slot)
                    hot.stamp_RKS[row, k, slot] = now
                    hot.count_RKE[row, k, HITS] += 1
                else:
                    absent.append((c, unit))
            given = sorted(victims(hot, row, k, slots, now)[:len(absent)])
            assert len(given) == len(absent), f"row {row}: {slots} hot units are too few"
            for (c, unit), slot in zip(absent, given, strict=True):
                page, old = int(host_RP[row, unit // page_units]), int(hot.unit_RKS[row, k, slot])
                assert page >= 0, f"row {row} has unit {unit} on no tier"
                if old >= 0:
                    hot.slot_RKM[row, k, old] = -1
                    hot.count_RKE[row, k, EVICTIONS] += 1
                hot.slot_RKM[row, k, unit], hot.unit_RKS[row, k, slot] = slot, unit
                hot.stamp_RKS[row, k, slot] = now
                hot.count_RKE[row, k, MISSES] += 1
                slot_BKC[b, k, c] = place(slot)
                misses.append((k, page * page_units + unit % page_units, place(slot)))
    miss_E3 = chosen_BKC.new_zeros(chosen_BKC.numel(), 3)
    if misses:
        miss_E3[:len(misses)] = chosen_BKC.new_tensor(misses)
    return slot_BKC, miss_E3, chosen_BKC.new_tensor([len(misses)])
