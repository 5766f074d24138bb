"""Twelve agents on one engine: hits and time to first token by size of the host tier.

    PYTHONPATH=src python bench/agents.py [--scale 8] [--seeds 3] [--step-ms 10] [--prompt-rate 15000] [--retained]

The machine is an assumption, the same for every row: 600,000 tokens of KV on the device, 48 KB a token, 50 GB/s from
and to host memory, and steps of `step-ms`, 1 ms more for each request that decodes. A row is the median of its seeds.
It takes 5 s of CPU a row and seed at scale 8, 100 s at scale 1. docs/design/adr/0093 has what came out.
"""
from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import median

from penstock.bench.report import percentile, table
from penstock.core.settings import CacheGroup, CoreConfig
from penstock.plan.agents import Agents, agents
from penstock.plan.rates import ENDLESS, Rates, unmeasured
from penstock.plan.shape import Planned, Shape, divided
from penstock.plan.world import Result, World

PAGE, TOKEN_BYTES, DEVICE = 64, 48_000, 600_000
ROWS = (("2M", 2_000_000, 0, False, 0.0), ("2M and 60 one-shot prompts", 2_000_000, 60, False, 0.0),
        ("2M, decode from host", 2_000_000, 0, True, 0.0), ("3M", 3_000_000, 0, False, 0.0),
        ("4M", 4_000_000, 0, False, 0.0), ("4M, decode from host", 4_000_000, 0, True, 0.0))
RETAINED = [(f"2M and 60 one-shot prompts, {share:g} retained", 2_000_000, 60, False, share)
            for share in (0.0, 0.5, 0.7, 0.8, 0.9)]


def machine(step_ms: float, prompt_rate: float) -> Rates:
    return unmeasured("cpu", step_us=1e3 * step_ms, prompt_flops_s=prompt_rate, request_us=1_000, load_bytes_s=50e9,
                      save_bytes_s=50e9, miss_bytes_s=ENDLESS)


def engine(host_tokens: int, hosted: bool, retained: float) -> Planned:
    """retained: share of the host tier that agents may retain, as `--retained-share`. One FLOP a prompt token, so that
    the rate of FLOP is that of tokens."""
    core = CoreConfig(page_size=PAGE, rows=64, hbm_pages=DEVICE // PAGE, dram_pages=host_tokens // PAGE,
                      retained_pages=int(retained * (host_tokens // PAGE)), step_tokens=8_192,
                      max_len=400_000, hot_pages=4_096 // PAGE * hosted, budget=2_048 * hosted,
                      groups=(CacheGroup(name="full", page_bytes=TOKEN_BYTES * PAGE),))
    shape = Shape(dense_bytes=0, expert_bytes=0, visited=0, token_flops=1, attention=())
    return Planned(core=core, shape=shape, vocab=1_000, context=core.max_len, weight_bytes=0, device_bytes=0,
                   host_bytes=0)


def row(host_tokens: int, one_shots: int, hosted: bool, *, scale: float, seed: int, rates: Rates,
        retained: float = 0.0) -> Result:
    planned = engine(host_tokens, hosted, retained)
    trace = agents(Agents(one_shots=one_shots, seed=seed), scale)
    return World(trace, replace(planned, core=divided(planned.core, scale)), rates, scale=scale).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=10)
    parser.add_argument("--prompt-rate", type=float, default=15_000, help="tokens/s")
    parser.add_argument("--retained", action="store_true", help="2M and one-shot prompts, by --retained-share")
    args = parser.parse_args()
    rows = []
    for name, host, one_shots, hosted, retained in RETAINED if args.retained else ROWS:
        done = [row(host, one_shots, hosted, scale=args.scale, seed=seed, retained=retained,
                    rates=machine(args.step_ms, args.prompt_rate)) for seed in range(args.seeds)]
        hits = sorted(r.hits / r.largest_hits for r in done)
        ttft = [median(percentile(r.ttft_s, p) for r in done) for p in (50, 95)]
        rows.append((name, f"{median(hits):.2f} ({hits[0]:.2f} to {hits[-1]:.2f})", f"{ttft[0]:.2f}, {ttft[1]:.1f}",
                     f"{median(r.output_tokens / r.seconds for r in done):.0f}"))
        print(*rows[-1], flush=True)
    print(table(("host tokens", "realised / theoretical hits", "TTFT p50, p95 (s)", "tokens/s"), rows))


if __name__ == "__main__":
    main()
