"""Weights of experts in MXFP4, as gpt-oss ships them: 32 elements of four bits share a power of two.

Owns the names and the layout in safetensors; `weights.codes` has that of GGUF files. A layer's experts are in
two pairs of tensors, `_blocks` and `_scales`, of which each is read an expert at a time.

    E experts   O rows   G blocks of a row   I = 32 G columns
Source: OCP Microscaling Formats (MX) 1.0, sections 5.3.3 and 6.3.
"""
from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.model.weights.fp8 import MXFP4

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK_BYTES, ELEMENTS = 16, 32
_NAME = re.compile(r"(.*\.experts)\.(gate_up|down)_proj_blocks\Z", re.DOTALL)
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127                     # of a scale's exponent; 255 is NaN


class Part(NamedTuple):
    """A weight of one expert: rows `first`, `first` + `step`, .. of what the tensor has of it."""

    name: str
    expert: int
    first: int
    step: int


def says(config: Mapping[str, Any]) -> bool:
    """Whether config.json says that experts are so."""
    given = config.get("quantization_config")
    return isinstance(given, dict) and given.get("quant_method") == MXFP4


def parts_of(name: str, num_experts: int) -> Iterator[Part]:
    """The weights in a tensor of blocks of this name; none where it has another."""
    if (match := _NAME.match(name)) is None:
        return
    halves = ("gate", "up") if match[2] == "gate_up" else ("down",)
    for expert in range(num_experts):
        for first, half in enumerate(halves):           # gate and up in turns
            yield Part(f"{match[1]}.{expert}.{half}_proj.weight", expert, first, len(halves))


def floats(block_OGB: Tensor, scale_OG: Tensor) -> Tensor:
    """float32 [O, I]: what they mean. block_OGB, scale_OG: uint8; of two elements the low half is first."""
    value = torch.tensor((*_VALUES, *(-v for v in _VALUES)), device=block_OGB.device)
    code_OGI = torch.stack((block_OGB & 15, block_OGB >> 4), -1).flatten(2)
    power_OG = torch.exp2(scale_OG.float() - _BIAS).where(scale_OG < 255, torch.nan)
    return (value[code_OGI.long()] * power_OG[..., None]).flatten(1)
