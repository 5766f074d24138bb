"""Codes of GGUF blocks: what they mean, and that fused, reordered and mixed weights keep it."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from penstock.kernels.fused import layer
from penstock.kernels.types.packed import Packed, joined
from penstock.model.weights.formats.gguf import PACKED, format_of, packed_of
from penstock.model.weights.gguf_file import BLOCKS
from penstock.model.weights.slots import Slots

HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
          "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "MXFP4": []}


def some(block: str, outputs: int, inputs: int, seed: int = 0) -> tuple[Packed, torch.Tensor]:
    """Random blocks, and what the gguf package says that they mean."""
    elements, num_bytes = next((e, b) for name, e, b in BLOCKS.values() if name == block)
    rng = np.random.default_rng(seed)
    raw_NB = rng.integers(0, 256, (outputs * inputs // elements, num_bytes), dtype=np.uint8)
    for at in HALVES[block]:
        raw_NB[:, at : at + 2] = rng.normal(0, 0.01, (len(raw_NB), 1)).astype(np.float16).view(np.uint8)
    if block == "MXFP4":                # one byte, an exponent
        raw_NB[:, 0] = rng.integers(110, 130, len(raw_NB))
    want = dequantize(raw_NB.reshape(1, -1), GGMLQuantizationType[block])[0].reshape(outputs, inputs)
    return packed_of(block, raw_NB, (outputs, inputs)), torch.from_numpy(want)


@pytest.mark.parametrize("block", sorted(PACKED))
def test_codes_mean_what_the_file_says(block):
    codes, want = some(block, 6, 512)
    assert torch.equal(codes.floats(), want) and codes.finite()
    assert format_of(block).num_bytes(codes.shape) == codes.num_bytes
    order = torch.tensor([5, 0, 3])
    assert torch.equal(codes[order].floats(), want[order])
    codes.scale_RJ[2, 1] = 70_000.0
    assert not codes.finite()                       # f16 could not hold it


def test_rows_of_several_types_are_joined():
    parts = [some("Q4_K", 3, 256, 1), some("Q6_K", 2, 256, 2), some("Q8_0", 4, 256, 3)]
    whole = joined([codes for codes, _ in parts])
    assert torch.equal(whole.floats(), torch.cat([want for _, want in parts]))


@pytest.mark.parametrize("plain", [False, True], ids=["all codes", "one of floats"])
def test_a_fused_weight_is_codes_if_all_of_it_is(plain):
    packed = []

    def pack(weight, bias):
        packed.append((weight, bias))
        return lambda x_TI: x_TI
    slots = Slots(torch.float32, pack, layer.OP.use("reference"))
    slots.linear(["q", "v"], [4, 2], 256, True, order=torch.tensor([5, 4, 3, 2, 1, 0]))
    (q, q_floats), (v, v_floats) = some("Q4_0", 4, 256, 1), some("Q6_K", 2, 256, 2)
    for name, tensor in (("v.weight", v_floats if plain else v), ("q.bias", torch.zeros(4)),
                         ("q.weight", q), ("v.bias", torch.ones(2))):
        assert not packed
        slots.load(name, tensor)
    [(weight, bias)] = packed
    assert isinstance(weight, torch.Tensor) is plain
    assert torch.equal(weight if plain else weight.floats(), torch.cat([q_floats, v_floats]).flip(0))
    assert bias.tolist() == [1, 1, 0, 0, 0, 0]


def test_an_embedding_of_codes_is_looked_up():
    slots = Slots(torch.float32, lambda *_: pytest.fail("packed"), layer.OP.use("reference"))
    table = slots.table("embed", (8, 256))
    codes, want = some("Q8_0", 8, 256)
    slots.load("embed", codes)
    ids_T = torch.tensor([3, 3, 7, 0])
    assert torch.equal(table(ids_T), want[ids_T])
