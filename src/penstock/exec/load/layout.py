"""The cache groups of a model as memory: page layouts, slabs, and what a number of bytes holds."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.config.base.sizes import counted
from penstock.core.plan import Group
from penstock.core.settings import CacheGroup, CoreConfig
from penstock.kernels.types.states import BLOCK
from penstock.memory import dram, hbm, slabs
from penstock.memory.dram import DramPool
from penstock.memory.hbm import HbmPool
from penstock.memory.pinned import Pinned
from penstock.memory.pool import PageLayout, PoolPart
from penstock.memory.slabs import Slabs
from penstock.model.base import CacheShape, LocalLayer, Stage

PAGES_MAX = 1 << 31         # of a context
STATE_TOKENS = 128          # from a state to the next, at least, unless --state-interval says less


@dataclass(frozen=True, slots=True)
class Caches:
    """Of a whole model, or of one stage of it; `groups` and `layouts` by cache group. The core counts a
    pool in pages of group 0, the same on every stage."""

    groups: tuple[CacheGroup, ...]
    layouts: tuple[PageLayout, ...]
    slabs: Slabs
    host: Slabs                 # of the host pool, which all ranks of a machine share
    parts: tuple[PoolPart, ...]     # by group: what of the pages of that is here
    origins: tuple[tuple[int, int], ...] = ()       # by group: their first layer and head

    @property
    def page_size(self) -> int:
        """Tokens of a page, but of states."""
        return self.layouts[0].page_size

    @property
    def page_bytes(self) -> int:
        """One page of every group."""
        return sum(layout.page_bytes for layout in self.layouts)

    @property
    def token_bytes(self) -> int:
        """What a token adds to a long context: windows and states have all of theirs."""
        return sum(layout.page_bytes // layout.page_size for group, layout in
                   zip(self.groups, self.layouts, strict=True) if not group.reach)

    @property
    def words(self) -> str:
        """Of each group: layers, bytes of a token, tokens that are kept."""
        return "; ".join(
            f"{group.name}: {counted(layout.num_layers, 'layer')}, "
            + (f"{layout.page_bytes // layout.page_size} bytes a token" if not group.snapshot else
               f"states of {layout.page_bytes} bytes, kept each {layout.page_size} tokens")
            + (f", the last {group.window} are kept" if group.window else "")
            + (f", in the prefix cache those before each {group.keep} tokens" if group.keep else "")
            for group, layout in zip(self.groups, self.layouts, strict=True))

    def num_pages(self, nbytes: int) -> int:
        """Whole slabs in `nbytes`, in pages of group 0."""
        return nbytes // self.slabs.slab_bytes * self.slabs.slab_pages[0]

    def host_pages(self, nbytes: int) -> int:
        """Of a host pool of so many bytes, of all ranks together, in pages of group 0."""
        return nbytes // self.host.slab_bytes * self.host.slab_pages[0]

    def host_bytes_for(self, pages: int) -> int:
        """Memory of a host pool, of all ranks together, of at least so many pages of group 0."""
        return -(-pages // self.host.slab_pages[0]) * self.host.slab_bytes

    def nbytes(self, num_pages: int) -> int:
        """Memory of a pool of so many pages of group 0."""
        return num_pages // self.slabs.slab_pages[0] * self.slabs.slab_bytes

    def slabs_for(self, pages: int, group: int) -> int:
        """In which a context of `pages` pages fits, in this group: of a window its pages and the one that is
        written, of a state that which is read and that which is written, each in a slab of its own where
        groups share them, as `core.policy.capacity` counts."""
        reach, unit = self.groups[group].reach, self.layouts[group].page_size
        kept = -(-pages * self.page_size // unit)
        return min(kept, -(-reach // unit) + 1) if reach else -(-kept // self.slabs.slab_pages[group])

    def bytes_for(self, pages: int) -> int:
        """Device memory in which a context of `pages` pages fits, in every group."""
        return sum(self.slabs_for(pages, g) for g in range(len(self.groups))) * self.slabs.slab_bytes

    def context_pages(self, nbytes: int) -> int:
        """Pages of the longest context that fits into `nbytes`; PAGES_MAX where windows alone are kept."""
        low, high = 0, PAGES_MAX + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.bytes_for(middle) <= nbytes else (low, middle)
        return low

    def stage(self, stage: Stage, shapes: Sequence[CacheShape], node: Sequence[Stage] = ()) -> Caches:
        """Of the layers and heads of a part of this model, of which `shapes` are the cache groups. Slabs have
        as many pages as the model's, of these; in the host it has its rectangle of each page, which other
        TP ranks may have too. node: all parts on its machine, whose host pool has what these have of each page;
        (): all of the model's are."""
        own, parts, held, origins = [], [], [], []
        for layout, shape in zip(self.layouts, shapes, strict=True):
            layers, heads = _rectangle(stage, layout, shape)
            own.append(replace(layout, num_layers=len(layers), num_kv_heads=len(heads)))
            first_layer, first_head, all_of = 0, 0, layout
            if node:
                rectangles = [_rectangle(one, layout, shape) for one in node]
                first_layer = min(ls.start for ls, _ in rectangles)
                first_head = min(hs.start for _, hs in rectangles)
                all_of = replace(layout, num_layers=max(ls.stop for ls, _ in rectangles) - first_layer,
                                 num_kv_heads=max(hs.stop for _, hs in rectangles) - first_head)
            held.append(all_of)
            origins.append((first_layer, first_head))
            same = [one.tp_rank.index for one in node or (stage,) if one.first == stage.first
                    and one.tp_rank.kv_heads(layout.num_kv_heads) == stage.tp_rank.kv_heads(layout.num_kv_heads)]
            writes = min(same) == stage.tp_rank.index if node else stage.tp_rank.owns(layout.num_kv_heads)
            parts.append(PoolPart(all_of, layers.start - first_layer, heads.start - first_head, writes))
        host = self.slabs if tuple(held) == self.layouts else slabs.of_counts(held, self.slabs.slab_pages)
        return Caches(self.groups, tuple(own), slabs.of_counts(own, self.slabs.slab_pages), host,
                      tuple(parts), tuple(origins))

    def host_bytes(self, cfg: CoreConfig) -> int:
        """Memory of the host pool, of all ranks together."""
        return cfg.dram_pages // self.host.slab_pages[0] * self.host.slab_bytes

    def pools(self, cfg: CoreConfig, device: torch.device | str = "cpu", *, host_memory: Tensor | None = None,
              device_memory: Tensor | None = None) -> tuple[list[HbmPool], list[DramPool]]:
        """Device and host pools by cache group, those of a tier in one memory; no host pools without
        a host tier. host_memory: what ranks share, uint8 [`host_bytes`]; device_memory: what another process
        sees too, uint8 [`nbytes`]. None: it is made here."""
        if device_memory is None:
            device_memory = hbm.allocate(self.nbytes(cfg.hbm_pages), device)
        device_pools = self.device_pools(cfg, device_memory)
        if not cfg.dram_pages:
            return device_pools, []
        pinned = None
        if device_memory.is_cuda:
            pinned = Pinned(self.host_bytes(cfg), self.host.slab_bytes, memory=host_memory)
            host_memory = pinned.memory
        elif host_memory is None:
            host_memory = dram.allocate(self.host_bytes(cfg))
        return device_pools, self.host_pools(cfg, host_memory, pinned)

    def device_pools(self, cfg: CoreConfig, memory: Tensor) -> list[HbmPool]:
        """By cache group, over uint8 [`nbytes`]."""
        return [HbmPool(layout, self._count(g, cfg.hbm_pages), base=cfg.hbm_base + g * cfg.group_base,
                        group=Group(g), memory=memory, page_stride=self.slabs.page_stride(g),
                        part=replace(self.parts[g], writes=True))
                for g, layout in enumerate(self.layouts)]

    def host_pools(self, cfg: CoreConfig, memory: Tensor, pinned: Pinned | None = None) -> list[DramPool]:
        """By cache group, over uint8 [`host_bytes`]."""
        return [DramPool(layout, self._count(g, cfg.dram_pages), base=cfg.dram_base + g * cfg.group_base,
                         group=Group(g), memory=memory, page_stride=self.host.page_stride(g),
                         pinned=pinned, part=part)
                for g, (layout, part) in enumerate(zip(self.layouts, self.parts, strict=True))]

    def _count(self, group: int, num_pages: int) -> int:
        return num_pages // self.slabs.slab_pages[0] * self.slabs.slab_pages[group]

    def tell(self, log: Callable[[str], object]) -> None:
        """Say what groups there are, how they share slabs, and what that wastes."""
        if len(self.groups) > 1:
            log(f"kv: {self.words}")
            log(f"kv: slabs of {self.slabs.slab_bytes} bytes: " + ", ".join(
                f"{counted(n, 'page')} of {group.name} ({self.slabs.unused(g):.0%} unused)"
                for g, (group, n) in enumerate(zip(self.groups, self.slabs.slab_pages, strict=True))))


