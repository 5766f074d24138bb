"""fp8 with a scale for a tensor or for each row: fp8 without blocks, and fbgemm_fp8."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from packers import read, refused, weight

STATIC = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
MX = {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}
CODE = weight(6, 10).mul(40).to(torch.float8_e4m3fn)
SCALES = {
    "Mistral's": (STATIC, {"weight_scale_inv": torch.tensor(.25), "activation_scale": torch.tensor(3.)}, .25),
    "one scale": (STATIC, {"weight_scale": torch.tensor([.25]), "input_scale": torch.tensor([3.])}, .25),
    "a row has one": (FBGEMM, {"weight_scale": torch.arange(1., 7)[:, None]}, torch.arange(1., 7)[:, None]),
    "a row has one, flat": ({**STATIC, "activation_scheme": "dynamic"}, {"weight_scale": torch.arange(1., 7)},
                            torch.arange(1., 7)[:, None]),
    "powers of two": (MX, {"weight_scale_inv": torch.arange(124, 130, dtype=torch.uint8)[:, None]},
                      torch.tensor([.125, .25, .5, 1, 2, 4])[:, None]),
    "powers of two, by another name": ({"quant_method": "mxfp8"}, {
        "weight_scale": torch.arange(124, 130, dtype=torch.uint8)[:, None]},
        torch.tensor([.125, .25, .5, 1, 2, 4])[:, None]),
}


@pytest.mark.parametrize("case", SCALES)
def test_elements_are_multiplied_by_their_scale(case: str, tmp_path: Path) -> None:
    given, scales, times = SCALES[case]
    assert read(tmp_path, given, {"weight": CODE, **scales}).equal(CODE.float() * times)


@pytest.mark.parametrize("tensors, words", [
    ({"weight": CODE}, "no file holds its 'weight_scale'"),
    ({"weight": CODE, "weight_scale": torch.ones(10, 1)}, r"is F32 of shape \(10, 1\), expected .* of \(6, 1\)"),
    ({"weight": CODE[None], "weight_scale": torch.ones(1)}, "each expert in tensors of its own")])
def test_scales_that_do_not_fit_are_refused(tensors: dict[str, torch.Tensor], words: str, tmp_path: Path) -> None:
    refused(tmp_path, FBGEMM, tensors, words)
