"""What a layer's scan is: its shape, its rule, its weights.

    X channels: queries, keys, values   W taps   N heads   K key heads   S key dim   V value dim
    R parts of a state   Y channels of a part
"""
from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanSpec:
    """`delta`: the gated delta rule, which takes back what the state answers to a key before it stores the
    key's value, with normed queries and keys; else the state of Mamba-2 (SSD). `taps`: of the convolution in
    front. `least`, `most`: bounds of the steps of Mamba-2.

    A state is cut into parts of as many heads each: those of a key head, or, by `split`, so many parts of each
    key head, which share its queries and keys. A part has all that its heads need, so it can be kept, moved and
    computed without the others."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    taps: int
    delta: bool
    least: float = 0.0
    most: float = math.inf
    split: int = 1

    def __post_init__(self) -> None:
        assert self.heads % self.parts == 0, f"{self.heads} heads in {self.parts} parts"

    @property
    def parts(self) -> int:
        return self.key_heads * self.split

    @property
    def each(self) -> int:
        """Heads of a part."""
        return self.heads // self.parts

    def some(self, parts: int) -> ScanSpec:
        """Return the scan of so many of the parts."""
        assert self.split == 1 or self.key_heads == 1, "parts of several key heads that are split"
        return replace(self, heads=parts * self.each, key_heads=parts if self.split == 1 else 1,
                       split=1 if self.split == 1 else parts)

    @property
    def channels(self) -> int:
        """X: queries, then keys, of all key heads, then values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def part_channels(self) -> int:
        """Y: queries and keys of the part's key head, then values of its heads."""
        return 2 * self.key_dim + self.each * self.value_dim

    @property
    def part_elements(self) -> int:
        """Values of a part of a state: the inputs of the last W - 1 tokens [W - 1, Y], oldest first, then
        [N / R, S, V]."""
        return (self.taps - 1) * self.part_channels + self.each * self.key_dim * self.value_dim

    @property
    def elements(self) -> int:
        """Values of a state: [R, values of a part]."""
        return self.parts * self.part_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanWeights:
    """All float32 and dense. decay_N: negative, times a step it is the logarithm of what is kept. step_N is
    added to a step before its softplus. skip_N: times the value, added to the output."""

    conv_WX: Tensor
    bias_X: Tensor | None
    decay_N: Tensor
    step_N: Tensor
    skip_N: Tensor | None
