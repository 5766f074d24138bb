"""Routing and experts' MLPs in Triton, for any number of tokens, over grids that follow from that number; of one
token packed weights in C++.

A program makes some outputs of one expert, for all tokens that visit it, so each weight that is needed is
read once. Of a few tokens there is a program for each visit: the first of an expert's does the work of all,
over every token (a product has 16 rows at least), and the others end at once. Of many, visits are sorted on
the device into blocks of one expert each; there are always as many blocks as could be needed.

Imported only where a CUDA device was asked for.

    T tokens   D model dim   E experts   C chosen per token   S = T * C visits, visit t * C + c
    I MLP width   M blocks   J visits of a block
"""
from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gemm.experts import Clamped, Gate, TanhGelu
from penstock.kernels.gemm.linear.triton_packed import InCpp, in_cpp
from penstock.kernels.triton.lazy import alone
from penstock.kernels.triton.tiles import add_product, parts_of, tile_cols
from penstock.kernels.types.packed import Packed

if TYPE_CHECKING:
    from penstock.kernels.gemm.experts import Biases, Rule


@triton.jit
def route_tokens(logit, bias, expert, weight, l_row, scale, E, PER_GROUP, E_PAD: tl.constexpr,
                 C: tl.constexpr, C_PAD: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr,
                 GROUPS_CHOSEN: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr,
                 RENORMALIZE: tl.constexpr):
    """One token. The best is taken C times; of equal ones the first."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, E_PAD)
    own = e < E
    x = tl.load(logit + t * l_row + e, mask=own, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-x))
    else:
        score = tl.exp(x - tl.max(x, 0))
        score = score / tl.sum(score, 0)
    rank = score
    if BIAS:
        rank += tl.load(bias + e, mask=own, other=0.0)
    rank = tl.where(own, rank, float("-inf"))
    if GROUPS_CHOSEN < GROUPS:
        group = e // PER_GROUP
        g = tl.arange(0, GROUPS_PAD)
        best = tl.full([GROUPS_PAD], float("-inf"), tl.float32)
        for i in range(GROUPS):
            mine = tl.where(group == i, rank, float("-inf"))
            top = tl.max(mine, 0)
            first = tl.min(tl.where(mine == top, e, E_PAD), 0)
            second = tl.max(tl.where(e == first, float("-inf"), mine), 0)
            best = tl.where(g == i, top + second, best)
        allowed = tl.zeros([E_PAD], tl.int32)
        for _ in range(GROUPS_CHOSEN):
            best_g = tl.min(tl.where(best == tl.max(best, 0), g, GROUPS_PAD), 0)
            allowed = tl.where(group == best_g, 1, allowed)
            best = tl.where(g == best_g, float("-inf"), best)
        rank = tl.where(allowed == 1, rank, float("-inf"))
    c = tl.arange(0, C_PAD)
    chosen = tl.zeros([C_PAD], tl.int32)
    weighs = tl.zeros([C_PAD], tl.float32)
    for n in range(C):
        # Where nothing equals the largest, scores are NaN: an expert that exists, and what it weighs tells.
        best_e = tl.minimum(tl.min(tl.where(rank == tl.max(rank, 0), e, E_PAD), 0), E - 1)
        chosen = tl.where(c == n, best_e, chosen)
        weighs = tl.where(c == n, tl.sum(tl.where(e == best_e, score, 0.0), 0), weighs)
        rank = tl.where(e == best_e, float("-inf"), rank)
    if RENORMALIZE:
        weighs = weighs / tl.maximum(tl.sum(weighs, 0), 1e-20)
    tl.store(expert + t * C + c, chosen.to(tl.int64), mask=c < C)
    tl.store(weight + t * C + c, weighs * scale, mask=c < C)


@triton.jit
def _visits(expert, block_expert, block_visit, T, FIRST, E, C: tl.constexpr, C_PAD: tl.constexpr,
            VISITS: tl.constexpr, FEW: tl.constexpr):
    """(expert whose weights this program reads, of the E that are here, its visits); -1: none."""
    m = tl.program_id(1)
    j = tl.arange(0, VISITS)
    if FEW:
        c = tl.arange(0, C_PAD)[None, :]
        at = j[:, None] * C + c
        listed = tl.load(expert + at, mask=(j[:, None] < T) & (c < C), other=-1)
        mine = tl.load(expert + m)
        here = (mine >= FIRST) & (mine < FIRST + E)
        visit = tl.max(tl.where(listed == mine, at, -1), 1)
        first = tl.min(tl.min(tl.where(listed == mine, at, VISITS * C_PAD), 1), 0)
        e = tl.where((first == m) & here, mine - FIRST, -1).to(tl.int32)
    else:
        e = tl.load(block_expert + m)
        visit = tl.load(block_visit + m * VISITS + j)
    return e, visit


@triton.jit(do_not_specialize=["T"])
def experts_in(x, weight, scale, offset, bias, expert, block_expert, block_visit, inner, T, FIRST, E, x_row, SCALES,
               WIDTH, alpha, limit,
               INPUTS: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr, VISITS: tl.constexpr,
               ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
               KIND: tl.constexpr, OFFSET: tl.constexpr, ZERO_CODE: tl.constexpr, FEW: tl.constexpr,
               EXACT: tl.constexpr, BIAS: tl.constexpr, CLAMPED: tl.constexpr, GELU: tl.constexpr,
               GATED: tl.constexpr):
    """silu(gate(x)) * up(x), ROWS of WIDTH outputs of each visit, into row `visit` of `inner`; or clamped, or
    by GELU, or without a gate relu(up(x)) ** 2."""
    e, visit = _visits(expert, block_expert, block_visit, T, FIRST, E, C, C_PAD, VISITS, FEW)
    if e >= 0:
        o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        own = o < WIDTH
        row = e.to(tl.int64) * (WIDTH * 2 if GATED else WIDTH) + o
        up_row = row + WIDTH if GATED else row
        k = tl.arange(0, COLS)
        visits = visit >= 0
        token = tl.where(visits, visit, 0).to(tl.int64) // C
        gate = tl.zeros([ROWS, VISITS], tl.float32)
        up = tl.zeros([ROWS, VISITS], tl.float32)
        for start in range(0, INPUTS, COLS):
            x_JK = tl.load(x + token[:, None] * x_row + start + k[None, :],
                           mask=visits[:, None] & (start + k < INPUTS)[None, :], other=0.0)
            if GATED:
                gate = add_product(gate, weight, scale, offset, row, own, x_JK, start, SCALES, INPUTS, COLS,
                                   BLOCK_ROWS, BLOCK_COLS, KIND, OFFSET, ZERO_CODE, EXACT)
            up = add_product(up, weight, scale, offset, up_row, own, x_JK, start, SCALES, INPUTS, COLS, BLOCK_ROWS,
                             BLOCK_COLS, KIND, OFFSET, ZERO_CODE, EXACT)
        if BIAS:
            if GATED:
                gate += tl.load(bias + row, mask=own, other=0.0).to(tl.float32)[:, None]
            up += tl.load(bias + up_row, mask=own, other=0.0).to(tl.float32)[:, None]
        if not GATED:
            y = tl.where(up < 0.0, 0.0, up) * up
        elif CLAMPED:             # NaN stays NaN
            gate = tl.where(gate > limit, limit, gate)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
            y = gate / (1.0 + tl.exp(-alpha * gate)) * up
        elif GELU:                # (1 + tanh(z)) / 2 is the sigmoid of 2 z
            y = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))) * up
        else:
            y = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(inner + visit.to(tl.int64)[None, :] * WIDTH + o[:, None], y.to(inner.dtype.element_ty),
                 mask=own[:, None] & visits[None, :])


@triton.jit(do_not_specialize=["T"])
def experts_out(inner, weight, scale, offset, bias, expert, block_expert, block_visit, weighs, part, T, FIRST, E,
                SCALES, OUTPUTS, INPUTS: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr,
                VISITS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
                BLOCK_COLS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, ZERO_CODE: tl.constexpr,
                FEW: tl.constexpr, EXACT: tl.constexpr,
                BIAS: tl.constexpr):
    """What a visit weighs times down(inner), ROWS outputs of each visit, into row `visit` of `part`."""
    e, visit = _visits(expert, block_expert, block_visit, T, FIRST, E, C, C_PAD, VISITS, FEW)
    if e >= 0:
        o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        own = o < OUTPUTS
        row = e.to(tl.int64) * OUTPUTS + o
        k = tl.arange(0, COLS)
        visits = visit >= 0
        at = tl.where(visits, visit, 0).to(tl.int64)
        acc = tl.zeros([ROWS, VISITS], tl.float32)
        for start in range(0, INPUTS, COLS):
            x_JK = tl.load(inner + at[:, None] * INPUTS + start + k[None, :],
                           mask=visits[:, None] & (start + k < INPUTS)[None, :], other=0.0)
            acc = add_product(acc, weight, scale, offset, row, own, x_JK, start, SCALES, INPUTS, COLS, BLOCK_ROWS,
                              BLOCK_COLS, KIND, OFFSET, ZERO_CODE, EXACT)
        if BIAS:
            acc += tl.load(bias + row, mask=own, other=0.0).to(tl.float32)[:, None]
        y = acc * tl.load(weighs + at, mask=visits, other=0.0)[None, :]
        tl.store(part + at[None, :] * OUTPUTS + o[:, None], y.to(part.dtype.element_ty),
                 mask=own[:, None] & visits[None, :])


@triton.jit
def sum_visits(part, expert, out, FIRST, E, DIM, C: tl.constexpr, BLOCK: tl.constexpr):
    """A token's visits to experts that are here, added in their order."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = d < DIM
    acc = tl.zeros([BLOCK], tl.float32)
    for c in range(C):
        e = tl.load(expert + t * C + c)
        here = (e >= FIRST) & (e < FIRST + E)
        one = tl.load(part + (t * C + c) * DIM + d, mask=own, other=0.0).to(tl.float32)
        acc += tl.where(here, one, 0.0)         # elsewhere nothing was written
    tl.store(out + t * DIM + d, acc.to(out.dtype.element_ty), mask=own)


