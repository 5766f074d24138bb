"""What a steady decode step of the Qwen3-8B shape does besides computing: synchronisations, copies off the
device, and how long the GPU idles, by torch's profiler over many steps.

    PYTHONPATH=src python bench/device/steps.py OUT [--requests 32] [--prompt 8192]
"""
from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from direct import QWEN3_8B, Direct, build_model, write

from penstock.config.request.params import SamplingParams

LEAD, TAIL = 8, 4       # steps at both ends that are not counted


def prompts_of(count: int, tokens: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(10, 150000) for _ in range(tokens)] for _ in range(count)]


def profiled(engine: Direct, prompts: Sequence[Sequence[int]], steps: int,
             params: SamplingParams | None = None) -> Any:
    """A profile of `steps` decode steps of all these prompts, the prompts and `LEAD` steps not in it."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU,
                                                  torch.profiler.ProfilerActivity.CUDA])
    seen = 0

    def every_step() -> None:
        nonlocal seen
        seen += 1
        if seen == LEAD:
            profiler.start()
        if seen == LEAD + steps:
            torch.cuda.synchronize()
            profiler.stop()
    # The first to be prefilled decode while the others are: those steps do not count.
    engine.run(prompts, LEAD + steps + TAIL + len(prompts), every_step=every_step, params=params)
    assert seen >= LEAD + steps, f"{seen} steps in which all decode"
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        return json.loads(Path(folder, "trace.json").read_text())["traceEvents"]


def report(events: Any, steps: int) -> dict[str, Any]:
    """Counts a step, and the idle share of the time from the first to the last kernel. Times in us."""
    calls: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    busy: list[tuple[float, float]] = []
    for event in events:
        kind, name = event.get("cat", ""), event.get("name", "")
        if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            busy.append((event["ts"], event["ts"] + event["dur"]))
            kernels[name[:48]] += event["dur"]
        if kind == "gpu_memcpy" or (kind in ("cuda_runtime", "cuda_driver") and (
                "ynchronize" in name or "Launch" in name or "emcpy" in name or "Query" in name)):
            calls[name] += 1
    busy.sort()
    idle, gaps, end = 0.0, [], busy[0][1]
    for start, stop in busy:
        if start > end:
            idle += start - end
            gaps.append(start - end)
        end = max(end, stop)
    whole = end - busy[0][0]
    gaps.sort(reverse=True)
    return {"calls_a_step": {k: v / steps for k, v in sorted(calls.items())},
            "kernels_us_a_step": {name: round(us / steps, 1) for name, us in kernels.most_common(12)},
            "span_ms_a_step": whole / steps / 1e3, "idle_share": idle / whole,
            "idle_in_gaps_over_5us_share": sum(g for g in gaps if g > 5) / whole,
            "largest_gaps_us": gaps[:5], "device_activities_a_step": len(busy) / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    tokens = args.prompt + args.steps + LEAD + TAIL + args.requests + 32
    engine = Direct(build_model(QWEN3_8B | {"num_hidden_layers": args.layers}), rows=args.requests,
                    max_len=tokens, hbm_tokens=args.requests * (tokens + 32), buckets=(args.requests,))
    events = profiled(engine, prompts_of(args.requests, args.prompt), args.steps)
    write("steps", args.out, [{"requests": args.requests, "prompt": args.prompt, "steps": args.steps,
                               **report(events, args.steps)}])


if __name__ == "__main__":
    main()
