"""Speed of this machine without HTTP: one stream, eight streams, prefill, a repeated prompt.

With `--against transformers` the same weights, dtype, threads and token ids run through
transformers' `generate`, the arms taking turns, so that ratios hold on a machine whose speed drifts.
"""
from __future__ import annotations

import asyncio
import gc
import random
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.bench.report import Spread, optional, plot_bars, table, write_json
from penstock.config.request.params import SamplingParams
from penstock.config.settings.tree import Config
from penstock.llm.llm import AsyncLLM

OURS = "penstock"                # the arm under test: an engine process
PROMPT = 64                      # tokens before a measured decode
STREAMS = 8
PREFILLS = (512, 2048)
REPEATED = 2000                  # tokens of the prompt that is sent twice


async def once(llm: AsyncLLM, prompt: list[int], new: int) -> tuple[float, float]:
    """Seconds to the first token and to the last, from the call on, as a user's program sees them."""
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    start, first = time.perf_counter(), 0.0
    seen = 0
    async for delta in llm.stream({"prompt_token_ids": prompt}, params):
        first = first or time.perf_counter() - start
        seen += len(delta.token_ids)
    assert seen == new, f"{seen} tokens came instead of {new}"
    return first, time.perf_counter() - start


async def measure(config: Config, args: Namespace) -> int:
    """Runs every workload `args.runs` times, arms in turn, and prints medians with their spread."""
    rng = random.Random(args.seed)
    results: dict[str, dict[str, list[float]]] = {}
    async with AsyncLLM(config=config) as llm:
        theirs = None
        if args.against == "transformers":
            from penstock.bench.versus import Transformers
            theirs = Transformers(config)
            # Its modules live on; the collector would walk them while the other arm runs.
            gc.collect()
            gc.freeze()
        vocab = llm.vocab_size
        longest = llm.max_model_len

        def ids(n: int) -> list[int]:
            # Fresh ids for every call: a prefix hit would measure the cache.
            return [rng.randrange(vocab) for _ in range(n)]

        works = _works(llm, theirs, ids, args.output_len, longest)
        for _, run in works:                    # warm up: packing, page faults, first touches
            await run({})
        bar = optional("tqdm").tqdm(total=args.runs * len(works), unit="run", disable=args.quiet or None)
        for _ in range(args.runs):
            for name, run in works:
                await run(results.setdefault(name, {}))
                bar.update()
        bar.close()
    _report(config, args, results)
    return 0


Run = Callable[[dict[str, list[float]]], Awaitable[None]]


def _works(llm: AsyncLLM, theirs: Any, ids: Callable[[int], list[int]], new: int,
           longest: int) -> list[tuple[str, Run]]:
    works: list[tuple[str, Run]] = []

    def work(name: str) -> Callable[[Run], None]:
        return lambda run: works.append((name, run))

    @work("decode, 1 stream")
    async def _(out: dict[str, list[float]]) -> None:
        prompt = ids(PROMPT)
        _put(out, OURS, new / (await once(llm, prompt, new))[1])
        if theirs is not None:
            _put(out, theirs.name, new / theirs.once(prompt, new))

    @work(f"decode, {STREAMS} streams")
    async def _(out: dict[str, list[float]]) -> None:
        prompts = [ids(PROMPT) for _ in range(STREAMS)]
        start = time.perf_counter()
        await asyncio.gather(*(once(llm, p, new) for p in prompts))
        _put(out, OURS, STREAMS * new / (time.perf_counter() - start))
        if theirs is not None:                  # the yardstick is transformers' one stream
            _put(out, theirs.name, new / theirs.once(prompts[0], new))

    for n in PREFILLS:
        if n + 1 > longest:
            continue

        @work(f"prefill {n}")
        async def _(out: dict[str, list[float]], n: int = n) -> None:
            prompt = ids(n)
            _put(out, OURS, n / (await once(llm, prompt, 1))[0])
            if theirs is not None:
                _put(out, theirs.name, n / theirs.once(prompt, 1))

    @work("first token of a repeated prompt, % of the first time")
    async def _(out: dict[str, list[float]]) -> None:
        prompt = ids(min(REPEATED, longest - 1))
        first = (await once(llm, prompt, 1))[0]
        _put(out, OURS, 100 * (await once(llm, prompt, 1))[0] / first)

    return works


def _put(out: dict[str, list[float]], arm: str, value: float) -> None:
    out.setdefault(arm, []).append(value)


def _report(config: Config, args: Namespace, results: dict[str, dict[str, list[float]]]) -> None:
    rows, data, bars = [], {}, {}
    for name, arms in results.items():
        spread = {arm: Spread.of(v) for arm, v in arms.items()}
        ratio = ""
        if len(arms) == 2:
            a, b = arms.values()
            pairs = Spread.of([x / y for x, y in zip(a, b, strict=True)])
            ratio = str(pairs)
            bars[name] = spread
        rows.append([name, *(str(spread.get(a, "")) for a in (OURS, "transformers")), ratio])
        data[name] = arms
    about = (f"{config.model.model}, {config.model.dtype}, {config.device.threads} threads, "
             f"{args.runs} runs, {PROMPT}+{args.output_len} tokens")
    print(f"\n{about}\ntokens/s: median (minimum .. maximum); ratio pair by pair\n")
    print(table(("work", "penstock", "transformers", "ratio"), rows))
    if args.output_json:
        write_json(args.output_json, {"about": about, "results": data})
    if args.plot:
        plot_bars(args.plot, about, "tokens/s", bars or {
            n: {a: Spread.of(v) for a, v in r.items()} for n, r in results.items()})
