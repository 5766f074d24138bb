"""compressed-tensors: int4 and int8 in words, int8 and fp8 with scales, and what is refused."""
from __future__ import annotations

from functools import partial
from pathlib import Path

import packers
import pytest
import torch
from packers import compressed_config as config_of
from packers import read, refused, weight

from penstock.config.base.errors import ConfigError

INT4 = partial(config_of, "pack-quantized", strategy="group", num_bits=4)


INTS = {
    "group": (INT4(group_size=16), partial(packers.compressed_int, group=16), (6, 48)),
    "odd number of groups": (INT4(group_size=8), partial(packers.compressed_int, group=8), (5, 24)),
    "asymmetric, rows fill no word": (INT4(group_size=8, symmetric=False), partial(
        packers.compressed_int, group=8, symmetric=False), (11, 24)),
    "columns fill no word": (INT4(group_size=4), partial(packers.compressed_int, group=4), (4, 12)),
    "channel": (config_of("pack-quantized", num_bits=4), partial(packers.compressed_int, group=0), (6, 40)),
    "channel, asymmetric": (config_of("pack-quantized", num_bits=4), partial(
        packers.compressed_int, group=0, symmetric=False), (10, 40)),
    "eight bits": (config_of("pack-quantized", strategy="group", group_size=8, symmetric=False), partial(
        packers.compressed_int, group=8, bits=8, symmetric=False), (5, 24)),
    "int8 by row": (config_of("int-quantized"), packers.compressed_int8, (6, 7)),
    "int8, one scale": (config_of("int-quantized", strategy="tensor"), partial(
        packers.compressed_int8, channel=False), (6, 7)),
    "fp8 by row": (config_of("float-quantized", type="float"), packers.compressed_fp8, (6, 7)),
    "fp8, one scale": (config_of("float-quantized", type="float", strategy="tensor"), partial(
        packers.compressed_fp8, channel=False), (6, 7)),
    "its format in the group": ({**config_of("mixed-precision"), "config_groups": {"group_0": {
        **config_of("", num_bits=4, strategy="group", group_size=8)["config_groups"]["group_0"],
        "format": "pack-quantized"}}}, partial(packers.compressed_int, group=8), (4, 16)),
}


@pytest.mark.parametrize("case", INTS)
def test_a_weight_equals_what_its_codes_mean(case: str, tmp_path: Path) -> None:
    given, packer, shape = INTS[case]
    parts, twin = packer(weight(*shape))
    assert read(tmp_path, given, parts).equal(twin)


PACKED = [[1351104906, 1520024125], [-404995993, -232349272]]
ZEROS = [[60, 161]]
MEANT = [[-1.0, -2.0, -1.5, -4.5, -2.0, -2.0, -6.0, -3.5, 12.0, 2.0, 9.0, 10.0, 8.0, 8.0, 9.0, 4.0],
         [8.0, 6.0, -6.0, 2.0, 18.0, 20.0, 8.0, 22.0, -0.5, 0.0, -2.25, 0.0, -1.0, -2.0, -2.0, 1.25]]


def test_words_that_compressed_tensors_wrote_mean_what_it_reads(tmp_path: Path) -> None:
    """Written and decompressed by compressed-tensors 0.20.1: `pack_to_int32` of the codes and, along the rows,
    of the zero points; values are (code - zero point) * scale."""
    packed = torch.tensor(PACKED, dtype=torch.int32)
    zero = torch.tensor(ZEROS, dtype=torch.int32)
    scale = torch.tensor([[.5, 1.], [2., .25]])
    found = read(tmp_path, INT4(group_size=8, symmetric=False), {
        "weight_packed": packed, "weight_zero_point": zero, "weight_scale": scale,
        "weight_shape": torch.tensor([2, 16])})
    assert found.equal(torch.tensor(MEANT))


def test_columns_of_any_group_follow_their_index(tmp_path: Path) -> None:
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    given = weight(5, 24)
    parts, twin = packers.compressed_int(given[:, order], 8, symmetric=False)
    code = packers.grouped(given[:, order], 8, 4, symmetric=False)[0][:, order.argsort()]
    parts |= {"weight_packed": packers.words(code, 4), "weight_g_idx": (torch.arange(24) // 8)[order.argsort()].int()}
    assert read(tmp_path, INT4(group_size=8), parts).equal(twin[:, order.argsort()])
    parts["weight_g_idx"] = parts["weight_g_idx"] + 1
    with pytest.raises(ConfigError, match="groups 1 to 3 of 3: the file is damaged"):
        read(tmp_path, INT4(group_size=8), parts)


def test_blocks_and_zero_points_of_eight_bits(tmp_path: Path) -> None:
    code = weight(6, 10).mul(30).to(torch.float8_e4m3fn)
    scale = weight(2, 3)
    block = config_of("float-quantized", type="float", strategy="block", block_structure=[4, 4])
    twin = code.float() * scale.repeat_interleave(4, 0)[:6].repeat_interleave(4, 1)[:, :10]
    assert read(tmp_path, block, {"weight": code, "weight_scale": scale}).equal(twin)
    code, scale, zero = weight(6, 10).mul(30).to(torch.int8), weight(6, 1), weight(6, 1).mul(9).to(torch.int8)
    found = read(tmp_path, config_of("int-quantized"), {
        "weight": code, "weight_scale": scale, "weight_zero_point": zero})
    assert found.equal((code.float() - zero.float()) * scale)


GOOD = packers.compressed_int(weight(8, 16), 8, symmetric=False)[0]
REFUSED = {
    "another format": (config_of("marlin-24", num_bits=4), GOOD, "'marlin-24' with 4 bits"),
    "six bits": (config_of("pack-quantized", num_bits=6), GOOD, "6 bits of type 'int', which is not supported"),
    "no groups": ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, GOOD, "config_groups"),
    "sparse": ({**INT4(group_size=8), "sparsity_config": {"format": "sparse-24-bitmask"}}, GOOD, "sparsity_config"),
    "rotated": ({**INT4(group_size=8), "transform_config": {"config_groups": {"u": {}}}}, GOOD, "transform_config"),
    "no scales": (INT4(group_size=8), {"weight_packed": GOOD["weight_packed"]}, "no file holds its 'weight_scale'"),
    "scales of other rows": (INT4(group_size=8), {**GOOD, "weight_scale": torch.ones(7, 2)},
                             r"weight_scale is F32 of shape \(7, 2\), expected F16 or BF16 or F32 of \(8, 2\)"),
    "groups that do not fit": (INT4(group_size=8), {"weight_packed": GOOD["weight_packed"],
                                                    "weight_scale": torch.ones(8, 3)}, "3 groups do not share 16"),
    "zero points as codes are": (INT4(group_size=8), {**GOOD, "weight_zero_point": torch.ones(8, 1).int()},
                                 r"weight_zero_point is I32 of shape \(8, 1\), expected I32 of \(1, 2\)"),
    "experts in one tensor": (INT4(group_size=8), {**GOOD, "weight_packed": GOOD["weight_packed"][None]},
                              "two dimensions"),
    "words where none are said": (config_of("int-quantized"), GOOD, "pack-quantized"),
    "int8 without scales": (config_of("int-quantized"), {"weight": torch.ones(4, 4).to(torch.int8)}, "weight_scale"),
    "nothing said": (None, GOOD, "'I32': this type is not supported where config.json has no quant"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_before_a_weight_is(case: str, tmp_path: Path) -> None:
    refused(tmp_path, *REFUSED[case])
