"""Vectors in fp8: how many bytes, which rounding, and what is not finite stays that."""
from __future__ import annotations

import pytest
import torch

from penstock.kernels.types import fp8


@pytest.mark.parametrize("dim, coded, width", [(576, 512, 656), (128, 128, 132), (112, 96, 132),
                                               (32, 32, 36)])
def test_a_vector_has_as_many_bytes(dim: int, coded: int, width: int) -> None:
    assert fp8.width(dim, coded) == fp8.encode(torch.randn(3, dim), coded).shape[1] == width


def test_each_value_is_within_the_rounding_of_its_block() -> None:
    """The largest of a block is kept; a code has three bits of fraction, and steps of scale / 512."""
    x = torch.randn(50, 2, 576) * torch.logspace(-4, 4, 50)[:, None, None]
    back = fp8.decode(fp8.encode(x, 512), 512)
    block, found = (t[..., :512].unflatten(-1, (4, 128)) for t in (x, back))
    most = block.abs().amax(-1, keepdim=True)
    assert ((found - block).abs() <= block.abs() / 16 + most / 448 / 512).all()
    at = block.abs().argmax(-1, keepdim=True)
    assert torch.allclose(found.gather(-1, at), block.gather(-1, at), rtol=1e-6)
    assert torch.equal(back[..., 512:], x[..., 512:].bfloat16().float())
    assert torch.equal(fp8.encode(x[3:4], 512), fp8.encode(x, 512)[3:4]), "a row depends on those beside it"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_does_not_become_a_number(value: float) -> None:
    x = torch.randn(3, 576)
    x[1, 200], x[2, 550] = value, value
    back = fp8.decode(fp8.encode(x, 512), 512)
    assert back[0].isfinite().all() and not back[1, 200].isfinite() and not back[2, 550].isfinite()


def test_zeros_stay_zeros_and_bytes_of_free_pages_are_nan() -> None:
    assert (fp8.decode(fp8.encode(torch.zeros(2, 128), 128), 128) == 0).all()
    assert fp8.decode(torch.full((1, 656), 255, dtype=torch.uint8), 512).isnan().all()


@pytest.mark.parametrize("kept, step", [(torch.uint8, 1 / 8), (torch.bfloat16, 1 / 128)])
@pytest.mark.parametrize("dim", [20, 128, 256])
def test_a_bound_that_is_rounded_still_is_one(kept: torch.dtype, step: float, dim: int) -> None:
    """And no further off than a step of its type, or of the smallest codes: they begin at 2**-9 of the scale,
    which is at most 1/224 of the largest."""
    x = torch.randn(60, dim) * torch.logspace(-30, 30, 60)[:, None] * torch.logspace(-6, 0, dim)
    x[7], x[8, 1::2] = 0.0, -448.0
    for given in (x, x.bfloat16()):
        low, high = (fp8.floats(fp8.outward(given, kept, up=up), dim) for up in (False, True))
        given = given.float()
        assert (low <= given).all() and (given <= high).all()
        least = given.abs().amax(1, keepdim=True) / (224 * 512) if kept == torch.uint8 else 1e-38
        assert (high - low <= given.abs() * step * 1.01 + least).all()
    x[1, 3], x[2, 3] = float("nan"), float("inf")
    bad = fp8.floats(fp8.outward(x, kept, up=True), dim)
    assert not bad[1, 3].isfinite() and not bad[2, 3].isfinite() and bad[3].isfinite().all()


@pytest.mark.parametrize("size", [16, 32, 128])
def test_a_pair_that_is_mixed_has_the_same_product(size: int) -> None:
    q, k = torch.randn(64, 3, size), torch.randn(64, 3, size)
    mixed = fp8.mixed(k)
    assert torch.allclose((fp8.mixed(q) * mixed).sum(-1), (q * k).sum(-1), rtol=1e-4, atol=1e-4)
    assert torch.allclose(fp8.mixed(mixed), k, rtol=1e-4, atol=1e-4) and not torch.allclose(mixed, k)
