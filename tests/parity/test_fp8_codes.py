"""All 256 codes of e4m3 through each kernel in C that decodes them, against `fp8.decode`."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.attention import latent_attention
from penstock.kernels.choose import index_select
from penstock.kernels.choose import select as unit_select
from penstock.kernels.choose.select.spec import SelectRule
from penstock.kernels.op import Op, Unusable
from penstock.kernels.platform import probe
from penstock.kernels.types import fp8

CODES = torch.arange(256, dtype=torch.uint8)
ONE, DIM = 0x38, 128
NEAR = 2.0 ** -6                # a code of 7 is 7 % off if it is decoded as a normal one


def native(op: Op):
    try:
        op.get("c").usable_on(probe())
    except Unusable as why:
        pytest.skip(str(why))
    return op.get("c").run


def kept(code: Tensor, scale: Tensor) -> Tensor:
    """[.., DIM + 4] bytes: `code` [..] and zeros, of one scale [..] f32."""
    codes = torch.zeros(*code.shape, DIM, dtype=torch.uint8)
    codes[..., 0] = code
    return torch.cat((codes, scale[..., None].float().contiguous().view(torch.uint8)), -1)


def test_latent_attention_decodes_every_fp8_code():
    run = native(latent_attention.OP)
    scale, rest = torch.tensor([1.0, 0.5]).view(torch.uint8), torch.zeros(64, dtype=torch.bfloat16)
    for codes in (CODES.where(CODES & 0x7f != 0x7f, 0), CODES):
        pool = torch.cat((codes, scale, rest.view(torch.uint8)))[None, None].contiguous()
        out, _ = run(torch.zeros(1, 4, 320), pool, torch.tensor([[0]], dtype=torch.int32), value_dim=256,
                     scale=1.0)
        want = fp8.decode(pool[0, 0], 256)[:256]
        assert want.isfinite().all() == (codes[0x7f] == 0)
        if codes[0x7f] == 0:
            assert torch.equal(out[0], want.expand(4, -1))
        else:                       # NaN in a key shows in all that is made of it
            assert out.isnan().all()


def beside_rivals() -> tuple[Tensor, Tensor]:
    """Rows of three keys [252, 3, DIM + 4]: one a little less than a code's value, the code, one a little
    more, seen by [252] queries of its sign."""
    codes = CODES[(CODES & 0x7f != 0x7f) & (CODES & 0x7f != 0)]
    value = codes.view(torch.float8_e4m3fn).float()
    around = torch.stack((value.abs() * (1 - NEAR), torch.ones_like(value), value.abs() * (1 + NEAR)), 1)
    code = torch.full((len(codes), 3), ONE, dtype=torch.uint8)
    code[:, 1] = codes
    sign = value.sign()[:, None].expand(-1, 3).clone()
    sign[:, 1] = 1
    return kept(code, around * sign), value.sign()


def test_index_select_decodes_every_fp8_code():
    run = native(index_select.OP)
    keys, sign = beside_rivals()
    num = len(keys)
    q = torch.zeros(num, 1, DIM)
    q[:, 0, 0] = sign
    row = torch.arange(num, dtype=torch.int32)
    for topk, want in ((1, [2]), (2, [1, 2])):
        out = run(q, torch.ones(num, 1), keys, row[:, None].contiguous(), row,
                  torch.full((num,), 2, dtype=torch.int32), topk=topk)
        wrong = (out != torch.tensor(want)).any(1).nonzero().flatten().tolist()
        assert not wrong, f"keys {wrong} are decoded as others"


def test_select_decodes_every_fp8_code():
    run = native(unit_select.OP)
    keys, sign = beside_rivals()
    num = len(keys)
    bounds = keys[:, None, None].expand(-1, 1, 2, -1, -1).contiguous()
    q = torch.zeros(num, 1, DIM)
    q[:, 0, 0] = sign
    row = torch.arange(num, dtype=torch.int32)
    rule = SelectRule(unit=1, sink=0, window=1)
    for budget, want in ((2, [2, 3]), (3, [1, 2, 3])):
        position, units = (torch.full((num,), n, dtype=torch.int32) for n in (3, budget))
        out = run(q, bounds, torch.stack((row, row), 1).contiguous(), row, position, units, rule=rule,
                  chosen=budget)
        wrong = (out[:, 0] != torch.tensor(want)).any(1).nonzero().flatten().tolist()
        assert not wrong, f"bounds {wrong} are decoded as others"
