"""First tokens with nothing stored, while it is stored, and after a restart; decode beside it.

    python bench/storage.py [--tokens 3000] [--dir DIR]

Three engines of the demo model, one after the other: without storage, with an empty folder, with what that
left. --pages: only what a folder costs, seconds of processor for each GB that is written, and read again.
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

SIZES: dict[str, Any] = {"threads": 2, "max_num_seqs": 8, "hbm_bytes": "1G", "dram_bytes": "1G"}
SETTLE_S = 3.0                  # writes go on behind the answers


def measure(name: str, prompts: list[list[int]], **more: Any) -> None:
    first = SamplingParams(max_tokens=1, temperature=0.0)
    many = SamplingParams(max_tokens=128, temperature=0.0, ignore_eos=True)
    with LLM("demo", **SIZES, **more) as llm:
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
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--dir", default=tempfile.gettempdir())
    args = parser.parse_args()
    dice, root = random.Random(1), Path(args.dir) / "penstock-bench-storage"
    shutil.rmtree(root, ignore_errors=True)
    if args.pages:
        pages(root)
        shutil.rmtree(root)
        return
    prompts = [[dice.randrange(1000, 40000) for _ in range(args.tokens)] for _ in range(4)]
    measure("none", prompts)
    for name in ("empty", "restarted"):
        measure(name, prompts, kv_storage=f"file://{root.absolute()}")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
