"""Decode through host memory: requests of 64k tokens on a device whose KV memory holds one of them.

    PYTHONPATH=src python bench/device/hosted.py OUT [--layers 36] [--bounds fp8_e4m3 --hot 8192]
    PYTHONPATH=src python bench/device/hosted.py OUT --kv fp8_e4m3 --hot 7168       # the bytes of 4,032 in bfloat16
    PYTHONPATH=src python bench/device/hosted.py OUT --layers 12 --oversubscribed 2

Two engines with the same weights take turns: one reads all of one request's KV, from device pages, the other
selects 2,048 tokens of each of eight requests, whose KV is in host pages. Memory, prompts and pages are those
of all layers of the model; with fewer --layers everything but the head is that share of it. With
--oversubscribed the device holds that part of all requests' KV and they are hosted as there is need, with hot
buffers of the default's sizes: counted is what they miss a token, without the other engine.
"""
from __future__ import annotations

import argparse
import functools
import random
import time
from pathlib import Path
from typing import Any

import torch
from direct import LINK_BYTES_S, QWEN3_8B, Direct, hbm_bytes_s, kernels_of, show_kernels, spread, write
from resident import bytes_of

from penstock.config.request.selection import Selection
from penstock.config.settings.tree import KVConfig
from penstock.exec.load.sizing import HOT_BUDGETS
from penstock.kernels.fused import layer
from penstock.kernels.gemm import linear
from penstock.kernels.types import fp8
from penstock.model import registry as families

LAYERS, DEVICE_BYTES = 36, 16e9
BLOCK, PROFILED = 24, 4         # steps of one engine before the other's turn; of a profile
CONFIG = QWEN3_8B | {"max_position_embeddings": 163840}


def build_model(config: dict[str, Any], noise: float) -> Any:
    """Random weights of variance one over their inputs, embeddings that share most of what they are: `noise`
    sets how much a token's own part weighs, and with it how much selections of consecutive steps differ."""
    model = families.build(config, dtype=torch.bfloat16, ops=layer.OP.use("triton"),
                           linear=functools.partial(linear.pack, backend="triton"))
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return torch.empty(shape, device="cuda").normal_(0, scale, generator=generator)
    for name, shape in families.tensor_shapes(config):
        if len(shape) == 1:
            tensor = torch.ones(shape, device="cuda")
        elif "embed_tokens" in name:
            tensor = normal(1, shape[1], scale=1 - noise) + normal(*shape, scale=noise)
        else:
            gain = 0.2 if "o_proj" in name or "down_proj" in name else 1.0
            tensor = normal(*shape, scale=gain / shape[1] ** 0.5)
        model.load(name, tensor.bfloat16())
    model.finish()
    return model


def counts(engine: Direct) -> dict[str, int]:
    """Units selected so far, by where they were, and copies of pages."""
    found: dict[str, int] = {}
    for name, value in engine.rank.stats().items():
        if name.startswith(("hot_", "selected_device", "moves_total")):
            key = name.partition("{")[0]
            found[key] = found.get(key, 0) + int(value)
    return found


