"""Faults that are put into a reader, one at a time: no format has the weight that its codes mean any more.

Of each format a weight of 16 x 48 whose rows and groups differ in size, so that the wrong scale shows.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import packers
import pytest
import torch
from packers import FORMATS, compressed_config, read

from penstock.kernels.types import packed as types
from penstock.model.weights.formats import values

Patch = pytest.MonkeyPatch


def fp8_blocks(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    parts, twin = packers.modelopt_blocks(weight)
    return {"weight": parts["weight"], "weight_scale_inv": parts["weight_scale"][:, 0, :, 0]}, twin


# Rows and columns fill no word: 11 zero points of four bits, 12 columns.
CASES = {**FORMATS, "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8_blocks),
         "int4, words not full": (compressed_config(
             "pack-quantized", strategy="group", num_bits=4, group_size=4, symmetric=False),
             partial(packers.compressed_int, group=4, symmetric=False))}
SHAPES = {"int4, words not full": (11, 12), "fp8 blocks": (300, 300), "modelopt fp8 blocks": (300, 300)}
E2M1 = ("nvfp4", "mxfp4", "modelopt nvfp4")
POWERS = ("mxfp4", "mxfp8", "mxfp8, minimax")
INTEGERS = ("int4", "int4 asymmetric", "int4 channel", "int8 packed", "int8", "awq", "gptq", "gptq v2", "auto-round",
            "int4, words not full")
NO_COLUMNS = ("int4 channel", "int8", "fp8", "fbgemm")      # a row has one scale


def around(patch: Patch, name: str, change: Callable[..., tuple]) -> None:
    """What a function of `values` is given is what `change` makes of it."""
    real = getattr(values, name)
    patch.setattr(values, name, lambda *given: real(*change(*given)))


def halves_swapped(patch: Patch) -> None:
    around(patch, "e2m1", lambda byte, *rest: (byte >> 4 | byte << 4, *rest))
    real = values.unpacked

    def unpacked(word: torch.Tensor, bits: int) -> torch.Tensor:
        code = real(word, bits)
        return code if bits == 8 else code.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    patch.setattr(values, "unpacked", unpacked)


def zero_off_by_one(patch: Patch) -> None:
    around(patch, "packed", lambda code, scale, zero, *rest: (code, scale, zero + 1, *rest))
    patch.setattr(types, "LEAST", types.LEAST + 1)


def zero_of_the_neighbour(patch: Patch) -> None:
    around(patch, "packed", lambda code, scale, zero, *rest: (
        code, scale, zero if isinstance(zero, int) else zero.roll(1, 0), *rest))


def scale_of_the_next(axis: int, patch: Patch) -> None:
    for name in ("packed", "e2m1"):
        around(patch, name, lambda code, scale, *rest: (code, scale.roll(1, axis), *rest))


def exponent_off_by_one(patch: Patch) -> None:
    real = values.power
    patch.setattr(values, "power", lambda byte: real(byte) * 2)


def padding_of_words(patch: Patch) -> None:
    """What fills up the last word of a row of codes, or of a column of zero points, is taken for the first one."""
    real = values.unpacked
    patch.setattr(values, "unpacked", lambda word, bits: real(word, bits).roll(1, -1))


FAULTS: dict[str, tuple[Callable[[Patch], None], tuple[str, ...]]] = {
    "halves swapped": (halves_swapped, (*E2M1, *(form for form in INTEGERS if "int8" not in form))),
    "zero off by one": (zero_off_by_one, (*E2M1, *INTEGERS)),
    "zero of the neighbour": (zero_of_the_neighbour, ("int4 asymmetric", "awq", "gptq", "gptq v2",
                                                      "int4, words not full")),
    "scale of the next row": (partial(scale_of_the_next, 0), tuple(CASES)),
    "scale of the next group": (partial(scale_of_the_next, 1), tuple(form for form in CASES if form not in NO_COLUMNS)),
    "exponent off by one": (exponent_off_by_one, POWERS),
    "padding of words": (padding_of_words, ("int4, words not full",))}


def right(form: str, folder: Path) -> bool:
    given, packer = CASES[form]
    rows, columns = SHAPES.get(form, (16, 48))
    size = torch.arange(1.0, rows + 1)[:, None] * (1 + torch.arange(columns) // 4 % 5)
    parts, twin = packer(packers.weight(rows, columns) * size)
    return read(folder, given, parts).equal(twin)


@pytest.mark.parametrize("form", CASES)
def test_without_a_fault_it_is_the_weight(form: str, tmp_path: Path) -> None:
    assert right(form, tmp_path)


@pytest.mark.parametrize(("fault", "form"), [(fault, form) for fault, (_, forms) in FAULTS.items() for form in forms])
def test_a_fault_is_seen(fault: str, form: str, monkeypatch: Patch, tmp_path: Path) -> None:
    FAULTS[fault][0](monkeypatch)
    assert not right(form, tmp_path)
