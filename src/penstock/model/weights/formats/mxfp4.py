"""Weights of experts in MXFP4, as gpt-oss ships them: 32 elements of four bits share a power of two.

Owns the names and the layout in safetensors; `formats.gguf` has that of GGUF files. A layer's experts are in
two pairs of tensors, `_blocks` and `_scales`, of which each is read an expert at a time.

    E experts   O rows   G blocks of a row   I = 32 G columns
Source: OCP Microscaling Formats (MX) 1.0, sections 5.3.3 and 6.3.
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.config.base.errors import ConfigError
from penstock.model.weights.formats.reader import Format, WeightReader, check
from penstock.model.weights.safetensors_file import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.types.packed import Packed

BLOCK_BYTES, ELEMENTS = 16, 32
_NAME = re.compile(r"(.*\.experts)\.(gate_up|down)_proj\Z", re.DOTALL)


class Mxfp4Reader(WeightReader):
    """`quant_method` mxfp4."""

    label, beside, between, stacked = "MXFP4 experts", frozenset(("blocks", "scales")), "_", True

    def __init__(self, given: Mapping[str, Any], where: str) -> None:
        """What decides is in the files."""

    def names(self, module: str) -> tuple[str, ...]:
        if (match := _NAME.match(module)) is None:
            return ()
        before = match[1].replace("{", "{{").replace("}", "}}")
        return tuple(f"{before}.{{}}.{half}_proj.weight" for half in (
            ("gate", "up") if match[2] == "gate_up" else ("down",)))

    def parts(self, module: Mapping[str, StoredTensor], where: str) -> tuple[str, ...]:
        blocks = module.get("blocks")
        shape = () if blocks is None else blocks.shape
        if len(shape) != 4 or shape[1] % 2 or shape[3] != BLOCK_BYTES:
            raise ConfigError(f"{where}; supported: blocks of [experts, rows, blocks of a row, {BLOCK_BYTES}]")
        check(blocks, "blocks", ("U8",), shape, where)
        check(module.get("scales"), "scales", ("U8",), shape[:3], where)
        return "blocks", "scales"

    def format_of(self, module: Mapping[str, StoredTensor]) -> Format | None:
        return Format("e2m1", 1, ELEMENTS, 4)

    def read(self, module: Mapping[str, Tensor]) -> Packed:
        from penstock.model.weights.formats.values import e2m1, power

        return e2m1(module["blocks"].flatten(1), power(module["scales"]), ELEMENTS)
