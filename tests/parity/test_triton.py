"""Own Triton kernels without a GPU: compiled for Hopper, and interpreted on small inputs.

The interpreter has no bfloat16 products, so it runs float32 and float16; the device runs the cases.
"""
from __future__ import annotations

import ast
import importlib
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.kernels.c import device
from penstock.kernels.op import Unusable
from penstock.kernels.platform import probe

pytest.importorskip("triton", reason="Triton is not installed here")
pytestmark = pytest.mark.when_changed("src/penstock/kernels")
KERNELS = Path(__file__).parents[2] / "src" / "penstock" / "kernels"
BF16, F16, F32, I16, I32, I64, U8, E4M3 = "*bf16", "*fp16", "*fp32", "*i16", "*i32", "*i64", "*u8", "*fp8e4nv"
STRIDES = {"q_row": "i32", "q_head": "i32", "kv_page": "i64", "kv_head": "i32", "kv_token": "i32",
           "table_row": "i32"}
PLACES, NO_PLACES = dict(of=I32, context=I32), dict(of=None, context=None)
PAGED = {"DIM": 128, "DIM_PAD": 128, "PAGE": 16}

FP8, FLOATS = (dict(BLOCK_ROWS=n, BLOCK_COLS=n, KIND=kind, OFFSET="", ZERO_CODE=0)
               for n, kind in ((128, "e4m3"), (1, "floats")))
INT4, ASYMMETRIC, FP4, SHIFTED = (dict(BLOCK_ROWS=1, BLOCK_COLS=cols, KIND=kind, OFFSET=offset, ZERO_CODE=zero)
                                  for cols, kind, offset, zero in ((128, "u4", "", 8), (32, "u4", "code", 8),
                                                                   (16, "e2m1", "", 0), (32, "u8", "shift", 128)))
PACKED = {"weight": U8, "scale": F32, "offset": F32}
VISITS = {"expert": I64, "block_expert": I32, "block_visit": I32, "FIRST": "i32", "E": "i32"}
FEW, MANY = (dict(VISITS=64, ROWS=64, COLS=128, FEW=True), dict(VISITS=64, ROWS=64, COLS=64, FEW=False))
EXPERTS = [(BF16, PACKED, FP8, FEW), (BF16, PACKED, FP8, MANY), (BF16, PACKED, INT4, FEW), (BF16, PACKED, INT4, MANY),
           (BF16, PACKED | {"scale": BF16}, FP4, FEW),
           (BF16, {"weight": BF16, "scale": BF16, "offset": BF16}, FLOATS, FEW),
           (BF16, {"weight": BF16, "scale": BF16, "offset": BF16}, FLOATS, MANY),
           (F32, {"weight": F32, "scale": F32, "offset": F32}, FLOATS, MANY)]
SCANS = {delta: dict(CHANNELS=8192, KEYS=16, KEY_DIM=128, VALUE_DIM=128, TAPS=4, DELTA=delta, EACH=2, WIDTH=512,
                     SIZE=34_304) for delta in (True, False)}

