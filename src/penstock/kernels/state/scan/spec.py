"""What a layer's scan is: its shape, its rule, its weights.

    X channels: queries, keys, values   W taps   N heads   K key heads   S key dim   V value dim
"""
from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanSpec:
    """`delta`: the gated delta rule, which takes back what the state answers to a key before it stores the
    key's value, with normed queries and keys; else the state of Mamba-2 (SSD). `taps`: of the convolution in
    front. `least`, `most`: bounds of the steps of Mamba-2."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    taps: int
    delta: bool
    least: float = 0.0
    most: float = math.inf

    @property
    def channels(self) -> int:
        """X: queries, then keys, of all key heads, then values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def elements(self) -> int:
        """Values of a state: the inputs of the last W - 1 tokens [W - 1, X], oldest first, then [N, S, V]."""
        return (self.taps - 1) * self.channels + self.heads * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanWeights:
    """All float32 and dense. decay_N: negative, times a step it is the logarithm of what is kept. step_N is
    added to a step before its softplus. skip_N: times the value, added to the output."""

    conv_WX: Tensor
    bias_X: Tensor | None
    decay_N: Tensor
    step_N: Tensor
    skip_N: Tensor | None
