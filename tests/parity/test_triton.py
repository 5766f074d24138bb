"""Own Triton kernels without a GPU: compiled for Hopper, and interpreted on small inputs.

The interpreter has no bfloat16 products, so it runs float32 and float16; the device runs the cases.
"""
from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")
KERNELS = Path(__file__).parents[2] / "src" / "penstock" / "kernels"
BF16, F32, I32 = "*bf16", "*fp32", "*i32"
STRIDES = {"q_row": "i32", "q_head": "i32", "kv_page": "i64", "kv_head": "i32", "kv_token": "i32",
           "table_row": "i32"}
PAGED = {"DIM": 128, "DIM_PAD": 128, "PAGE": 16}

# (module, kernel): (types of arguments, constants, warps, stages); one or more ways to compile each
COMPILED: dict[tuple[str, str], list[tuple[dict[str, str], dict[str, object], int, int]]] = {
    ("paged_attention.triton_decode", "attend_parts"): [
        (dict(q=BF16, k=BF16, v=BF16, table=I32, row=I32, context=I32, out=BF16, part=F32, peak=F32,
              scale="fp32", **STRIDES),
         dict(GROUP=4, GROUP_PAD=16, BLOCK=64, PARTS=4, EXACT=False, **PAGED), 4, 5)],
    ("paged_attention.triton_decode", "join_parts"): [
        (dict(part=F32, peak=F32, out=BF16), dict(DIM=80, DIM_PAD=128, PARTS=3, PARTS_PAD=4), 1, 3)],
    ("paged_attention.triton_decode", "store_rows"): [
        (dict(k_new=BF16, v_new=BF16, k=BF16, v=BF16, table=I32, row_T=I32, position_T=I32,
              new_token="i32", new_head="i32", kv_page="i64", kv_head="i32", kv_token="i32",
              table_row="i32"),
         dict(HEADS=8, HEADS_PAD=8, **PAGED), 4, 3)],
    ("paged_attention.triton_decode", "merge_parts"): [
        (dict(a=BF16, a_log=F32, b=BF16, b_log=F32, out=BF16, tokens="i32", heads="i32", b_token="i32",
              b_head="i32", a_token="i32", a_head="i32"), dict(DIM=128, DIM_PAD=128), 1, 3)],
    ("gather.triton_copy", "copy_units"): [
        (dict(host=BF16, pool=BF16, miss=I32, num=I32, entries="i32", h_page="i32", h_head="i32",
              h_plane="i32", p_page="i32", p_head="i32", p_plane="i32", WORDS="i32"),
         dict(WORD="int64", HOST_UNITS=2, POOL_UNITS=2, PLANES=2, WORDS_PAD=256, LINES=8), 4, 3)],
    ("layer.triton_ops", "add_norm"): [
        (dict(h=BF16, delta=BF16, weight=BF16, out=BF16, eps="fp32"),
         dict(DIM=4096, DIM_PAD=4096, ADD=True), 8, 3)],
    ("layer.triton_ops", "norm_rotate"): [
        (dict(x=BF16, cos=BF16, sin=BF16, q_weight=BF16, k_weight=BF16, eps="fp32", x_token="i32",
              x_head="i32", M="i32", N="i32"),
         dict(DIM=128, HALF=64, HALF_PAD=64, HEADS=4, NORM=norm), 1, 3) for norm in (True, False)],
    ("layer.triton_ops", "silu_gate"): [
        (dict(x=BF16, out=BF16, x_token="i32", WIDTH="i32"), dict(BLOCK=1024), 4, 3)],
    ("linear.triton_rows", "one_row"): [
        (dict(x=BF16, weight=BF16, bias=BF16, out=BF16, OUTPUTS="i32"),
         dict(INPUTS=4096, ROWS=8, COLS=512, STAGES=3, BIAS=False), 4, 3)],
    ("linear.triton_rows", "few_rows"): [
        (dict(x=BF16, weight=BF16, bias=BF16, out=BF16, T="i32", OUTPUTS="i32", x_row="i32"),
         dict(INPUTS=4096, T_PAD=16, ROWS=64, COLS=128, BIAS=True), 4, 5)],
}


def test_every_kernel_is_in_the_list() -> None:
    found = set()
    for path in KERNELS.rglob("triton_*.py"):
        module = ".".join(path.relative_to(KERNELS).with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and any(
                    isinstance(d, ast.Attribute) and d.attr == "jit" for d in node.decorator_list):
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
        signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
        built = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=constants),
                               target=GPUTarget("cuda", 90, 32),
                               options={"num_warps": warps, "num_stages": stages})
        assert ".target sm_90a" in built.asm["ptx"] and len(built.asm["cubin"]) > 1000


def test_kernels_interpreted_equal_the_references() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("triton_interpreted.py"))],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(KERNELS.parents[1])},
        capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith("checked "), done.stdout + done.stderr[-3000:]
