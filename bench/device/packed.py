"""Linears with packed weights: time of each kind beside cuBLAS in bfloat16, and the share of what the bytes that must
be read allow.

    PYTHONPATH=src python bench/device/packed.py OUT [--kinds int4-g128 nvfp4] [--rows 1 64] [--sweep] [--experts]

Each result is first compared with the product of what the weight means. A time is that of one call in a CUDA graph of
many, over copies of the weight that a cache does not hold. `--sweep` tries tiles of the kernel in Triton.
"""
from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from direct import hbm_bytes_s, write
from torch import Tensor

from penstock.kernels.gemm import linear
from penstock.kernels.gemm.experts import OP as EXPERTS
from penstock.kernels.gemm.linear import triton_packed
from penstock.kernels.gemm.linear.triton_rows import TileShape
from penstock.kernels.platform import KernelError, probe
from penstock.kernels.types.packed import Kind, Packed, joined, quantised

SHAPES = {"square": (8192, 8192), "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096),
          "down": (4096, 12288)}
ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
# kind, rows and columns of a block (0: all), offsets
KINDS: dict[str, tuple[Kind, int, int, bool]] = {
    "int4-g128": ("u4", 1, 128, False), "int4-g128-zero": ("u4", 1, 128, True), "int4-g32": ("u4", 1, 32, False),
    "int4-g32-zero": ("u4", 1, 32, True), "int4-channel": ("u4", 1, 0, False), "nvfp4": ("e2m1", 1, 16, False),
    "mxfp4": ("e2m1", 1, 32, False), "int8-channel": ("u8", 1, 0, False), "fp8-blocks": ("e4m3", 128, 128, False),
    "fp8-channel": ("e4m3", 1, 0, False), "fp8-tensor": ("e4m3", 0, 0, False), "mxfp8": ("e4m3", 1, 32, False)}
COPIES_BYTES, COPIES_MAX, CALLS = 256 << 20, 32, 64
TOLERANCE = 2e-2
CUTS = [TileShape(*cut) for cut in (
    (32, 128, 4, 4), (64, 64, 4, 5), (64, 128, 4, 4), (64, 128, 4, 3), (64, 256, 4, 3))]
TILES = [TileShape(*cut) for cut in ((64, 64, 4, 3), (64, 128, 4, 3), (64, 128, 8, 3), (128, 64, 8, 3), (128, 64, 4, 4),
                                     (128, 128, 8, 3), (128, 32, 8, 4))]


def weight_of(kind: str, outputs: int, inputs: int) -> Packed:
    """Normal weights as a checkpoint of this kind has them."""
    form, rows, cols, zeros = KINDS[kind]
    made = quantised(torch.randn(outputs, inputs, device="cuda") * inputs ** -0.5, rows or outputs, cols or inputs,
                     form)
    scale_RJ = made.scale_RJ
    if kind == "mxfp4":
        scale_RJ = scale_RJ.log2().ceil().exp2()
    elif form in ("u4", "e2m1"):
        scale_RJ = scale_RJ.half().float() if kind != "nvfp4" else scale_RJ
    offset = (torch.randint(6, 10, scale_RJ.shape, device="cuda").short() if zeros else None)
    return Packed(made.code_OI, scale_RJ, made.rows, made.cols, offset, made.four).compact()


def copied(weight: Packed) -> list[Packed]:
    num = min(COPIES_MAX, max(2, math.ceil(COPIES_BYTES / weight.num_bytes)))
    return [weight, *(Packed(weight.code_OI.clone(), weight.scale_RJ.clone(), weight.rows, weight.cols,
                             None if weight.offset_RJ is None else weight.offset_RJ.clone(), weight.four)
                      for _ in range(num - 1))]


