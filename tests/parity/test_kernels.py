"""Every implementation of every op against its reference, on every case of the op."""
from __future__ import annotations

import pytest
import torch

from penstock.kernels.cases import Case, cases_of
from penstock.kernels.paged_attention import AttentionSpec, store
from penstock.kernels.platform import Op, Unusable, WrongResult, probe
from penstock.kernels.ragged import Ragged
from penstock.kernels.registry import OPS

WALK = [(op, implementation.name) for op in OPS.values()
        for implementation in op.implementations if implementation.name != "reference"]


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    """Outputs of the references, computed once for all implementations."""
    return {}


def outputs_differ(case: Case, out: torch.Tensor, want: torch.Tensor) -> str:
    """Why `out` is not what the reference says, or ''."""
    if out.shape != want.shape or out.dtype != want.dtype or not out.is_contiguous():
        return f"{case.name}: {tuple(out.shape)} {out.dtype} strides {out.stride()}"
    gap = (out.float() - want.float()).abs().max() / want.float().abs().max()
    return "" if gap <= case.tolerance else f"{case.name}: differs by {gap:.2g} of the largest"


def skip_unusable(op: Op, name: str) -> None:
    try:
        op.get(name).probe(probe())
    except WrongResult:
        raise                           # users get around it by skipping; here it is a failure
    except Unusable as why:
        pytest.skip(f"{op.name} {name}: {why}")


@pytest.mark.parametrize("op, name", WALK, ids=[f"{op.name}-{name}" for op, name in WALK])
def test_implementation_equals_reference(op, name, expected):
    implementation = op.get(name)
    skip_unusable(op, name)
    wrong = []
    for case in cases_of(op):
        key = f"{op.name} {case.name}"
        if key not in expected:
            expected[key] = case.run(op.get("reference").run)
        assert expected[key].isfinite().all(), f"{key}: the reference read a slot it must not"
        wrong.append(outputs_differ(case, case.run(implementation.run), expected[key]))
    wrong = [text for text in wrong if text]
    assert not wrong, f"{len(wrong)} cases\n" + "\n".join(wrong[:20])


@pytest.mark.parametrize("name", list(OPS))
def test_op_has_a_reference_and_distinct_cases(name):
    names = [case.name for case in cases_of(OPS[name])]
    assert len(set(names)) == len(names)
    assert OPS[name].names[-1] == "reference"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store_writes_its_slots_and_no_other(dtype):
    pages, size, heads, dim = 5, 3, 2, 8
    pools = [torch.full((pages, size, heads, dim), 7.0, dtype=dtype) for _ in range(2)]
    qkv = torch.randn(4, 6, dim).to(dtype)
    slots = [2, 14, 0, 9]
    store(qkv[:, 2:4], qkv[:, 4:], *pools, torch.tensor(slots))
    for pool, at in zip(pools, (2, 4), strict=True):
        for slot in range(pages * size):
            want = (qkv[slots.index(slot), at:at + heads] if slot in slots
                    else torch.full((heads, dim), 7.0, dtype=dtype))
            assert torch.equal(pool[slot // size, slot % size], want)


@pytest.mark.parametrize("name", ["native", "sdpa"])
def test_attention_rounds_to_nearest(name):
    """With equal scores the output is the mean of two values, which a truncation would miss."""
    op = OPS["paged_attention"]
    skip_unusable(op, name)
    v = torch.randn(2, 1, 2, 64).bfloat16()                     # two pages of one token
    plan = op.get(name).run(
        Ragged((0, 1), (2,), ((0, 1),), torch.tensor([1]), 1),
        AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=64, dtype=v.dtype, scale=1.0))
    out = plan(torch.zeros(1, 2, 64, dtype=v.dtype), torch.ones_like(v), v)
    assert torch.equal(out[0], v.float().mean(0)[0].bfloat16())


def test_gate_rounds_to_nearest():
    op = OPS["layer"]
    skip_unusable(op, "native")
    up = torch.randn(3, 70).bfloat16()
    gate_up = torch.cat((torch.full_like(up, 300.0), up), -1)   # silu(300) is 300
    assert torch.equal(op.get("native").run.gate(gate_up), (300.0 * up.float()).bfloat16())
