"""Attention of a prompt over chosen latent rows: the kernel in C++, the one in Gluon, the reference.

    PYTHONPATH=src:bench/device python lab/device/chosen_rows.py OUT

First some shapes are compared, then one chunk is timed: 8,192 queries of 64 heads, each with 2,048 of the rows that
there are, drawn for each query, or nearly those of the query before.
"""
from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from direct import spread, write
from torch import Tensor

from penstock.kernels.attention.latent_attention import gluon_latent, prompt_latent, reference

QUERIES, HEADS, CHOSEN, SCALE = 8192, 64, 2048, 576 ** -0.5
# Page size, heads, rows that there is room for, rows of the queries, how often, a factor of scores.
SHAPES = ((64, 64, 2048, (0, 1, 63, 64, 65, 127, 128, 129, 300, 1000, 2047, 2048), 12, 1),
          (64, 128, 2048, (2048, 5, 700), 50, 1), (16, 96, 257, (257, 256, 1, 0, 130), 40, 8),
          (3, 33, 100, (100, 99, 64, 3), 60, 30), (64, 64, 2048, (2048,), 300, 20))


def in_gluon(q: Tensor, pool: Tensor, slot: Tensor, out: Tensor, lse: Tensor, scale: float) -> None:
    blocks = 1 << (-(-slot.shape[1] // 64) - 1).bit_length()
    gluon_latent.attend(q, pool, slot, None, out[:, :, None], lse[:, :, None], scale, 64 * blocks)


def chosen(queries: int, rows: int, num: int, near: bool = False) -> Tensor:
    scores = torch.rand(queries, rows, device="cuda")
    if near:
        scores = 0.15 * scores + torch.rand(rows, device="cuda")
    return scores.topk(num, -1).indices.sort(-1).values.int()


def apart(size: int, heads: int, room: int, counts: tuple[int, ...], times: int, factor: int) -> dict[str, Any]:
    """Rows that no query has are NaN. Every seventh query is compared; all must come out the same again."""
    counts *= times
    pages = -(-8192 // size)
    slot = chosen(len(counts), 8192, room)
    for b, count in enumerate(counts):
        slot[b, count:] = -1
    pool = torch.full((pages, 2, size, 576), torch.nan, dtype=torch.bfloat16, device="cuda")[:, 1]
    at = slot[slot >= 0].long().unique()
    pool[at // size, at % size] = torch.randn(len(at), 576, device="cuda").bfloat16()
    q = (torch.randn(len(counts), heads, 576, device="cuda") * factor ** 0.5).bfloat16()
    scale = SCALE * factor ** 0.5
    want, want_log = (x[::7].float() for x in reference.latent_attention(
        q[::7].float().repeat_interleave(7, 0)[:len(q)], pool, slot, value_dim=512, scale=scale))
    row: dict[str, Any] = {"size": size, "heads": heads, "room": room, "factor": factor}
    for name, run in (("gluon", in_gluon), ("cpp", prompt_latent.attend)):
        outs = []
        for _ in range(2):
            out = torch.full((*q.shape[:2], 512), torch.nan, dtype=q.dtype, device="cuda")
            lse = torch.full(q.shape[:2], torch.nan, device="cuda")
            run(q, pool, slot, out, lse, scale)
            outs.append((out, lse))
        seen = torch.isfinite(want_log)
        row[name] = {"error": float((out[::7].float() - want).norm() / want.norm()),
                     "log": float((lse[::7] - want_log)[seen].abs().max()),
                     "same_again": all(torch.equal(a, b) for a, b in zip(*outs, strict=True))}
    print(row, flush=True)
    return row


def times(run: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of nine, behind two."""
    taken = []
    for _ in range(11):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        run()
        ended.record()
        ended.synchronize()
        taken.append(began.elapsed_time(ended))
    return spread(taken[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = [apart(*shape) for shape in SHAPES]
    q = torch.randn(QUERIES, HEADS, 576, device="cuda").bfloat16()
    out, lse = torch.empty_like(q[..., :512]).contiguous(), torch.empty(q.shape[:2], device="cuda")
    for num, near in ((32768, False), (131072, False), (32768, True)):
        pool = torch.randn(num // 64, 64, 576, device="cuda").bfloat16()
        slot = torch.cat([chosen(256, num, CHOSEN, near) for _ in range(QUERIES // 256)])
        for name, run in (("gluon", in_gluon), ("cpp", prompt_latent.attend)):
            ms = times(lambda run=run, pool=pool, slot=slot: run(q, pool, slot, out, lse, SCALE))
            flops = 2 * QUERIES * HEADS * CHOSEN * (576 + 512)
            rows.append({"rows": num, "near": near, "kernel": name, "ms": ms,
                         "tflop_s": flops / ms["median"] / 1e9})
    write("chosen-rows", args.out, rows)


if __name__ == "__main__":
    main()
