"""W1 and W1b: decode of a model of MLA KV entries that chooses 2,048 tokens itself, on the device and hosted.

    PYTHONPATH=src python bench/device/latent.py OUT [--cells W1:resident:1,8 W1:hosted W1b:hosted:1,8]

Six layers of DeepSeek-V3.2's shape with 64 heads and a hidden size of 4,096, made here by a formula; random
prompts of 32,768 tokens. W1b is W1 whose consecutive choices overlap as a trained model's do. Cells: all KV
on the device; always hosted, with hot buffers of 4,096 tokens, or grown to 8,192, the tight ones with 4.0 GB
for KV on the device. A cell's formats are of rows and of indexer keys. The file is written anew after each row,
so that a run that is cut off tells what it had. `kernels`: by torch's profiler over some steps, by name:
launches a step, and us a step from the end of the kernel in front to its own, since kernels begin early.
"""
from __future__ import annotations

import argparse
import functools
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from direct import LINK_BYTES_S, Direct, hbm_bytes_s, kernels_of, show_kernels, spread, write
from hosted import counts

from penstock.config.settings.tree import KVConfig
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
PROFILED = 8                                        # steps
SPREAD = 8              # tokens more of each request, that the last comes before the first ends
# A token's own part of its embedding, the rotated part of index queries.
WORK = {"W1": (0.3, 1.0), "W1b": (0.1, 0.0)}
# Bytes of a token and layer, by format.
ROWS, KEYS = {"auto": 576 * 2, "fp8_e4m3": 656}, {"auto": 128 * 2, "fp8_e4m3": 132}


@dataclass(frozen=True, slots=True)
class Cell:
    """batches: requests at once; device: bytes for KV there, None: as many as it takes; hot: tokens."""

    batches: tuple[int, ...]
    device: float | None = None
    hot: int = 0
    rows: str = "auto"
    keys: str = "auto"


CELLS = {"resident": Cell((1, 8, 64)), "keys": Cell((64,), keys="fp8_e4m3"),
         "hosted": Cell((1, 8, 16), hot=4096),
         "grown": Cell((8, 16), hot=8192),               # what the default's hot buffers grow to
         "hosted-keys": Cell((1, 8, 16), hot=4096, keys="fp8_e4m3"),
         "hosted-fp8": Cell((1, 8, 16), hot=4096, rows="fp8_e4m3", keys="fp8_e4m3"),
         "tight": Cell((64,), 4.0e9, 4096, keys="fp8_e4m3"),
         "tight-fp8": Cell((64,), 4.0e9, 4096, "fp8_e4m3", "fp8_e4m3")}


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
                           linear=functools.partial(linear.pack, backend="triton"))
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


def by_layer(engine: Direct) -> dict[str, list[int]]:
    """Hits and misses so far, of each layer."""
    stats = engine.rank.stats()
    return {name: [int(stats.get(f'hot_{name}_total{{layer="{i}"}}', 0)) for i in range(LAYERS)]
            for name in ("hits", "misses")}


