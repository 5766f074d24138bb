"""W1 and W1b: decode of a model of latent rows that chooses 2,048 tokens itself, on the device and hosted.

    PYTHONPATH=src python bench/device/latent.py OUT [--cells resident,hosted,tight] [--work W1] [--profile]

Six layers of DeepSeek-V3.2's shape with 64 heads and a hidden size of 4,096, made here by a formula; random
prompts of 32,768 tokens. W1b is W1 whose consecutive choices overlap as a trained model's do. Cells: all KV
on the device; always hosted, with hot buffers of 4,096 tokens; the last with 4.0 GB for KV on the device.
"""
from __future__ import annotations

import argparse
import functools
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from direct import HBM_BYTES_S, LINK_BYTES_S, Direct, spread, write
from hosted import counts

from penstock.kernels.fused import layer
from penstock.kernels.gemm import linear
from penstock.model import registry as families

LAYERS, HIDDEN, HEADS, INNER, TOPK = 6, 4096, 64, 8192, 2048
CONFIG = {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "hidden_size": HIDDEN,
    "attention_bias": False, "first_k_dense_replace": LAYERS, "hidden_act": "silu", "index_head_dim": 128,
    "index_n_heads": 64, "index_topk": TOPK, "intermediate_size": INNER, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": HEADS, "num_experts_per_tok": 8,
    "num_hidden_layers": LAYERS, "num_key_value_heads": HEADS, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
    "v_head_dim": 128, "vocab_size": 32000,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
}
# A token's own part of its embedding, the rotated part of index queries.
WORK = {"W1": (0.3, 1.0), "W1b": (0.1, 0.0)}
ROW, KEY = 576 * 2, 128 * 2                         # bytes a token and layer
# Batches of a cell, KV memory of the device in bytes (None: all of it), hot tokens.
CELLS: dict[str, tuple[tuple[int, ...], float | None, int]] = {
    "resident": ((1, 8, 64), None, 0), "hosted": ((1, 8, 16), None, 4096), "tight": ((64,), 4.0e9, 4096)}


def drawn(shapes: Iterable[str]) -> list[str]:
    """Names in the order in which W1 has always been drawn: what is chosen, and so what hits, hangs on it."""
    parts = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
    names = []
    for name in shapes:
        if ".indexer." not in name:
            names.append(name)
        if name.endswith("o_proj.weight"):
            names += [name.replace("o_proj.weight", f"indexer.{part}") for part in parts]
    return names


def build_model(noise: float, index_rope: float) -> Any:
    """Weights of variance one over their inputs; embeddings of which all tokens share most."""
    model = families.build(CONFIG, dtype=torch.bfloat16, ops=layer.OP.use("triton"),
                           linear=functools.partial(linear.pack, backend="cuda"))
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return torch.empty(shape, device="cuda").normal_(0, scale, generator=generator)
    shapes = dict(families.tensor_shapes(CONFIG))
    for name in drawn(shapes):
        shape = shapes[name]
        if len(shape) == 1:
            tensor = torch.full(shape, float("bias" not in name), device="cuda")
        elif "embed_tokens" in name:
            tensor = normal(1, shape[1], scale=1 - noise) + normal(*shape, scale=noise)
        else:
            gain = 0.2 if "o_proj" in name or "down_proj" in name else 1.0
            tensor = normal(*shape, scale=gain / shape[1] ** 0.5)
            if "indexer.wq_b" in name:
                tensor.view(64, 128, -1)[:, :64] *= index_rope
        model.load(name, tensor.bfloat16())
    model.finish()
    return model


def weights_bytes() -> int:
    """What a decode step reads of them."""
    return 2 * sum(a * b for name, (a, b) in (
        (name, shape) for name, shape in families.tensor_shapes(CONFIG) if len(shape) == 2)
        if "embed" not in name)


