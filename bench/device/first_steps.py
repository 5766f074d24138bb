"""The first request of each kind after an engine is ready, and the second, over HTTP: its first token, and
the longest gap of a request that streams beside it.

    PYTHONPATH=src python bench/device/first_steps.py OUT [--servers latent gqa pd ...] [--warm]

Six layers of DeepSeek-V3.2's shape (bench/device/latent.py) and 36 of Qwen3-8B's (direct.py), dummy weights,
prompts as token ids; each server begins with an empty cache of compiled kernels. A row of the result has
both times of the first and of the second of a kind, their ratios (1.3 is the goal), and how many kernels the
engine compiled meanwhile (`penstock:executor_compiled_total`).
"""
from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import tempfile
import time
import urllib.request
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from direct import QWEN3_8B, write
from latent import CONFIG as LATENT
from serving import serving

BESIDE = 30_000                 # tokens of the stream beside, at most
COMMON = ("--device", "cuda", "--load-format", "dummy", "--max-num-seqs", "64", "--page-size", "64")
ALWAYS = ("--host-decode", "always", "--kv-offloading-size", "16G")
SERVERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "latent": (LATENT, ("--kv-cache-memory-bytes", "12G", "--kv-offloading-size", "4G", "--host-decode", "off")),
    "latent-drafts": (LATENT, ("--kv-cache-memory-bytes", "12G", "--speculative-method", "ngram", "--host-decode",
                               "off")),
    "latent-offloaded": (LATENT, ("--kv-cache-memory-bytes", "4G", *ALWAYS)),
    "latent-offloaded-drafts": (LATENT, ("--kv-cache-memory-bytes", "4G", *ALWAYS, "--speculative-method", "ngram")),
    "gqa": (QWEN3_8B, ("--kv-cache-memory-bytes", "24G", "--kv-offloading-size", "8G")),
    "gqa-drafts": (QWEN3_8B, ("--kv-cache-memory-bytes", "24G", "--speculative-method", "ngram")),
    "gqa-offloaded": (QWEN3_8B, ("--kv-cache-memory-bytes", "12G", *ALWAYS, "--sparse-top-k", "2048")),
    "pd": (LATENT, ("--prefill-replicas", "1", "--decode-replicas", "1", "--kv-cache-memory-bytes", "4G", *ALWAYS)),
    "float32": (LATENT, ("--dtype", "float32", "--kv-cache-memory-bytes", "12G", "--host-decode", "off")),
}


