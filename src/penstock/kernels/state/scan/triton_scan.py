"""`scan` in Triton: what the convolution gives, all tokens at once, then each head's state through its row's
tokens, one after the other. Imported only where a CUDA device was asked for.

    T tokens of the step   B rows   X channels   N heads   K key heads   V value dim   S key dim   W taps
    R parts of a state, each [inputs of its channels, states of its heads]
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.state.scan.reference import EPS
from penstock.kernels.state.scan.spec import ScanSpec, ScanWeights
from penstock.kernels.triton.depend import early, follow
from penstock.kernels.types.states import States

VALUES = 32             # of a head's state, that one program has


@triton.jit(do_not_specialize_on_alignment=["start_B", "row_T", "from_B"])
def convolve(x, conv, bias, pool, start_B, row_T, from_B, y, x_token, page, CHANNELS: tl.constexpr,
             KEYS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TAPS: tl.constexpr,
             EACH: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, SPLIT: tl.constexpr,
             DELTA: tl.constexpr, BIAS: tl.constexpr, EPSILON: tl.constexpr, BLOCK: tl.constexpr):
    """y_TX float32 of one token and one head: queries, keys, then values."""
    follow()
    t, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_key = part < 2 * KEYS
    first = tl.where(is_key, part * KEY_DIM, 2 * KEYS * KEY_DIM + (part - 2 * KEYS) * VALUE_DIM)
    i = tl.arange(0, BLOCK)
    own = i < tl.where(is_key, KEY_DIM, VALUE_DIM)
    c = first + i
    n = part - 2 * KEYS
    kept = tl.where(is_key, part % KEYS * SPLIT * SIZE + part // KEYS * KEY_DIM,
                    n // EACH * SIZE + 2 * KEY_DIM + n % EACH * VALUE_DIM) + i
    row = tl.load(row_T + t)
    begins, held = tl.load(start_B + row), tl.load(from_B + row)
    total = tl.zeros([BLOCK], tl.float32)
    for w in tl.static_range(TAPS):
        at = t - (TAPS - 1) + w
        new = tl.load(x + at * x_token + c, mask=tl.where(at >= begins, own, False), other=0.0).to(tl.float32)
        old = tl.load(pool + held * page + (at - begins + TAPS - 1) * WIDTH + kept,
                      mask=tl.where(at < begins, tl.where(held >= 0, own, False), False), other=0.0)
        total += tl.where(at >= begins, new, old) * tl.load(conv + w * CHANNELS + c, mask=own, other=0.0)
    if BIAS:
        total += tl.load(bias + c, mask=own, other=0.0)
    total = total / (1.0 + tl.exp(-total))
    if DELTA:
        length = tl.sqrt(tl.sum(total * total, 0) + EPSILON)
        scale = tl.where(part < KEYS, 1.0 / tl.sqrt(1.0 * KEY_DIM), 1.0)
        total = tl.where(is_key, total / length * scale, total)
    tl.store(y + t * CHANNELS + c, total, mask=own)


@triton.jit
def _leave_inputs(x, pool, to_T, begin, first, end, held, c, kept, own, x_token, page, WIDTH: tl.constexpr,
                  TAPS: tl.constexpr, ROUND: tl.constexpr):
    """The inputs of these channels that a state ends with, into each page that a token of [first, end) leaves, where
    `kept` says. The last ones first: the page that the row comes from, which earlier ones ask, is the first that it
    leaves. begin: the first token of the row."""
    w = tl.arange(0, ROUND)[:, None]
    for back in range(0, end - first):
        t = end - 1 - back
        to = tl.load(to_T + t)
        if to >= 0:
            at = t - (TAPS - 2) + w
            mine = (w < TAPS - 1) & own[None, :]
            new = tl.load(x + at * x_token + c[None, :], mask=mine & (at >= begin), other=0.0).to(tl.float32)
            old = tl.load(pool + held * page + (at - begin + TAPS - 1) * WIDTH + kept[None, :],
                          mask=mine & (at < begin) & (held + 0 * w >= 0), other=0.0)
            tl.debug_barrier()
            tl.store(pool + to * page + w * WIDTH + kept[None, :], tl.where(at >= begin, new, old), mask=mine)


@triton.jit(do_not_specialize_on_alignment=["begin_B", "first_B", "end_B", "from_B", "to_T"])
def walk(x, y, step, write, decay, add, skip, pool, begin_B, first_B, end_B, from_B, to_T, out, x_token, step_token,
         write_token, page, least, most, HEADS: tl.constexpr, CHANNELS: tl.constexpr, KEYS: tl.constexpr,
         KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TAPS: tl.constexpr, EACH: tl.constexpr,
         WIDTH: tl.constexpr, SIZE: tl.constexpr, ROUND: tl.constexpr, DELTA: tl.constexpr, KEY_BLOCK: tl.constexpr,
         VALUE_BLOCK: tl.constexpr):
    """Tokens [first, end) of one row, which begins at `begin`: one head, some of its values."""
    follow()
    row, n, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, first, end = tl.load(begin_B + row), tl.load(first_B + row), tl.load(end_B + row)
    held = tl.load(from_B + row)
    i, j = tl.arange(0, KEY_BLOCK), block * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    own = (i < KEY_DIM)[:, None] & (j < VALUE_DIM)[None, :]
    own_s, own_v = (i < KEY_DIM)[:, None], (j < VALUE_DIM)[None, :]
    part = n // EACH * SIZE
    at_z = part + (TAPS - 1) * WIDTH + (n % EACH * KEY_DIM + i[:, None]) * VALUE_DIM + j[None, :]
    z = tl.load(pool + held * page + at_z, mask=own & (held + 0 * at_z >= 0), other=0.0)
    tl.debug_barrier()
    key = n // (HEADS // KEYS)
    kept, added = tl.load(decay + n), tl.load(add + n)
    if not DELTA:
        skipped = tl.load(skip + n)
    c_q, c_k, c_v = key * KEY_DIM + i, (KEYS + key) * KEY_DIM + i, 2 * KEYS * KEY_DIM + n * VALUE_DIM + j
    for t in range(first, end):
        q = tl.load(y + t * CHANNELS + c_q[:, None], mask=own_s, other=0.0)
        k = tl.load(y + t * CHANNELS + c_k[:, None], mask=own_s, other=0.0)
        v = tl.load(y + t * CHANNELS + c_v[None, :], mask=own_v, other=0.0)
        s = tl.load(step + t * step_token + n).to(tl.float32) + added
        s = tl.where(s > 20.0, s, tl.log(1.0 + tl.exp(tl.minimum(s, 20.0))))
        if DELTA:
            z = z * tl.exp(kept * s)
            opens = 1.0 / (1.0 + tl.exp(-tl.load(write + t * write_token + n).to(tl.float32)))
            z += k * ((v - tl.sum(z * k, 0)[None, :]) * opens)
            o = tl.sum(z * q, 0)[None, :]
        else:
            s = tl.minimum(tl.maximum(s, least), most)
            z = z * tl.exp(kept * s) + k * (v * s)
            o = tl.sum(z * q, 0)[None, :] + skipped * v
        tl.store(out + (t * HEADS + n) * VALUE_DIM + j[None, :], o.to(out.dtype.element_ty), mask=own_v)
        to = tl.load(to_T + t)
        if to >= 0:
            tl.store(pool + to * page + at_z, z, mask=own)
    _leave_inputs(x, pool, to_T, begin, first, end, held, c_v, part + 2 * KEY_DIM + n % EACH * VALUE_DIM + j,
                  j < VALUE_DIM, x_token, page, WIDTH, TAPS, ROUND)
    if n % EACH + block == 0:           # of each part: those of one key head have its inputs all
        _leave_inputs(x, pool, to_T, begin, first, end, held, c_q, part + i, i < KEY_DIM, x_token, page, WIDTH, TAPS,
                      ROUND)
        _leave_inputs(x, pool, to_T, begin, first, end, held, c_k, part + KEY_DIM + i, i < KEY_DIM, x_token, page,
                      WIDTH, TAPS, ROUND)


def scan(x_TX: Tensor, step_TN: Tensor, write_TN: Tensor | None, weights: ScanWeights, states: States,
         spec: ScanSpec) -> Tensor:
    y_TX = convolved(x_TX, write_TN, weights, states, spec)
    out_TNV = x_TX.new_empty(len(x_TX), spec.heads, spec.value_dim)
    walked(x_TX, y_TX, step_TN, write_TN, weights, states, spec, out_TNV, states.start_B[:-1], states.from_B)
    return out_TNV


def convolved(x_TX: Tensor, write_TN: Tensor | None, weights: ScanWeights, states: States, spec: ScanSpec) -> Tensor:
    """y_TX, float32."""
    pool = states.pool_PE
    assert pool.dtype == torch.float32 and pool.stride(1) == x_TX.stride(1) == 1
    assert (write_TN is not None) == spec.delta and spec.taps > 1
    y_TX = torch.empty(len(x_TX), spec.channels, dtype=torch.float32, device=x_TX.device)
    convolve[len(x_TX), 2 * spec.key_heads + spec.heads](
        x_TX, weights.conv_WX, weights.bias_X, pool, states.start_B, states.row_T, states.from_B, y_TX,
        x_TX.stride(0), pool.stride(0), **shape_of(spec), BIAS=weights.bias_X is not None, EPSILON=EPS,
        SPLIT=spec.split, BLOCK=triton.next_power_of_2(max(spec.key_dim, spec.value_dim)), num_warps=1, **early())
    return y_TX


def walked(x_TX: Tensor, y_TX: Tensor, step_TN: Tensor, write_TN: Tensor | None, weights: ScanWeights, states: States,
           spec: ScanSpec, out_TNV: Tensor, first_B: Tensor, from_B: Tensor) -> None:
    """Write the outputs and states of each row's tokens from `first_B` on, from the state in page `from_B`."""
    assert step_TN.stride(1) == 1
    values = min(VALUES, triton.next_power_of_2(spec.value_dim))
    walk[len(states.starts) - 1, spec.heads, triton.cdiv(spec.value_dim, values)](
        x_TX, y_TX, step_TN, write_TN, weights.decay_N, weights.step_N, weights.skip_N, states.pool_PE, states.start_B,
        first_B, states.start_B[1:], from_B, states.to_T, out_TNV, x_TX.stride(0), step_TN.stride(0),
        0 if write_TN is None else write_TN.stride(0), states.pool_PE.stride(0), spec.least, min(spec.most, 3e38),
        HEADS=spec.heads, **shape_of(spec), ROUND=triton.next_power_of_2(spec.taps - 1),
        KEY_BLOCK=triton.next_power_of_2(spec.key_dim), VALUE_BLOCK=values, num_warps=4, **early())


def shape_of(spec: ScanSpec) -> dict[str, int | bool]:
    return {"CHANNELS": spec.channels, "KEYS": spec.key_heads, "KEY_DIM": spec.key_dim, "VALUE_DIM": spec.value_dim,
            "TAPS": spec.taps, "DELTA": spec.delta, "EACH": spec.each, "WIDTH": spec.part_channels,
            "SIZE": spec.part_elements}