def seconds(calls: Sequence[Callable[[], object]], least_s: float = 0.02) -> float:
    """Of one call, in a graph of all of them by turns."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph, turns = torch.cuda.CUDAGraph(), max(CALLS, len(calls))
    with torch.cuda.graph(graph):
        for i in range(turns):
            calls[i % len(calls)]()
    graph.replay()
    torch.cuda.synchronize()
    best, spent = math.inf, 0.0
    while spent < least_s:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        took = start.elapsed_time(end) / 1e3
        best, spent = min(best, took / turns), spent + took
    return best


def gap(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).abs().max() / want.float().abs().max())


def ways(weights: list[Packed], x: Tensor, backends: list[str]) -> dict[str, list[Callable[[], Tensor]]]:
    found: dict[str, list[Callable[[], Tensor]]] = {}
    for name in backends:
        found[name] = [partial(linear.pack(weight, None, backend=name), x) for weight in weights]
    if len(x) > 16:
        found["tile"] = [partial(triton_packed.run, x, weight, None) for weight in weights]
        found["dequantised"] = [partial(triton_packed.many, x, weight, None) for weight in weights]
    return found


def dense(args: argparse.Namespace, speed: float) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    floats_s: dict[tuple[str, int], float] = {}
    platform = probe("cuda")
    for shape in args.shapes:
        outputs, inputs = SHAPES[shape]
        plain = [torch.randn(outputs, inputs, device="cuda").bfloat16() for _ in range(3)]
        for rows in args.rows:
            x = torch.randn(rows, inputs, device="cuda").bfloat16()
            floats_s[shape, rows] = seconds([partial(F.linear, x, weight) for weight in plain])
        del plain
        for kind in args.kinds:
            weights = copied(weight_of(kind, outputs, inputs))
            means = weights[0].floats().bfloat16()
            for rows in args.rows:
                x = torch.randn(rows, inputs, device="cuda").bfloat16()
                names = [name for name in ("cuda", "fp8") if name in linear.OP.names
                         and weights[0].kind in linear.kinds(platform, name)]
                tried = ways(weights, x, names)
                if args.sweep and shape == "square":
                    for cut, split in product(CUTS if rows <= 64 else TILES, (1, 2, 4, 8) if rows <= 64 else (1,)):
                        tried[f"{cut.rows} {cut.cols} {cut.warps} {cut.stages} / {split}"] = [
                            partial(triton_packed.run, x, weight, None, cut, split) for weight in weights]
                want = F.linear(x, means)
                need = weights[0].num_bytes + 2 * (x.numel() + rows * outputs)
                for name, calls in tried.items():
                    try:
                        off = gap(calls[0](), want)
                        took = seconds(calls)
                    except (KernelError, RuntimeError) as why:         # a tile that does not fit
                        print(f"{shape} {kind} {rows} {name}: {str(why).splitlines()[0][:100]}", flush=True)
                        continue
                    line = {"shape": shape, "kind": kind, "rows": rows, "way": name, "us": took * 1e6, "gap": off,
                            "bytes_share": need / speed / took, "bf16_us": floats_s[shape, rows] * 1e6,
                            "tflops": 2 * rows * outputs * inputs / took / 1e12}
                    lines.append(line)
                    print(f"{shape:8} {kind:15} {rows:5} {name:12} {took * 1e6:9.1f} us, {line['bytes_share']:.2f} of"
                          f" the byte bound, bf16 {line['bf16_us']:.1f} us, gap {off:.1e}", flush=True)
                    bar = 6e-2 if name == "fp8" else TOLERANCE
                    assert off <= bar, f"{shape} {kind} {rows} {name}: differs by {off:.2g}"
            del weights, means
    return lines


def moe(args: argparse.Namespace, speed: float) -> list[dict[str, Any]]:
    """A layer of Qwen3-30B-A3B's experts: 128, of which a token visits 8, 2,048 x 768."""
    dim, width, count, chosen = 2048, 768, 128, 8
    lines, backends = [], {name: EXPERTS.use(name) for name in ("cuda", "triton")}
    for kind in args.kinds:
        if kind not in ("int4-g128", "int4-g32", "nvfp4", "mxfp4", "fp8-blocks", "fp8-channel", "int8-channel"):
            continue
        gate_up, down = (joined([weight_of(kind, *shape) for _ in range(count)])
                         for shape in ((2 * width, dim), (dim, width)))
        plain = [part.floats().bfloat16() for part in (gate_up, down)]
        for tokens in args.visits:
            x = torch.randn(tokens, dim, device="cuda").bfloat16()
            expert = torch.rand(tokens, count, device="cuda").topk(chosen).indices
            weigh = torch.rand(tokens, chosen, device="cuda")
            floats = partial(backends["triton"].mlp, x, expert, weigh, *plain)
            plain_s = seconds([floats])
            hit = len(expert.unique()) / count * (gate_up.num_bytes + down.num_bytes)
            for way, ops in backends.items():
                packed = partial(ops.mlp, x, expert, weigh, gate_up, down)
                off = gap(packed(), floats())
                assert off <= TOLERANCE, f"experts {kind} {tokens}: differs by {off:.2g}"
                took = seconds([packed])
                line = {"experts": kind, "tokens": tokens, "way": way, "us": took * 1e6, "bf16_us": plain_s * 1e6,
                        "bytes_share": hit / speed / took, "gap": off}
                lines.append(line)
                print(f"experts {kind:12} {tokens:5} {way:7} {took * 1e6:9.1f} us, {line['bytes_share']:.2f} of the "
                      f"byte bound, bf16 {plain_s * 1e6:.1f} us, gap {off:.1e}", flush=True)
    return lines


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--sweep", action="store_true", help="tiles of the kernel in Triton")
    parser.add_argument("--experts", action="store_true", help="experts alone")
    parser.add_argument("--visits", nargs="*", type=int, default=[1, 8, 32, 64, 512, 2048, 8192],
                        help="tokens of experts")
    args = parser.parse_args()
    torch.manual_seed(0)
    began, speed = time.perf_counter(), hbm_bytes_s()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {speed / 1e12:.2f} TB/s", flush=True)
    lines = moe(args, speed) if args.experts else dense(args, speed)
    print(f"{time.perf_counter() - began:.0f} s")
    write("experts-packed" if args.experts else "packed", args.out, lines, shown=False)


if __name__ == "__main__":
    main()
