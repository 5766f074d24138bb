"""Changes that a plan makes to tensors on a device: gathered while the plan is read, then applied together.

One bind needs a handful of small copies, and 64 prompts that arrive together are 64 binds. Here all changes of a plan
are one copy from the host, and one scatter for each tensor.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Entries: TypeAlias = Iterable[tuple[int, int | float]]


class Edits:
    """Entries of contiguous tensors of one device, by their place in the flat tensor."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._made: dict[int, tuple[Tensor, dict[int, int | float]]] = {}

    def put(self, table: Tensor, entries: Entries) -> None:
        """Of one entry that is put twice the second counts."""
        self._made.setdefault(id(table), (table, {}))[1].update(entries)

    def apply(self) -> None:
        """Make them. Does not wait for a device: what is launched from now on sees them."""
        made, self._made = [of for of in self._made.values() if of[1]], {}
        if not made:
            return
        values = [torch.tensor(list(entries.values()), dtype=table.dtype) for table, entries in made]
        at = [torch.tensor(list(entries)) for _, entries in made]
        there = at + values if self._device.type == "cpu" else _together(at + values, self._device)
        for (table, _), at_E, value_E in zip(made, there[:len(made)], there[len(made):], strict=True):
            table.view(-1).index_copy_(0, at_E, value_E)


def _together(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies on `device`, made by one copy that the host does not wait for. Wide ones lie first, so that each
    is aligned."""
    order = sorted(range(len(parts)), key=lambda i: -parts[i].itemsize)
    packed = torch.cat([parts[i].view(torch.uint8) for i in order]).pin_memory().to(device, non_blocking=True)
    found = dict(zip(order, torch.split(packed, [parts[i].nbytes for i in order]), strict=True))
    return [found[i].view(part.dtype) for i, part in enumerate(parts)]
