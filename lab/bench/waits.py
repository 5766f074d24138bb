"""What waiting at OpenMP's barriers costs: processor and wall time of the same answer, in alternating pairs.

    PYTHONPATH=src python lab/bench/waits.py [--pairs 10] [--busy 2] [--model demo] [--arms 300000 1000 ...]

An arm is a value of GOMP_SPINCOUNT (300000 is libgomp's own default), `default` for what penstock sets, or
`one` for --threads 1. --busy: processes that take a core each meanwhile. Prints medians of each arm, and of
its ratio to the first arm, pair by pair.
"""
from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import time
from pathlib import Path
from statistics import median

from penstock import LLM, SamplingParams

PROMPT = [(7 * i) % 4000 + 100 for i in range(64)]
NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")


def busy() -> None:
    while True:
        pass


def engine_pids() -> list[int]:
    return [int(pid) for task in Path("/proc/self/task").iterdir()
            for pid in (task / "children").read_text().split()
            if "serve.engine.main" in Path(f"/proc/{pid}/cmdline").read_text()]


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def opened(arm: str, model: str) -> tuple[LLM, int]:
    for name in NAMES:
        os.environ.pop(name, None)
    if arm.isdecimal():
        os.environ["GOMP_SPINCOUNT"] = arm
    before = engine_pids()
    llm = LLM(model, hbm_bytes="64M", prefix_cache=False, **({"threads": 1} if arm == "one" else {}))
    [pid] = [pid for pid in engine_pids() if pid not in before]
    return llm, pid


def once(llm: LLM, pid: int, tokens: int) -> tuple[float, float]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    began, took = time.perf_counter(), processor_s(pid)
    llm.generate([{"prompt_token_ids": PROMPT}], params)
    return processor_s(pid) - took, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--arms", nargs="+", default=["300000", "default", "one"])
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        arms = {arm: opened(arm, args.model) for arm in args.arms}
        for llm, pid in arms.values():
            stack.callback(llm.close)
            once(llm, pid, args.tokens)
        for _ in range(args.busy):
            process = multiprocessing.get_context("fork").Process(target=busy, daemon=True)
            process.start()
            stack.callback(process.kill)
        found: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
        for n in range(args.pairs):
            for arm in (list(arms) if n % 2 else list(arms)[::-1]):
                found[arm].append(once(*arms[arm], args.tokens))
            print(n, {arm: [round(x, 2) for x in took[-1]] for arm, took in found.items()}, flush=True)
    first = found[args.arms[0]]
    print(f"{args.pairs} pairs, {args.busy} busy processes, {args.tokens} tokens; "
          f"load {os.getloadavg()[0]:.1f}")
    for arm, took in found.items():
        ratios = [median(a[k] / b[k] for a, b in zip(took, first, strict=True)) for k in range(2)]
        print(f"{arm:>8}: processor {median(p for p, _ in took):.2f} s ({ratios[0]:.3f}), "
              f"wall {median(w for _, w in took):.2f} s ({ratios[1]:.3f})")


if __name__ == "__main__":
    main()