# (module, kernel): (types of arguments, :16 of multiples, constants, warps, stages); one or more ways each
COMPILED: dict[tuple[str, str], list[tuple[dict[str, str], dict[str, object], int, int]]] = {
    ("attention.paged_attention.triton_decode", "attend_parts"): [
        (dict(q=BF16, k=pages, v=pages, k_words=words, v_words=words, table=I32, row=I32, context=I32, sinks=F32,
              out=BF16, part=F32, peak=F32, scale="fp32", cap="fp32", **STRIDES),
         dict(GROUP=4, GROUP_PAD=16, BLOCK=64, PARTS=4, EXACT=False, WINDOW=window, CAPPED=special,
              SINKS=special, FIRST=first, CODED=pages == U8, **{**PAGED, **dims}), 4, 5)
        for window, special, first, pages, words, dims in (
            (0, False, 0, BF16, BF16, {}), (128, True, 0, BF16, BF16, {}), (0, False, 1, BF16, BF16, {}),
            (0, False, 0, U8, F32, {}), (0, False, 0, U8, F32, dict(DIM=256, DIM_PAD=256)))],
    ("attention.paged_attention.triton_decode", "join_parts"): [
        (dict(part=F32, peak=F32, out=BF16), dict(DIM=80, DIM_PAD=128, PARTS=3, PARTS_PAD=4), 1, 3)],
    ("attention.paged_attention.triton_decode", "write_rows"): [
        (dict(k_new=BF16, v_new=BF16, k=BF16, v=BF16, table=of, **({"row_T": of} if whose else {}),
              position_T=of, new_token="i32", new_head="i32", kv_page="i64", kv_head="i32", kv_token="i32",
              table_row="i32"),
         dict(HEADS=8, HEADS_PAD=8, **PAGED, **({} if whose else {"row_T": None})), 4, 3)
        for of, whose in ((I32, True), (I64, False))],
    ("attention.merge.triton_merge", "merge_parts"): [
        (dict(out=BF16, lse=F32, more=BF16, more_lse=F32, NUM="i32"), dict(DIM=80, DIM_PAD=128, LINES=64), 8, 3)],
    ("kv.gather.triton_copy", "copy_units"): [
        (dict(host=BF16, pool=BF16, miss=I32, num=I32, entries="i32", h_page="i32", h_head="i32",
              h_plane="i32", p_page="i32", p_head="i32", p_plane="i32", WORDS="i32"),
         dict(WORD="int64", HOST_UNITS=2, POOL_UNITS=2, PLANES=2, WORDS_PAD=256, LINES=8, ANYWHERE=anywhere,
              BESIDE=beside), 4, 3) for anywhere in (False, True) for beside in (False, True)],
    ("kv.write_kv.triton_places", "write_tokens"): [
        (dict(x0=pages, x1=pages, device=pages, host=pages, words0=words, device_words=words, host_words=words,
              bounds=bounds, scales=scales, device_T="*i64", host_T="*i64",
              bounds_T="*i64", row_T=I32, position_T=I32, hot_slot=I32, hot_page=I32, UNITS="i32",
              HOT_PAGES="i32", x_token="i32", x_head="i32",
              **{f"{pool}_{part}": "i32" for pool in "dhb" for part in ("page", "head", "plane")}),
         dict(HEADS=8, HEADS_PAD=8, DIM=wide, DIM_PAD=wide if key == 0 else 256, SIZE=64, UNIT=8,
              SUMMARIES=summaries, PLANES=2, HOT=summaries > 0, VECTOR=vector, FORMAT=form, KEY=key), 4, 3)
        for summaries, bounds, scales, vector, form, pages, words, wide, key in (
            (0, BF16, BF16, 128, 0, BF16, BF16, 128, 0), (8, BF16, BF16, 128, 0, BF16, BF16, 128, 0),
            (8, U8, F32, 132, 2, BF16, BF16, 128, 0), (8, BF16, BF16, 128, 1, U8, F32, 144, 128))],
    ("choose.select.triton_bounds", "score_units"): [
        (dict(q=BF16, bounds=f"{bounds}:16", scales=f"{scales}:16", table=I32, row=I32, position=I32,
              score=F32, q_row="i32", q_head="i32", b_page="i32:16", b_head="i32", b_plane="i32",
              table_row="i32", UNITS="i32", SINK_UNITS="i32", WINDOW="i32", turns="i32"),
         dict(UNIT=8, GROUP=4, COLS=16, DIM=128, PART=128, PARTS=1, OF_PAGE=8, BLOCK=64, MOST=0.75,
              LEAST=0.25, EXACT=False, VECTOR=vector, CODED=bounds == U8, STAGES=stages), warps, 3)
        for bounds, scales, vector, stages, warps in (
            (BF16, BF16, 128, 1, 4), (U8, F32, 132, 1, 2), (U8, F32, 132, 3, 2))],
    ("choose.select.triton_bounds", "choose_units"): [
        (dict(score=F32, position=I32, chosen=I32, UNITS="i32", CHOSEN="i32", SINK_UNITS="i32", WINDOW="i32",
              **({"budget": I32} if given else {})),
         dict(UNIT=8, CHOSEN_PAD=256, BLOCK=16384, WHOLE=whole, **({} if given else {"budget": None})), 16, 3)
        for whole, given in ((True, True), (False, True), (True, False))],
    ("choose.block_select.triton_blocks", "score_blocks"): [
        (dict(q=q, key=key, scales=words, table=I32, row=I32, position=I32, score=F32, q_row="i32", key_page="i32",
              table_row="i32", UNITS="i32", SINK_UNITS="i32", WINDOW="i32", turns="i32", NUM="i32"),
         dict(UNIT=unit, HEADS=4, HEADS_PAD=16 // min(queries, 4), DIM=128, DIM_PAD=128, SIZE=128, PART=min(unit, 128),
              PARTS=-(-unit // 128), BLOCKS=max(1, 64 // unit), EXACT=q == F32, KEY=row, CODED=key == E4M3,
              QUERIES=queries), 8 if q == F32 else 4, 2)
        for q, key, words, row, unit, queries in (
            (BF16, BF16, BF16, 128, 128, 1), (BF16, BF16, BF16, 128, 16, 16), (BF16, BF16, BF16, 128, 256, 16),
            (E4M3, E4M3, F32, 33, 128, 1), (E4M3, E4M3, F32, 33, 128, 16), (F32, F32, F32, 128, 128, 1))],
    ("choose.index_pair.triton_pair", "mix_pair"): [
        (dict(q=BF16, weight=F32, key=BF16, matrix=BF16, mixed=U8, counts=F32, codes=U8, scales=F32,
              weight_token="i32", key_token="i32", HEADS="i32", factor="fp32"),
         dict(DIM=128, LINES=16, EXACT=False), 4, 3)],
    ("choose.index_select.triton_keys", "score_keys"): [
        (dict(q=q, weight=F32, key=key, scales=words, table=I32, row=I32, position=I32, score=F32,
              counted=I32, q_row="i32", weight_row="i32", key_page="i32", table_row="i32", TOKENS="i32",
              BLOCKS="i32", NUM="i32"),
         dict(SIZE=64, HEADS=64, HEADS_PAD=64, DIM=128, DIM_PAD=128, BLOCK=block, EXACT=q == F32, KEY=row,
              CODED=key == E4M3, BINS=8192, QUERIES=queries), warps, stages)
        for q, key, words, row, block, queries, warps, stages in (
            (BF16, BF16, BF16, 128, 128, 1, 4, 2), (BF16, BF16, BF16, 128, 64, 1, 4, 3),
            (BF16, BF16, BF16, 128, 64, 4, 4, 3), (E4M3, E4M3, F32, 33, 128, 1, 4, 2),
            (E4M3, E4M3, F32, 33, 128, 4, 8, 2))],
    ("choose.index_select.triton_keys", "clear_bins"): [(dict(counted=I32), dict(BINS=8192), 8, 3)],
    ("choose.index_select.triton_keys", "mark_keys"): [
        (dict(score=F32, position=I32, counted=I32, above=I32, near_score=F32, near_at=I32, TOKENS="i32",
              TOPK="i32"), dict(BINS=8192, BLOCK=block, NEAR=2048), 8, 3) for block in (1024, 2048)],
    ("choose.index_select.triton_keys", "take_keys"): [
        (dict(score=F32, position=I32, counted=I32, above=I32, near_score=F32, near_at=I32, chosen=I32,
              TOKENS="i32", TOPK="i32"),
         dict(BINS=8192, BLOCK=block, NEAR=2048, BLOCKS_PAD=64, TOPK_PAD=2048), warps, 3)
        for block, warps in ((1024, 4), (2048, 8))],
    ("attention.latent_attention.triton_latent", "attend_rows"): [
        (dict(q=kind, pool=pool, rests=BF16 if pool == U8 else kind, slot=I32, part=F32, peak=F32, scale="fp32",
              pool_page="i32", HEADS="i32", CHOSEN="i32", **({"scales": F32} if pool == U8 else {}),
              **(PLACES if paged else {})),
         dict(SIZE=64, ROW=656 if pool == U8 else 576, DIM=576, VALUE=512, HALVES=2, HALF=256, REST_PAD=64,
              GROUP=group, BLOCK=32 if pool == U8 else 64, BLOCKS=4, EXACT=kind == F32, FIRST=int(paged),
              **({} if pool == U8 else {"scales": None}), **({} if paged else NO_PLACES)), 4, stages)
        for kind, pool, group, stages, places in (
            (BF16, BF16, 64, 2, (False, True)), (F32, F32, 16, 1, (False, True)), (BF16, U8, 64, 2, (True,)),
            (BF16, U8, 16, 2, (True,)), (F32, U8, 16, 1, (True,)))
        for paged in places],
    ("attention.latent_attention.triton_latent", "decode_rows"): [
        (dict(pool=U8, scales=F32, rests=BF16, out=out, own=I32, pool_page="i32", NUM="i32",
              **({"slot": I32} if named else {})),
         dict(SIZE=64, DIM=576, WORDS=164, VALUE=512, REST_PAD=64, LINES=16,
              **({} if named else {"slot": None})), 4, 3)
        for out in (BF16, F32) for named in (True, False)],
    ("triton.triton_codes", "encode_rows"): [
        (dict(x=BF16, codes=U8, scales=F32, rests=BF16, x_row="i32"),
         dict(DIM=576, CODED=512, WIDTH=656, REST_PAD=64), 1, 3)],
    ("triton.triton_codes", "encode_pairs"): [
        (dict(x=BF16, codes=U8, scales=F32, x_token="i32", x_plane="i32", x_head="i32"),
         dict(HEADS=8, DIM=128, WIDTH=144), 1, 3)],
    ("triton.triton_codes", "decode_vectors"): [
        (dict(codes=U8, scales=F32, out=BF16, NUM="i32"), dict(DIM=128, DIM_PAD=128, WIDTH=144, LINES=32), 4, 3)],
    ("choose.resolve.triton_map", "clear_one"): [(dict(num=I32), {}, 1, 3)],
    ("choose.resolve.triton_map", "resolve_units"): [
        (dict(chosen=I32, row=I32, turn=I32, device=I32, host=I32, hot_slot=I32, hot_unit=I32, hot_stamp=I32,
              hot_page=I32, count="*i64", now=I32, slot=I32, victim=I32, miss=I32, num=I32, device_row="i32",
              host_row="i32", CHOSEN="i32", UNITS="i32", SLOTS="i32", HOT_PAGES="i32"),
         dict(PAGE_UNITS=8, CHOSEN_PAD=256, SLOTS_PAD=512, PAGES_PAD=64, HOT=hot, TURNS=turns), 4, 3)
        for hot, turns in ((True, False), (True, True), (False, False))],
    ("attention.sparse_attention.triton_units", "attend_units"): [
        (dict(q=BF16, k=pages, v=pages, k_words=words, v_words=words, chosen=I32, slot=I32, position=I32, part=F32,
              peak=F32, scale="fp32", q_row="i32", q_head="i32", kv_page="i32", kv_head="i32", CHOSEN="i32"),
         dict(UNIT=8, OF_PAGE=8, GROUP=4, GROUP_PAD=16, DIM=128, DIM_PAD=128, BLOCK=64, BLOCKS=4,
              EXACT=False, TOKEN=token, CODED=pages == U8), 4, 3)
        for pages, words, token in ((BF16, BF16, 128), (U8, F32, 144))],
    ("attention.sparse_attention.triton_units", "join_units"): [
        (dict(part=F32, peak=F32, out=BF16, lse=F32), dict(PARTS=16, PARTS_PAD=16, DIM=512, BLOCK=512), 4,
         3)],
    ("sample.draw.triton_draw", "draw_rows"): [
        (dict(logits=F32, w=F32, token="*i64", row_B=I32, position_B=I32, knobs="*fp64", stream="*i64",
              V="i32"),
         dict(BLOCK=4096, ONE=0x3F800000), 16, 3)],
    ("sample.mask.triton_mask", "mask_rows"): [
        (dict(logits=F32, words=I32, at_M="*i64", seen_M=I32, V="i32", WIDTH="i32"), dict(BLOCK=4096), 8, 3)],
    ("fused.step.triton_step", "begin_rows"): [
        (dict(row=I32, position=I32, last=I64, budget=I32, now=I32, table0=I32, table1=I32, table2=I32,
              wide=I64, narrow=I32, row0="i32", row1="i32", row2="i32", B="i32", LINE="i32", LAST="i32"),
         dict(PLACES=places, SIZE0=64, SIZE1=0, SIZE2=8, UNIT0=1, UNIT1=1, UNIT2=8, BUDGET=asks, TICK=asks,
              BLOCK=128), 4, 3) for places, asks in ((0, False), (3, True))],
    ("fused.step.triton_step", "turn_angles"): [
        (dict(position=I64, freq=F32, cos=out, sin=out, factor="fp32", freq_row="i32", F="i32"),
         dict(F_PAD=64), 1, 3) for out in (BF16, F32)],
    ("fused.step.triton_step", "best_parts"): [
        (dict(head=head, logits=F32, peak=F32, at=I32, token=I64, head_row="i32", V="i32"),
         dict(BLOCK=4096), 8, 3) for head in (BF16, F32)],
    ("fused.step.triton_step", "say_tokens"): [
        (dict(peak=F32, at=I32, token=I64, row=I32, position=I32, last=I64, count=I64, answer=I64, B="i32",
              LAST="i32", ROWS="i32", COUNTED="i32", HEADS="i32"),
         dict(PARTS=38, PARTS_PAD=64, COUNTED_PAD=counted), 4, 3) for counted in (0, 64, 512)],
    ("fused.layer.triton_ops", "add_norm"): [
        (dict(h=BF16, delta=BF16, weight=BF16, out=BF16, eps="fp32"),
         dict(DIM=4096, DIM_PAD=4096, ADD=True), 8, 3)],
    ("fused.layer.triton_ops", "norm_rotate"): [
        (dict(x=BF16, cos=BF16, sin=BF16, q_weight=BF16, k_weight=BF16, eps="fp32", x_token="i32",
              x_head="i32", M="i32", N="i32"),
         dict(DIM=128, HALF=64, HALF_PAD=64, HEADS=4, NORM=norm), 1, 3) for norm in (True, False)],
    ("fused.layer.triton_ops", "latent_rows"): [
        (dict(x=BF16, cos=BF16, sin=BF16, q_weight=BF16, row_weight=BF16, key_weight=BF16, key_bias=BF16,
              residual=BF16, key=BF16, h=BF16, head_weight=F32 if key else BF16, weight=F32 if key else BF16,
              eps="fp32", scale="fp32", x_token="i32"),
         dict(Q=1536, Q_PAD=2048, RANK=512, RANK_PAD=512, HALF=32, HALF_PAD=32, KEY=key,
              KEY_PAD=max(1, key), DIM=4096, COLS=1024, TOKENS=tokens), 4, 3)
        for key, tokens in ((0, 1), (128, 1), (128, 4))],
    ("fused.layer.triton_ops", "latent_queries"): [
        (dict(x=BF16, q=BF16, index=BF16, cos=BF16, sin=BF16, x_token="i32", x_turned="i32", q_head="i32",
              N="i32", INDEX="i32"), dict(HALF=32, HALF_PAD=32, REST=64, REST_PAD=64, HEADS=4), 1, 3)],
    ("fused.layer.triton_ops", "head_rows"): [
        (dict(x=BF16, weight=BF16, out=BF16, T="i32", OUTPUTS="i32", x_token="i32", x_head="i32",
              w_head="i32", w_out="i32", w_in="i32", out_token="i32", out_head="i32"),
         dict(INPUTS=inputs, INPUTS_PAD=inputs, T_PAD=16, ROWS=(1 << 14) // inputs), 4, 3)
        for inputs in (128, 512)],
    ("fused.layer.triton_ops", "silu_gate"): [
        (dict(x=BF16, out=BF16, x_token="i32", WIDTH="i32"), dict(BLOCK=1024), 4, 3)],
    ("gemm.linear.triton_rows", "one_row"): [
        (dict(x=BF16, weight=BF16, bias=BF16, out=BF16, OUTPUTS="i32"),
         dict(INPUTS=4096, ROWS=8, COLS=512, STAGES=3, BIAS=False), 4, 3)],
    ("gemm.linear.triton_rows", "few_rows"): [
        (dict(x=BF16, weight=BF16, bias=BF16, out=BF16, T="i32", OUTPUTS="i32", x_row="i32"),
         dict(INPUTS=4096, T_PAD=16, ROWS=64, COLS=128, BIAS=True), 4, 5)],
    ("gemm.linear.triton_fp8", "quantise_rows"): [
        (dict(x=BF16, codes=U8, scales=F32, T="i32", x_row="i32"), dict(INPUTS=12288, COLS=12288, TILE=1024), 4, 3)],
    ("gemm.linear.triton_fp8", "quantise_blocks"): [
        (dict(x=BF16, codes=U8, scales=F32, T="i32", x_row="i32"), dict(INPUTS=12288, COLS=128, GROUP=8), 4, 3)],
    ("gemm.linear.triton_packed", "packed_rows"): [
        (dict(x=f"{kind}:16", weight="*u8:16", scale=f"{scale}:16", offset=f"{offset}:16", bias=kind, out=kind, T="i32",
              OUTPUTS="i32:16", x_row="i32:16", SCALES="i32:16"),
         dict(INPUTS=2048, T_PAD=pad, ROWS=rows, COLS=cols, BIAS=False, EXACT=kind == F32, SPLIT=2, **form), warps,
         stages)
        for kind, scale, offset, form, pad, rows, cols, warps, stages in (
            (BF16, F32, F32, FP8, 16, 32, 128, 4, 4), (BF16, F32, F32, FP8, 64, 32, 128, 4, 4),
            (F32, F32, F32, FP8, 64, 32, 64, 4, 4), (BF16, F32, F32, INT4, 16, 32, 256, 4, 4),
            (BF16, F16, I16, ASYMMETRIC, 64, 32, 128, 4, 4), (BF16, BF16, BF16, FP4, 16, 32, 256, 4, 4),
            (BF16, F32, F32, SHIFTED, 64, 32, 128, 4, 4), (BF16, F32, F32, INT4, 128, 128, 64, 8, 3),
            (BF16, BF16, BF16, FP4, 128, 128, 64, 8, 3))],
    ("gemm.linear.triton_packed", "add_shares"): [
        (dict(part=F32, bias=BF16, out=BF16, NUM="i32", OUTPUTS="i32"), dict(SPLIT=4, BLOCK=1024, BIAS=True), 4, 3)],
    ("gemm.linear.triton_packed", "dequantise"): [
        (dict(weight=U8, scale=F32, offset=F32, out=BF16, FIRST="i32", END="i32", SCALES="i32"),
         dict(INPUTS=2048, ROWS=32, COLS=128, **form), 4, 3) for form in (FP8, INT4, ASYMMETRIC, FP4, SHIFTED)],
    ("gemm.experts.triton_experts", "route_tokens"): [
        (dict(logit=BF16, bias=F32, expert=I64, weight=F32, l_row="i32", scale="fp32", E="i32",
              PER_GROUP="i32"),
         dict(E_PAD=256, C=8, C_PAD=8, GROUPS=8, GROUPS_PAD=8, GROUPS_CHOSEN=chosen, SIGMOID=chosen < 8,
              BIAS=chosen < 8, RENORMALIZE=True), 1, 3) for chosen in (4, 8)],
    ("gemm.experts.triton_experts", "experts_in"): [
        (dict(x=kind, bias=kind, inner=kind, T="i32", x_row="i32", SCALES="i32", WIDTH="i32", alpha="fp32",
              limit="fp32", **VISITS, **weights),
         dict(INPUTS=2048, C=8, C_PAD=8, EXACT=kind == F32, BIAS=clamps, CLAMPED=clamps, GATED=gated,
              GELU=gelu, **tiles, **scaled), 4, 3) for kind, weights, scaled, tiles in EXPERTS
        for clamps, gated, gelu in {(False, True, False), (False, True, True), (False, False, False),
                                    (kind == weights["weight"] == BF16, True, False)}],
    ("gemm.experts.triton_experts", "experts_out"): [
        (dict(inner=kind, bias=kind, part=kind, weighs=F32, T="i32", SCALES="i32", OUTPUTS="i32", **VISITS,
              **weights),
         dict(INPUTS=768, C=8, C_PAD=8, EXACT=kind == F32, BIAS=biased, **tiles, **scaled), 4, 3)
        for kind, weights, scaled, tiles in EXPERTS for biased in {False, kind == weights["weight"] == BF16}],
    ("gemm.experts.triton_experts", "sum_visits"): [
        (dict(part=BF16, expert=I64, out=BF16, FIRST="i32", E="i32", DIM="i32"),
         dict(C=8, BLOCK=1024), 4, 3)],
    ("state.scan.triton_scan", "convolve"): [
        (dict(x=BF16, conv=F32, bias=F32, pool=F32, start_B=I64, row_T=I64, from_B=I64, y=F32, x_token="i32",
              page="i64"),
         dict(**SCANS[delta], SPLIT=1, BIAS=not delta, EPSILON=1e-6, BLOCK=128), 1, 3) for delta in (True, False)],
    ("state.scan.triton_scan", "walk"): [
        (dict(x=BF16, y=F32, step=BF16, write=BF16, decay=F32, add=F32, skip=F32, pool=F32, begin_B=I64, first_B=I64,
              end_B=I64, from_B=I64, to_T=I64, out=BF16, x_token="i32", step_token="i32", write_token="i32", page="i64",
              least="fp32", most="fp32"),
         dict(HEADS=32, **SCANS[delta], ROUND=4, KEY_BLOCK=128, VALUE_BLOCK=32), 4, 3)
        for delta in (True, False)],
    ("state.scan.triton_blocks", "solve_blocks"): [
        (dict(y=F32, step=kind, write=kind, decay=F32, add=F32, token_M=I64, gate=F32, solved=F32, seen=F32,
              step_token="i32", write_token="i32", least="fp32", most="fp32"),
         dict(HEADS=32, CHANNELS=8192, KEYS=16, KEY_DIM=128, DELTA=delta, KEY_BLOCK=128, BLOCK=64, PART=16,
              PRECISION=precision, EXACT="tf32x3"), 4, 3)
        for delta in (True, False) for kind, precision in ((BF16, "tf32"), (F32, "tf32x3"))],
    ("state.scan.triton_blocks", "advance"): [
        (dict(x=kind, y="*fp32:16", gate="*fp32:16", solved="*fp32:16", seen="*fp32:16", skip=F32, pool=F32,
              start_B=I64, rest_B=I64, row_R=I64, block_R=I64, from_B=I64, to_T=I64, out=kind, x_token="i32",
              page="i64"),
         dict(HEADS=32, **SCANS[delta], ROUND=4, KEY_BLOCK=128, VALUE_BLOCK=32, BLOCK=64, PRECISION=precision), 4, 2)
        for delta in (True, False) for kind, precision in ((BF16, "tf32"), (F32, "tf32x3"))],
    ("triton.triton_ranks", "add_ranks"): [
        (dict(x=BF16, inboxes=I64, count=I64, num="i32"),
         dict(RANK=1, RANKS=ranks, PROGRAMS=64, DATA=256 * ranks, ROOM=1 << 19, BLOCK=4096), 16, 3)
        for ranks in (2, 8)],
}

# Bytes of stack that a thread of the worst way takes, of kernels that have any: what registers do not hold.
TRITON = "3.9.0"
STACK = {"attend_rows": 11320, "score_keys": 336, "take_keys": 8, "experts_in": 1832, "experts_out": 272,
         "attend_units": 64, "attend_parts": 176, "choose_units": 32, "packed_rows": 32, "walk": 24,
         "solve_blocks": 2040, "advance": 1272}
FRAME_SIZE, SIZED = 0x11, 4         # of an entry of .nv.info: its kind, and the form with a length


def stack_of(cubin: bytes) -> int:
    """Of the function that takes most. Source: ELF's header; .nv.info as `cuobjdump -elf` prints it."""
    first, = struct.unpack_from("<Q", cubin, 0x28)
    size, num, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, first + i * size) for i in range(num)]
    [(at, length)] = [(s[4], s[5]) for s in sections
                      if cubin.startswith(b".nv.info\0", sections[names][4] + s[0])]
    most, end = -1, at + length
    while at < end:
        form, kind, n = struct.unpack_from("<BBH", cubin, at)
        if form == SIZED and kind == FRAME_SIZE:
            most = max(most, struct.unpack_from("<I", cubin, at + 8)[0])
        at += 4 + (n if form == SIZED else 0)
    assert most >= 0, "a cubin that does not say what stack it takes"
    return most


def test_every_kernel_is_in_the_list() -> None:
    found = set()
    for path in KERNELS.rglob("triton_*.py"):
        module = ".".join(path.relative_to(KERNELS).with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and any(
                    isinstance(d, ast.Attribute) and d.attr == "jit"
                    for d in (of.func if isinstance(of, ast.Call) else of for of in node.decorator_list)):
                found.add((module, node.name))
    assert found == set(COMPILED)


@pytest.mark.parametrize("module, name", list(COMPILED), ids=[name for _, name in COMPILED])
def test_kernel_compiles_for_hopper(module: str, name: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"penstock.kernels.{module}"), name)
    for types, constants, warps, stages in COMPILED[module, name]:
        constants = {k: getattr(triton.language, v) if k == "WORD" else v for k, v in constants.items()}
        kinds = [types.get(argument, "constexpr").partition(":") for argument in kernel.arg_names]
        signature = {argument: kind for argument, (kind, _, _) in zip(kernel.arg_names, kinds, strict=True)}
        aligned = {(i,): [["tt.divisibility", int(of)]] for i, (_, _, of) in enumerate(kinds) if of}
        built = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
                               target=GPUTarget("cuda", 90, 32),
                               options={"num_warps": warps, "num_stages": stages})
        assert ".target sm_90a" in built.asm["ptx"] and len(built.asm["cubin"]) > 1000
        assert built.metadata.shared <= 227 << 10, "more shared memory than a block has"
        # What spills is this compiler's doing: another one's figures are its own.
        if triton.__version__ == TRITON:
            assert stack_of(built.asm["cubin"]) <= STACK.get(name, 0), "it spills more than it did"


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("pool, size, blocks", [(BF16, 64, 16), (U8, 64, 16), (U8, 3, 1)])
def test_attention_in_gluon_compiles_for_hopper(pool: str, size: int, blocks: int, paged: bool) -> None:
    """Its scores once: 36 products of 16 dims, and four of 16 rows; all copies of 16 bytes. Without a stack
    frame."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from penstock.kernels.attention.latent_attention.gluon_latent import (
        BLOCK,
        GROUP,
        REST,
        VALUE,
        WARPS,
        attend_whole,
    )
    types = dict(q=BF16, pool=pool, slot=I32, part=F32, peak=F32, scale="fp32", pool_page="i32", HEADS="i32",
                 CHOSEN="i32", **(PLACES if paged else {}))
    constants = dict(SIZE=size, BLOCKS=blocks, G=GROUP, BLOCK=BLOCK, V=VALUE, R=REST, FIRST=int(paged),
                     **({} if paged else NO_PLACES))
    whole = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(attend_whole.arg_names)
             if name in types and name != "scale"}
    built = triton.compile(
        GluonASTSource(attend_whole, {a: types.get(a, "constexpr") for a in attend_whole.arg_names},
                       constants, whole),
        target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS})
    assert built.asm["ptx"].count("wgmma.mma_async") == (VALUE + REST) // 16 + BLOCK // 16
    copies = [line for line in built.asm["ptx"].splitlines() if "cp.async.c" in line and "commit" not in line]
    assert len(copies) == (72 if pool == BF16 else 54) and all(", 0x10, " in line for line in copies)
    assert built.metadata.shared <= 227 << 10 and stack_of(built.asm["cubin"]) <= (40 if paged else 0)


@pytest.mark.parametrize("name, defines", [
    ("choose/index_select/score_keys", dict(SIZE=64, HEADS=64, CODED=1)),
    ("choose/index_select/score_keys", dict(SIZE=16, HEADS=8, CODED=1)),
    ("choose/index_select/score_keys", dict(SIZE=64, HEADS=64, CODED=0)),
    *(("choose/index_select/score_prompt", dict(SIZE=size, HEADS=64, CODED=coded, GROUPS=3, STAGES=stages))
      for size, coded, stages in ((64, 1, 6), (16, 1, 6), (64, 0, 5))),
    *(("choose/choose_best", dict(BINS=8192, NEAR=2048, SHARE=share)) for share in (1, 2, 4, 8)),
    ("choose/choose_many", dict(BINS=8192, ROOM=2048)),
    *(("attention/latent_attention/attend_prompt", dict(SIZE=size)) for size in (64, 3)),
    ("choose/resolve/map_units", dict(THREADS=1024, CHOSEN=2048, SLOTS=4096, PAGE_UNITS=64, TURNS=0)),
    ("choose/resolve/map_units", dict(THREADS=1024, CHOSEN=4096, SLOTS=8192, PAGE_UNITS=64, TURNS=1)),
    *(("gemm/linear/packed_rows", dict(WARPS=8, AHEAD=ahead, TILES=tiles, KIND=kind, SCALE=scale, ZEROS=zeros,
                                       SMALL=small, GATE=gate, HALF=half))
      for half, kind, scale, zeros, small, tiles, ahead, gate in (
          (0, 0, 0, 0, 0, 1, 4, 0), (0, 0, 0, 0, 0, 2, 4, 0), (0, 1, 0, 0, 0, 1, 4, 0), (0, 1, 0, 0, 0, 2, 2, 0),
          (0, 1, 1, 16, 32, 1, 4, 0), (0, 2, 0, 0, 16, 1, 4, 0), (0, 2, 2, 0, 32, 1, 4, 0), (0, 3, 0, 0, 0, 2, 4, 0),
          (0, 0, 0, 0, 0, 1, 4, 1), (0, 1, 0, 0, 0, 1, 4, 1), (0, 2, 0, 0, 16, 1, 4, 5), (1, 1, 0, 0, 0, 2, 2, 0),
          (1, 1, 1, 16, 32, 1, 4, 0), (1, 2, 1, 0, 32, 1, 4, 0), (1, 2, 1, 0, 32, 1, 4, 3),
          (1, 2, 1, 0, 32, 1, 4, 5)))])
def test_kernel_in_cpp_compiles_for_hopper(name: str, defines: dict[str, int]) -> None:
    source = KERNELS / f"{name}.cu"
    assert stack_of(device.compiled(source, **defines)) == 0


def test_prompts_attend_in_gluon_where_nvrtc_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.kernels.attention import latent_attention
    hopper = replace(probe(), device="cuda", features=("sm_90",))
    monkeypatch.setattr(device, "version", lambda: "13.0")
    assert ", for prompts NVRTC 13.0," in latent_attention.OP.get("gluon").usable_on(hopper)

    def missing() -> str:
        raise Unusable("NVRTC is not installed")
    monkeypatch.setattr(device, "version", missing)
    assert "NVRTC" not in latent_attention.OP.get("gluon").usable_on(hopper)


def test_kernel_in_cpp_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    made, real = [], device._compiled

    def compiles(name: str, text: bytes, options: list[str]) -> bytes:
        made.append(name)
        return real(name, text, options)
    monkeypatch.setattr(device, "_compiled", compiles)
    source = tmp_path / "x.cu"
    source.write_text('extern "C" __global__ void x(int *p) { *p = TO; }')
    first = device.compiled(source, TO=1)
    assert device.compiled(source, TO=1) == first and len(made) == 1
    assert device.compiled(source, TO=2) != first and len(made) == 2
    source.write_text('extern "C" __global__ void x(int *p) { *p = TO + 2; }')
    assert device.compiled(source, TO=1) != first and len(made) == 3


def test_kernel_in_cpp_that_does_not_compile_says_why(tmp_path: Path) -> None:
    (tmp_path / "x.cu").write_text("__global__ void x() { nothing(); }")
    with pytest.raises(Unusable, match="nothing"):
        device.compiled(tmp_path / "x.cu")


INTERPRETED = ["latent draw attention ranks ends", "hosted experts mask states heads", "faults",
               "scaled layer linear gather chunks merge", "scan_blocks"]


def test_every_interpreted_part_is_run() -> None:
    source = Path(__file__).with_name("triton_interpreted.py").read_text()
    [parts] = [node.value for node in ast.parse(source).body
               if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PARTS"]
    assert isinstance(parts, ast.DictComp)
    listed = ast.unparse(parts.generators[0].iter).strip("()").split(", ")
    assert sorted(" ".join(INTERPRETED).split()) == sorted(listed)


@pytest.mark.parametrize("parts", INTERPRETED)
def test_kernels_interpreted_equal_the_references(parts: str) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("triton_interpreted.py")), *parts.split()],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(KERNELS.parents[1])},
        capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.startswith("checked "), done.stdout + done.stderr[-3000:]
