"""Run by test_triton.py in a process of its own, with TRITON_INTERPRET=1: kernels against plain torch."""
from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import packed_interpreted
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))     # `cases` of the ops

DTYPES = {torch.float32: 1e-5, torch.float16: 4e-3}
count = 0


def check(got: Tensor, want: Tensor, dtype: torch.dtype, what: object) -> None:
    global count
    count += 1
    assert got.shape == want.shape, (what, got.shape, want.shape)
    gap, most = (got.float() - want.float()).abs().max(), want.float().abs().max()
    assert gap <= DTYPES[dtype] * max(most, 1e-3), (what, dtype, float(gap), float(most))


def attended(q_NH: Tensor, k_SKH: Tensor, v_SKH: Tensor, scale: float, softcap: float = 0.0,
             sinks_N: Tensor | None = None) -> Tensor:
    group = q_NH.shape[0] // k_SKH.shape[1]
    k_SNH, v_SNH = (x.float().repeat_interleave(group, 1) for x in (k_SKH, v_SKH))
    scores_NS = torch.einsum("nh,snh->ns", q_NH.float(), k_SNH) * scale
    if softcap:
        scores_NS = softcap * (scores_NS / softcap).tanh()
    if sinks_N is not None:
        scores_NS = torch.cat((scores_NS, sinks_N[:, None]), 1)
    return torch.einsum("ns,snh->nh", scores_NS.softmax(-1)[:, :len(k_SNH)], v_SNH)