def oversubscribed(args: argparse.Namespace, model: Any, max_len: int, rule: Selection) -> None:
    """Counted from the second block of steps in which each request that has room got a token."""
    least = args.budget + args.page_size
    hosted = Direct(model, rows=args.requests, max_len=max_len, selection=rule, hot_tokens=least,
                    hbm_tokens=int(args.requests * args.tokens / args.oversubscribed),
                    dram_tokens=args.requests * (max_len + 64), buckets=(args.requests,),
                    hot_most=HOT_BUDGETS * args.budget, hosted=args.always, page_size=args.page_size,
                    step_tokens=16384)
    rng, at, core = random.Random(0), list[dict[str, int]](), dict[str, float]()
    seen = 0

    def every_step() -> None:
        nonlocal seen, core
        seen += 1
        if seen % BLOCK == 0:                  # a look waits for the device
            at.append(counts(hosted))
            core = hosted.core.stats()
    ran = hosted.run([[rng.randrange(10, 150000) for _ in range(args.tokens)] for _ in range(args.requests)],
                     args.steps, every_step=every_step, of=args.running)
    running = args.running or args.requests
    step_s = ran.step_s[BLOCK:BLOCK * len(at)]
    told = {key: at[-1][key] - at[0].get(key, 0) for key in at[-1]}
    write(f"oversubscribed-{args.oversubscribed:g}", args.out, [{
        "layers": args.layers, "requests": args.requests, "running": running, "context": args.tokens,
        "budget": args.budget, "oversubscribed": args.oversubscribed,
        "hot_tokens": [least, HOT_BUDGETS * args.budget],
        "noise": args.noise, "always": args.always, "steps": len(step_s), "units": told,
        "missed_a_token": told["hot_misses_total"] / (running * BLOCK * (len(at) - 1)),
        "hit_rate": told["hot_hits_total"] / (told["hot_hits_total"] + told["hot_misses_total"]),
        "step_ms": spread([1e3 * s for s in step_s]), "tokens_s": running * len(step_s) / sum(step_s),
        "core": core, "prompts_s": max(ran.first_s.values()), "wall_s": ran.wall_s}])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--hot", type=int, default=4096)
    parser.add_argument("--kv", default="auto", help="--kv-cache-dtype of the engine that selects")
    parser.add_argument("--bounds", default="auto", help="--sparse-metadata-dtype")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--noise", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=144)
    parser.add_argument("--oversubscribed", type=float, help="all requests' tokens over the device's")
    parser.add_argument("--always", action="store_true", help="with it: all rows on the host, fit or not")
    parser.add_argument("--running", type=int, default=0, help="with it: requests that have room; 0: all")
    parser.add_argument("--profile", action="store_true", help="print what the last steps' kernels took")
    args = parser.parse_args()
    config = CONFIG | {"num_hidden_layers": args.layers}
    began = time.perf_counter()
    model = build_model(config, args.noise)
    torch.cuda.synchronize()
    print(f"model {time.perf_counter() - began:.1f} s", flush=True)
    vectors, dim = 2 * args.layers * config["num_key_value_heads"], config["head_dim"]      # k and v of a token
    token_bytes = vectors * (2 * dim if args.kv == "auto" else fp8.head_width(dim))
    device = DEVICE_BYTES * args.layers / LAYERS
    max_len = args.tokens + args.steps + 256
    rule = Selection(selector="bounds", version=1, unit=8, budget=args.budget, sinks=16, window=64)
    if args.oversubscribed:
        return oversubscribed(args, model, max_len, rule)
    dense = Direct(model, rows=1, max_len=max_len, hbm_tokens=args.tokens + args.steps + 512, buckets=(1,),
                   prefix_cache=True, page_size=args.page_size, step_tokens=16384)
    began = time.perf_counter()
    hosted = Direct(model, rows=args.requests, max_len=max_len, hbm_tokens=int(device / token_bytes),
                    dram_tokens=args.requests * (max_len + 64), buckets=(args.requests,), selection=rule,
                    hot_tokens=args.hot, hosted=True, page_size=args.page_size, step_tokens=16384,
                    kv=KVConfig(kv_cache_dtype=args.kv, sparse_metadata_dtype=args.bounds))
    print(f"engine {time.perf_counter() - began:.1f} s, pools {hosted.pools_s:.1f} s, "
          f"capture {hosted.capture_s:.1f} s", flush=True)
    rng = random.Random(0)

    def prompt() -> list[int]:
        return [rng.randrange(10, 150000) for _ in range(args.tokens)]
    one = prompt()
    began = time.perf_counter()
    dense.run([one], 2)
    print(f"dense prompt {time.perf_counter() - began:.1f} s", flush=True)
    steps: dict[str, list[float]] = {"dense": [], "hosted": []}
    at: list[dict[str, int]] = []
    seen = 0

    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    late = (args.steps // BLOCK - 2) * BLOCK + 4            # pages of the prompts are down by then

    def every_step() -> None:
        nonlocal seen
        seen += 1
        if args.profile and seen in (late, late + PROFILED):
            torch.cuda.synchronize()
            (profiler.start if seen == late else profiler.stop)()
        if seen % BLOCK == 0:
            steps["dense"] += dense.run([one], BLOCK).step_s[4:]
            at.append(counts(hosted))
    began = time.perf_counter()
    ran = hosted.run([prompt() for _ in range(args.requests)], args.steps, every_step=every_step)
    print(f"hosted prompts {max(ran.first_s.values()):.1f} s", flush=True)
    # The steps around the other engine's turn, and the first ones, are not counted.
    steps["hosted"] = [s for i, s in enumerate(ran.step_s, 2) if i > BLOCK and 3 < i % BLOCK < BLOCK]
    if args.profile:
        show_kernels(kernels_of(profiler, PROFILED), 24)
    told = {key: at[-1][key] - at[0].get(key, 0) for key in at[-1]}
    hit = told["hot_hits_total"] / (told["hot_hits_total"] + told["hot_misses_total"])
    weights = bytes_of(config, 0, 0)
    context = args.tokens + args.steps / 2
    chosen = args.requests * args.budget * token_bytes
    bounds = vectors * dim * (2 if args.bounds == "auto" else 1) / 8    # of a token, scales not counted
    memory = (weights + args.requests * context * bounds + chosen) / hbm_bytes_s()
    link = chosen * (1 - hit) / LINK_BYTES_S
    alone = bytes_of(config, 1, context) / hbm_bytes_s()
    took = {name: spread([1e3 * s for s in values]) for name, values in steps.items()}
    third = len(steps["hosted"]) // 3           # in the first of them pages of the last prompts are on their way down
    took |= {f"hosted_{name}": spread([1e3 * s for s in steps["hosted"][at]])
             for name, at in (("first_third", slice(third)), ("last_third", slice(-third, None)))}
    bound = max(memory, link)
    write("hosted", args.out, [{
        "layers": args.layers, "requests": args.requests, "context": args.tokens, "budget": args.budget,
        "unit": 8, "hot_tokens": args.hot, "kv": args.kv, "bounds": args.bounds, "page_size": args.page_size,
        "noise": args.noise, "device_kv_bytes": device,
        "host_bytes": args.requests * (max_len + 64) * token_bytes,
        "steps": len(steps["hosted"]), "tokens_s": 1e3 * args.requests / took["hosted"]["median"],
        "hit_rate": hit, "units": told, "step_ms": took,
        "bound_memory_ms": 1e3 * memory, "bound_link_ms": 1e3 * link, "share_of_bound":
            1e3 * bound / took["hosted"]["median"],
        "dense_bound_ms": 1e3 * alone, "dense_share_of_bound": 1e3 * alone / took["dense"]["median"],
        "tokens_s_over_dense": args.requests * took["dense"]["median"] / took["hosted"]["median"],
        "bound_over_dense_bound": args.requests * alone / bound,
        "prompts_s": max(ran.first_s.values()), "pinning_s": hosted.pools_s, "capture_s": hosted.capture_s}])


if __name__ == "__main__":
    main()
