"""Load on a running server over HTTP: request rate or concurrency, latencies as users see them."""
from __future__ import annotations

import asyncio
import json
import random
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.bench.report import optional, percentile, plot_percentiles, shown, table, write_json
from penstock.eval.ask import Server


@dataclass(slots=True)
class Answer:
    """One request. Seconds since it was sent; `gaps` between chunks that carried text or tokens."""

    ttft: float = 0.0
    end: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    error: str = ""
    text: str = ""
    tokens: list[int] = field(default_factory=list)     # empty if the server shows no ids


async def measure(args: Namespace) -> int:
    """Sends `args.num_prompts` requests and prints percentiles. Returns 1 if any failed."""
    async with Server(args.base_url, args.bearer) as server:
        rng = random.Random(args.seed)
        gate = asyncio.Semaphore(args.concurrency or args.num_prompts)
        bar = optional("tqdm").tqdm(total=args.num_prompts, unit="request", disable=args.quiet or None)

        async def one(prompt: list[int], at: float) -> Answer:
            await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
            async with gate:
                answer = await send(server, prompt, args.output_len)
            bar.update()
            return answer

        at, tasks = 0.0, []
        start = time.perf_counter()
        for _ in range(args.num_prompts):
            prompt = [rng.randrange(args.token_id_max) for _ in range(args.input_len)]
            tasks.append(asyncio.create_task(one(prompt, at)))
            if args.request_rate:               # Poisson arrivals
                at += rng.expovariate(args.request_rate)
        answers = await asyncio.gather(*tasks)
        took = time.perf_counter() - start
        bar.close()
    return _report(args, answers, took)


async def send(server: Server, prompt: Sequence[int] | str, output_len: int, *, ids: bool = False,
               more: Mapping[str, object] | None = None) -> Answer:
    """One completion of exactly `output_len` tokens. ids: ask for their ids, too. more: fields of the body."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": output_len, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
            **({"return_token_ids": True} if ids else {}), **(more or {})}
    answer, start = Answer(), time.perf_counter()
    last = 0.0
    try:
        async with server.client.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                await reply.aread()
                answer.error = f"HTTP {reply.status_code}: {reply.text[:200]}"
                return answer
            async for line in reply.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk, now = json.loads(line[6:]), time.perf_counter() - start
                if chunk.get("choices"):
                    if last:
                        answer.gaps.append(now - last)
                    else:
                        answer.ttft = now
                    last = now
                    answer.text += chunk["choices"][0].get("text") or ""
                    answer.tokens += chunk["choices"][0].get("token_ids") or ()
                elif chunk.get("error"):
                    answer.error = chunk["error"]["message"]
                if usage := chunk.get("usage"):
                    answer.prompt_tokens = usage["prompt_tokens"]
                    answer.output_tokens = usage["completion_tokens"]
                    details = usage.get("prompt_tokens_details") or {}
                    answer.cached_tokens = details.get("cached_tokens", 0)
                    details = usage.get("completion_tokens_details") or {}
                    answer.drafted = details.get("draft_tokens", 0)
                    answer.accepted = details.get("accepted_draft_tokens", 0)
    except server.httpx.HTTPError as e:
        answer.error = f"{type(e).__name__}: {e}"
    answer.end = time.perf_counter() - start
    return answer


def _drafts(answers: list[Answer]) -> str:
    """Nothing of a server that drafts nothing."""
    drafted, accepted = sum(a.drafted for a in answers), sum(a.accepted for a in answers)
    return f", {drafted} drafted and {accepted} of them accepted" if drafted else ""


def _report(args: Namespace, answers: list[Answer], took: float) -> int:
    good = [a for a in answers if not a.error]
    series = {"time to first token": [a.ttft for a in good],
              "inter-token latency": [g for a in good for g in a.gaps],
              "end to end": [a.end for a in good]}
    out = sum(a.output_tokens for a in good)
    rate = f"{args.request_rate:g}/s" if args.request_rate else "all at once"
    about = (f"{len(answers)} requests, {rate}, concurrency {args.concurrency or 'unlimited'}, "
             f"{args.input_len} tokens in, {args.output_len} out")
    print(f"\n{about}: {len(answers) - len(good)} failed, {took:.2f} s, "
          f"{len(good) / took:.2f} requests/s, {out / took:.1f} output tokens/s, "
          f"{sum(a.prompt_tokens for a in good) / took:.1f} prompt tokens/s, "
          f"{sum(a.cached_tokens for a in good)} cached tokens{_drafts(good)}\n")
    print(table(("milliseconds", "mean", "p50", "p90", "p99", "max"), [
        [name, *(shown(1e3 * x, ".1f") for x in (
            sum(v) / len(v) if v else float("nan"), percentile(v, 50), percentile(v, 90),
            percentile(v, 99), percentile(v, 100)))] for name, v in series.items()]))
    for error in sorted({a.error for a in answers if a.error})[:5]:
        print(f"failed: {error}")
    if args.output_json:
        write_json(args.output_json, {"about": about, "seconds": took, "series": series})
    if args.plot and good:
        plot_percentiles(args.plot, about, series)
    return 0 if len(good) == len(answers) else 1