def launches(kernels: dict[str, dict[str, float]]) -> int:
    """Of a layer, in which no kernel is torch's own."""
    return sum(int(of["a_step"] + 0.01) // LAYERS for name, of in kernels.items() if "at::native" not in name)


def measure(model: Any, work: str, name: str, batches: tuple[int, ...], args: argparse.Namespace,
            out: list[dict[str, Any]]) -> None:
    cell = CELLS[name]
    row_bytes, key_bytes = ROWS[cell.rows], KEYS[cell.keys]
    rows = batches[-1]
    max_len = args.tokens + args.steps + SPREAD * rows + 128
    token = LAYERS * row_bytes
    every = rows * (max_len + 64)
    held = every * (row_bytes + key_bytes) / row_bytes
    fits = int(1.4 * held) + 4096
    hbm = (int(cell.device / token) if cell.device else fits if not cell.hot else
           int((rows * (cell.hot + 2048) * token + every * LAYERS * key_bytes) / token) + 32768)
    # The host has room for keys too: a prompt is not computed twice.
    engine = Direct(model, rows=rows, max_len=max_len, hbm_tokens=hbm, buckets=batches,
                    dram_tokens=int(1.1 * held) + 4096 if cell.hot else 0, hot_tokens=cell.hot,
                    hosted=bool(cell.hot), page_size=64, step_tokens=args.max_num_batched_tokens, prefix_cache=True,
                    kv=KVConfig(kv_cache_dtype=cell.rows, sparse_metadata_dtype=cell.keys))
    rng = random.Random(0)
    prompts = [[rng.randrange(10, 31000) for _ in range(args.tokens)] for _ in range(rows)]
    # All are known before any decodes, so that rows begin together.
    began = time.perf_counter()
    first_s = [engine.run([prompt], 1).first_s.popitem()[1] for prompt in prompts]
    print(f"{work} {name}: {rows} prompts in {time.perf_counter() - began:.1f} s", flush=True)
    for batch in batches:
        before, layers, began = counts(engine), by_layer(engine), time.perf_counter()
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        seen, profiled = 0, args.steps - 16

        def every_step() -> None:
            nonlocal seen
            seen += 1
            if seen in (profiled, profiled + PROFILED):  # noqa: B023
                torch.cuda.synchronize()
                (profiler.start if seen == profiled else profiler.stop)()  # noqa: B023
        ran = engine.run(prompts[:batch], args.steps + SPREAD * batch, every_step=every_step)
        wall = time.perf_counter() - began
        kernels = kernels_of(profiler, PROFILED) if seen >= profiled + PROFILED else {}
        told = {key: value - before.get(key, 0) for key, value in counts(engine).items()}
        hits, misses = ([a - b for a, b in zip(by_layer(engine)[of], layers[of], strict=True)]
                        for of in ("hits", "misses"))
        looked = sum(hits) + sum(misses)
        hit = sum(hits) / looked if looked else 1.0
        # The first steps find their hot buffers empty, and those around the profile are slow.
        steps = [1e3 * s for s in ran.step_s[16:profiled - 2]] or [float("nan")]
        took = spread(steps)
        memory = (weights_bytes() + batch * LAYERS * (
            key_bytes * (args.tokens + args.steps / 2) + row_bytes * TOPK)) / hbm_bytes_s()
        link = batch * LAYERS * row_bytes * TOPK * (1 - hit) / LINK_BYTES_S
        out.append({
            "work": work, "cell": name, "batch": batch, "context": args.tokens,
            "hot_tokens": cell.hot, "rows": cell.rows, "keys": cell.keys, "device_kv_bytes": cell.device,
            "step_ms": took, "tokens_s": 1e3 * batch / took["median"], "hit_rate": hit,
            "hit_rate_by_layer": [round(a / max(1, a + b), 4) for a, b in zip(hits, misses, strict=True)],
            "units": told, "bound_memory_ms": 1e3 * memory, "bound_link_ms": 1e3 * link,
            "share_of_larger_bound": 1e3 * max(memory, link) / took["median"],
            "share_of_both_in_turn": 1e3 * (memory + link) / took["median"],
            "launches_a_layer": launches(kernels),
            "kernels": kernels, "prompt_tokens_s": args.tokens / median(first_s[len(first_s) > 1:]),
            "first_s": spread(first_s), "wall_s": wall, "capture_s": engine.capture_s,
            "pools_s": engine.pools_s, "steps": len(steps)})
        write("latent", args.out, out, shown=False)
        row = out[-1]
        print(f"{work} {name} {batch}: {row['tokens_s']:.0f} tokens/s, step {took['median']:.3f} ms "
              f"({took['least']:.3f} to {took['largest']:.3f}, {len(steps)}), floors {1e3 * memory:.3f} and "
              f"{1e3 * link:.3f}, hits {hit:.3f} {row['hit_rate_by_layer']}, {row['launches_a_layer']} "
              f"launches a layer, wall {wall:.1f} s, capture {engine.capture_s:.1f}, prompts one by one "
              f"{row['prompt_tokens_s']:.0f} tokens/s", flush=True)
        show_kernels(kernels, args.kernels)
    del engine
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--cells", nargs="+", default=[f"{work}:{cell}" for work in WORK for cell in CELLS],
                        metavar="WORK:CELL[:BATCH,...]")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--kernels", type=int, default=24, help="that are printed")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    models: dict[str, Any] = {}
    for text in args.cells:
        work, cell, *of = text.split(":")
        if work not in models:
            models.clear()
            models[work] = build_model(*WORK[work])
        measure(models[work], work, cell, tuple(map(int, of[0].split(","))) if of else CELLS[cell].batches,
                args, rows)


if __name__ == "__main__":
    main()