async def stream(url: str, body: dict[str, Any], times: list[float]) -> None:
    """When it was sent, and when each piece came, into `times`."""
    host, _, port = url.removeprefix("http://").partition(":")
    data = json.dumps({"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True} | body)
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 24)
    times.append(time.perf_counter())
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: "
                 b"application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data.encode())
    try:
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
            elif line.startswith(b"{"):
                raise RuntimeError(line.decode()[:300])
    finally:
        writer.close()


def of(rng: random.Random, tokens: int, new: int, **more: Any) -> dict[str, Any]:
    return {"prompt": [rng.randrange(300, 30000) for _ in range(tokens)], "max_tokens": new} | more


def repeating(rng: random.Random, tokens: int, new: int) -> dict[str, Any]:
    """A prompt in which n-grams come again, so that there are drafts."""
    part = [rng.randrange(300, 30000) for _ in range(16)]
    return {"prompt": part * (tokens // 16), "max_tokens": new}


def longer(requests: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    return [body | {"prompt": body["prompt"] + body["prompt"][:tokens]} for body in requests]


Kind = Callable[[random.Random, int], list[dict[str, Any]]]
KINDS: dict[str, Kind] = {
    "prompt of one chunk": lambda r, _: [of(r, 2000, 4)],
    "prompt of several": lambda r, _: [of(r, 20_000, 4)],
    "longest prompt": lambda r, most: [of(r, most, 4)],
    "decode at 1": lambda r, _: [of(r, 40, 64)],
    "decode at 16": lambda r, _: [of(r, 40 + i, 64) for i in range(16)],
    "decode at 60": lambda r, _: [of(r, 40 + i, 64) for i in range(60)],
    "drafts": lambda r, _: [repeating(r, 320, 64)],
    "logprobs": lambda r, _: [of(r, 50, 16, logprobs=3)],
    "prompt logprobs": lambda r, _: [of(r, 700, 4, prompt_logprobs=1)],
    "drawn tokens": lambda r, _: [of(r, 50, 16, temperature=.8, top_p=.9, top_k=20, presence_penalty=.5)],
    "a grammar": lambda r, _: [of(r, 50, 16, guided_regex="[0-9]{40}", ignore_eos=False)],
}


def compiled(url: str) -> int:
    with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
        return int(sum(float(n) for n in re.findall(
            r"^penstock:\S*executor_compiled_total\S* (\S+)$", answer.read().decode(), re.M)))


async def once(url: str, requests: list[dict[str, Any]], beside: list[float]) -> dict[str, float]:
    before, began = len(beside), time.perf_counter()
    times: list[list[float]] = [[] for _ in requests]
    await asyncio.gather(*(stream(url, body, at) for body, at in zip(requests, times, strict=True)))
    await asyncio.sleep(.05)
    gaps = [b - a for a, b in pairwise(beside[max(0, before - 1):])]
    return {"first_ms": 1e3 * max(at[1] - at[0] for at in times), "gap_ms": 1e3 * max(gaps, default=0.0),
            "all_ms": 1e3 * (time.perf_counter() - began), "pieces_beside": len(gaps)}


async def streaming(url: str, rng: random.Random, beside: list[float]) -> asyncio.Task[None]:
    """A request that streams into `beside` from now on."""
    beside.clear()
    other = asyncio.create_task(stream(url, of(rng, 40, BESIDE), beside))
    while len(beside) < 40:
        await asyncio.sleep(.02)
        if other.done():
            other.result()
    return other


async def measure(url: str, most: int, rows: list[dict[str, Any]], name: str) -> None:
    beside: list[float] = []
    rng = random.Random(1)
    other = await streaming(url, rng, beside)
    # Of the stream beside: from its first token on, before anything else has come.
    start = {"server": name, "kind": "the very first", "first_ms": 1e3 * (beside[1] - beside[0]),
             "gap_ms": 1e3 * max(b - a for a, b in pairwise(beside[1:]))}
    rows.append(start)
    for kind, make in KINDS.items():
        row: dict[str, Any] = {"server": name, "kind": kind}
        for turn in ("first", "second"):        # of other lengths, as prompts are
            had = compiled(url)
            try:
                row[turn] = await once(url, longer(make(rng, most - 64), 3 * (turn == "second")), beside)
            except RuntimeError as why:
                row["refused"] = str(why)
                break
            row[turn]["compiled"] = compiled(url) - had
        if "second" in row:
            for what in ("first_ms", "gap_ms"):
                row[f"ratio_{what}"] = row["first"][what] / max(1e-9, row["second"][what])
        rows.append(row)
        print(json.dumps(row, default=lambda v: round(v, 2))[:400], flush=True)
        if other.done():
            other = await streaming(url, rng, beside)
    other.cancel()


def tokenizer(folder: Path) -> None:
    """One id a byte, for grammars."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--servers", nargs="+", choices=list(SERVERS), default=list(SERVERS)[:5])
    parser.add_argument("--name", default="first-steps", help="of the file in OUT")
    parser.add_argument("--warm", action="store_true", help="start each server once more, and only start it")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name in args.servers:
        config, flags = SERVERS[name]
        with tempfile.TemporaryDirectory() as folder:
            # No kernel has been compiled before on this machine.
            os.environ["TRITON_CACHE_DIR"] = folder + "/triton"
            os.environ["XDG_CACHE_HOME"] = folder + "/cache"
            model = Path(folder, "model")
            model.mkdir()
            own = {"torch_dtype": "bfloat16", "eos_token_id": 0} | config
            (model / "config.json").write_text(json.dumps(own))
            tokenizer(model)
            log = open(args.out / f"{args.name}-{name}.log", "w")
            most = 120_000 if config is LATENT else 32_000
            with log, serving(*COMMON, *flags, model=str(model), stderr=log) as server:
                rows.append({"server": name, "kind": "ready, cold", "ready_s": round(server.ready_s, 1),
                             "warm_seconds": server.get("/server_info").get("warm_seconds")})
                print(rows[-1], flush=True)
                asyncio.run(measure(server.url, most, rows, name))
            if args.warm:
                with serving(*COMMON, *flags, model=str(model)) as server:
                    rows.append({"server": name, "kind": "ready, warm", "ready_s": round(server.ready_s, 1)})
                    print(rows[-1], flush=True)
        write(args.name, args.out, rows)


if __name__ == "__main__":
    main()
