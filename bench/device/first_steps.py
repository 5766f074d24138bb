"""The first request of each kind after an engine is ready, and the second, over HTTP: its first token, and
the longest gap of a request that streams beside it.

    PYTHONPATH=src python bench/device/first_steps.py OUT [--servers latent gqa pd ...] [--warm]
    PYTHONPATH=src python bench/device/first_steps.py OUT --delivered latent gqa [--page-sizes 64 16]

Six layers of DeepSeek-V3.2's shape (bench/device/latent.py) and 36 of Qwen3-8B's (direct.py), dummy weights,
prompts as token ids; each server begins with an empty cache of compiled kernels. A row of the result has
both times of the first and of the second of a kind, their ratios (1.3 is the goal), and how many kernels the
engine compiled meanwhile (`penstock:executor_compiled_total`). `latent-tight` has device KV for some 64,000
tokens, and two kinds more: a prompt whose KV comes back from host memory, and requests that preempt each other.

The second: first tokens of prompts of 32,768 tokens (--tokens), one at a time, of one engine and then of a prefill and
a decode instance; `host`: of such a pair whose decode instance has KV on the device, and then of one in host memory.
`push_share` is the part of the pair's first token between the end of a prompt's last step and the last byte of its KV
on its way (`penstock:prefill_pd_tail_seconds_total`).
"""
from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import IO, Any

from direct import QWEN3_8B, spread, write
from experts import QWEN3_30B_A3B
from latent import CONFIG as LATENT
from serving import Server, serving

BESIDE = 30_000                 # tokens of the stream beside, at most
# A layer with experts of DeepSeek-V3.2 itself, in fp8 blocks, but for the vocabulary.
WIDE = LATENT | {
    "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 1,
    "first_k_dense_replace": 0, "quantization_config": QWEN3_30B_A3B["quantization_config"]}
COMMON = ("--device", "cuda", "--load-format", "dummy", "--max-num-seqs", "64")
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
    "pd-resident": (LATENT, ("--prefill-replicas", "1", "--decode-replicas", "1", "--kv-cache-memory-bytes", "12G",
                             "--host-decode", "off")),
    "pd-gqa": (QWEN3_8B, ("--prefill-replicas", "1", "--decode-replicas", "1", "--kv-cache-memory-bytes", "12G")),
    "latent-tight": (LATENT, ("--kv-cache-memory-bytes", "600M", "--kv-offloading-size", "8G", "--host-decode", "off",
                              "--max-model-len", "49152")),
    "moe": (QWEN3_30B_A3B | {"num_hidden_layers": 12}, (
        "--kv-cache-memory-bytes", "600M", "--kv-offloading-size", "8G", "--max-model-len", "20480")),
    "wide": (WIDE, ("--kv-cache-memory-bytes", "4G", "--host-decode", "off")),
    "float32": (LATENT, ("--dtype", "float32", "--kv-cache-memory-bytes", "12G", "--host-decode", "off")),
}
# Of --delivered: the server of one engine, and of a pair; or of two pairs.
DELIVERED = {"latent": ("latent", "pd"), "gqa": ("gqa", "pd-gqa"), "host": ("pd-resident", "pd")}
DELIVERED_TURNS = 6


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


# Of a server whose device KV they exceed: what goes before, unmeasured, and what is measured.
ONCE_MORE = of(random.Random(7), 16_000, 4)
TIGHT: dict[str, tuple[Kind, Kind]] = {
    "load back": (lambda r, _: [ONCE_MORE, *(of(r, 16_000, 1) for _ in range(4))], lambda r, _: [ONCE_MORE]),
    "preemption": (lambda r, _: [], lambda r, _: [of(r, 5_000, 1_500) for _ in range(12)]),
}
# Counters that tell whether a kind of TIGHT was one.
HAPPENED = {"load back": ("prefix_cache_hit_tokens", 'tier="host"'), "preemption": ("num_preemptions", "")}


def counted(url: str, name: str, label: str = "") -> float:
    """A counter of all engines; name: without what stands in front and behind; label: one that it must have."""
    with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
        return sum(float(n) for n in re.findall(
            rf"^penstock:\S*{name}_total\S*{label}\S* (\S+)$", answer.read().decode(), re.M))


def compiled(url: str) -> int:
    return int(counted(url, "executor_compiled"))


