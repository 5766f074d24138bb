"""Qwen3-30B-A3B's configuration in block-scaled fp8, weights made on the device: one layer against its
dequantised twin, then captured decode.

    PYTHONPATH=src python bench/device/experts.py OUT [--layers 48]

The twin has bfloat16 weights, cuBLAS and an MLP for each expert, so it shares no kernel of the products. A
token that visits other experts, by a rounding, is not compared but counted. Then tokens a second at batch 1
and 32 beside the bytes that a step must read, and what a step calls, by the profiler of `steps.py`.
"""
from __future__ import annotations

import argparse
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from direct import Direct, hbm_bytes_s, spread, write
from steps import profiled, prompts_of, report
from torch import Tensor

from penstock.kernels.fused import layer
from penstock.kernels.gemm import experts, linear
from penstock.kernels.types.packed import Packed
from penstock.model import registry as families
from penstock.model.weights.formats.blocks import quantises
from penstock.model.weights.formats.reader import Format

QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    "hidden_act": "silu", "attention_bias": False,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
BLOCKS = Format("e4m3", 128, 128)
TOLERANCE = 2e-2


def models_of(config: dict[str, Any], backend: str, twin: bool) -> list[Any]:
    """In fp8, and with `twin` the same dequantised."""
    made = [families.build(config, dtype=torch.bfloat16, linear=partial(linear.pack, backend="cuda"),
                           ops=layer.OP.use("triton"), experts=None if is_twin else experts.OP.use(backend))
            for is_twin in (False, True)[:1 + twin]]
    for name, weight in families.dummy_tensors(config, 0, device="cuda",
                                               formats=lambda n: BLOCKS if quantises(n) else None):
        for i, model in enumerate(made):
            model.load(name, weight.floats() if i and isinstance(weight, Packed) else weight)
    for model in made:
        model.finish()
    return made


def causal(_: Any, q_TNH: Tensor, kv_TCKH: Tensor, chosen: Any = None, sinks_N: Any = None) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q_TNH, kv_TCKH[:, 0], kv_TCKH[:, 1]))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


@torch.inference_mode()
def one_layer(tokens: int, pair: list[Any]) -> dict[str, Any]:
    """What both halves of the layer add: the largest difference, in units of the twin's largest value."""
    x_TD = torch.randn(tokens, QWEN3_30B_A3B["hidden_size"], device="cuda").bfloat16()
    outs, chosen = [], []
    for model in pair:
        one, mlp = model._layers[0], model._layers[0].mlp
        route = mlp.route
        def seen(*args: Any, route: Any = route) -> Any:
            found = route(*args)
            chosen.append(found[0].sort(-1).values)
            return found
        mlp.route = seen
        cos, sin = model._rope.angles(torch.arange(tokens, device="cuda"), model.dtype)
        h_TD = x_TD.clone()
        normed_TD = one.ops.norm(h_TD, None, one.norm_in.value, one.eps)
        first_TD, _ = one.attention(normed_TD, None, cos, sin, causal)
        second_TD = mlp(one.ops.norm(h_TD, first_TD, one.norm_mlp.value, one.eps))
        outs.append((first_TD.float(), second_TD.float()))
        mlp.route = route
    same_T = (chosen[0] == chosen[1]).all(-1)
    row: dict[str, Any] = {"tokens": tokens, "same_experts": same_T.float().mean().item()}
    for name, a, b in zip(("attention", "experts"), *outs, strict=True):
        gap_T = (a - b).abs().amax(-1) / b.abs().max()
        row[name] = (gap_T if name == "attention" else gap_T[same_T]).max().item()
        assert a.isfinite().all() and row[name] <= TOLERANCE, row
    assert row["same_experts"] > 0.8, row
    return row


def bytes_of(config: dict[str, Any], rows: int, context: float) -> float:
    """What a decode step must read: projections and the head, experts that are hit where tokens choose at
    random, and KV."""
    hidden, layers, count = config["hidden_size"], config["num_hidden_layers"], config["num_experts"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    hit = count * (1 - (1 - config["num_experts_per_tok"] / count) ** rows)
    of_layer = hidden * (2 * heads + 2 * kv) * 128 + 3 * hidden * config["moe_intermediate_size"] * hit
    of_layer += 2 * hidden * count + rows * context * kv * 128 * 4
    return layers * of_layer + 2 * hidden * config["vocab_size"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--steps", type=int, default=20, help="of the profile")
    parser.add_argument("--experts", default="cuda", choices=["cuda", "triton"])
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    pair = models_of(QWEN3_30B_A3B | {"num_hidden_layers": 1}, args.experts, twin=True)
    for tokens in (1, 8, 32, 64, 300):
        rows.append(one_layer(tokens, pair))
        print(rows[-1], flush=True)
    del pair
    torch.cuda.empty_cache()
    config = QWEN3_30B_A3B | {"num_hidden_layers": args.layers}
    started = time.perf_counter()
    [model] = models_of(config, args.experts, twin=False)
    torch.cuda.synchronize()
    rows.append({"layers": args.layers, "weights_s": time.perf_counter() - started,
                 "weights_bytes": torch.cuda.memory_allocated()})
    longest = args.prompt + args.new + args.steps + 96
    engine = Direct(model, rows=32, max_len=longest, hbm_tokens=32 * (longest + 32), buckets=(1, 32))
    rows[-1]["capture_s"] = engine.capture_s
    rng = random.Random(0)
    engine.run([[rng.randrange(10, 150000) for _ in range(64)]], 4)
    for count in (1, 32):
        times = []
        for _ in range(3):
            prompts = [[rng.randrange(10, 150000) for _ in range(args.prompt)] for _ in range(count)]
            times.append(spread(engine.run(prompts, args.new).step_s[4:])["median"])
        step = spread(times)
        bound = bytes_of(config, count, args.prompt + args.new / 2) / hbm_bytes_s()
        events = profiled(engine, prompts_of(count, args.prompt), args.steps)
        rows.append({"requests": count, "decode_step_ms": {k: 1e3 * v for k, v in step.items()},
                     "decode_tokens_s": count / step["median"], "decode_bound_ms": 1e3 * bound,
                     "decode_share": bound / step["median"], **report(events, args.steps)})
        print(rows[-1], flush=True)
        write("experts", args.out, rows, shown=False)


if __name__ == "__main__":
    main()