def route(logit_TE: Tensor, bias_E: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    """Implement `ExpertOps.route`. Capturable."""
    tokens, experts = logit_TE.shape
    assert logit_TE.stride(1) == 1, "logits of a token must be dense"
    shape, device = (tokens, rule.num_chosen), logit_TE.device
    expert_TC = torch.empty(shape, dtype=torch.int64, device=device)
    weight_TC = torch.empty(shape, dtype=torch.float32, device=device)
    route_tokens[(tokens,)](
        logit_TE, weight_TC if bias_E is None else bias_E, expert_TC, weight_TC, logit_TE.stride(0),
        rule.scale, experts, experts // rule.groups, E_PAD=triton.next_power_of_2(experts), C=rule.num_chosen,
        C_PAD=triton.next_power_of_2(rule.num_chosen), GROUPS=rule.groups,
        GROUPS_PAD=triton.next_power_of_2(rule.groups), GROUPS_CHOSEN=rule.groups_chosen,
        SIGMOID=rule.sigmoid, BIAS=bias_E is not None, RENORMALIZE=rule.renormalize, num_warps=1)
    return expert_TC, weight_TC


FEW_MAX = 64            # tokens
WIDE_MIN = 8            # tokens from which a program has 64 outputs: measured on an H200
BLOCK_VISITS = 64
_DOWN = 5               # as packed_rows.cu numbers what becomes of sums


def blocks(expert_TC: Tensor, first: int, num_experts: int, size: int) -> tuple[Tensor, Tensor]:
    """Visits sorted by expert, in blocks of `size` that have one each: (expert_M, visit_MJ), int32, -1: none.

    Of the experts from `first` on, counted from there. As many blocks as S visits could need, by torch's own
    operations that tell the host nothing.
    """
    expert_S = expert_TC.flatten() - first
    # Visits to others are behind all.
    expert_S = torch.where((expert_S >= 0) & (expert_S < num_experts), expert_S, num_experts)
    visits, device = len(expert_S), expert_S.device
    order_S = expert_S.argsort(stable=True)
    count_E = torch.zeros(num_experts + 1, dtype=torch.int64, device=device).scatter_add_(
        0, expert_S, torch.ones_like(expert_S))[:-1]
    blocks_E = (count_E + size - 1) // size
    last_E, before_E = blocks_E.cumsum(0), count_E.cumsum(0) - count_E
    block_M = torch.arange(visits // size + min(visits, num_experts), device=device)
    found_M = torch.searchsorted(last_E, block_M, right=True)
    expert_M = found_M.clamp(max=num_experts - 1)
    place_MJ = ((block_M - last_E[expert_M] + blocks_E[expert_M]) * size)[:, None] + torch.arange(
        size, device=device)
    listed_MJ = (found_M < num_experts)[:, None] & (place_MJ < count_E[expert_M][:, None])
    visit_MJ = order_S[(before_E[expert_M][:, None] + place_MJ).clamp(max=visits - 1)]
    return (torch.where(found_M < num_experts, found_M, -1).int(),
            torch.where(listed_MJ, visit_MJ, -1).int())


def mlp(x_TD: Tensor, expert_TC: Tensor, weight_TC: Tensor, gate_up: Tensor | Packed,
        down: Tensor | Packed, first: int = 0, biases: Biases | None = None,
        gate: Gate | None = None) -> Tensor:
    """Implement `ExpertOps.mlp`. Capturable."""
    (tokens, dim), chosen = x_TD.shape, expert_TC.shape[1]
    num_experts, width = down.shape[0] // dim, down.shape[1]
    assert x_TD.is_contiguous() and expert_TC.is_contiguous() and weight_TC.is_contiguous(), "not dense"
    gated = gate_up.shape[0] == 2 * width * num_experts
    assert gate_up.shape == ((1 + gated) * width * num_experts, dim), (
        f"{tuple(gate_up.shape)} of {num_experts} experts")
    visits, few = tokens * chosen, tokens <= FEW_MAX
    if few:
        size, grid = max(16, triton.next_power_of_2(tokens)), visits
        tables = expert_TC, expert_TC, expert_TC
    else:
        size = BLOCK_VISITS
        tables = expert_TC, *blocks(expert_TC, first, num_experts, size)
        grid = len(tables[1])
    inner_SI, part_SD = x_TD.new_empty(visits, width), x_TD.new_empty(visits, dim)
    exact = x_TD.dtype == torch.float32
    rows = 32 if tokens < WIDE_MIN or (few and exact) else 64
    most = 128 if few and not exact else 64
    same = dict(C=chosen, C_PAD=triton.next_power_of_2(chosen), VISITS=size, ROWS=rows, FEW=few,
                EXACT=exact, num_warps=4, num_stages=3)
    bias_in, bias_out = biases or (None, None)
    # As packed_rows.cu numbers gates.
    kind = 4 if not gated else 3 if isinstance(gate, Clamped) else 2 if isinstance(gate, TanhGelu) else 1
    numbers = (gate.alpha, gate.limit) if isinstance(gate, Clamped) else (0.0, 0.0)
    into = down_to = None
    if tokens == 1:         # of 8 Triton is faster, measured on an H200
        into, down_to = in_cpp(x_TD, gate_up, gate=kind), in_cpp(inner_SI, down, gate=_DOWN)
    if into is not None and down_to is not None:
        assert isinstance(gate_up, Packed) and isinstance(down, Packed)
        visit = expert_TC, weight_TC, num_experts, first
        _in_cpp(into, x_TD, gate_up, bias_in, inner_SI, *visit, numbers)
        _in_cpp(down_to, inner_SI, down, bias_out, part_SD, *visit)
        return _summed(part_SD, expert_TC, first, num_experts)
    element, scale, offset, scales, constants = parts_of(gate_up)
    experts_in[(triton.cdiv(width, rows), grid)](
        x_TD, element, scale, offset, x_TD if bias_in is None else bias_in, *tables, inner_SI, tokens, first,
        num_experts, dim, scales, width, *numbers,
        INPUTS=dim, COLS=tile_cols(gate_up, most, exact=exact), BIAS=bias_in is not None,
        CLAMPED=isinstance(gate, Clamped), GELU=isinstance(gate, TanhGelu), GATED=gated, **same, **constants)
    element, scale, offset, scales, constants = parts_of(down)
    experts_out[(triton.cdiv(dim, rows), grid)](
        inner_SI, element, scale, offset, x_TD if bias_out is None else bias_out, *tables, weight_TC, part_SD, tokens,
        first, num_experts, scales, dim, INPUTS=width, COLS=tile_cols(down, most, exact=exact),
        BIAS=bias_out is not None, **same, **constants)
    return _summed(part_SD, expert_TC, first, num_experts)


def _in_cpp(kernel: InCpp, x: Tensor, weight: Packed, bias: Tensor | None, out_SO: Tensor, expert_TC: Tensor,
            weight_TC: Tensor, experts: int, first: int, numbers: tuple[float, float] = (0.0, 0.0)) -> None:
    """Products of one token's visits with their experts, gated or weighted, into their rows of out. x: its row, or one
    for each visit."""
    visits = expert_TC.numel()
    outputs, inputs = weight.shape[0] // experts, weight.shape[1]
    groups = triton.cdiv(outputs, 16)           # of eight pairs, where what goes up is gated
    each = triton.cdiv(groups * min(visits, experts), kernel.blocks)
    kernel.launch((triton.cdiv(groups, each), visits), kernel.threads, x, weight.code_OI, weight.scale_RJ,
                  0 if weight.offset_RJ is None else weight.offset_RJ, 0 if bias is None else bias, out_SO, expert_TC,
                  weight_TC, outputs, inputs, *kernel.of_weight, first, experts,
                  *struct.unpack("2I", struct.pack("2f", *numbers)))


def _summed(part_SD: Tensor, expert_TC: Tensor, first: int, num_experts: int) -> Tensor:
    """out_TD: what a token's visits to experts that are here gave."""
    (tokens, chosen), dim = expert_TC.shape, part_SD.shape[1]
    out_TD = part_SD.new_empty(tokens, dim)
    block = min(1024, triton.next_power_of_2(dim))
    sum_visits[(tokens, triton.cdiv(dim, block))](
        part_SD, expert_TC, out_TD, first, num_experts, dim, C=chosen, BLOCK=block, num_warps=4)
    return out_TD


TRITON = SimpleNamespace(route=route, mlp=alone(mlp))       # without kernels in C++
