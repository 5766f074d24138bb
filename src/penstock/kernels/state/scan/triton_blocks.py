"""`scan` in Triton, prompts in blocks of 64 positions by matrix products: `States.blocks` says which. All other tokens,
and those that a row has left over, go one after the other as in `triton_scan.py`. Not imported without a CUDA device.

Within a block the delta rule is one triangular system: with f_c the product of the decays up to token c, and Z the
state in front of the block, d = (I + A)^-1 sigmoid(write) (v - f k Z), where A_ce = sigmoid(write_c) f_c / f_e k_c k_e
for e < c. What comes before position 0 of a block is in Z alone, so a prompt's bits do not depend on the steps that it
is cut into at block ends.

    T tokens of the step   B rows   X channels   N heads   M blocks   C tokens of a block   R rows that have blocks
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.state.scan import triton_scan
from penstock.kernels.state.scan.spec import ScanSpec, ScanWeights
from penstock.kernels.triton.depend import early, follow
from penstock.kernels.types.states import BLOCK, States

VALUES = 32             # of a head's state, that one program has
PART = 16               # rows of a triangular system that are solved one after the other
WIDE = 128              # values of a key of which shared memory holds those of two blocks
EXACT = "tf32x3"        # products of float32 to about its precision


@triton.jit(do_not_specialize_on_alignment=["token_M"])
def solve_blocks(y, step, write, decay, add, token_M, gate, solved, seen, step_token, write_token, least, most,
                 HEADS: tl.constexpr, CHANNELS: tl.constexpr, KEYS: tl.constexpr, KEY_DIM: tl.constexpr,
                 DELTA: tl.constexpr, KEY_BLOCK: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
                 PRECISION: tl.constexpr, EXACT: tl.constexpr):
    """One block, one head: gate [2, C], the logarithm of f and the steps; solved [C, C], (I + A)^-1 sigmoid(write);
    seen [C, C], what each query sees of each earlier d."""
    follow()
    m, n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c, i = tl.arange(0, BLOCK), tl.arange(0, KEY_BLOCK)
    t, key = tl.load(token_M + m) + c, n // (HEADS // KEYS)
    s = tl.load(step + t * step_token + n).to(tl.float32) + tl.load(add + n)
    s = tl.where(s > 20.0, s, tl.log(1.0 + tl.exp(tl.minimum(s, 20.0))))
    if not DELTA:
        s = tl.minimum(tl.maximum(s, least), most)
    fade = tl.cumsum(tl.load(decay + n) * s, 0)
    at = m * HEADS + n
    tl.store(gate + at * 2 * BLOCK + c, fade)
    tl.store(gate + at * 2 * BLOCK + BLOCK + c, s)
    own = (i < KEY_DIM)[None, :]
    q = tl.load(y + t[:, None] * CHANNELS + key * KEY_DIM + i[None, :], mask=own, other=0.0)
    k = tl.load(y + t[:, None] * CHANNELS + (KEYS + key) * KEY_DIM + i[None, :], mask=own, other=0.0)
    row, col = c[:, None], c[None, :]
    fades = tl.exp(tl.where(row >= col, fade[:, None] - fade[None, :], 0.0))
    square = at * BLOCK * BLOCK + row * BLOCK + col
    k_t = tl.trans(k)
    tl.store(seen + square, tl.where(row >= col, tl.dot(q, k_t, input_precision=PRECISION) * fades, 0.0))
    if DELTA:
        opens = 1.0 / (1.0 + tl.exp(-tl.load(write + t * write_token + n).to(tl.float32)))
        a = tl.where(row > col, tl.dot(k, k_t, input_precision=PRECISION) * fades * opens[:, None], 0.0)
        # Blocks of PART on the diagonal are solved row by row, all at once: each has its own columns.
        same = row // PART == col // PART
        inside = tl.where(same, a, 0.0)
        inverse = tl.where(row == col, 1.0, 0.0)
        for r in range(1, PART):
            turn = row % PART == r
            line = tl.sum(tl.where(turn, inside, 0.0), 0)
            taken = tl.sum(line[:, None] * inverse, 0)
            inverse = tl.where(turn & same, inverse - taken[None, :], inverse)
        # (I + N)^-1 = (I + N N) (I - N), since N has BLOCK / PART = 4 lines of parts below the diagonal.
        below = tl.dot(inverse, tl.where(same, 0.0, a), input_precision=EXACT)
        twice = tl.dot(below, below, input_precision=EXACT)
        inverse -= tl.dot(below, inverse, input_precision=EXACT)
        inverse += tl.dot(twice, inverse, input_precision=EXACT)
        tl.store(solved + square, inverse * opens[None, :])


@triton.jit
def _leave(x, pool, to, t, c, kept, own, x_token, page, WIDTH: tl.constexpr, TAPS: tl.constexpr, ROUND: tl.constexpr):
    """The inputs of these channels of the last tokens before `t`, into page `to`."""
    w = tl.arange(0, ROUND)[:, None]
    mine = (w < TAPS - 1) & own[None, :]
    new = tl.load(x + (t - (TAPS - 1) + w) * x_token + c[None, :], mask=mine, other=0.0).to(tl.float32)
    tl.store(pool + to * page + w * WIDTH + kept[None, :], new, mask=mine)


@triton.jit(do_not_specialize_on_alignment=["start_B", "rest_B", "row_R", "block_R", "from_B", "to_T"])
def advance(x, y, gate, solved, seen, skip, pool, start_B, rest_B, row_R, block_R, from_B, to_T, out, x_token, page,
            HEADS: tl.constexpr, CHANNELS: tl.constexpr, KEYS: tl.constexpr, KEY_DIM: tl.constexpr,
            VALUE_DIM: tl.constexpr, TAPS: tl.constexpr, EACH: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
            ROUND: tl.constexpr, DELTA: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
            BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """The blocks of one row: one head, some of its values. Tokens that are left over find the state in the page that
    the row's last token leaves."""
    follow()
    of, n, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(row_R + of)
    held, end = tl.load(from_B + row), tl.load(start_B + row + 1)
    i, j, c = tl.arange(0, KEY_BLOCK), block * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK), tl.arange(0, BLOCK)
    own_s, own_v = (i < KEY_DIM)[None, :], (j < VALUE_DIM)[None, :]
    own = (i < KEY_DIM)[:, None] & own_v
    part = n // EACH * SIZE
    at_z = part + (TAPS - 1) * WIDTH + (n % EACH * KEY_DIM + i[:, None]) * VALUE_DIM + j[None, :]
    z = tl.load(pool + held * page + at_z, mask=own & (held + 0 * at_z >= 0), other=0.0)
    tl.debug_barrier()
    key = n // (HEADS // KEYS)
    c_q, c_k, c_v = key * KEY_DIM + i, (KEYS + key) * KEY_DIM + i, 2 * KEYS * KEY_DIM + n * VALUE_DIM + j
    square = c[:, None] * BLOCK + c[None, :]
    if not DELTA:
        skipped = tl.load(skip + n)
    t = tl.load(start_B + row)
    for m in range(tl.load(block_R + of), tl.load(block_R + of + 1)):
        at, line = m * HEADS + n, (t + c[:, None]) * CHANNELS
        fade = tl.load(gate + at * 2 * BLOCK + c)
        v = tl.load(y + line + c_v[None, :], mask=own_v, other=0.0)
        k = tl.load(y + line + c_k[None, :], mask=own_s, other=0.0)
        f = tl.exp(fade)[:, None]
        if DELTA:
            d = tl.dot(tl.load(solved + at * BLOCK * BLOCK + square),
                       v - f * tl.dot(k, z, input_precision=PRECISION), input_precision=PRECISION)
        else:
            d = v * tl.load(gate + at * 2 * BLOCK + BLOCK + c)[:, None]
        q = tl.load(y + line + c_q[None, :], mask=own_s, other=0.0)
        o = f * tl.dot(q, z, input_precision=PRECISION)
        o += tl.dot(tl.load(seen + at * BLOCK * BLOCK + square), d, input_precision=PRECISION)
        if not DELTA:
            o += skipped * v
        tl.store(out + ((t + c[:, None]) * HEADS + n) * VALUE_DIM + j[None, :], o.to(out.dtype.element_ty), mask=own_v)
        last = tl.load(gate + at * 2 * BLOCK + BLOCK - 1)
        z = z * tl.exp(last) + tl.dot(tl.trans(k), d * tl.exp(last - fade)[:, None], input_precision=PRECISION)
        t += BLOCK
        to = tl.load(to_T + t - 1)
        if to >= 0:
            tl.store(pool + to * page + at_z, z, mask=own)
            _leave(x, pool, to, t, c_v, part + 2 * KEY_DIM + n % EACH * VALUE_DIM + j, j < VALUE_DIM, x_token, page,
                   WIDTH, TAPS, ROUND)
            if n % EACH + block == 0:
                _leave(x, pool, to, t, c_q, part + i, i < KEY_DIM, x_token, page, WIDTH, TAPS, ROUND)
                _leave(x, pool, to, t, c_k, part + KEY_DIM + i, i < KEY_DIM, x_token, page, WIDTH, TAPS, ROUND)
    if t < end:
        tl.store(pool + tl.load(to_T + end - 1) * page + at_z, z, mask=own)


