"""`penstock bench rates MODEL`: the speeds of this machine, as `penstock plan --rates` reads them.

An engine with the given flags is asked what separates them: one request and many that decode, short and long
prompts, a prompt that only host memory or storage has. Numbers that its flags leave out are marked as estimated.
"""
from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from random import Random
from statistics import median
from typing import Any, Literal

from penstock.bench.report import check_output, table, write_json
from penstock.config.base.errors import ConfigError
from penstock.config.base.machine import probe
from penstock.config.request.params import SamplingParams
from penstock.config.settings.resolve import resolve
from penstock.config.settings.tree import Config
from penstock.engine.client.client import ChoiceStream, EngineClient
from penstock.model.source.hub import pull
from penstock.plan.rates import ENDLESS, UNITS, unmeasured
from penstock.plan.shape import Planned, kv_read, plan_engine
from penstock.plan.trace import Session, Span, Trace, Turn
from penstock.plan.world import World

REQUESTS, SHORT, NEW = 8, 64, 64        # requests at once, their shortest prompt, output tokens
FITTED = ("weights_bytes_s", "request_us", "kv_bytes_s", "prompt_flops_s", "cached_us")
CONTEXTS = 4                            # that the device has room for while links are measured
SETTLE_S = 30.0                         # within which copies that are under way have ended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("bench rates")
    group.add_argument("--output-json", metavar="FILE", required=True, help="the rates file to write")
    group.add_argument("--context", type=int, default=8_192, metavar="N", help="longest prompt that is measured")
    group.add_argument("--runs", type=int, default=5, metavar="N", help="repetitions of each measurement")


def run(config: Config, args: argparse.Namespace) -> int:
    """`config` is not resolved. Raises ConfigError."""
    for name, least in (("context", 4 * SHORT), ("runs", 1)):
        if getattr(args, name) < least:
            raise ConfigError(f"--{name} is {getattr(args, name)}: at least {least}")
    check_output("--output-json", args.output_json)
    found = asyncio.run(measure(config, args.context, args.runs))
    write_json(args.output_json, found)
    print(table(("rate", "value", "unit", "source"), [
        (name, f"{one['value']:.4g}", one["unit"], one["source"]) for name, one in found["rates"].items()]))
    return 0


async def measure(config: Config, context: int, runs: int) -> dict[str, Any]:
    """Return what a rates file holds. config: not resolved. Raises ConfigError."""
    kv, machine = config.kv, probe()
    device: Literal["cpu", "cuda"] = "cpu" if "cpu" in (config.device.device, machine.device) else "cuda"
    rest = unmeasured(device)
    planned = plan_engine(replace(config, kv=replace(kv, kv_storage=None, kv_cache_memory_bytes=(
        kv.kv_cache_memory_bytes or 1 << 40))), rest)
    context = min(context, planned.core.max_len - NEW - 1)
    values: dict[str, float] = {}
    dense = replace(kv, sparse_top_k=None, host_decode="off", hot_buffer_tokens=None)
    if kv.kv_offloading_size:           # a prompt soon leaves the device, and the host still has it
        few = CONTEXTS * context // planned.core.page_size * sum(group.page_bytes for group in planned.core.groups)
        dense = replace(dense, kv_cache_memory_bytes=few, kv_offloading_size=f"{4 * few}B")
    if kv.kv_storage:
        dense = replace(dense, kv_storage_policy="wait_complete")
    async with started(replace(config, kv=dense), planned, runs) as e:
        values |= await e.steps(context)
        if kv.kv_offloading_size:
            values |= await e.links(context)
        if kv.kv_storage:
            values |= await e.storage(context)
        values |= {name: float(value) for name, given in (("memory_bytes", "gpu_bytes"), (
            "workspace_bytes", "workspace_bytes")) if (value := e.client.ready.info.get(given))}
    if kv.sparse_top_k:
        offloaded = replace(kv, kv_storage=None, host_decode="always")
        async with started(replace(config, kv=offloaded), planned, runs) as e:
            values |= await e.offloaded(context, values, kv.sparse_top_k)
    about = f"penstock bench rates {config.model.model}: prompts of up to {context:,} tokens, medians of {runs}"
    return {"name": machine.gpus[0] if device == "cuda" else machine.cpu, "device": device, "about": about, "rates": {
        name: {"value": values[name], "unit": unit, "source": "measured"} if name in values else
        {"value": getattr(rest, name), "unit": unit, "source": "not measured with these flags", "estimated": True}
        for name, unit in UNITS.items()}}


