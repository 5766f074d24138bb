"""The C linear of every instruction set that this machine runs: cases, codes, rows alone and together.

All other C kernels of less than this CPU has run in processes of their own, `limited_isa.py`.
"""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from cases import cases_of, takes
from gguf import GGMLQuantizationType as Type

from penstock.kernels.gemm import linear
from penstock.kernels.gemm.linear.panels import Panels
from penstock.kernels.op import Unusable, WrongResult
from penstock.kernels.platform import probe
from penstock.kernels.types.packed import Packed
from penstock.model.weights.formats.gguf import PACKED, packed_of

pytestmark = pytest.mark.when_changed("src/penstock/kernels", "tests/kernels")
ISAS = ("native", "avx512", "avx2", "plain")          # plain runs on any machine that has a compiler


@pytest.fixture(params=ISAS)
def panels(request) -> Panels:
    made = Panels(request.param)
    probed(made.probe, probe())
    return made


def probed(ask, here) -> str:
    """What a probe says. Where it cannot run the test is skipped, not where it runs wrongly."""
    try:
        return ask(here)
    except WrongResult:
        raise
    except Unusable as why:
        pytest.skip(str(why))


def test_cases_of_every_instruction_set(panels):
    wrong = [case.wrong(case.run(panels), case.run(linear.OP.use("reference")))
             for case in cases_of(linear.OP) if takes(linear.OP.get("c"), case)]
    assert not any(wrong), [text for text in wrong if text][:5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_a_row_is_the_same_in_every_batch(panels, dtype):
    torch.manual_seed(0)
    if dtype is torch.uint8:
        code_OI = torch.randint(0, 16, (70, 96), dtype=dtype)
        run = panels.codes(Packed(code_OI, torch.randn(70, 3), 1, 32, torch.randn(70, 3)), None)
        x_TI = torch.randn(140, 96)
    else:
        run, x_TI = panels(torch.randn(70, 97).to(dtype), None), torch.randn(140, 97).to(dtype)
    alone = torch.cat([run(x_TI[t : t + 1]) for t in range(len(x_TI))])
    for rows in (2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 128, 129, 140):
        assert torch.equal(run(x_TI[:rows]), alone[:rows]), rows


def test_rows_of_a_wider_tensor_are_read_where_they_are(panels):
    torch.manual_seed(0)
    run, wide_TI = panels(torch.randn(70, 64).bfloat16(), None), torch.randn(40, 160).bfloat16()
    for rows in (1, 16, 19, 40):
        x_TI = wide_TI[:rows, 32:96]
        assert torch.equal(run(x_TI), run(x_TI.contiguous())), rows


@pytest.mark.parametrize("most, group", [(16, 32), (16, 16), (256, 32), (256, 16)])
def test_codes_equal_the_weights_they_mean(panels, most, group):
    torch.manual_seed(1)
    code_OI = torch.randint(0, most, (70, 96), dtype=torch.uint8)
    scale_BOG = torch.randn(2, 70, 96 // group)
    scale_BOG[:, 0] *= 1e-5                     # subnormal in f16, or nearly
    scale_OG, shift_OG = scale_BOG.half().float()
    codes = Packed(code_OI, scale_OG, 1, group, shift_OG)
    kept = scale_OG.repeat_interleave(group, 1)
    weight_OI, bias_O = code_OI * kept + shift_OG.repeat_interleave(group, 1), torch.randn(70)
    for rows in (1, 3, 8, 40):
        x_TI = torch.randn(rows, 96)
        gap = (panels.codes(codes, bias_O)(x_TI) - (x_TI @ weight_OI.T + bias_O)).abs()
        most_TO = x_TI.abs() @ weight_OI.abs().T + bias_O.abs()      # what rounding is relative to
        assert (gap <= 1e-6 * most_TO).all(), (rows, (gap / most_TO).max())


@pytest.mark.parametrize("isa", ["avx2", "plain"])
def test_the_other_kernels_of_a_lesser_cpu(isa):
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("limited_isa.py")), isa],
                          capture_output=True, text=True, timeout=300)
    if "Unusable" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0 and done.stdout.startswith("checked "), done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize("block", sorted(PACKED))
def test_weights_of_blocks_are_within_a_thousandth(panels, block):
    """Of the largest of their group, which is what scales are rounded by: exact but for those of K types."""
    elements, size = gguf.GGML_QUANT_SIZES[Type[block]]
    rng = np.random.default_rng(2)
    raw_NB = rng.integers(0, 256, (256 * 512 // elements, size), dtype=np.uint8)
    two = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
    for at in (208,) if block == "Q6_K" else (0, 2) if block in two else (0,):
        raw_NB[:, at : at + 2] = rng.normal(0, 0.01, (len(raw_NB), 1)).astype(np.float16).view(np.uint8)
    if block == "MXFP4":                                            # its scale is one byte, a power of two
        raw_NB[:, 0] = rng.integers(118, 124, len(raw_NB))
    codes = packed_of(block, raw_NB, (256, 512))
    want_OI, groups = codes.floats(), codes.scale_RJ.shape[1]
    gap_OI = panels.codes(codes, None)(torch.eye(512)).T - want_OI
    gap, most = (w_OI.abs().view(256, groups, -1).amax(-1) for w_OI in (gap_OI, want_OI))
    assert (gap <= (1e-3 if block.endswith("K") else 1e-6) * most).all(), (gap / most).nan_to_num().max()
