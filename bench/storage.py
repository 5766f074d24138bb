"""First tokens with nothing stored, while it is stored, and after a restart; decode beside it.

    python bench/storage.py [--model M] [--tokens 3000] [--dir DIR] [--turns N | --pages]

Three engines of the demo model, one after the other: without storage, with an empty folder, with what that
left. --turns: two side by side, without and with a folder: each batch of requests goes to one and then to
the other, N times (2 or more), so that what else the machine does falls on both. --pages: only what a folder
costs, seconds of processor for each GB that is written, and read again.
"""
from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from penstock import LLM, SamplingParams
from penstock.memory.stores.files import Files

SIZES: dict[str, Any] = {"threads": 2, "max_num_seqs": 8, "kv_cache_memory_bytes": "1G", "kv_offloading_size": "1G"}
SETTLE_S = 3.0                  # writes go on behind the answers
# Small, so that all memory was touched, and a full folder is swept, before anything counts: the first touch
# of a page of a virtual machine costs several times its copy.
STEADY: dict[str, Any] = {**SIZES, "kv_cache_memory_bytes": "256M", "kv_offloading_size": "256M"}
QUOTA, WARM_TURNS = "256M", 6
QUIET_S = 0.005                 # of processor in a tenth of a second: nothing is written any more


def measure(model: str, name: str, prompts: list[list[int]], **more: Any) -> None:
    first = SamplingParams(max_tokens=1, temperature=0.0)
    many = SamplingParams(max_tokens=128, temperature=0.0, ignore_eos=True)
    with LLM(model, **SIZES, **more) as llm:
        llm.generate([{"prompt_token_ids": [5] * 40}], first)
        took, cached = [], 0
        for prompt in prompts:
            began = time.monotonic()
            [result] = llm.generate([{"prompt_token_ids": prompt}], first)
            took.append(time.monotonic() - began)
            cached += result.num_cached_tokens or 0
        began = time.monotonic()
        llm.generate([{"prompt_token_ids": [*prompt[:200], i]} for i, prompt in enumerate(prompts * 2)], many)
        speed = 2 * len(prompts) * 128 / (time.monotonic() - began)
        print(f"{name}: first token {statistics.median(took):.3f} s ({min(took):.3f} to {max(took):.3f}), "
              f"{cached} tokens cached; 8 rows decode {speed:.0f} tokens/s", flush=True)
        time.sleep(SETTLE_S)


def turns(model: str, num: int, tokens: int, dice: random.Random, **more: Any) -> None:
    """A prompt that nobody has seen, then 8 rows that decode, while their pages are written or not."""
    first = SamplingParams(max_tokens=1, temperature=0.0)
    many = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    with LLM(model, **STEADY) as without, LLM(model, **STEADY, kv_storage_bytes=QUOTA, **more) as storing:
        ratios: dict[str, list[float]] = {}
        for turn in range(-WARM_TURNS, num):
            batches = [([{"prompt_token_ids": _prompt(dice, tokens)}], first),
                       ([{"prompt_token_ids": _prompt(dice, 100)} for _ in range(8)], many)]
            took: dict[LLM, list[float]] = {}
            for llm in (without, storing) if turn % 2 else (storing, without):
                took[llm] = []
                for batch, params in batches if turn >= 0 else batches[:1]:
                    took[llm] += _seconds(llm, batch, params)
            if turn >= 0:
                names = "first token", "its processor", "tokens/s", "their processor"
                for name, one, other in zip(names, took[without], took[storing], strict=True):
                    ratios.setdefault(name, []).append(one / other if name == "tokens/s" else other / one)
                print(f"turn {turn}:", ", ".join(f"{name} {found[-1]:.3f}" for name, found in ratios.items()),
                      flush=True)
        for name, found in ratios.items():
            low, middle, high = statistics.quantiles(found, n=4)
            print(f"{name}: {middle:.3f} of without storage, median of {num} turns "
                  f"(half of them {low:.3f} to {high:.3f}, all {min(found):.3f} to {max(found):.3f})")


def _seconds(llm: LLM, batch: list[Any], params: SamplingParams) -> tuple[float, float]:
    """Until the batch is answered; and of the engine's processors, until all of it is stored."""
    clock = ~llm._inner._client.pid << 3 | 2        # Linux: the processor time of a process
    began, busy = time.monotonic(), time.clock_gettime(clock)
    llm.generate(batch, params)
    took, last = time.monotonic() - began, 0.0
    while (now := time.clock_gettime(clock)) - last > QUIET_S:
        last = now
        time.sleep(0.1)
    return took, now - busy


def _prompt(dice: random.Random, num: int) -> list[int]:
    return [dice.randrange(1000, 40000) for _ in range(num)]


def pages(root: Path) -> None:
    for size in (72 << 10, 720 << 10):
        files, num = Files(root, f"{size:032x}", [size]), (1 << 29) // size
        page = memoryview(bytearray(random.Random(size).randbytes(size)))
        keys = [random.randbytes(16) for _ in range(num)]
        took = []
        for what in (files.put, files.get):
            began, wall = time.process_time(), time.monotonic()
            for key in keys:
                list(what([key], 0, [page]))
            took += [(time.process_time() - began) * 1e9 / (num * size),
                     num * size / 1e6 / (time.monotonic() - wall)]
        print(f"pages of {size >> 10} KiB: {took[0]:.1f} s of processor a GB written ({took[1]:.0f} MB/s), "
              f"{took[2]:.2f} s a GB read ({took[3]:.0f} MB/s)", flush=True)
        files.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pages", action="store_true")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--turns", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--dir", default=tempfile.gettempdir())
    args = parser.parse_args()
    dice, root = random.Random(1), Path(args.dir) / "penstock-bench-storage"
    shutil.rmtree(root, ignore_errors=True)
    if args.pages:
        pages(root)
        shutil.rmtree(root)
        return
    stored = {"kv_storage": f"file://{root.absolute()}"}
    if args.turns:
        turns(args.model, args.turns, args.tokens, dice, **stored)
    else:
        prompts = [_prompt(dice, args.tokens) for _ in range(4)]
        measure(args.model, "none", prompts)
        for name in ("empty", "restarted"):
            measure(args.model, name, prompts, **stored)
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