@asynccontextmanager
async def started(config: Config, planned: Planned, runs: int) -> AsyncIterator[Measured]:
    config = resolve(config, probe())
    await asyncio.to_thread(pull, config, print)
    client = EngineClient(config)
    await client.start()
    try:
        e = Measured(client, planned, runs)
        await e.ask([e.prompt(SHORT)], NEW)                 # page faults, kernels that are compiled late
        yield e
    finally:
        await client.close()


@dataclass(frozen=True, slots=True)
class Answer:
    first_s: float                      # since it was sent
    gaps: list[float]                   # seconds a token while all requests decode


class Measured:
    """An engine that runs, and what its answers take."""

    def __init__(self, client: EngineClient, planned: Planned, runs: int) -> None:
        self.client, self.planned, self.runs = client, planned, runs
        self._rng = Random()          # storage may have the prompts of an earlier run

    def prompt(self, tokens: int) -> list[int]:
        """Tokens that no prompt had before."""
        return self._rng.choices(range(self.planned.vocab), k=tokens)

    async def ask(self, prompts: Sequence[Sequence[int]], new: int) -> list[Answer]:
        """All at once."""
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        start = time.perf_counter()

        async def one(stream: ChoiceStream) -> list[tuple[float, int]]:
            return [(time.perf_counter() - start, len(chunk.tokens)) async for chunk in stream if chunk.tokens]

        came = await asyncio.gather(*(one(self.client.submit(prompt, params)[0]) for prompt in prompts))
        begin, end = max(times[0][0] for times in came), min(times[-1][0] for times in came)
        return [Answer(times[0][0], [(at - before) / count for (before, _), (at, count) in itertools.pairwise(times)
                                     if before >= begin and at <= end]) for times in came]

    async def first_s(self, prompt: Sequence[int]) -> float:
        return (await self.ask([prompt], 1))[0].first_s

    # ---------------------------------------------------------------- steps
    async def steps(self, context: int) -> dict[str, float]:
        """What a step takes, what decodes in it, and prompt tokens. What is measured is planned as well, with one
        rate at a time: that says how much of it is in each."""
        many = min(REQUESTS, self.planned.core.rows)
        decode = [(1, SHORT), (1, context), (many, SHORT), (many, context // many)]
        prompts = [(0, SHORT), (0, context // 4), (0, context), (context // 2, SHORT), (context - SHORT, SHORT),
                   (context // 2, context // 8), (context * 3 // 4, context // 8)]
        found: dict[tuple[str, int, int], list[float]] = {}
        for _ in range(self.runs):      # in turns: a machine whose speed drifts is slow for all of them
            for n, tokens in decode:
                answers = await self.ask([self.prompt(tokens) for _ in range(n)], NEW)
                found.setdefault(("decode", n, tokens), []).extend(gap for a in answers for gap in a.gaps)
            for cached, tokens in prompts:
                prompt = self.prompt(cached)
                if cached:
                    await self.first_s(prompt)
                found.setdefault(("prompt", cached, tokens), []).append(
                    await self.first_s(prompt + self.prompt(tokens)))
        took = {key: median(times) for key, times in found.items() if times}
        terms = [tuple(self._planned(key, name) for name in FITTED) for key in took]
        return {name: factor if name.endswith("_us") else 1 / factor
                for name, factor in zip(FITTED, _fit(terms, list(took.values())), strict=True)
                if factor or name.endswith("_us")}

    def _planned(self, key: tuple[str, int, int], name: str) -> float:
        """Seconds of a measurement if all rates but one take no time, and that is 1 byte/s, 1 FLOP/s or 1 us."""
        kind, n, tokens = key
        rates = unmeasured("cpu", **{"load_bytes_s": ENDLESS, "save_bytes_s": ENDLESS, name: 1.0})
        if kind == "decode":
            sessions = [Session(0.0, (Turn((Span(f"{i}", tokens),), NEW),)) for i in range(n)]
        else:
            spans = (Span("cached", n), Span("new", tokens))
            sessions = [Session(0.0, ((Turn(spans[:1], 1),) if n else ()) + (Turn(spans if n else spans[1:], 1),))]
        result = World(Trace("", tuple(sessions)), self.planned, rates).run()
        return median(result.gaps_s) if kind == "decode" else result.ttft_s[-1]

    # ---------------------------------------------------------------- copies
    async def links(self, context: int) -> dict[str, float]:
        """A prompt that only host memory has, against one that the device has."""
        before, longer = await self._settled(), []
        for _ in range(self.runs):
            prompt = self.prompt(context)
            await self.first_s(prompt)
            near = await self.first_s(prompt)
            for _ in range(2 * CONTEXTS):
                await self.first_s(self.prompt(context))
            await self._settled()
            longer.append(await self.first_s(prompt) - near)
        after = await self._settled()
        loaded, load_s, saved, save_s = (_grown(before, after, name, way) for way in (
            'src="dram",dst="hbm"', 'src="hbm",dst="dram"') for name in ("moved_bytes_total", "move_seconds_total"))
        if not loaded or not saved:
            raise ConfigError(f"no prompt of --context {context} came back from host memory: give it more tokens")
        return {"load_bytes_s": loaded / max(load_s, self.runs * median(longer)), "save_bytes_s": saved / save_s}

    async def storage(self, context: int) -> dict[str, float]:
        """A prompt that only storage has; time before the first byte is in its rate."""
        before, longer = await self._settled(), []
        for _ in range(self.runs):
            prompt = self.prompt(context)
            await self.first_s(prompt)
            near = await self.first_s(prompt)
            await self._settled()
            self.client.flush()
            longer.append(await self.first_s(prompt) - near)
        after = await self._settled()
        read, written, read_s, write_s = (_grown(before, after, f"storage_{name}_total") for name in (
            "read_bytes", "written_bytes", "read_seconds", "write_seconds"))
        if not read or not written:
            raise ConfigError("no prompt came back from storage: leave --kv-storage-write-policy out, and "
                              "give it room for prompts of --context")
        return {"store_read_bytes_s": read / (max(0.0, self.runs * median(longer)) or read_s),
                "store_write_bytes_s": written / write_s, "store_us": 0.0}

    async def offloaded(self, context: int, known: Mapping[str, float], budget: int) -> dict[str, float]:
        """Requests that decode from host memory: what their hot buffers miss, and what that takes."""
        cfg, many = self.planned.core, min(REQUESTS, self.planned.core.rows)
        before, gaps = await self._settled(), list[float]()
        for _ in range(self.runs):
            answers = await self.ask([self.prompt(context // 2) for _ in range(many)], NEW)
            gaps += [gap for a in answers for gap in a.gaps]
        after = await self._settled()
        hits, misses = (_grown(before, after, name) for name in ("hot_hits_total", "hot_misses_total"))
        if not hits + misses:
            raise ConfigError(f"no request has selected: --context {context} is not over twice --sparse-top-k")
        share, speed = misses / (hits + misses), unmeasured("cpu").miss_bytes_s
        more, less = (kv_read(cfg.groups, cfg.page_size, 2, selected) for selected in (2, 1))
        read = kv_read(cfg.groups, cfg.page_size, context // 2, budget)
        alone = self.planned.shape.weights_read(many) / known["weights_bytes_s"]
        each = (median(gaps) - alone) / many - known["request_us"] / 1e6 - read / known.get("kv_bytes_s", 1e18)
        return {"miss_share": share, "selecting_us": max(0.0, 1e6 * (
            each - budget * share * (more - less) / speed))}

    async def _settled(self) -> dict[str, float]:
        """Wait until no copy is under way. Return the engine's numbers."""
        until = time.monotonic() + SETTLE_S
        while True:
            stats = await self.client.stats()
            busy = stats["moves_in_flight"] + stats.get("storage_in_flight", 0.0) + sum(
                n for name, n in stats.items() if name.startswith(("storage_queued_pages", "pages_to_store")))
            if not busy or time.monotonic() > until:
                return stats
            await asyncio.sleep(0.02)


def _grown(before: Mapping[str, float], after: Mapping[str, float], name: str, labels: str = "") -> float:
    """How much a counter has grown, with all its labels that have these in them."""
    return sum(n - before.get(one, 0.0) for one, n in after.items() if one.startswith(name) and labels in one)


def _fit(terms: Sequence[tuple[float, ...]], took: Sequence[float]) -> list[float]:
    """Return the factors of the terms, none below 0: least squares of the relative errors."""
    import numpy as np

    a, left = np.array(terms) / np.array(took)[:, None], list(range(len(terms[0])))
    while True:
        found, *_ = np.linalg.lstsq(a[:, left], np.ones(len(took)), rcond=None)
        if found.min() >= 0:
            break
        left.pop(int(found.argmin()))
    return [float(found[left.index(n)]) if n in left else 0.0 for n in range(len(terms[0]))]
