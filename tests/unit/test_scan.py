"""`scan`: what a token gets does not depend on how tokens are cut into steps, and nothing else is touched.

    T tokens of the step   X channels   P pages   E elements of a state
"""
from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import where
from cases import scan as cases

from penstock.kernels.op import Unusable
from penstock.kernels.platform import probe
from penstock.kernels.state.scan import OP
from penstock.kernels.types.states import Blocks, States

SPECS = {name: cases._SHAPES[name] for name in ("delta", "delta large", "ssd")}
TOKENS = 90


def at(pages):
    return torch.tensor(pages, device=where.DEVICE)


@pytest.fixture(params=OP.names)
def run(request):
    try:
        OP.get(request.param).usable_on(probe(where.DEVICE))
    except Unusable as why:
        pytest.skip(str(why))
    return OP.use(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_any_cut_into_steps_gives_the_same_bits(name, dtype, run):
    """Steps that begin in the page that the one before wrote, and leave states every 32 tokens."""
    x, step, write, weights, _, spec = cases.make(
        dtype, SPECS[name], ((TOKENS, False, TOKENS),), where.DEVICE)
    found = []
    for cut in ([0, TOKENS], [0, 1, 8, 64, 65, TOKENS], [*range(TOKENS + 1)], [0, 40, 41, 43, TOKENS]):
        pool = torch.full((3, spec.elements), float("nan"), device=where.DEVICE)
        outs = []
        for first, end in pairwise(cut):
            to = [t // 32 if (t + 1) % 32 == 0 or t == end - 1 else -1 for t in range(first, end)]
            states = States.of(pool, (0, end - first), at([(first - 1) // 32]), at(to))
            part = None if write is None else write[first:end]
            outs.append(run(x[first:end], step[first:end], part, weights, states, spec))
        found.append((torch.cat(outs), pool))
    for out, pool in found[1:]:
        assert torch.equal(out, found[0][0]) and torch.equal(pool, found[0][1])
    assert found[0][1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_cuts_at_ends_of_blocks_give_the_same_bits(name, dtype, run):
    """A prompt that leaves a state each 128 tokens, and its rest; beside it, in each step, a row that decodes."""
    tokens = 300
    x, step, write, weights, _, spec = cases.make(dtype, SPECS[name], ((tokens, False, tokens),), where.DEVICE)
    found = []
    for cut in ([0, tokens], [0, 64, 128, 192, 256, tokens], [0, 192, tokens], [0, 128, 256, tokens]):
        pool = torch.full((4, spec.elements), float("nan"), device=where.DEVICE)
        outs = []
        for first, end in pairwise(cut):
            to = [-1, *(t // 128 if (t + 1) % 128 == 0 or t == end - 1 else -1 for t in range(first, end))]
            states = States.of(pool, (0, 1, 1 + end - first), at([-1, (first - 1) // 128]), at(to), (77, first))
            args = [None if a is None else torch.cat((a[:1], a[first:end])) for a in (x, step, write)]
            outs.append(run(*args, weights, states, spec)[1:])
        found.append((torch.cat(outs), pool[:3]))
    for out, pool in found[1:]:
        assert torch.equal(out, found[0][0]) and torch.equal(pool, found[0][1])
    assert found[0][1].isfinite().all()


def test_blocks_are_whole_ones_that_begin_with_the_row():
    """Not those of rows that begin inside one, of too few tokens, or with drafts."""
    starts, device = (0, 1, 131, 194, 264, 328, 392), torch.device("cpu")
    blocks = Blocks.of(starts, (70, 128, 0, 5, 64, -1), device)
    assert blocks.row_R.tolist() == [1, 4] and blocks.block_R.tolist() == [0, 2, 3]
    assert blocks.token_M.tolist() == [1, 65, 264] and blocks.rest_B.tolist() == [0, 129, 131, 194, 328, 328]
    assert Blocks.of(starts, (64, 3, 0, 5, 1, -1), device) is None


def test_pages_that_nobody_names_stay(run):
    args = cases.make(torch.float32, SPECS["delta"], ((7, True, 3), (2, False, 5)), where.DEVICE)
    pool, named = args[4].pool_PE, args[4].to_T[args[4].to_T >= 0]
    before = pool.clone()
    run(*args)
    same = torch.ones(len(pool), dtype=torch.bool)
    same[named] = False
    assert torch.equal(pool[same].nan_to_num(7.0), before[same].nan_to_num(7.0))
    assert pool[named].isfinite().all() and len(named) == 4


def test_a_row_does_not_see_its_neighbours(run):
    x, step, write, weights, states, spec = cases.make(
        torch.float32, SPECS["ssd"], ((5, True, 5), (1, True, 1), (9, False, 9)), where.DEVICE)
    pool = states.pool_PE.clone()
    whole = run(x, step, write, weights, states, spec)
    for i, (first, end) in enumerate(pairwise(states.starts)):
        own = States.of(pool.clone(), (0, end - first), states.from_B[i:i + 1], states.to_T[first:end])
        assert torch.equal(run(x[first:end], step[first:end], None, weights, own, spec), whole[first:end])
