"""Prompts that come together, over HTTP: when each has its first token, and the gaps of who decodes beside.

SmolLM2's shape with random weights, prompts of 100 tokens as ids, `penstock serve` as a user starts it.

    PYTHONPATH=src python bench/device/crowd.py OUT [FLAGS of serve ...]

With `--work 32x8000+128`, Qwen3-8B's shape and so many clients, tokens of prompt and of answer: first
tokens, gaps and tokens/s. Gaps are told twice: as this client saw them, and from the server's own histogram,
since one Python process that takes 47,000 pieces a second makes gaps of its own.
"""
from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import tempfile
import time
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

from direct import QWEN3_8B
from serving import serving

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
    "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "head_dim": 64, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "eos_token_id": 0}
CROWDS, PROMPT = (1, 64, 256), 100


async def stream(url: str, ids: list[int], new: int) -> list[float]:
    """When the request was sent, and when each piece of its answer came."""
    host, _, port = url.removeprefix("http://").partition(":")
    body = json.dumps({"prompt": ids, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True,
                       "return_token_ids": True}).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    times = [time.perf_counter()]
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                 b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
    writer.close()
    assert len(times) > new // 2, f"{len(times)} pieces of {new} tokens"
    return times


def prompt(rng: random.Random, tokens: int = PROMPT) -> list[int]:
    return [rng.randrange(10, 49000) for _ in range(tokens)]


def quantiles(values: list[float]) -> dict[str, float]:
    """In ms."""
    ordered = sorted(1e3 * v for v in values)
    return {"p50": statistics.median(ordered), "p99": ordered[int(.99 * (len(ordered) - 1))],
            "most": ordered[-1], "count": len(ordered)}


_GAP = re.compile(r'inter_token_latency_seconds_bucket\{le="([^"]+)"\} (\S+)')


def gaps_until_now(url: str) -> dict[float, float]:
    """Of the server: how many gaps so far were at most so many seconds."""
    with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
        return {float(bound): float(count) for bound, count in _GAP.findall(answer.read().decode())}


def between(before: dict[float, float], after: dict[float, float]) -> dict[str, float]:
    """In ms: the bound under which so many of the gaps lie that came between."""
    count = {bound: after[bound] - before[bound] for bound in after}
    all_of = count[float("inf")]
    return {f"p{q}": 1e3 * min(b for b, c in count.items() if c >= q / 100 * all_of) for q in (50, 99)} | {
        "count": all_of}


async def work(url: str, clients: int, tokens: int, new: int) -> dict[str, Any]:
    """All clients at once, once."""
    rng, before, began = random.Random(clients), gaps_until_now(url), time.perf_counter()
    got = await asyncio.gather(*(stream(url, prompt(rng, tokens), new) for _ in range(clients)))
    seconds = time.perf_counter() - began
    return {"work": f"{clients}x{tokens}+{new}", "tokens_s": clients * new / seconds, "seconds": seconds,
            "first_token_ms": quantiles([t[1] - t[0] for t in got]),
            "gaps_ms": quantiles([b - a for times in got for a, b in pairwise(times[1:])]),
            "server_gaps_at_most_ms": between(before, gaps_until_now(url))}


async def measure(url: str, repeats: int) -> list[dict[str, Any]]:
    rng, rows = random.Random(0), []
    await asyncio.gather(*(stream(url, prompt(rng), 8) for _ in range(8)))
    for count in CROWDS:
        each = []
        for _ in range(repeats + 1):
            got = await asyncio.gather(*(stream(url, prompt(rng), 4) for _ in range(count)))
            each.append(statistics.median(t[1] - t[0] for t in got))
        rows.append({"crowd": count, "first_token_p50_ms": [1e3 * e for e in each[1:]],
                     "first_time_ms": 1e3 * each[0]})
        print(rows[-1], flush=True)
    for count in CROWDS[1:]:
        decoding = [asyncio.create_task(stream(url, prompt(rng), 900)) for _ in range(count)]
        await asyncio.sleep(.5)
        before, began = gaps_until_now(url), time.perf_counter()
        for _ in range(repeats):
            await asyncio.gather(*(stream(url, prompt(rng), 4) for _ in range(count)))
        after, ended = gaps_until_now(url), time.perf_counter()
        gaps = [b - a for times in await asyncio.gather(*decoding) for a, b in pairwise(times[1:])
                if began < b < ended]
        rows.append({"decoding": count, "gaps_ms": quantiles(gaps),
                     "server_gaps_at_most_ms": between(before, after), "window_s": ended - began})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", nargs="+", default=[], metavar="CLIENTSxPROMPT+NEW")
    args, flags = parser.parse_known_args()
    shape = QWEN3_8B | {"torch_dtype": "bfloat16", "eos_token_id": 0} if args.work else SMOLLM2
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        with serving("--load-format", "dummy", "--max-num-seqs", "256" if args.work else "512",
                     "--max-waiting", "2048", *flags, model=folder) as server:
            rows = []
            for each in args.work:
                rows.append(asyncio.run(work(server.url, *map(int, re.split(r"[x+]", each)))))
                print(rows[-1], flush=True)
            rows = rows or asyncio.run(measure(server.url, args.repeats))
            stats = server.get("/server_info")["stats"]
        kept = {name: value for name, value in stats.items() if name.startswith(("steps", "executor"))}
        found = {"ready_s": server.ready_s, "rows": rows, "stats": kept}
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
