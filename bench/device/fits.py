"""Decode that selects where everything fits on the device, with a host tier and without one, in turns.

    PYTHONPATH=src python bench/device/fits.py OUT [--layers 36]
"""
from __future__ import annotations

import argparse
import random
from pathlib import Path

from direct import QWEN3_8B, Direct, build_model, spread, write
from hosted import counts

from penstock.config.request.selection import Selection


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=4)
    args = parser.parse_args()
    model = build_model(QWEN3_8B | {"num_hidden_layers": args.layers})
    rule = Selection(selector="bounds", version=1, unit=8, budget=2048, sinks=16, window=64)
    each = args.tokens + args.new + 64
    room = args.requests * each * 5 // 4 + 2048             # bounds are an eighth
    arms = {name: Direct(model, rows=args.requests, max_len=each, hbm_tokens=room, dram_tokens=host,
                         hot_tokens=hot, buckets=(args.requests,), selection=rule)
            for name, host, hot in (("host tier", args.requests * each, 4096), ("none", 0, 0))}
    rng = random.Random(0)
    steps: dict[str, list[float]] = {name: [] for name in arms}
    alike = 0
    for repeat in range(args.repeats + 1):
        prompts = [[rng.randrange(10, 150000) for _ in range(args.tokens)] for _ in range(args.requests)]
        told = {}
        for name in sorted(arms, reverse=bool(repeat % 2)):
            ran = arms[name].run(prompts, args.new)
            told[name] = ran.tokens
            if repeat:                                      # the first makes plans and compiles
                steps[name].append(1e3 * spread(ran.step_s[4:])["median"])
        a, b = (list(of.values()) for of in told.values())
        alike += sum(x == y for x, y in zip(a, b, strict=True))
    ratio = [b / a for a, b in zip(steps["host tier"], steps["none"], strict=True)]
    write("fits", args.out, [{
        "layers": args.layers, "requests": args.requests, "context": args.tokens, "budget": 2048,
        "step_ms": {name: spread(values) for name, values in steps.items()}, "speed_ratio": spread(ratio),
        "requests_with_equal_tokens": alike, "of": args.requests * (args.repeats + 1),
        "units": {name: counts(arm) for name, arm in arms.items()}}])


if __name__ == "__main__":
    main()
