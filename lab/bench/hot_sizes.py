"""Hot buffers that grow beside those of one size: one engine each, in turns, asked the same.

    python lab/bench/hot_sizes.py [ROUNDS]

Eight prompts of 3,000 tokens of this repository's notebook as it stands, on a device that
holds half of them, so that rows decode from host pages; a step selects 256 tokens. Prints, for each size,
units that were missed for each token and tokens per second, prompts included, and the ratios of each round.
What a miss costs on a CPU is a copy in memory: the count is what is measured here.
"""
from __future__ import annotations

import asyncio
import statistics
import sys
import time
from pathlib import Path

from penstock import AsyncLLM, SamplingParams

BUDGET, PAGE, PROMPT, NEW, ROWS = 256, 16, 3_000, 192, 8
SIZES = {"one size": BUDGET + PAGE, "growing": 4 * BUDGET}


async def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    token_bytes = 30 * 3 * 64 * 2 * 4           # the demo's layers, KV heads, width, k and v, float32
    text = (Path(__file__).parents[1] / "archive" / "log.md").read_text()
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in SIZES}
    engines = {name: AsyncLLM("demo", sparse_top_k=BUDGET, hot_buffer_tokens=size, page_size=PAGE,
                         hbm_bytes=ROWS * (PROMPT + NEW) * token_bytes // 2, max_running_requests=ROWS,
                         dram_bytes=3 * ROWS * (PROMPT + NEW) * token_bytes, prefix_cache=False)
               for name, size in SIZES.items()}
    for llm in engines.values():
        await llm.start()
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True, top_k_tokens=BUDGET)
    for k in range(rounds):
        for name, llm in list(engines.items())[::1 - 2 * (k % 2)]:
            ids = llm.encode(text)[k * ROWS * 100:]
            prompts = [{"prompt_token_ids": ids[i * PROMPT:(i + 1) * PROMPT]} for i in range(ROWS)]
            before = time.perf_counter()
            outputs = await llm.generate(prompts, params)
            took = time.perf_counter() - before
            device, hits, misses = (sum(o.kv_reads[what] for o in outputs)
                                    for what in ("device", "hot_hits", "hot_misses"))
            missed, rate = misses / (ROWS * NEW), ROWS * NEW / took
            seen[name].append((missed, rate))
            print(f"{name}: {missed:.0f} units missed a token, {rate:.2f} tokens/s with prompts, of selected "
                  f"units {device / (device + hits + misses):.2f} on the device, "
                  f"{hits / max(1, hits + misses):.3f} of the others hot", flush=True)
    for at, what in enumerate(("units missed a token", "tokens/s")):
        ratios = [b[at] / a[at] for a, b in zip(*seen.values(), strict=True)]
        print(f"{what}, growing over one size: median {statistics.median(ratios):.3f} of "
              f"{', '.join(f'{ratio:.3f}' for ratio in ratios)}")
    for llm in engines.values():
        await llm.close()


if __name__ == "__main__":
    asyncio.run(main())
