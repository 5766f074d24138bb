"""What selecting units promises beside its cases: bounds bound, nothing depends on batch, chunk or place."""
from __future__ import annotations

import pytest
import torch
from cases import cases_of
from cases.resolve import empty
from cases.select import make
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.attention.paged_attention import AttentionSpec
from penstock.kernels.choose.select import SelectRule
from penstock.kernels.choose.select.reference import least_and_most, scores
from penstock.kernels.kv.write_kv import WriteAt
from penstock.kernels.op import Unusable
from penstock.kernels.platform import probe
from penstock.kernels.registry import OPS
from penstock.kernels.types.ragged import Ragged

RULE = SelectRule(unit=4, sink=6, window=13)
BACKENDS = ("reference", "c")


def usable(op: str, name: str):
    implementation = OPS[op].get(name)
    try:
        implementation.usable_on(probe())
    except Unusable as why:
        pytest.skip(str(why))
    return implementation.run


def run(backend: str, inputs, **changed):
    args = {"q_BNH": inputs.q_BNH, "bounds_PK2SH": inputs.bounds_PK2SH, "table_RP": inputs.table_RP,
            "row_B": inputs.row_B, "position_B": inputs.position_B, "budget_B": inputs.budget_B}
    return usable("select", backend)(**{**args, **changed}, rule=RULE, chosen=20)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2 ** 31), st.integers(1, 16), st.integers(1, 4), st.integers(1, 70), st.booleans())
def test_no_true_score_is_outside_of_the_bounds_between_which_a_units_score_is(seed, unit, group, dim, grid):
    """On a grid where sums are exact, exactly; else up to the rounding of two sums."""
    g = torch.Generator().manual_seed(seed)
    q_gH, keys_UuH = torch.randn(group, dim, generator=g), torch.randn(5, unit, dim, generator=g) * 3
    if grid:
        q_gH, keys_UuH = (q_gH * 4).round() / 4, (keys_UuH * 4).round() / 4
    bounds_U2H = torch.stack((keys_UuH.amin(1), keys_UuH.amax(1)), 1)
    products = q_gH[None, None] * keys_UuH[:, :, None]
    true_Uug, score_U = products.sum(-1), scores(q_gH, bounds_U2H)
    slack_U1 = 0 if grid else 1e-6 * products.abs().sum(-1).flatten(1).amax(1)[:, None]
    least_Ug, most_Ug = least_and_most(q_gH, bounds_U2H)
    assert (most_Ug >= true_Uug.amax(1) - slack_U1).all() and (least_Ug <= true_Uug.amin(1) + slack_U1).all()
    assert (score_U <= (most_Ug + slack_U1).amax(1)).all()
    assert (score_U >= (least_Ug - slack_U1).amax(1)).all()
    if unit == 1 and grid:
        assert torch.equal(score_U, true_Uug[:, 0].amax(1))         # bounds of one key are its score


def test_one_key_that_is_wanted_outranks_many_that_could_be_and_are_not():
    """A wide unit's keys never agree with the query: its upper bound promises what none of them keeps."""
    g = torch.Generator().manual_seed(0)
    q_gH = torch.ones(1, 64)
    wide_uH = 0.6 * torch.randn(8, 64, generator=g)
    wide_uH -= wide_uH.mean(1, keepdim=True)                        # q.k is 0 for each
    wanted_uH = 0.5 + 0.1 * torch.randn(8, 64, generator=g)
    bounds_U2H = torch.stack([torch.stack((x.amin(0), x.amax(0))) for x in (wide_uH, wanted_uH)])
    most_Ug = least_and_most(q_gH, bounds_U2H)[1]
    assert most_Ug[0] > most_Ug[1] and (q_gH @ wide_uH.T).abs().max() < 1e-4 < (q_gH @ wanted_uH.T).min()
    assert scores(q_gH, bounds_U2H).argmax() == 1