def scan(x_TX: Tensor, step_TN: Tensor, write_TN: Tensor | None, weights: ScanWeights, states: States,
         spec: ScanSpec) -> Tensor:
    if states.blocks is None or not fits(spec):
        return triton_scan.scan(x_TX, step_TN, write_TN, weights, states, spec)
    rest_B, start_B = states.blocks.rest_B, states.start_B[:-1]
    y_TX = triton_scan.convolved(x_TX, write_TN, weights, states, spec)
    out_TNV = x_TX.new_empty(len(x_TX), spec.heads, spec.value_dim)
    _scan_blocks(x_TX, y_TX, step_TN, write_TN, weights, states, spec, out_TNV)
    if BLOCK * len(states.blocks.token_M) == len(x_TX):
        return out_TNV
    # What is left over of a row with blocks goes on from where `advance` has put the state.
    from_B = torch.where(rest_B > start_B, states.to_T[states.start_B[1:] - 1], states.from_B)
    triton_scan.walked(x_TX, y_TX, step_TN, write_TN, weights, states, spec, out_TNV, rest_B, from_B)
    return out_TNV


def fits(spec: ScanSpec) -> bool:
    """Whether the last inputs of a block are all that its state needs, and a program has a whole key."""
    return spec.taps <= BLOCK and spec.key_dim <= 256