def attention() -> None:
    """Stores every token through the tables into pages that are NaN elsewhere, then decodes."""
    from penstock.kernels.attention.paged_attention import AttentionSpec, triton_decode

    contexts = [17, 1, 0, 16]
    rows = torch.tensor([5, 1, 0, 3], dtype=torch.int32)
    for dtype, (kv_heads, group, dim), size in (
            (torch.float32, (2, 3, 20), 3), (torch.float16, (2, 3, 20), 16), (torch.float32, (1, 8, 16), 16)):
        needed = [-(-n // size) for n in contexts]
        pool = torch.full((sum(needed) + 3, 2, kv_heads, 2, size, dim), float("nan")).to(dtype)
        free = torch.randperm(len(pool)).int()
        table = torch.full((8, 80), -1, dtype=torch.int32)
        for row, pages in zip(rows.tolist(), free.split([*needed, 3]), strict=False):
            table[row, :len(pages)] = pages
        k, v = pool[:, 1, :, 0], pool[:, 1, :, 1]
        qkv = torch.randn(sum(contexts), 2 * kv_heads + 1, dim).to(dtype)
        k_new, v_new = qkv[:, 1:kv_heads + 1], qkv[:, kv_heads + 1:]
        row_T = torch.cat([torch.full((n,), int(r)) for n, r in zip(contexts, rows, strict=True)]).int()
        position_T = torch.cat([torch.arange(n) for n in contexts]).int()
        row_T, position_T = torch.cat((row_T, row_T[:1])), torch.cat((position_T, position_T[:1] - 1))
        padded = torch.cat((qkv, qkv[:1]))                  # its last token has position -1
        triton_decode.write_kv(padded[:, 1:kv_heads + 1], padded[:, kv_heads + 1:], k, v, table, row_T,
                               position_T)
        assert pool[:, 0].isnan().all()
        q = torch.randn(len(contexts), kv_heads * group + 1, dim).to(dtype)[:, 1:]
        starts = [sum(contexts[:i]) for i in range(len(contexts))]
        for window, softcap, sinks, first in ((0, 0.0, False, 0), (3, 0.0, True, 0), (16, 2.0, False, 0),
                                              (0, 2.0, True, 0), (0, 0.0, False, 1)):
            spec = AttentionSpec(num_heads=q.shape[1], num_kv_heads=kv_heads, head_dim=dim, dtype=dtype,
                                 scale=0.3, window=window, softcap=softcap, sinks=sinks, first=first)
            sinks_N = torch.randn(q.shape[1]) if sinks else None
            begins = [spec.first_seen(max(0, n - 1)) for n in contexts]
            want = torch.stack([
                attended(q[i], k_new[s + b:s + n], v_new[s + b:s + n], 0.3, softcap, sinks_N) if n else
                torch.zeros(q.shape[1:])
                for i, (s, b, n) in enumerate(zip(starts, begins, contexts, strict=True))])
            seen = table.clone()
            for row, begin in zip(rows.tolist(), begins, strict=True):
                seen[row, :begin // size] = -1
            for parts in (1, 3):
                got = triton_decode.decode(
                    q, k, v, seen, rows, torch.tensor(contexts, dtype=torch.int32), spec=spec,
                    cut=triton_decode.Tuning(block=16, parts=parts), sinks_N=sinks_N)
                check(got, want, dtype, ("decode", kv_heads, group, dim, size, parts, spec))


def heads() -> None:
    """KV heads in codes: into them and out of them, to the bit, and decodes over them."""
    from cases import paged_attention as cases

    from penstock.kernels.attention import hidden
    from penstock.kernels.attention.paged_attention import reference, triton_decode
    from penstock.kernels.triton import triton_codes
    from penstock.kernels.types import fp8

    for dtype, dim in product(DTYPES, (16, 64, 128, 256, 576)):
        # Exact ones: where others carry, the interpreter rounds wrong.
        kv = torch.randint(0, 0x7f, (5, 4, 2, dim)).to(torch.uint8).view(torch.float8_e4m3fn).float()
        kv[..., ::64] = 448
        kv = (kv * -2.0 ** torch.arange(-6, 4, 2)[:, None, None, None]).to(dtype).transpose(1, 2)
        kv[1, 1, 2], kv[2, 0, 1, 3], kv[3, 1, 0, 7] = 0, float("inf"), float("nan")
        want = fp8.encode_heads(torch.stack(hidden.marked(*kv.unbind(1)), 1))
        got = triton_codes.encode_heads(kv, fp8.head_width(dim))
        sound = [fp8.decode_heads(x).isfinite() for x in (got, want)]
        assert torch.equal(*sound) and not sound[0].all() and torch.equal(got[3, 1], want[3, 1]), ("faults", dtype, dim)
        assert torch.equal(got[[0, 1, 4]], want[[0, 1, 4]]), ("codes", dtype, dim)
        assert fp8.head_dim_of(fp8.head_width(dim)) == dim
        check(triton_codes.decode_heads(want[[0, 1, 4], 1:], dim, dtype),
              fp8.decode_heads(want[[0, 1, 4], 1:], dtype), torch.float32, ("floats", dtype, dim))
    rows = ((1, 47), (1, 1), (1, 16))
    for dtype, shape, scores, parts in product(DTYPES, cases._CODED, (cases._PLAIN, *cases._SCORES[:4]), (1, 3)):
        inputs = cases.make(dtype, rows, shape, 16, True, "cpu", scores)
        layout, spec = inputs.layout, replace(inputs.spec, coded=True)
        pools = cases.codes_of(inputs.k_PKGH, inputs.v_PKGH)
        got = triton_decode.decode(
            inputs.q_TNH, *pools, layout.pages_RM, torch.tensor(layout.rows).int(), torch.tensor(layout.context).int(),
            spec=spec, cut=triton_decode.Tuning(block=16, parts=parts), sinks_N=inputs.sinks_N)
        check(got, reference.prepare(layout, spec)(inputs.q_TNH, *pools, inputs.sinks_N), dtype, (shape, scores, parts))


def chunks() -> None:
    """A chunk's rows into pages that are NaN elsewhere."""
    from penstock.kernels.attention import hidden
    from penstock.kernels.attention.paged_attention import triton_decode

    for dtype, (heads, dim), size in product(DTYPES, ((2, 20), (3, 16)), (3, 16)):
        pool = torch.full((20, 2, heads, 2, size, dim), float("nan")).to(dtype)
        k, v, pages = pool[:, 1, :, 0], pool[:, 1, :, 1], torch.randperm(20).int()
        new, at = torch.randn(37, 2 * heads + 1, dim).to(dtype)[:, 1:], torch.arange(37)
        triton_decode.write_kv(new[:, :heads], new[:, heads:], k, v, pages[at // size].long()[:, None], None,
                               at % size)
        assert pool[:, 0].isnan().all() and int(pool.isfinite().sum()) == new.numel()
        # A value that is not finite is stored as zeros, and its key is what marks it; nothing else changes.
        new[3, heads, 5], new[20, 2 * heads - 1, 0], new[21, 0, 2] = float("nan"), float("-inf"), float("inf")
        at_T = pages[at // size].long(), at % size
        triton_decode.write_kv(new[:, :heads], new[:, heads:], k, v, at_T[0][:, None], None, at_T[1])
        for part, want in zip((k, v), hidden.marked(new[:, :heads], new[:, heads:]), strict=True):
            assert torch.equal(part[at_T[0], :, at_T[1]].nan_to_num(7.0), want.nan_to_num(7.0))


def merge() -> None:
    """Its own cases, but those in bfloat16."""
    global count
    from cases import merge as cases

    from penstock.kernels.attention.merge import reference, triton_merge

    for case in cases.cases():
        if case.name.startswith("float32"):
            if why := case.wrong(case.run(triton_merge.merge), case.run(reference.merge)):
                raise AssertionError(why)
            count += 1
    assert count


def gather() -> None:
    """Scattered units of several planes and heads, odd widths, any alignment; a grid that goes round."""
    from penstock.kernels.kv.gather import reference, triton_copy

    triton_copy.GRID = 2
    for dtype, (heads, planes, size, width), unit, entries in (
            (torch.float32, (3, 2, 16, 64), 8, 21), (torch.uint8, (1, 1, 4, 657), 1, 9),
            (torch.float16, (2, 2, 3, 5), 3, 12), (torch.float32, (3, 2, 16, 64), 8, 0)):
        host = torch.randint(0, 99, (5, 2, heads, planes, size, width)).to(dtype)
        pools = [torch.zeros(9, 2, heads, planes, size, width, dtype=dtype) for _ in range(2)]
        places = torch.randperm(heads * 9 * (size // unit))[:entries + 2]
        sources = torch.randint(0, 5 * (size // unit), (len(places),))
        miss = torch.stack((places % heads, sources, places // heads), 1).int()
        num = torch.tensor([min(entries, len(places))], dtype=torch.int32)
        for pool, run in zip(pools, (triton_copy.gather, reference.gather), strict=True):
            run(host[:, 1], pool[:, 1], miss, num, unit=unit)
        check(pools[0], pools[1], torch.float32, ("gather", dtype, width))
    for width, offset in ((1, 0), (7, 3), (13, 8), (100, 4)):
        host = torch.arange(3 * width + 16).to(torch.uint8)
        outs = [torch.zeros_like(host) for _ in range(2)]
        one = torch.ones(1, dtype=torch.int32)
        for out, run in zip(outs, (triton_copy.gather, reference.gather), strict=True):
            a, b = (x[offset:offset + 3 * width].view(1, 1, 1, 3, width) for x in (host, out))
            run(a, b, torch.tensor([[0, 1, 2]], dtype=torch.int32), one, unit=1)
        check(outs[0], outs[1], torch.float32, ("row", width, offset))


def hosted() -> None:
    """Ops of hosted decode over their own cases; then with rows of more scores than one program keeps, and
    with more queries than memory is taken for."""
    global count
    from cases import cases_of

    from penstock.kernels import registry
    from penstock.kernels.attention.sparse_attention import triton_units
    from penstock.kernels.choose.select import triton_bounds

    for name in ("write_kv", "resolve", "sparse_attention", "sparse_attention", "select", "select", "block_select"):
        op = registry.OPS[name]
        for i, case in enumerate(cases_of(op)):
            # A device runs all of them. Bounds in fp8 are multiplied as float16, which the interpreter has.
            coded = name == "select" and case.name.startswith("bfloat16") and "uint8" in case.name
            products = name in ("select", "sparse_attention")
            if name == "block_select" and (i % 7 != 1 or not case.name.startswith("float32-")):
                continue
            if not coded and name != "block_select" and (i % (10 if name == "write_kv" else 8) != 1 or (products and (
                    case.name.startswith("bfloat16") or "-long-" in case.name))):
                continue
            why = case.wrong(case.run(op.use("triton")), case.run(op.use("reference")))
            assert not why, (name, why)
            count += 1
        if name == "select":
            triton_bounds.WHOLE_UNITS, triton_bounds.SCORES, triton_bounds.MANY = 32, 200, 0
        if name == "sparse_attention":
            triton_units.SUMS = 100


def layer() -> None:
    from cases import layer as cases

    from penstock.kernels.fused.layer.reference import LayerReference
    from penstock.kernels.fused.layer.triton_ops import TritonOps

    own, reference = TritonOps(), LayerReference()
    for dtype, tokens, dim in product(DTYPES, (1, 3), (7, 300)):
        h, delta, weight = (torch.randn(n, dim).to(dtype) for n in (tokens, tokens, 1))
        for add in (None, delta):
            a, b = h.clone(), h.clone()
            check(own.norm(a, add, weight[0], 1e-5), reference.norm(b, add, weight[0], 1e-5), dtype, "norm")
            check(a, b, dtype, "norm h")
        wide = torch.randn(tokens, 2 * dim + 5).to(dtype)[:, :2 * dim]
        wide[0, 0] = -60.0
        check(own.gate(wide), reference.gate(wide), dtype, "gate")
    for dtype, tokens, (heads, dim) in product(DTYPES, (1, 3), ((1, 2), (9, 64))):
        x, angles = torch.randn(tokens, heads + 2, dim).to(dtype), torch.randn(2, tokens, 1, dim).to(dtype)
        weights = torch.randn(2, dim).to(dtype)
        a, b = x.clone(), x.clone()
        own.rotate(a[:, 1:heads + 1], *angles)
        reference.rotate(b[:, 1:heads + 1], *angles)
        check(a, b, dtype, ("rotate", heads, dim))
        own.norm_rotate(a[:, 1:heads + 1], *angles, *weights, heads * 3 // 4, 1e-5)
        reference.norm_rotate(b[:, 1:heads + 1], *angles, *weights, heads * 3 // 4, 1e-5)
        check(a, b, dtype, ("norm_rotate", heads, dim))
    for tokens, sizes in product((1, 9), ((3, 20, 70), (2, 128, 512))):
        a, b = (cases._by_head("cpu", torch.float16, tokens, *sizes, ops) for ops in (own, reference))
        check(a, b, torch.float16, ("by_head", tokens, sizes))
    for dtype, index in product(DTYPES, (0, 24, 128)):
        a, b = (cases.latent("cpu", dtype, 3, index, ops) for ops in (own, reference))
        check(a, b, dtype, ("latent", index))


def linear() -> None:
    from penstock.kernels.gemm.linear import triton_rows

    for tokens, (outputs, inputs), cut in product(
            (1, 2, 17), ((37, 19), (64, 300)), (triton_rows.TileShape(16, 64, 4, 2),)):
        x = torch.randn(tokens, inputs + 3).half()[:, :inputs]
        weight, bias = torch.randn(outputs, inputs).half(), torch.randn(outputs).half()
        for b in (None, bias):
            want = F.linear(x.float(), weight.float(), None if b is None else b.float())
            check(triton_rows.run(x, weight, b, cut), want, torch.float16, ("linear", tokens, outputs, cut))


def scaled() -> None:
    packed_interpreted.scaled(check)


def faults() -> None:
    packed_interpreted.faults()


def experts() -> None:
    """Routing over its own cases; of those of experts some, with few tokens and with many."""
    global count
    from cases import cases_of
    from cases import experts as cases

    from penstock.kernels.gemm.experts import OP, Rule, triton_experts

    triton, reference = OP.use("triton"), OP.use("reference")
    for case in cases_of(OP):
        kind, what, tokens = case.name.split("-")
        some = {"1": ("16x8", "of 5"), "3": ("5x2", "3x3", "1x1", "u4", "of 5"), "37": ("of 5",),
                "150": ("5x2", "of 5", "u4 3x2")}.get(tokens, ())
        if "route" in what or (kind == "float32" and any(shape in what for shape in some)):
            why = case.wrong(case.run(triton), case.run(reference))
            assert not why, why
            count += 1
    for tokens, packed in ((3, ""), (70, "e4m3"), (3, "u4"), (70, "e2m1")):
        out = [cases._mlp("cpu", torch.float16, (5, 2, 48, 32, 1, 16), packed, tokens, ops)
               for ops in (triton, reference)]
        check(*out, torch.float16, ("experts", tokens, packed))
    # A token whose router is damaged must show, and must not read outside of the weights.
    rule = Rule(num_chosen=2, renormalize=True)
    logits = torch.randn(2, 6)
    logits[1] = float("nan")
    expert, weight = triton.route(logits, None, rule)
    assert (expert >= 0).all() and (expert < 6).all()
    assert weight[0].isfinite().all() and weight[1].isnan().all()
    up, down = torch.randn(6 * 2 * 8, 16), torch.randn(6 * 16, 8)
    out = triton.mlp(torch.randn(2, 16), expert, weight, up, down)
    assert out[0].isfinite().all() and out[1].isnan().all()
    # As many blocks as there could be, each visit in one of them, and each block of one expert.
    for visits in (torch.zeros(9, 2), torch.arange(18).view(9, 2) % 7, torch.randint(0, 7, (40, 2))):
        for first, num in ((0, 7), (2, 3)):
            expert_M, visit_MJ = triton_experts.blocks(visits.long(), first, num, 4)
            assert len(expert_M) == visits.numel() // 4 + num
            assert sorted(visit_MJ[visit_MJ >= 0].tolist()) == [
                v for v, e in enumerate(visits.flatten()) if first <= e < first + num]
            for e, row in zip(expert_M.tolist(), visit_MJ.tolist(), strict=True):
                assert {int(visits.flatten()[v]) for v in row if v >= 0} <= {first + e}
            count += 1


def draw() -> None:
    """With blocks of 64 tokens, so that a row has several."""
    global count
    from cases import draw as cases

    from penstock.kernels.sample.draw import OP, triton_draw

    triton_draw.BLOCK = 64
    for case in list(cases.cases())[::4]:           # a device runs all of them
        if why := case.wrong(case.run(OP.use("triton")), case.run(OP.use("reference"))):
            raise AssertionError(why)
        count += 1


def mask() -> None:
    """With blocks of 64 tokens, so that a row has several."""
    global count
    from cases import mask as cases

    from penstock.kernels.sample.mask import OP, triton_mask

    triton_mask.BLOCK = 64
    for case in cases.cases():
        if not case.name.startswith(("256", "32 masks")):      # a device runs all of them
            if why := case.wrong(case.run(OP.use("triton")), case.run(OP.use("reference"))):
                raise AssertionError(why)
            count += 1


def latent() -> None:
    """Half of the ops' own cases in float32 but the largest, some of other formats; ties in all of a row."""
    from cases import index_pair as pairs
    from cases import index_select as keys
    from cases import latent_attention as rows

    from penstock.kernels.attention.latent_attention import reference as attends
    from penstock.kernels.attention.latent_attention import triton_latent
    from penstock.kernels.choose.index_pair import reference as paired
    from penstock.kernels.choose.index_pair import triton_pair
    from penstock.kernels.choose.index_select import reference as selects
    from penstock.kernels.choose.index_select import triton_keys
    from penstock.kernels.triton import triton_codes
    from penstock.kernels.types import fp8

    for module, run, want in ((keys, triton_keys.index_select, selects.index_select),
                              (rows, triton_latent.latent_attention, attends.latent_attention)):
        plain = [case for case in module.cases("cpu") if case.name.startswith("float32-")
                 and not any(part in case.name for part in ("128", "long", "chunk of many"))]
        # Products of codes are the same in any type; the interpreter has none of bfloat16.
        names = ("float32 over", *(["bfloat16 over fp8"] if module is keys else []))
        others = [case for case in module.cases("cpu") if case.name.startswith(names) and any(
            part in case.name for part in ("page edges", "-one row", "together", "a chunk of one row-(4"))]
        codes = [case for case in module.cases("cpu") if case.name.startswith("float32 over") and
                 "contexts to" in case.name and "-(8" in case.name]
        for case in (*plain[::2], *others[::2], *codes):        # a device runs all of them
            got, right = (x if isinstance(x, tuple) else (x,) for x in map(case.run, (run, want)))
            for a, b in zip(got, right, strict=True):
                check(a.nan_to_num(neginf=-1e3), b.nan_to_num(neginf=-1e3), torch.float32, case.name)
    assert any("contexts" in case.name for case in (*plain[::2], *others[::2])) and len(codes) > 3
    q, pool, slot = rows.make(torch.float32, torch.uint8, (5, 1, 40, 17), (4, 24, 16), 3)
    triton_latent.DECODED = 24 * 4 * 41 * 3             # rows of three of these queries, and then of one
    check(triton_latent.latent_attention(q, pool, slot, value_dim=16, scale=0.2)[0],
          attends.latent_attention(q, pool, slot, value_dim=16, scale=0.2)[0], torch.float32, "in parts")
    wholes, real = [], triton_latent.decoded
    triton_latent.decoded = lambda *of, every: (wholes.append(every), real(*of, every=every))[1]
    for page in (pool[:1], pool[:1].clone(memory_format=torch.contiguous_format)):
        triton_latent.latent_attention(q, page, slot.clamp(max=2), value_dim=16, scale=0.2)
    assert (wholes[0], wholes[-1]) == (False, True), "one page stands for a pool at the start"
    triton_latent.decoded = real
    x = torch.randint(0, 0x7f, (40, 24)).to(torch.uint8).view(torch.float8_e4m3fn).float()     # exact ones
    x[:, :2] = 448
    x[::3] *= -2.0 ** torch.arange(-6, 8)[:, None]
    x[1] = 0
    strided = torch.cat((x, x), 1)[:, :24]
    assert triton_codes.encode(strided, 20, fp8.width(24, 20)).equal(fp8.encode(x, 20)), "codes"
    for case in pairs.cases("cpu"):     # of ties the interpreter rounds up, and there are some in the others
        if case.name.startswith("float32-3") and "128" not in case.name:
            out, right = map(case.run, (triton_pair.index_pair, paired.index_pair))
            # Nor does it carry what it rounds up into the exponent: of queries that need no rounding, below.
            assert not (why := case.wrong(out[1:], right[1:])), why
    one = torch.eye(16)[:12].view(3, 4, 16) * torch.tensor([3.0, -0.25, 28.0, 0.0])[:, None]
    weight = torch.rand(3, 4)
    for a, b in zip(*(run(one, weight, one[:, 0]) for run in (triton_pair.index_pair, paired.index_pair)),
                    strict=True):
        assert a.dtype == b.dtype and torch.equal(a.float(), b.float()), "exact queries"
    args = keys.make(torch.float32, torch.float32, ((0, 200), (1, 63), (2, 64), (1, -1)), (1, 16), 16)
    for near in (64, 4):            # of the tokens near the cut, all that the list holds, and more
        triton_keys.NEAR, triton_keys.TAKEN = near, 64
        check(triton_keys.index_select(*args, topk=24), selects.index_select(*args, topk=24), torch.float32,
              near)


def ranks() -> None:
    """Each rank's kernel, one after the other: twice, as the first time the others' numbers are not there. Of
    sums of several lengths one after the other, so that both halves are written over."""
    from penstock.kernels.triton import triton_ranks

    inboxes = [torch.zeros(triton_ranks.inbox_bytes(3), dtype=torch.uint8) for _ in range(3)]
    counts = [triton_ranks.counts(1, "cpu") for _ in inboxes]
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes])
    sums = list(product(DTYPES, (5, 9000, 4096)))
    for done, (dtype, num) in enumerate(sums):
        given = [torch.randn(num).to(dtype) for _ in inboxes]
        for _ in range(2):
            found = [x.clone() for x in given]
            for rank, (x, told) in enumerate(zip(found, counts, strict=True)):
                told[:-1] = done
                triton_ranks.add(x, addresses, told, rank)
        want = (given[0].float() + given[1].float() + given[2].float()).to(dtype)
        assert all(x.equal(want) for x in found) and all((told[:-1] == done + 1).all() for told in counts)
    assert triton_ranks.takes(torch.zeros(1 << 18)) and not triton_ranks.takes(torch.zeros(1 << 18 | 1))


def states() -> None:
    from cases import scan as cases

    from penstock.kernels.state.scan import reference, triton_scan

    for spec in cases._SHAPES.values():
        for rows in (((1, True, 1), (1, False, 1)), ((7, False, 3), (2, True, 5), (9, True, 4)),
                     cases._STEPS["drafts"]):
            found = []
            for run in (triton_scan.scan, reference.scan):
                args = cases.make(torch.float32, spec, rows)
                found.append((run(*args), args[4].pool_PE.nan_to_num(7.0)))
            for got, want in zip(*found, strict=True):
                check(got, want, torch.float32, (spec, rows))


def scan_blocks() -> None:
    """One row has blocks and a rest, one goes on with a block in place, one decodes. Then the first one's prompt by
    another cut, to the bit, and one whose keys are all alike and are hardly forgotten."""
    from cases import scan as cases

    from penstock.kernels.state.scan import reference, triton_blocks
    from penstock.kernels.types.states import States

    for name in ("delta split", "ssd bounded"):
        spec, rows, at = cases._SHAPES[name], ((131, False, 128), (64, True, 64), (1, True, 1)), (0, 128, 9)
        args, want = (cases.make(torch.float32, spec, rows, at=at) for _ in range(2))
        out = triton_blocks.scan(*args)
        check(out, reference.scan(*want), torch.float32, name)
        check(args[4].pool_PE.nan_to_num(7.0), want[4].pool_PE.nan_to_num(7.0), torch.float32, name)
        x, step, write, weights, states, _ = cases.make(torch.float32, spec, rows, at=at)
        for first, end, before in ((0, 64, -1), (64, 131, 0)):
            own = States.of(states.pool_PE[:2], (0, end - first), torch.tensor([before]),
                            torch.tensor([0 if t in (63, 127) else 1 if t == 130 else -1 for t in range(first, end)]),
                            (first,))
            got = triton_blocks.scan(x[first:end], step[first:end], None if write is None else write[first:end],
                                     weights, own, spec)
            assert torch.equal(got, out[first:end]), (name, first)
        assert torch.equal(states.pool_PE[1], args[4].pool_PE[args[4].to_T[130]]), name
        x[:] = x[:1]
        step[:] = -9.0
        if write is not None:
            write[:] = 9.0
        row = [States.of(states.pool_PE[:1].clone(), (0, 64), torch.tensor([-1]), torch.tensor([-1] * 63 + [0]), (0,))
               for _ in range(2)]
        some = x[:64], step[:64], None if write is None else write[:64], weights
        check(triton_blocks.scan(*some, row[0], spec), reference.scan(*some, row[1], spec), torch.float32, "alike")
        check(row[0].pool_PE, row[1].pool_PE, torch.float32, "alike")


def ends() -> None:
    """Of captured steps, over their own cases."""
    global count
    from cases import step as cases

    from penstock.kernels.fused.step import reference, triton_step

    for case in cases.cases():
        if why := case.wrong(case.run(triton_step), case.run(reference)):
            raise AssertionError(why)
        count += 1


PARTS = {part.__name__: part for part in (attention, heads, chunks, merge, gather, hosted, layer, linear, scaled,
                                          faults, experts, draw, mask, latent, ranks, states, scan_blocks, ends)}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        torch.manual_seed(0)
        PARTS[name]()
    print("checked", count)
