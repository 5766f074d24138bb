"""NVFP4, MXFP4 and MXFP8 of compressed-tensors: what halves, scales and the factor mean, and refusals."""
from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import packers
import pytest
import torch
from packers import NVFP4, SMALL, read, refused, weight
from packers import compressed_config as config_of

from penstock.config.base.errors import ConfigError

FOUR, MX4 = config_of("nvfp4-pack-quantized", **NVFP4), config_of("mxfp4-pack-quantized", **SMALL)
MX8 = config_of("mxfp8-quantized", **{**SMALL, "num_bits": 8})
CASES = {
    "nvfp4": (FOUR, packers.nvfp4, (6, 48)), "nvfp4, one group": (FOUR, packers.nvfp4, (5, 16)),
    "nvfp4, in a group of its own format": ({**config_of("mixed-precision"), "config_groups": {"group_0": {
        **FOUR["config_groups"]["group_0"], "format": "nvfp4-pack-quantized"}}}, packers.nvfp4, (6, 48)),
    "mxfp4": (MX4, partial(packers.mx, bits=4), (6, 96)), "mxfp4, the last group smaller": (
        MX4, partial(packers.mx, bits=4), (3, 48)),
    "mxfp8": (MX8, partial(packers.mx, bits=8), (6, 96)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_weight_equals_what_its_codes_mean(case: str, tmp_path: Path) -> None:
    given, packer, shape = CASES[case]
    parts, twin = packer(weight(*shape))
    assert read(tmp_path, given, parts).equal(twin)


def test_every_code_and_exponent_means_what_the_standard_says(tmp_path: Path) -> None:
    """By hand: two elements in a byte, the low half first; a scale is 2 to the power of its byte less 127."""
    low = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2] * 2, dtype=torch.uint8)
    found = read(tmp_path, MX4, {"weight_packed": low, "weight_scale": torch.tensor([[127], [0]], dtype=torch.uint8)})
    row = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6] * 2)
    assert found.equal(torch.stack([row, row * 2 ** -127]))


def test_weights_that_compressed_tensors_wrote_mean_what_it_reads(tmp_path: Path) -> None:
    """Bit by bit, but for NVFP4, whose values the library rounds to bfloat16."""
    pytest.importorskip("compressed_tensors", reason="the dev extra has it")
    from compressed_tensors.compressors import (
        MXFP4PackedCompressor,
        MXFP8QuantizationCompressor,
        NVFP4PackedCompressor,
    )
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    given = weight(8, 64)
    most = given.unflatten(1, (-1, 16)).abs().amax(2)
    factor = (6 * 448 / most.amax()).view(1)
    nvfp4 = {"weight": given, "weight_scale": (most / 6 * factor).to(torch.float8_e4m3fn).float(),
             "weight_global_scale": factor}
    powers = torch.exp2(given.unflatten(1, (-1, 32)).abs().amax(2).log2().floor() - 2)
    for i, (config, compressor, args, state) in enumerate((
            (FOUR, NVFP4PackedCompressor, dict(num_bits=4, strategy="tensor_group", group_size=16), nvfp4),
            (MX4, MXFP4PackedCompressor, dict(num_bits=4, strategy="group", group_size=32, scale_dtype=torch.uint8),
             {"weight": given, "weight_scale": powers}),
            (MX8, MXFP8QuantizationCompressor, dict(num_bits=8, strategy="group", group_size=32,
                                                    scale_dtype=torch.uint8),
             {"weight": given, "weight_scale": powers / 64}))):
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(type="float", **args))
        stored = compressor.compress(state, scheme)
        want = compressor.decompress(stored, scheme)["weight"]
        folder = tmp_path / str(i)
        folder.mkdir()
        found = read(folder, config, stored)
        if config is FOUR:
            kept = stored["weight_scale"].float() / factor
            want, rounded = packers.meant(stored["weight_packed"]) * kept.repeat_interleave(16, 1), want
            assert (want - rounded.float()).abs().max() <= want.abs().max() / 128
        assert found.equal(want.float()), config["format"]


def without(parts: dict[str, torch.Tensor], name: str, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**{part: t for part, t in parts.items() if part != name}, **more}


NV, MX = packers.nvfp4(weight(8, 32))[0], packers.mx(weight(8, 64), 4)[0]
REFUSED: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], str]] = {
    "no factor": (FOUR, without(NV, "weight_global_scale"), "no file holds its 'weight_global_scale'"),
    "a factor of each row": (FOUR, {**NV, "weight_global_scale": torch.ones(8)}, r"expected F32 of \(1,\)"),
    "a factor of powers of two": (MX4, {**MX, "weight_global_scale": torch.ones(1)}, "powers of two"),
    "no scales": (MX4, without(MX, "weight_scale"), "no file holds its 'weight_scale'"),
    "groups of eight": (FOUR, {**NV, "weight_scale": torch.ones(8, 4).to(torch.float8_e4m3fn)},
                        r"weight_scale is F8_E4M3 of shape \(8, 4\), expected F8_E4M3 of \(8, 2\)"),
    "zero points": (FOUR, {**NV, "weight_zero_point": torch.zeros(8, 2)}, "has zero points"),
    "experts in one tensor": (FOUR, {**NV, "weight_packed": NV["weight_packed"][None]}, "two dimensions"),
    "six bits": (config_of("mxfp6-pack-quantized", **{**SMALL, "num_bits": 6}), MX, "supported: pack-.* take"),
    "four bits of another format": (config_of("float-quantized", **NVFP4), NV, "4 bits of type 'float', which is not"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_before_a_weight_is(case: str, tmp_path: Path) -> None:
    refused(tmp_path, *REFUSED[case])


def test_an_exponent_of_255_is_no_number(tmp_path: Path) -> None:
    scale = MX["weight_scale"].clone()
    scale[1, 1] = 255
    with pytest.raises(ConfigError, match="holds NaN or infinity: the file is damaged"):
        read(tmp_path, MX4, {**MX, "weight_scale": scale})