def _scan_blocks(x_TX: Tensor, y_TX: Tensor, step_TN: Tensor, write_TN: Tensor | None, weights: ScanWeights,
                 states: States, spec: ScanSpec, out_TNV: Tensor) -> None:
    blocks, pool = states.blocks, states.pool_PE
    assert blocks is not None and step_TN.stride(1) == 1
    num, rows = len(blocks.token_M), len(blocks.row_R)
    gate_MN2C = y_TX.new_empty(num, spec.heads, 2, BLOCK)
    seen_MNCC = y_TX.new_empty(num, spec.heads, BLOCK, BLOCK)
    solved_MNCC = torch.empty_like(seen_MNCC) if spec.delta else None
    shape = triton_scan.shape_of(spec)
    sizes = {"HEADS": spec.heads, "KEY_BLOCK": max(16, triton.next_power_of_2(spec.key_dim)), "BLOCK": BLOCK,
             "PRECISION": EXACT if x_TX.dtype == torch.float32 else "tf32"}
    solve_blocks[num, spec.heads](
        y_TX, step_TN, write_TN, weights.decay_N, weights.step_N, blocks.token_M, gate_MN2C, solved_MNCC, seen_MNCC,
        step_TN.stride(0), 0 if write_TN is None else write_TN.stride(0), spec.least, min(spec.most, 3e38),
        **{name: shape[name] for name in ("CHANNELS", "KEYS", "KEY_DIM", "DELTA")}, **sizes, PART=PART, EXACT=EXACT,
        num_warps=4, **early())
    values = max(16, min(VALUES, triton.next_power_of_2(spec.value_dim)))
    advance[rows, spec.heads, triton.cdiv(spec.value_dim, values)](
        x_TX, y_TX, gate_MN2C, solved_MNCC, seen_MNCC, weights.skip_N, pool, states.start_B, blocks.rest_B,
        blocks.row_R, blocks.block_R, states.from_B, states.to_T, out_TNV, x_TX.stride(0), pool.stride(0), **shape,
        **sizes, ROUND=triton.next_power_of_2(spec.taps - 1), VALUE_BLOCK=values, num_warps=4,
        num_stages=2 if sizes["KEY_BLOCK"] <= WIDE else 1, **early())
