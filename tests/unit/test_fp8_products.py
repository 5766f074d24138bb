"""Products in fp8 (`--backends linear=fp8`): what quantised activations mean, which weights take part, and on a GPU the
same by its tensor cores."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton is not installed here")

from penstock.kernels.gemm import linear
from penstock.kernels.gemm.linear import triton_fp8
from penstock.kernels.op import Unusable
from penstock.kernels.platform import KernelError, probe
from penstock.kernels.registry import choose
from penstock.kernels.types.packed import Packed, joined, quantised

WEIGHTS = {"blocks": (384, 512, 128, 128), "rows": (272, 528, 1, 528), "tensor": (96, 208, 96, 208),
           "joined": (160, 208, 96, 208)}     # of two weights with a scale per tensor, 96 and 64 rows


def made(form: str) -> tuple[Packed, torch.Tensor, torch.Tensor]:
    """A weight, rows of which some are a thousand times as large as others, and a bias."""
    outputs, inputs, rows, cols = WEIGHTS[form]
    generator = torch.Generator().manual_seed(outputs)
    x = torch.randn(270, inputs, generator=generator) * torch.logspace(-2, 1, 270)[:, None]
    weight_OI = torch.randn(outputs, inputs, generator=generator)
    weight = (joined([quantised(9 * weight_OI[:rows], rows, cols), quantised(weight_OI[rows:], outputs - rows, cols)])
              if form == "joined" else quantised(weight_OI, rows, cols))
    return weight, x.bfloat16(), torch.randn(outputs, generator=generator).bfloat16()


def wrong(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest error of a row, in units of its norm."""
    return float(((got.float() - want.float()).norm(dim=1) / want.float().norm(dim=1)).max())


@pytest.mark.parametrize("form", WEIGHTS)
def test_quantised_activations_cost_a_few_percent_of_a_row(form: str) -> None:
    weight, x, _ = made(form)
    exact = F.linear(x.float(), weight.floats())
    assert 1e-3 < wrong(triton_fp8.reference(weight, None)(x), exact) < 5e-2


@pytest.mark.parametrize("form", ["rows", "tensor", "joined"])
def test_each_output_has_the_scale_of_its_block(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, _ = made(form)
    outputs, inputs = weight.shape
    assert triton_fp8.form_of(weight) == inputs and (form != "joined" or weight.rows == 32)

    def scaled_mm(x_TI: torch.Tensor, code_IO: torch.Tensor, scale_T1: torch.Tensor, by: object, scale_1O: torch.Tensor,
                  each: object, **_: object) -> torch.Tensor:
        assert by == each == F.ScalingType.RowWise and scale_1O.shape == (1, outputs)
        assert scale_1O.dtype == torch.float32 and scale_1O.is_contiguous()
        return (x_TI.float() @ code_IO.float()) * scale_T1 * scale_1O
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    scale_T1 = x.float().abs().amax(1, keepdim=True) / 448
    got = triton_fp8._product(weight, inputs)((x.float() / scale_T1).to(torch.float8_e4m3fn), scale_T1)
    assert wrong(got, triton_fp8.reference(weight, None)(x)) < 1e-2


def test_a_row_of_zeros_and_the_largest_elements_are_kept() -> None:
    x = torch.tensor([[0.0] * 128, [3.0e38] + [1.0] * 127, [448.0] + [1.0] * 127])
    found = triton_fp8.quantised(x, 128)
    assert found[0].eq(0).all() and found[2].equal(x[2]) and found[1].isfinite().all()


@pytest.mark.parametrize("weight, cols", [
    ((256, 256, 128, 128), 128), ((256, 264, 128, 128), 0), ((192, 256, 64, 128), 0), ((64, 48, 1, 48), 48),
    ((64, 48, 64, 48), 48), ((64, 48, 16, 48), 48), ((64, 48, 1, 16), 0), ((63, 48, 1, 48), 0)])
def test_weights_that_take_part(weight: tuple[int, int, int, int], cols: int) -> None:
    outputs, inputs, *block = weight
    assert triton_fp8.form_of(quantised(torch.randn(outputs, inputs), *block)) == cols
    assert triton_fp8.form_of(quantised(torch.randn(outputs, inputs), 1, 16, "u8")) == 0


def test_fp8_is_chosen_by_name_only_and_on_hopper_only(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = replace(probe(), device="cuda", features=("sm_90",))
    assert choose(gpu, {}, ("linear",))["linear"].name != "fp8"
    assert choose(gpu, {"linear": "fp8"}, ("linear",))["linear"].name == "fp8"
    with pytest.raises(KernelError, match="on Hopper only"):
        choose(replace(gpu, features=("sm_100",)), {"linear": "fp8"}, ("linear",))
    monkeypatch.delattr(F, "scaled_mm")
    with pytest.raises(Unusable, match="has no scaled_mm"):
        linear.OP.get("fp8").usable_on(gpu)


@pytest.mark.parametrize("form", WEIGHTS)
@pytest.mark.parametrize("rows", [257, 270])
@pytest.mark.parametrize("bias", [False, True])
def test_products_in_fp8_equal_the_reference(form: str, rows: int, bias: bool) -> None:
    try:
        linear.OP.get("fp8").usable_on(probe("cuda"))
    except (Unusable, KernelError) as why:
        pytest.skip(str(why))
    weight, x, bias_O = (part.to("cuda") for part in made(form))
    args = weight, bias_O if bias else None
    got, want = linear.pack(*args, backend="fp8")(x[:rows]), triton_fp8.reference(*args)(x[:rows])
    assert got.shape == want.shape and got.dtype == torch.bfloat16 and wrong(got, want) < 1e-2
    few = linear.pack(*args, backend="fp8")(x[:16])
    assert few.equal(linear.pack(*args, backend="cuda")(x[:16]))
