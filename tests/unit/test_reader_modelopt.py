"""ModelOpt: fp8 by tensor, row and block, MXFP8 and NVFP4, in either of two files, and what is refused."""
from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import packers
import pytest
import torch
from packers import read, refused, weight, written

from penstock.model.weights.checkpoint import open_checkpoint
from penstock.model.weights.locate import locate


def said(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "producer": {"name": "modelopt"}, **more}


def fp8(given: torch.Tensor, rows: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    parts, twin = packers.compressed_fp8(given, rows)
    return {**parts, "weight_scale": parts["weight_scale"].flatten() if rows else parts["weight_scale"].view(()),
            "input_scale": torch.tensor(2.)}, twin


NVFP4 = partial(packers.nvfp4, modelopt=True)
CASES = {
    "one scale": (said("FP8"), partial(fp8, rows=False), (6, 10)),
    "a row has one": (said("FP8_PER_CHANNEL_PER_TOKEN"), partial(fp8, rows=True), (6, 10)),
    "blocks": (said("fp8_pb_wo"), packers.modelopt_blocks, (300, 150)),
    "nvfp4": (said("NVFP4", group_size=16, kv_cache_quant_algo="FP8"), NVFP4, (6, 48)),
    "nvfp4 for floats": (said("W4A16_NVFP4"), NVFP4, (6, 48)),
    "mxfp8": (said("MXFP8"), partial(packers.mx, bits=8), (6, 64)),
    "one of several": (said("MIXED_PRECISION", quantized_layers={
        "a.b": {"quant_algo": "NVFP4"}, "c": {"quant_algo": "FP8"}}), NVFP4, (4, 16)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_weight_equals_what_its_codes_mean(case: str, tmp_path: Path) -> None:
    given, packer, shape = CASES[case]
    parts, twin = packer(weight(*shape))
    assert read(tmp_path, given, parts).equal(twin)


def test_blocks_have_rows_first(tmp_path: Path) -> None:
    """Two by two: transposed scales would fit as well."""
    code = torch.ones(256, 256).to(torch.float8_e4m3fn)
    found = read(tmp_path, said("FP8_PB_WO"), {
        "weight": code, "weight_scale": torch.tensor([[1., 2.], [3., 4.]])[:, None, :, None]})
    assert found[::128, ::128].tolist() == [[1, 2], [3, 4]]


def test_the_factor_multiplies_where_that_of_compressed_tensors_divides(tmp_path: Path) -> None:
    parts = {"weight": torch.full((1, 8), 0x22, dtype=torch.uint8), "weight_scale": torch.ones(1, 1).to(
        torch.float8_e4m3fn), "weight_scale_2": torch.tensor(.25)}
    assert read(tmp_path, said("NVFP4"), parts).eq(.25).all()
    other = {"weight_packed": parts["weight"], "weight_scale": parts["weight_scale"],
             "weight_global_scale": torch.tensor([.25])}
    (tmp_path / "other").mkdir()
    assert read(tmp_path / "other", packers.FORMATS["nvfp4"][0], other).eq(4).all()


def test_its_own_file_says_what_config_json_does_not(tmp_path: Path) -> None:
    parts, twin = NVFP4(weight(8, 32))
    written(tmp_path, None, {f"a.b.{part}": t for part, t in parts.items()})
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({
        "producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}))
    files = locate(str(tmp_path))
    assert files.config["quantization_config"]["quant_method"] == "modelopt"
    [(name, found)] = open_checkpoint(files).tensors()
    assert name == "a.b.weight" and found.equal(twin)


PARTS, BLOCKS = NVFP4(weight(8, 32))[0], packers.modelopt_blocks(weight(300, 150))[0]
REFUSED: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], str]] = {
    "int4": (said("W4A16_AWQ"), PARTS, "'modelopt' with 'W4A16_AWQ', which is not supported; supported: FP8, .* take"),
    "int4 of one layer": (said("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "W4A8_AWQ"}}), PARTS,
                          "'W4A8_AWQ', which is not supported"),
    "nothing said": ({"quant_method": "modelopt"}, PARTS, "with None, which is not supported"),
    "smoothed inputs": (said("NVFP4"), {**PARTS, "pre_quant_scale": torch.ones(32)}, "pre_quant_scale is not .* take"),
    "a low rank beside": (said("NVFP4"), {**PARTS, "svdquant_lora_a": torch.ones(4, 32)}, "svdquant_lora_a is not"),
    "no factor": (said("NVFP4"), {n: t for n, t in PARTS.items() if n != "weight_scale_2"},
                  "no file holds its 'weight_scale_2'"),
    "no scales": (said("FP8"), {"weight": BLOCKS["weight"]}, "no file holds its 'weight_scale'"),
    "blocks of other sizes": (said("FP8_PB_WO"), {**BLOCKS, "weight_scale": torch.ones(2, 1, 2, 1)},
                              "one scale, one per row, or one per 128 x 128"),
    "experts in one tensor": (said("NVFP4"), {**PARTS, "weight": PARTS["weight"][None]}, "two dimensions"),
    "fp8 experts in one tensor": (said("FP8"), {"weight": BLOCKS["weight"][None], "weight_scale": torch.ones(1)},
                                  "each expert must have tensors of its own"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_before_a_weight_is(case: str, tmp_path: Path) -> None:
    refused(tmp_path, *REFUSED[case])