def _rectangle(stage: Stage, layout: PageLayout, shape: CacheShape) -> tuple[range, range]:
    """Layers and heads of whole pages that a part of the model has; layers of a group that it has none of are
    those between its neighbours', none."""
    heads = stage.tp_rank.kv_heads(layout.num_kv_heads)
    if shape.drafts:
        return range(len(shape.layers) * stage.heads), range(heads.first, heads.end)
    before = sum(layer < stage.first for layer in shape.layers)
    return (range(before, sum(layer < stage.end for layer in shape.layers)), range(heads.first, heads.end))


def stage_shapes(shapes: Sequence[CacheShape], stage: Stage) -> tuple[CacheShape, ...]:
    """A whole model's cache groups as `stage` has them: of each its own layers, perhaps none, and heads."""
    tp_rank = stage.tp_rank
    return tuple(replace(
        shape, num_kv_heads=tp_rank.kv_heads(shape.num_kv_heads).size, owned=tp_rank.owns(shape.num_kv_heads),
        layers=shape.layers * stage.heads if shape.drafts else tuple(
            LocalLayer(layer - stage.first) for layer in shape.layers
            if stage.first <= layer < stage.end)) for shape in shapes)


def caches_of(groups: Sequence[CacheShape], page_size: int, dtype: torch.dtype) -> Caches:
    """Layouts of a model's cache groups, in `dtype` where a group has none of its own."""
    interval = _interval(groups, page_size, dtype)
    layouts = tuple(_layout(group, page_size, dtype) if not group.snapshot else
                    _layout(replace(group, unit=group.page_tokens or interval), group.page_tokens or interval,
                            dtype) for group in groups)
    shared = slabs.share(layouts)
    return Caches(tuple(
        CacheGroup(name=group.name, page_bytes=layout.page_bytes, selector=group.selector,
                   resident=group.resident, slab_pages=n, window=group.window, keep=group.keep, snapshot=group.snapshot,
                   page_tokens=layout.page_size if group.snapshot else 0)
        for group, layout, n in zip(groups, layouts, shared.slab_pages, strict=True)),
        layouts, shared, shared, tuple(map(PoolPart, layouts)))


def _layout(group: CacheShape, tokens: int, dtype: torch.dtype) -> PageLayout:
    return PageLayout(
        num_layers=len(group.layers), num_kv_heads=group.num_kv_heads, page_size=tokens,
        head_dim=group.head_dim, planes=group.planes, unit=group.unit, dtype=group.dtype or dtype)


def _interval(groups: Sequence[CacheShape], page_size: int, dtype: torch.dtype) -> int:
    """Tokens from a state that stays to the next, where nobody says: as many as have KV of a quarter of its
    size, in whole pages and blocks, but STATE_TOKENS at least. Inner ones go before all else: more of them cost copies
    to the host, and no memory that is short."""
    states = sum(_layout(group, 1, dtype).page_bytes for group in groups
                 if group.snapshot and not group.page_tokens)
    token = sum(_layout(group, group.unit, dtype).page_bytes // group.unit for group in groups
                if not (group.snapshot or group.window))
    whole = math.lcm(page_size, BLOCK)
    return -(-max(STATE_TOKENS, states // max(1, 4 * token)) // whole) * whole
