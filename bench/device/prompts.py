"""Where the time of a long prompt goes: layers of W1's shape, one prompt after another of each length.

    PYTHONPATH=src python bench/device/prompts.py OUT [--tokens 32768 131072] [--index-dtype fp8_e4m3]
        [--layers 6] [--once] [--overlap]

`seconds` is the engine's, from a request to its token, planning included; `kernels`: by torch's profiler,
launches and us. --once: the first prompt of each length only, behind one of 16,384 tokens; of
one that takes a minute. --overlap: the share of tokens that fp8 keys choose as bfloat16 keys do, by layer of both.
"""
from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import latent
import torch
from direct import Direct, kernels_of, show_kernels, write

from penstock.config.settings.tree import KVConfig
from penstock.exec.sparse import selectors

EVERY = 64                              # queries of which one is compared


def engine(model: Any, tokens: int, keys: str) -> Direct:
    return Direct(model, rows=1, max_len=tokens + 512, hbm_tokens=int(1.4 * (tokens + 4096)) + 8192,
                  buckets=(1,), page_size=64, step_tokens=8192, kv=KVConfig(sparse_metadata_dtype=keys))


def measure(model: Any, tokens: int, keys: str, *, once: bool) -> dict[str, Any]:
    rng = random.Random(1)
    prompts = [[rng.randrange(10, 31000) for _ in range(tokens)] for _ in range(3)]
    runs = engine(model, tokens, keys)
    if once:
        runs.run([prompts[1][:16384]], 1)                               # compiles
        seconds = runs.run(prompts[:1], 1).wall_s
        print(f"{tokens} tokens, keys {keys}, once: {seconds:.3f} s", flush=True)
        return {"tokens": tokens, "keys": keys, "layers": latent.LAYERS, "seconds": seconds,
                "tokens_s": tokens / seconds}
    seconds = [runs.run([prompt], 1).wall_s for prompt in prompts[:2]][1]      # the first compiles
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    torch.cuda.synchronize()
    profiler.start()
    profiled = runs.run([prompts[2]], 1).wall_s
    torch.cuda.synchronize()
    profiler.stop()
    kernels = kernels_of(profiler, 1)
    print(f"{tokens} tokens, keys {keys}: {seconds:.3f} s ({profiled:.3f} profiled)", flush=True)
    show_kernels(kernels, 12)
    return {"tokens": tokens, "keys": keys, "layers": latent.LAYERS, "seconds": seconds,
            "tokens_s": tokens / seconds, "profiled_s": profiled, "kernels": kernels}


def overlap(work: str, tokens: int) -> dict[str, Any]:
    """After the first chunk, in which most queries choose all that they see."""
    model, real, seen = latent.build_model(*latent.WORK[work]), selectors.relu, {}
    rng = random.Random(3)
    prompt = [rng.randrange(10, 31000) for _ in range(tokens)]
    for keys in ("bfloat16", "fp8_e4m3"):
        chosen = seen[keys] = []

        def kept(*of: Any, to: list[Any] = chosen) -> Any:
            score = real(*of)

            def choose(*args: Any) -> Any:
                out = score(*args)
                to.append(out[::EVERY, 0].tolist())
                return out
            return choose
        selectors.SCORES = {**selectors.SCORES, "relu": kept}
        engine(model, tokens, keys).run([prompt], 1)
    selectors.SCORES = {**selectors.SCORES, "relu": real}
    shares: list[list[float]] = [[] for _ in range(latent.LAYERS)]
    for i, steps in enumerate(zip(*seen.values(), strict=True)):
        if i >= latent.LAYERS and len(steps[0]) * EVERY > 4096:
            shares[i % latent.LAYERS] += [len({*a} & {*b}) / latent.TOPK for a, b in zip(*steps, strict=True)]
    row = {"work": work, "tokens": tokens, "overlap": [round(sum(s) / len(s), 4) for s in shares]}
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", nargs="+", type=int, default=[32768])
    parser.add_argument("--index-dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--overlap", action="store_true")
    args = parser.parse_args()
    if args.overlap:
        rows = [overlap(work, args.tokens[0]) for work in latent.WORK]
    else:
        latent.LAYERS = args.layers
        latent.CONFIG |= {"num_hidden_layers": args.layers, "first_k_dense_replace": args.layers,
                          "max_position_embeddings": 1200000}
        model = latent.build_model(*latent.WORK["W1b"])
        rows = [measure(model, tokens, args.index_dtype, once=args.once) for tokens in args.tokens]
    write("prompts", args.out, rows, shown=False)


if __name__ == "__main__":
    main()
