"""Every implementation of every op on every device against the reference on a CPU, on every case."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import Case, cases_of, takes
from cases import step as of_steps

from penstock.kernels.attention.paged_attention import AttentionSpec, write_kv
from penstock.kernels.fused import step
from penstock.kernels.fused.step import reference as plain
from penstock.kernels.op import DEVICES, Op, Unusable, WrongResult
from penstock.kernels.platform import KernelError, probe
from penstock.kernels.registry import OPS
from penstock.kernels.types.ragged import Ragged

# On a GPU each shape is a kernel to compile: so many tests of an op there, of neighbouring cases.
PARTS = {"paged_attention": 12, "select": 3, "index_select": 3, "block_select": 2, "layer": 2, "latent_attention": 2,
         "experts": 3, "linear": 3}
WALK = [(op, implementation.name, device, part) for op in OPS.values()
        for implementation in op.implementations for device in implementation.devices
        if (implementation.name, device) != ("reference", "cpu")
        for part in range(PARTS.get(op.name, 1) if device == "cuda" else 1)]


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor | tuple[torch.Tensor, ...]]:
    """Outputs of the references on a CPU, computed once for all implementations."""
    return {}


def skip_unusable(op: Op, name: str, device: str = "cpu") -> None:
    try:
        op.get(name).usable_on(probe(device))
    except WrongResult:
        raise                           # users get around it by skipping; here it is a failure
    except (Unusable, KernelError) as why:
        pytest.skip(f"{op.name} {name}: {why}")


@pytest.mark.parametrize("op, name, device, part", WALK, ids=[
    f"{op.name}-{name}-{device}" + (f"-{part}" if device == "cuda" and op.name in PARTS else "")
    for op, name, device, part in WALK])
def test_implementation_equals_reference(op, name, device, part, expected):
    implementation = op.get(name)
    skip_unusable(op, name, device)
    pairs = [pair for pair in zip(cases_of(op, device), cases_of(op), strict=True)
             if takes(implementation, pair[0])]
    wrong = []
    parts = PARTS.get(op.name, 1) if device == "cuda" else 1
    for case, here in pairs[part * len(pairs) // parts:(part + 1) * len(pairs) // parts]:
        key = f"{op.name} {case.name}"
        if key not in expected:
            expected[key] = here.run(op.use("reference"))
        want = expected[key]
        for tensor in want if isinstance(want, tuple) else (want,):
            assert tensor.isfinite().all(), f"{key}: the reference read a slot it must not"
        wrong.append(case.wrong(case.run(implementation.run), want))
    wrong = [text for text in wrong if text]
    assert not wrong, f"{len(wrong)} cases\n" + "\n".join(wrong[:20])


def test_a_case_says_what_is_wrong():
    a = torch.tensor([1.0, 2.0])
    case = Case("it", lambda run: a, 0.1)
    assert case.wrong(a + 0.1, a) == "" and case.wrong((a, a.int()), (a, a.int())) == ""
    assert "differs by 0.5" in case.wrong(a + 0.5, a)
    assert "differs by nan" in case.wrong(a * torch.nan, a)
    assert "float64" in case.wrong(a.double(), a) and "(1,)" in case.wrong(a[:1], a)
    assert "strides (2,)" in case.wrong(torch.zeros(2, 2)[:, 0], a)
    assert "1 outputs for 2" in case.wrong((a,), (a, a))
    own = Case("it", lambda run: a, check=lambda out, want: "" if out.sum() == want.sum() else "no")
    assert own.wrong(a, a) == "" and own.wrong(a + 1, a) == "it: no"


def test_a_device_that_is_not_there_is_refused_with_the_reason():
    if torch.cuda.is_available():
        assert probe("cuda").features[0].startswith("sm_") and probe("cuda").gpu
    else:
        with pytest.raises(KernelError, match=r"^device 'cuda': .*(CUDA|NVIDIA)"):
            probe("cuda")


def test_an_implementation_for_another_device_is_unusable_and_is_not_probed():
    gpu = replace(probe(), device="cuda", features=("sm_90",))
    for op in OPS.values():
        for implementation in op.implementations:
            if "cuda" not in implementation.devices:
                with pytest.raises(Unusable, match="runs on cpu, not on cuda"):
                    implementation.usable_on(gpu)
        assert op.get("reference").devices == DEVICES


@pytest.mark.parametrize("name", list(OPS))
def test_op_has_a_reference_and_distinct_cases(name):
    names = [case.name for case in cases_of(OPS[name])]
    assert len(set(names)) == len(names)
    assert OPS[name].names[-1] == "reference"


def test_ends_of_a_captured_step():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table, budget, now, rows, at = (torch.tensor(x, dtype=torch.int32, device=device) for x in (
        [[4, -1], [0, 2]], [0, 6], [8], [1, 0, 0, 0], [63, 5, 40, -1]))
    last = torch.tensor([11, 22, 33], device=device)
    looks = step.Looks((step.BlockTableRef(table, 32), step.BlockTableRef(None, 32),
                        step.BlockTableRef(table, 16, 2)), budget, now,
                       torch.arange(16, device=device).view(1, 2, 2, 4))
    found = step.begin(rows, at, last, looks)
    assert [x.tolist() for x in (found.context_B, found.own_B, found.index_B, found.token_B, found.at_B)] == [
        [64, 6, 41, 0], [1, 0, 0, -1], [1, 0, 0, 2], [22, 11, 11, 33], [63, 5, 40, 0]]
    assert found.slot_LB.tolist() == [[95, 133, -1, -1], [-1] * 4, [47, 66, -1, -1]] and now.tolist() == [9]
    assert (found.budget_B.tolist(), found.select_B.tolist()) == ([6, 0, 0, 0], [63, -1, -1, -1])
    head = torch.tensor([[1, 3, 3], [torch.inf, 0, 0], [0, 0, 1], [0, 5, 0]], device=device).bfloat16()
    logits = torch.empty(4, 3, device=device)
    best = step.best(head, logits)
    best.token_B[2] = 0                                         # is drawn
    answer = step.say(best, rows, at, last, looks.count_LRKE)
    assert torch.equal(logits, head.float()) and answer.tolist() == [
        [1, 0, 0, 1], [1, 0, 1, 1], [20, 4, 4, 0], [22, 6, 6, 0], [24, 8, 8, 0], [26, 10, 10, 0]]
    assert last.tolist() == [0, 1, 1]
    wrong = [case.wrong(case.run(step), here.run(plain))
             for case, here in zip(of_steps.cases(device), of_steps.cases(), strict=True)]
    assert not any(wrong), [text for text in wrong if text][:20]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_parts_of_a_context_merge_to_attention_over_all_of_it(dtype, tolerance):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    attend, merge = (OPS[name].use("reference") for name in ("chunk_attention", "merge"))
    q, k, v = torch.randn(3, 13, 4, 20, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    want, lse = attend(q[:3], k, v, causal=False, scale=3.0)        # far apart: weights differ much
    parts = [attend(q[:3], k[part], v[part], causal=False, scale=3.0)
             for part in (slice(0, 5), slice(5, 6), slice(6, 13))]
    nothing = torch.full_like(want, torch.nan), torch.full_like(lse, -torch.inf)
    for order in ((*parts, nothing), (nothing, *parts[::-1])):
        (out, total), *more = ([x.clone() for x in part] for part in order)
        for part in more:
            merge(out, total, *part)
        torch.testing.assert_close(out, want, rtol=0, atol=tolerance * float(want.abs().max()))
        torch.testing.assert_close(total, lse, rtol=1e-5, atol=1e-5)
    out, total = (x.clone() for x in nothing)
    merge(out, total, *nothing)
    assert not out.any() and (total == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store_writes_its_slots_and_no_other(dtype):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pages, size, heads, dim = 5, 3, 2, 8
    pools = torch.full((pages, 3, heads, 2, size, dim), 7.0, dtype=dtype, device=device)
    qkv = torch.randn(4, 6, dim).to(device, dtype)
    slots = [(0, 2), (4, 2), (0, 0), (3, 0)]
    page_T, offset_T = (x.contiguous() for x in torch.tensor(slots, device=device).T)
    write_kv(qkv[:, 2:4], qkv[:, 4:], pools[:, 1, :, 0], pools[:, 1, :, 1], page_T, offset_T)
    want = torch.full(pools.shape, 7.0, dtype=dtype, device=device)
    for token, (page, offset) in enumerate(slots):
        for plane in (0, 1):
            want[page, 1, :, plane, offset] = qkv[token, 2 + 2 * plane:4 + 2 * plane]
    assert torch.equal(pools, want)


@pytest.mark.parametrize("name", ["c", "sdpa"])
def test_attention_rounds_to_nearest(name):
    """With equal scores the output is the mean of two values, which a truncation would miss."""
    op = OPS["paged_attention"]
    skip_unusable(op, name)
    v = torch.randn(2, 2, 1, 64).bfloat16()                     # two pages of one token
    plan = op.use(name)(
        Ragged((0, 1), (2,), (0,), torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([1]),
               torch.tensor([0]), 1),
        AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=64, dtype=v.dtype, scale=1.0))
    out = plan(torch.zeros(1, 2, 64, dtype=v.dtype), torch.ones_like(v), v)
    assert torch.equal(out[0], v.float().mean(0)[:, 0].bfloat16())


def test_gate_rounds_to_nearest():
    op = OPS["layer"]
    skip_unusable(op, "c")
    up = torch.randn(3, 70).bfloat16()
    gate_up = torch.cat((torch.full_like(up, 300.0), up), -1)   # silu(300) is 300
    assert torch.equal(op.use("c").gate(gate_up), (300.0 * up.float()).bfloat16())
