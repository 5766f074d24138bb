"""Steps that have prompts and decoding rows: where their time goes, by tokens a step.

    PYTHONPATH=src:bench/device python lab/device/mixed_steps.py OUT [--step-tokens 8192 2048]

Qwen3-8B's shape with random weights, 256 prompts of 512 tokens at once, 24 output tokens each, without HTTP. `busy`:
kernels' own time by torch's profiler; `advance`, `submit`, `poll`: where the loop's own thread was.
"""
from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import torch
from direct import QWEN3_8B, Direct, build_model, kernels_of, show_kernels, write

ROWS, PROMPT, NEW = 256, 512, 24


def timed(owner: Any, name: str, spent: dict[str, float]) -> None:
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return real(*args, **kwargs)
        finally:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - began
            spent[f"{name}s"] = spent.get(f"{name}s", 0) + 1
    setattr(owner, name, call)


def measure(model: Any, step_tokens: int) -> dict[str, Any]:
    rng = random.Random(1)
    prompts = [[[rng.randrange(10, 31000) for _ in range(PROMPT)] for _ in range(ROWS)] for _ in range(3)]
    runs = Direct(model, rows=ROWS, max_len=1024, hbm_tokens=ROWS * 1024, step_tokens=step_tokens)
    runs.run(prompts[0], NEW)
    spent: dict[str, float] = {}
    for owner, name in ((runs.core, "advance"), (runs.front, "submit"), (runs.front, "poll")):
        timed(owner, name, spent)
    wall = runs.run(prompts[1], NEW).wall_s
    took = dict(spent)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    torch.cuda.synchronize()
    profiler.start()
    profiled = runs.run(prompts[2], NEW).wall_s
    torch.cuda.synchronize()
    profiler.stop()
    kernels = kernels_of(profiler, 1)
    busy = sum(of["its_own_us"] for of in kernels.values()) / 1e6
    row = {"step_tokens": step_tokens, "wall_s": wall, "profiled_s": profiled, "busy_s": busy, **took}
    print({k: round(v, 3) for k, v in row.items()}, flush=True)
    show_kernels(kernels, 16)
    return {**row, "kernels": kernels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--step-tokens", nargs="+", type=int, default=[8192, 2048])
    args = parser.parse_args()
    model = build_model(QWEN3_8B)
    write("mixed-steps", args.out, [measure(model, n) for n in args.step_tokens], shown=False)


if __name__ == "__main__":
    main()
