"""What a device remembers of hot buffers: which units of a row are in which slots of its hot pages.

Owns maps, stamps and counts of every row and layer of one offloaded group; the bytes are pages of the device
pool. Nothing here decides what is brought in or given up: `kernels.resolve` does, in every layer, on
the device. Knows rows and table entries, not requests.

    L layers of the group   R rows   K KV heads   M units that a row may have   S slots   W hot pages
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kernels.types.hot import HotLayer
from penstock.kernels.types.ragged import on_device

_COPIED = 4096      # counts that are copied as they are: to add them up is one more launch beside each step


class HotBuffers:
    """The hot buffers of all rows. Rows, pages and entries are indices: ids less their base.

    pages        entries that a row's page table may have
    hot_pages    pages that a row's hot buffer may have; 0: no row is ever offloaded, and nothing is remembered
    page_units   units of a page
    readers      layers that read one layer's entries, at most: in a step each has a stamp of its own, so that a
                 later one may evict what an earlier one has read
    """

    def __init__(self, *, layers: int, rows: int, kv_heads: int, pages: int, hot_pages: int,
                 page_units: int, device: torch.device | str = "cpu", readers: int = 1) -> None:
        self._page_units, self._readers = page_units, readers
        self.hot_pages = hot_pages
        pages = pages if hot_pages else 0

        def filled(value: int, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)
        self._slot_LRKM = filled(-1, layers, rows, kv_heads, pages * page_units)
        self._unit_LRKS = filled(-1, layers, rows, kv_heads, hot_pages * page_units)
        self._stamp_LRKS = filled(0, layers, rows, kv_heads, hot_pages * page_units)
        self._page_RW = filled(-1, rows, hot_pages)
        self._pages: list[list[int]] = [[] for _ in range(rows)]       # what _page_RW has
        self.now_1 = filled(0, 1)
        self.count_LRKE = torch.zeros(layers, rows, kv_heads, 4, dtype=torch.int64, device=device)
        self.layers = tuple(
            HotLayer(self._slot_LRKM[layer], self._unit_LRKS[layer], self._stamp_LRKS[layer],
                     self._page_RW, self.count_LRKE[layer]) for layer in range(layers))

    @property
    def nbytes(self) -> int:
        """Device bytes of all tables, which count in the budget as pages do."""
        return sum(t.nbytes for t in (self._slot_LRKM, self._unit_LRKS, self._stamp_LRKS,
                                      self._page_RW, self.now_1, self.count_LRKE))

    def bind(self, row: int, pages: Sequence[int], keeps: Sequence[int]) -> None:
        """Forget what is hot of `row`; from now on its hot buffer is `pages` of the device pool.

        keeps   for each of them the table entry whose content it holds already, or -1: `Hot.keeps`.
                Later entries count as used later.
        """
        assert len(pages) == len(keeps) <= self._page_RW.shape[1], (
            f"{len(pages)} hot pages, {len(keeps)} of them kept, of at most {self._page_RW.shape[1]}")
        self.void(row)
        self._page_RW[row] = -1
        self._pages[row] = list(pages)
        if not pages:
            return
        self._page_RW[row, :len(pages)] = on_device(pages, self._page_RW.device, torch.int32)
        kept = [(page, entry) for page, entry in enumerate(keeps) if entry >= 0]
        if not kept:
            return
        assert len({entry for _, entry in kept}) == len(kept), "two hot pages hold one table entry"
        size = self._page_units
        place_J = torch.arange(size, device=self._page_RW.device)
        page_J, entry_J = on_device([x for pair in kept for x in pair], place_J.device,
                                    torch.int64).view(-1, 2).unbind(1)
        slot_J, unit_J = ((x[:, None] * size + place_J).flatten() for x in (page_J, entry_J))
        self._slot_LRKM[:, row, :, unit_J] = slot_J.int()
        self._unit_LRKS[:, row, :, slot_J] = unit_J.int()
        # Before any step that is still to come: a unit that this step used could not be given up.
        self._stamp_LRKS[:, row, :, slot_J] = self.now_1 * self._readers + (unit_J - unit_J.max() - 1).int()

    def resize(self, row: int, pages: Sequence[int]) -> None:
        """The hot buffer of `row` is longer or shorter by its end. What is hot in a page that stays, stays;
        of one that goes it is forgotten, and what comes holds nothing. Asserts that no page has moved."""
        had = self._pages[row]
        both = min(len(had), len(pages))
        assert had and list(pages[:both]) == had[:both], f"row {row}: hot pages {had} become {list(pages)}"
        assert len(pages) <= self._page_RW.shape[1], (
            f"row {row}: {len(pages)} hot pages of at most {self._page_RW.shape[1]}")
        slots = both * self._page_units
        slot_LKM = self._slot_LRKM[:, row]
        slot_LKM.masked_fill_(slot_LKM >= slots, -1)
        self._unit_LRKS[:, row, :, slots:] = -1
        self._page_RW[row, both:] = -1
        if len(pages) > both:
            self._page_RW[row, both:len(pages)] = on_device(pages[both:], self._page_RW.device, torch.int32)
        self._pages[row] = list(pages)

    def pages(self, row: int) -> Tensor:
        """int32 [W]: pool pages of the row's hot buffer, then -1."""
        return self._page_RW[row]

    def void(self, row: int) -> None:
        """Nothing of `row` is hot any more: its hot pages hold something else, or will."""
        self._slot_LRKM[:, row] = -1
        self._unit_LRKS[:, row] = -1

    def tick(self, rounds: int) -> tuple[Tensor, ...]:
        """By reader, int32 [rounds, 1]: the stamps of as many rounds of a step, each larger than all before, and
        than an earlier reader's; valid until the next."""
        self.now_1 += rounds * self._readers
        if rounds * self._readers == 1:         # each operation is a launch of every step
            return (self.now_1[None],)
        after = torch.arange(1 - rounds * self._readers, 1, dtype=torch.int32, device=self.now_1.device)
        return torch.split(((self.now_1 + after) * self._readers)[:, None], rounds)

    @property
    def now_R11(self) -> tuple[Tensor, ...]:
        """By reader, int32 [1, 1]: the stamp of a step of one round; the begin of the step has added one to
        `now_1`."""
        if self._readers == 1:
            return (self.now_1[None],)
        return tuple((self.now_1 * self._readers + reader)[None] for reader in range(self._readers))

    def all_counts(self) -> Tensor:
        """int64 [L, R, K, 4], a copy on the host that is complete once the device has come here: chosen units
        of each row that were on the device, hot, missed, and units that lost their slot, since the start. By
        layer and head, or added up where that is much to copy (L and K are 1)."""
        count_LRKE = self.count_LRKE
        if count_LRKE.numel() > _COPIED:
            count_LRKE = count_LRKE.sum((0, 2), keepdim=True)
        return count_LRKE.to("cpu", non_blocking=True, copy=True)
