"""What a prompt's kernels take where its KV goes to the host, and where it stays on the device.

    PYTHONPATH=src:bench/device python lab/device/hosted_prompts.py [--layers 6] [--tokens 65536] [--hot 4096]

Qwen3-8B's shape with fewer layers. Each prompt twice: the second is timed, a third is profiled.
"""
from __future__ import annotations

import argparse
import random
import time

import torch
from direct import QWEN3_8B, Direct, kernels_of, show_kernels
from hosted import build_model

from penstock.config.request.selection import Selection


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--hot", type=int, default=4096)
    parser.add_argument("--step-tokens", type=int, default=16384)
    args = parser.parse_args()
    config = QWEN3_8B | {"max_position_embeddings": 163840, "num_hidden_layers": args.layers}
    model, longest = build_model(config, .3), args.tokens + 512
    rule = Selection(selector="bounds", version=1, unit=8, budget=2048, sinks=16, window=64)
    shared = {"max_len": longest, "buckets": (1,), "page_size": 64, "step_tokens": args.step_tokens, "rows": 1}
    engines = {"device": Direct(model, hbm_tokens=longest + 512, **shared),
               "host": Direct(model, hbm_tokens=longest // 2, dram_tokens=longest + 64, selection=rule,
                              hot_tokens=args.hot, hosted=True, **shared)}
    dice = random.Random(0)
    for name, engine in engines.items():
        for turn in range(3):
            prompt = [dice.randrange(10, 150000) for _ in range(args.tokens)]
            began = time.perf_counter()
            if turn == 2:
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                    engine.run([prompt], 2)
                    torch.cuda.synchronize()
                print(f"{name}: profiled {time.perf_counter() - began:.3f} s", flush=True)
                show_kernels(kernels_of(profiler, 1), 16)
            else:
                ran = engine.run([prompt], 2)
                print(f"{name}: first token {max(ran.first_s.values()):.3f} s", flush=True)


if __name__ == "__main__":
    main()