async def first_tokens(url: str, rng: random.Random, tokens: int) -> dict[str, Any]:
    """Of prompts that no engine has seen; two before them compile what is not compiled yet."""
    took: list[float] = []
    names = [f"prefill_pd_{name}" for name in ("tail_seconds", "tail_bytes", "sent_bytes", "sent_frames",
                                                 "send_seconds")]
    before: list[float] = []
    for turn in range(-2, DELIVERED_TURNS):
        if turn == 0:
            before = [counted(url, name) for name in names]
        times: list[float] = []
        await stream(url, of(rng, tokens, 8), times)
        if turn >= 0:
            took.append(times[1] - times[0])
    tail_s, tail_bytes, sent, frames, send_s = (counted(url, name) - was
                                                for name, was in zip(names, before, strict=True))
    row: dict[str, Any] = {"first_s": spread(took)}
    if sent:
        row |= {"push_ms": 1e3 * tail_s / len(took), "push_share": tail_s / len(took) / median(took),
                "tail_bytes_share": tail_bytes / sent, "prompt_bytes": sent / len(took),
                "us_a_frame": 1e6 * send_s / frames, "frame_bytes": sent / frames, "send_GB_s": sent / send_s / 1e9}
    return row


def delivered(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    for name in args.delivered:
        for size in args.page_sizes:
            found: list[list[dict[str, Any]]] = []
            for server in DELIVERED[name]:
                with tempfile.TemporaryDirectory() as folder:
                    log = args.out / f"delivered-{server}-{size}.log"
                    with open(log, "w") as file, started(Path(folder), server, "--page-size", str(size),
                                                         stderr=file) as at:
                        found.append([asyncio.run(first_tokens(at.url, random.Random(1), tokens))
                                      for tokens in args.tokens])
                for tokens, row in zip(args.tokens, found[-1], strict=True):
                    rows.append({"server": server, "page_size": size, "tokens": tokens, **row})
                    print(json.dumps(rows[-1]), flush=True)
            for tokens, before, after in zip(args.tokens, *found, strict=True):
                one, pair = (row["first_s"]["median"] for row in (before, after))
                rows.append({"delivered": name, "page_size": size, "tokens": tokens, "added_s": pair - one,
                             "added_share": 1 - one / pair, "push_share": after.get("push_share")})
                print(json.dumps(rows[-1]), flush=True)


@contextlib.contextmanager
def started(folder: Path, name: str, *flags: str, stderr: IO[str] | None = None) -> Iterator[Server]:
    """A server of SERVERS, whose model is made in `folder` if it is not there."""
    config, own = SERVERS[name]
    model = folder / "model"
    if not model.exists():
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", "eos_token_id": 0} | config))
        tokenizer(model)
    with serving(*COMMON, *own, *flags, model=str(model), stderr=stderr) as server:
        yield server


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
    kinds = {kind: (lambda r, _: [], make) for kind, make in KINDS.items()} | (TIGHT if "tight" in name else {})
    for kind, (prepare, make) in kinds.items():
        row: dict[str, Any] = {"server": name, "kind": kind}
        for turn in ("first", "second"):        # of other lengths, as prompts are
            try:
                for body in prepare(rng, most):
                    await once(url, [body], beside)
                had = compiled(url)
                happened = counted(url, *HAPPENED[kind]) if kind in HAPPENED else 0.0
                row[turn] = await once(url, longer(make(rng, most - 64), 3 * (turn == "second")), beside)
            except RuntimeError as why:
                row["refused"] = str(why)
                break
            row[turn]["compiled"] = compiled(url) - had
            if kind in HAPPENED:
                row[turn][HAPPENED[kind][0]] = counted(url, *HAPPENED[kind]) - happened
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
    parser.add_argument("--delivered", nargs="+", choices=list(DELIVERED))
    parser.add_argument("--page-sizes", nargs="+", type=int, default=[64], help="of --delivered")
    parser.add_argument("--tokens", nargs="+", type=int, default=[32_768], help="of its prompts")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    if args.delivered:
        delivered(args, rows)
        write("delivered", args.out, rows, shown=False)
        return
    for name in args.servers:
        with tempfile.TemporaryDirectory() as folder:
            # No kernel has been compiled before on this machine.
            os.environ["TRITON_CACHE_DIR"] = folder + "/triton"
            os.environ["XDG_CACHE_HOME"] = folder + "/cache"
            log = open(args.out / f"{args.name}-{name}.log", "w")
            most = 45_000 if "tight" in name else 120_000 if SERVERS[name][0] is LATENT else 32_000
            with log, started(Path(folder), name, "--page-size", "64", stderr=log) as server:
                rows.append({"server": name, "kind": "ready, cold", "ready_s": round(server.ready_s, 1),
                             "warm_seconds": server.get("/server_info").get("warm_seconds")})
                print(rows[-1], flush=True)
                asyncio.run(measure(server.url, most, rows, name))
            if args.warm:
                with started(Path(folder), name, "--page-size", "64") as server:
                    rows.append({"server": name, "kind": "ready, warm", "ready_s": round(server.ready_s, 1)})
                    print(rows[-1], flush=True)
        write(args.name, args.out, rows)


if __name__ == "__main__":
    main()
