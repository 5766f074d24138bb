"""What one end of a pair tells the other before anything else, and what of it must be the same.

Owns the words of a refusal. Knows nothing of sockets or pages.
"""
from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.memory.pool import PageLayout
from penstock.transfer.layout import PageSlice

Info = dict[Annotated[str, Meta(max_length=256)],
            Annotated[str, Meta(max_length=4096)] | int | float | bool | None]
_Name = Annotated[str, Meta(max_length=256)]
_Count = Annotated[int, Meta(ge=1, le=1 << 24)]


class GroupFacts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One cache group of an engine: its pages are blocks [layers, heads, planes, units, dim]."""

    name: _Name
    num_layers: Annotated[int, Meta(ge=1, lt=1 << 16)]
    num_kv_heads: _Count
    planes: _Count
    head_dim: _Count
    unit: _Count                        # tokens that one vector stands for
    dtype: _Name
    itemsize: _Count
    page_size: _Count                   # tokens; may differ from the other end's

    @property
    def cell_bytes(self) -> int:
        """Bytes of one unit in one layer."""
        return self.num_kv_heads * self.planes * self.head_dim * self.itemsize

    def bytes_of(self, piece: PageSlice) -> int:
        return piece.layers * piece.units * (piece.heads or self.num_kv_heads) * (self.cell_bytes // self.num_kv_heads)

    @property
    def is_state(self) -> bool:
        """Whether one vector stands for a whole page: what is kept is a state, not what tokens have left."""
        return self.planes == 1 and self.unit == self.page_size > 1

    @property
    def page_units(self) -> int:
        return self.page_size // self.unit


class Facts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """must     by name, in words: weights, selector, RoPE, ... each the same at both ends
    groups   cache groups in order: all but the page size the same
    stages   of each group: how many of its layers each stage has; may differ
    info     for people who ask the other end about this one
    """

    role: _Name
    must: Annotated[dict[_Name, Annotated[str, Meta(max_length=4096)]], Meta(max_length=64)]
    groups: Annotated[list[GroupFacts], Meta(min_length=1, max_length=64)]
    stages: Annotated[list[Annotated[list[Annotated[int, Meta(ge=0, le=1 << 24)]], Meta(max_length=1024)]],
                      Meta(max_length=64)]
    info: Annotated[Info, Meta(max_length=256)] = {}


def group_facts(name: str, layout: PageLayout) -> GroupFacts:
    return GroupFacts(name, layout.num_layers, layout.num_kv_heads, layout.planes, layout.head_dim,
                      layout.unit, str(layout.dtype).removeprefix("torch."), layout.dtype.itemsize,
                      layout.page_size)


def differences(ours: Facts, theirs: Facts) -> str:
    """Why these two cannot be a pair, with both values of each difference; "" if they can."""
    found = []
    if ours.role == theirs.role:
        found.append(f"both ends are {ours.role} engines")
    for name in [*ours.must, *(n for n in theirs.must if n not in ours.must)]:
        _compare(found, name, ours.must.get(name, "nothing"), theirs.must.get(name, "nothing"))
    _compare(found, "cache groups", ", ".join(g.name for g in ours.groups),
             ", ".join(g.name for g in theirs.groups))
    for a, b in zip(ours.groups, theirs.groups, strict=False):
        for field in ("num_layers", "num_kv_heads", "planes", "head_dim", "unit", "dtype", "itemsize"):
            _compare(found, f"{field.replace('_', ' ')} of {a.name}", getattr(a, field), getattr(b, field))
    return "; ".join(found or _nonsense(theirs))


def _compare(found: list[str], what: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        found.append(f"{what}: {ours} here and {theirs} there")


def _nonsense(facts: Facts) -> list[str]:
    """What no engine of ours says of itself."""
    found = [f"pages of {g.page_size} tokens and units of {g.unit} there"
             for g in facts.groups if g.page_size % g.unit]
    if len(facts.stages) != len(facts.groups) or any(
            sum(stages) != g.num_layers for g, stages in zip(facts.groups, facts.stages, strict=False)):
        found.append(f"stages there that do not have the layers of each group: {facts.stages}")
    return found