def floats(queries):
    """`make`, with values whose sums depend on their order."""
    inputs = make(torch.float32, torch.float32, queries, (3, 3, 64), 4, RULE)
    inputs.bounds_PK2SH.mul_(1.1)
    inputs.q_BNH.mul_(0.7)
    return inputs


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_chooses_alike_alone_and_in_a_batch_with_any_thread_count(backend):
    inputs = floats(tuple((row, 900 + 7 * row - 100 * n, 20 - n) for row in range(3) for n in range(5)))
    together = run(backend, inputs)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for b in range(len(together)):
            alone = run(backend, inputs, q_BNH=inputs.q_BNH[b:b + 1],
                        **{name: getattr(inputs, name)[b:b + 1].clone()
                           for name in ("row_B", "position_B", "budget_B")})
            assert torch.equal(alone[0], together[b])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_that_are_kept_anyway_or_come_later_never_enter(backend):
    """They are NaN in `make` for all queries together; here for an early query of a later chunk."""
    inputs = floats(((0, 300, 12), (0, 700, 12)))
    before = run(backend, inputs)
    first, end = RULE.scored(300)
    units = torch.tensor([*range(first), *range(end, RULE.scored(700)[1])])
    inputs.bounds_PK2SH[inputs.table_RP[0, units // 4].long(), :, :, units % 4] = float("nan")
    assert torch.equal(run(backend, inputs)[0], before[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_scores_go_to_the_lower_position_and_zero_has_no_sign(backend):
    inputs = floats(((0, 500, 14),))
    inputs.bounds_PK2SH.copy_(inputs.bounds_PK2SH.new_tensor(1.0))
    inputs.bounds_PK2SH[:, :, :, ::2].neg_()                # units score 0 and -0 in turns
    inputs.q_BNH.zero_()
    first, end = RULE.scored(500)
    kept = first + 500 // 4 + 1 - end
    assert run(backend, inputs)[0, 0, :14].tolist() == [*range(14 - kept + first), *range(end, 126)]


@pytest.mark.parametrize("position", range(0, 60))
def test_every_visible_token_is_kept_scored_or_outside(position):
    first, end = RULE.scored(position)
    units = position // RULE.unit + 1
    assert 0 <= first <= end <= units and first <= RULE.sink_units
    assert end * RULE.unit <= max(0, position + 1 - RULE.window)    # all of a scored unit is past
    assert first + units - end < RULE.least_units


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("context", [1, 7, 128, 129, 777])
def test_a_full_budget_is_dense_attention_bit_by_bit(dtype, context):
    heads, kv_heads, dim, size, unit = 9, 3, 64, 16, 8
    g = torch.Generator().manual_seed(context)
    pages_P = torch.randperm(-(-context // size), generator=g)
    pool = torch.randn(len(pages_P), kv_heads, 2, size, dim, generator=g).to(dtype)
    q = torch.randn(1, heads, dim, generator=g).to(dtype)
    units = torch.arange(-(-context // unit))
    slot = pages_P[units * unit // size] * (size // unit) + units % (size // unit)
    chosen, slot = (x.int().expand(1, kv_heads, -1).contiguous() for x in (units, slot))
    spec = AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, dtype=dtype, scale=0.125)
    none = torch.tensor([0])                                        # what is stored, which nothing reads
    layout = Ragged((0, 1), (context,), (0,), pages_P.int()[None], none, none, size)
    dense = usable("paged_attention", "c")(layout, spec)(q, pool[:, :, 0], pool[:, :, 1])
    out, lse = usable("sparse_attention", "c")(
        q, pool, chosen, slot, torch.tensor([context - 1], dtype=torch.int32), unit=unit, scale=0.125)
    assert torch.equal(out, dense)
    assert lse.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_where_units_lie_does_not_show(backend):
    g = torch.Generator().manual_seed(3)
    pool = torch.randn(40, 2, 2, 8, 16, generator=g)
    chosen = torch.arange(0, 120, 2, dtype=torch.int32).expand(1, 2, 60).contiguous()
    moved, outs = torch.empty_like(pool), []
    flat, moved_flat = (p.view(40, 2, 2, 2, 4, 16) for p in (pool, moved))
    order = torch.randperm(80, generator=g)
    for to, source in enumerate(order.tolist()):
        moved_flat[to // 2, :, :, to % 2] = flat[source // 2, :, :, source % 2]
    for pages, places in ((pool, torch.arange(60)), (moved, torch.argsort(order)[:60])):
        slot = places.int().expand(1, 2, 60).contiguous()
        outs.append(usable("sparse_attention", backend)(
            torch.ones(1, 4, 16), pages, chosen, slot, torch.tensor([477], dtype=torch.int32),
            unit=4, scale=0.3))
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


def test_every_row_size_and_each_tail_is_a_case_of_gather():
    names = [case.name for case in cases_of(OPS["gather"])]
    assert any("from 1 to 4,096" in name for name in names) and any("8-byte tail" in name for name in names)


def test_a_copy_that_loses_its_tail_fails_the_cases():
    """The change report's bug: whole words of 8 bytes are copied, the last 1 to 7 are not."""
    reference = OPS["gather"].use("reference")

    def words_only(host, pool, miss, num, *, unit):
        width = host.shape[4] * host.element_size()
        if host.dtype is torch.uint8 and width % 8:
            host, pool = host[..., :width // 8 * 8], pool[..., :width // 8 * 8]
        reference(host, pool, miss, num, unit=unit)
    broken = [case.name for case in cases_of(OPS["gather"])
              if not torch.equal(case.run(words_only), case.run(reference))]
    assert {"every row size from 1 to 4,096 bytes"} < set(broken)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_map_of_an_earlier_hot_buffer_is_noticed_and_not_followed(backend):
    """A bind that voids nothing: the map names a slot of a page that the row gave back."""
    hot, i32 = empty(1, 1, 4, 2, 2), {"dtype": torch.int32}
    hot.slot_RKM[0, 0, 1], hot.unit_RKS[0, 0, 3] = 3, 1
    hot.page_RW[0, 0] = 5
    row, table = torch.zeros(1, **i32), torch.zeros(1, 2, **i32)
    with pytest.raises(AssertionError, match="hot in a page that the row does not have"):
        usable("resolve", backend)(torch.tensor([[[1]]], **i32), row, table - 1, table, hot,
                                   torch.ones(1, **i32), page_units=2)
    pool, none = torch.zeros(6, 1, 1, 4, 8), torch.tensor([-1])
    with pytest.raises(AssertionError, match="hot in a page that the row does not have"):
        usable("write_kv", backend)([torch.ones(1, 1, 8)], WriteAt(
            none, none, none, row, torch.tensor([3], **i32), 2), pool, None, hot)
    assert pool.count_nonzero() == 0