def measure(model: Any, cell: str, work: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    batches, device, hot = CELLS[cell]
    batches = tuple(b for b in batches if b <= args.most)
    if not batches:
        return []
    # Whoever is first decodes beside the prompts of the others: as many tokens more.
    rows, chunks = batches[-1], -(-args.tokens // args.step_tokens) + 1
    max_len = args.tokens + args.steps + rows * chunks + 128
    token = LAYERS * ROW
    every = rows * (max_len + 64)
    fits = int(1.4 * every * (token + LAYERS * KEY) / token) + 4096
    hbm = (int(device / token) if device else fits if not hot else
           int((rows * (hot + 64) * token + every * LAYERS * KEY) / token) + 8192)
    engine = Direct(model, rows=rows, max_len=max_len, hbm_tokens=hbm, dram_tokens=every if hot else 0,
                    buckets=batches, hot_tokens=hot, hosted=bool(hot) and device is None, page_size=64,
                    step_tokens=args.step_tokens, prefix_cache=True)
    rng = random.Random(0)
    prompts = [[rng.randrange(10, 31000) for _ in range(args.tokens)] for _ in range(rows)]
    alone = [engine.run([[rng.randrange(10, 31000) for _ in range(args.tokens)]], 2).first_s.popitem()[1]
             for _ in range(args.prompts + 1)][1:]
    if args.profile and args.prompts:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as of_prompt:
            engine.run([[rng.randrange(10, 31000) for _ in range(args.tokens)]], 1)
        print(cell, "prompt", of_prompt.key_averages().table(
            sort_by="cuda_time_total", row_limit=20, max_name_column_width=50), flush=True)
    out = []
    for batch in batches:
        before, began = counts(engine), time.perf_counter()
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        seen = 0

        def every_step() -> None:
            nonlocal seen
            seen += 1
            if args.profile and seen in (24, 32):
                torch.cuda.synchronize()
                (profiler.start if seen == 24 else profiler.stop)()  # noqa: B023
        ran = engine.run(prompts[:batch], args.steps + batch * chunks, every_step=every_step)
        wall = time.perf_counter() - began
        if args.profile and seen >= 32:
            print(cell, batch, profiler.key_averages().table(
                sort_by="cuda_time_total", row_limit=28, max_name_column_width=50), flush=True)
        told = {key: value - before.get(key, 0) for key, value in counts(engine).items()}
        looked = told.get("hot_hits_total", 0) + told.get("hot_misses_total", 0)
        hit = told.get("hot_hits_total", 0) / looked if looked else 1.0
        steps = [1e3 * s for s in ran.step_s[40:]] or [float("nan")]
        took = spread(steps)
        memory = (weights_bytes() + batch * LAYERS * (KEY * (args.tokens + args.steps / 2) + ROW * TOPK)
                  ) / HBM_BYTES_S
        link = batch * LAYERS * ROW * TOPK * (1 - hit) / LINK_BYTES_S
        out.append({
            "work": work, "cell": cell, "batch": batch, "context": args.tokens, "hot_tokens": hot,
            "device_kv_bytes": device, "step_ms": took, "tokens_s": 1e3 * batch / took["median"],
            "hit_rate": hit, "units": told, "bound_memory_ms": 1e3 * memory, "bound_link_ms": 1e3 * link,
            "share_of_larger_bound": 1e3 * max(memory, link) / took["median"],
            "share_of_both_in_turn": 1e3 * (memory + link) / took["median"],
            "prompt_tokens_s": [args.tokens / s for s in alone],
            "first_s": spread(list(ran.first_s.values())), "wall_s": wall, "capture_s": engine.capture_s,
            "pools_s": engine.pools_s, "steps": len(steps)})
        print(work, cell, batch, f"{out[-1]['tokens_s']:.0f} tokens/s, step {took['median']:.3f} ms, hit "
              f"{hit:.3f}, first {out[-1]['first_s']['largest']:.2f} s, wall {wall:.1f}, prompts alone "
              f"{[round(n) for n in out[-1]['prompt_tokens_s']]} tokens/s", flush=True)
    del engine
    torch.cuda.empty_cache()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--work", default=",".join(WORK))
    parser.add_argument("--most", type=int, default=64, help="of requests at once")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=192)
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=2, help="that are timed alone")
    parser.add_argument("--profile", action="store_true", help="print what some steps' kernels took")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for work in args.work.split(","):
        model = build_model(*WORK[work])
        for cell in args.cells.split(","):
            rows += measure(model, cell, work, args)
        del model
        torch.cuda.empty_cache()
    write("latent", args.out, rows)


if __name__ == "__main__":
    main()
