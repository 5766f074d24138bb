"""W2: decode and prefill of the Qwen3-8B shape with random weights, everything on the device. The first
prompts of each length are told apart: cuDNN builds plans for them.

    PYTHONPATH=src python bench/device/resident.py OUT [--layers 36] [--new 96]
"""
from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from direct import FLOPS_S, GREEDY, QWEN3_8B, Direct, build_model, hbm_bytes_s, spread

from penstock.config.request.params import SamplingParams

# (requests, prompt tokens): decode of the first three is in the table, and prefill from 8k on
WORK = ((1, 512), (8, 8192), (32, 8192), (1, 32768))


def bytes_of(config: dict[str, Any], rows: int, context: float) -> float:
    """What one decode step must read: weights but the embedding, and KV."""
    hidden, heads, kv = (config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    linear = hidden * (2 * heads + 2 * kv) * 128 + 3 * hidden * config["intermediate_size"]
    weights = config["num_hidden_layers"] * linear + hidden * config["vocab_size"]
    return 2 * weights + rows * context * config["num_hidden_layers"] * kv * 128 * 2 * 2


def flops_of(config: dict[str, Any], rows: int, tokens: int) -> float:
    """Of prefill: products, and causal attention."""
    hidden, heads, kv = (config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    linear = hidden * (2 * heads + 2 * kv) * 128 + 3 * hidden * config["intermediate_size"]
    layers = config["num_hidden_layers"]
    return rows * layers * (2.0 * linear * tokens + 2.0 * heads * 128 * tokens * tokens)


def main() -> None:
    from direct import write
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--new", type=int, default=96, help="tokens of each request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--most", type=int, default=32, help="requests at once")
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0: with top-k 50 and top-p 0.9")
    args = parser.parse_args()
    config = QWEN3_8B | {"num_hidden_layers": args.layers}
    params = GREEDY if not args.temperature else SamplingParams(
        temperature=args.temperature, top_k=50, top_p=0.9, seed=1, max_tokens=None)
    model = build_model(config)
    work = [w for w in WORK if w[0] <= args.most]
    longest = max(n for _, n in work) + args.new + 16
    engine = Direct(model, rows=max(b for b, _ in work), max_len=longest, step_tokens=args.max_num_batched_tokens,
                    hbm_tokens=max(b * (n + args.new + 32) for b, n in work), buckets=(1, 8, 32)[:len(work)])
    rng = random.Random(0)
    rows = []
    engine.run([[rng.randrange(10, 150000) for _ in range(600)]], 4)
    for count, tokens in work:
        decode, prefill, first = [], [], 0.0
        for again in range(1 + (args.repeats if count < 32 else 2)):
            prompts = [[rng.randrange(10, 150000) for _ in range(tokens)] for _ in range(count)]
            ran = engine.run(prompts, args.new, params=params)
            if not again:
                first = max(ran.first_s.values())
                continue
            decode.append(spread(ran.step_s[4:])["median"])
            prefill.append(max(ran.first_s.values()))
        context = tokens + args.new / 2
        bound = bytes_of(config, count, context) / hbm_bytes_s()
        flops = flops_of(config, count, tokens)
        row = {"requests": count, "prompt": tokens, "decode_step_ms": spread([1e3 * s for s in decode]),
               "decode_tokens_s": count / spread(decode)["median"], "decode_bound_ms": 1e3 * bound,
               "decode_share": bound / spread(decode)["median"], "prefill_first_s": first,
               "prefill_s": spread(prefill),
               "prefill_tflops": flops / spread(prefill)["median"] / 1e12,
               "prefill_share": flops / spread(prefill)["median"] / FLOPS_S}
        rows.append(row)
        print(row, flush=True)
    rows.append({"capture_s": engine.capture_s, "temperature": args.temperature})
    write("resident", args.out, rows)


if __name__ == "__main__":
    main()
