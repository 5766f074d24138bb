"""Layouts on two GPUs beside one GPU, over HTTP: decode steps of so many requests, a long prompt.

    PYTHONPATH=src python bench/device/stages.py OUT [--layouts one pp ...] [--server latent-offloaded] [--rows 1 32]
    PYTHONPATH=src python bench/device/stages.py OUT --shared 16384 --server moe --layouts one tp pp
    PYTHONPATH=src python bench/device/stages.py OUT --growth 80 --layouts one pp tp pair

Six layers of DeepSeek-V3.2's shape with MLA KV in host memory (first_steps.py's `latent-offloaded`), dummy weights,
prompts as token ids. A row has of each layout the first token of a prompt of 32,768 tokens, and the gap between
tokens while all requests of its kind decode; `begins_ms`: the first gaps of one request, `first_32`: the mean of the
first 32 of each, `busy`: the percentage of that time in which each GPU computed, as its driver says, `bound`: the time
that a GPU's part of a step's weights and KV takes to be read, of a model of MLA KV on the device.

--shared: first tokens of prompts of so many tokens, and of others that share all but the last 256, once the device has
had to give the first one's pages up; where their KV was, and how many answers of 24 tokens are those of the first
layout. --growth: all layouts at once under load for so many seconds; memory of their processes (anonymous, MiB) and of
each GPU, in the second and the last quarter.
"""
from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeAlias

import torch
from chaos import family
from direct import hbm_bytes_s, spread, write
from first_steps import SERVERS, of, repeating, started, stream
from serving import Server

from penstock.model import registry as families
from penstock.model.weights.formats.blocks import quantises

PAIR = ("--prefill-replicas", "1", "--decode-replicas", "1")
LAYOUTS = {
    "one": (), "one-4096": ("--max-num-batched-tokens", "4096"),
    "pp": ("--pp", "2"), "pp-4096": ("--pp", "2", "--max-num-batched-tokens", "4096"),
    "pp-turns": ("--pp", "2", "--pp-together", "1"), "tp-ep": ("--tp", "2", "--ep", "2"),
    "pp-launched": ("--pp", "2", "--enforce-eager"),
    "pp-drafts": ("--pp", "2", "--speculative-method", "ngram"), "one-drafts": ("--speculative-method", "ngram"),
    "tp": ("--tp", "2"), "pair": PAIR, "pair-pp": (*PAIR, "--pp", "2"), "pair-tp": (*PAIR, "--tp", "2"),
}
PROMPT, TURNS = 32_768, 5
SHORT = 4000                # tokens of prompts of several requests, and 16 more of each than of the one before
END, ROUNDS, NEW = 256, 3, 24           # of --shared
QUARTERS = 4
Busy: TypeAlias = list[tuple[float, list[float]]]      # when it was said, of each GPU


@contextlib.contextmanager
def watching() -> Iterator[Busy]:
    """What the driver says of all GPUs, five times a second; nothing without one."""
    said: Busy = []
    if shutil.which("nvidia-smi") is None:
        yield said
        return
    asks = subprocess.Popen(["nvidia-smi", "--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits",
                             "-lms", "200"], stdout=subprocess.PIPE, text=True)

    def read() -> None:
        assert asks.stdout is not None
        for line in asks.stdout:
            gpu, _, percent = line.partition(",")
            with contextlib.suppress(ValueError):
                if int(gpu) == 0:
                    said.append((time.perf_counter(), []))
                said[-1][1].append(float(percent))
    threading.Thread(target=read, daemon=True).start()
    try:
        yield said
    finally:
        asks.terminate()
        asks.wait()


async def gaps(url: str, bodies: list[dict[str, Any]], busy: Busy) -> dict[str, Any]:
    """Between tokens of a request, from when the last has begun until the first has ended."""
    times: list[list[float]] = [[] for _ in bodies]
    await asyncio.gather(*(stream(url, body, at) for body, at in zip(bodies, times, strict=True)))
    since, until = max(at[1] for at in times), min(at[-1] for at in times)
    found = [1e3 * (b - a) for at in times for a, b in pairwise(at[1:]) if since <= a and b <= until]
    said = [each for at, each in [*busy] if since + .4 <= at <= until]         # each is of some time before
    return spread(found) | {"gaps": len(found), "first_ms": 1e3 * max(at[1] - at[0] for at in times),
                            "first_32": mean([1e3 * (at[33] - at[1]) / 32 for at in times if len(at) > 33] or [0.0]),
                            "begins_ms": [round(1e3 * (b - a), 3) for a, b in pairwise(times[0][1:14])],
                            "tokens_s": sum(since <= x <= until for at in times for x in at) / (until - since),
                            "busy": [median(of) for of in zip(*said, strict=False)]}


async def measure(url: str, layout: str, rows: list[int], busy: Busy) -> dict[str, Any]:
    rng, took = random.Random(1), list[float]()
    make = repeating if "drafts" in layout else of
    for turn in range(-2, TURNS):
        times: list[float] = []
        await stream(url, of(rng, PROMPT, 4), times)
        if turn >= 0:
            took.append(times[1] - times[0])
    row: dict[str, Any] = {"prompt_s": spread(took)}
    # A prefill instance begins the last of 32 prompts when 400 tokens of the first would have been decoded.
    new = 2000 if "pair" in layout else 1000
    await gaps(url, [make(rng, SHORT + 16 * i, 400) for i in range(32)], busy)   # compiles what is not compiled yet
    for count in rows:
        row[f"step_{count}_ms"] = await gaps(
            url, [make(rng, PROMPT if count == 1 else SHORT + 16 * i, new) for i in range(count)], busy)
    return row


def bound_ms(config: dict[str, Any], gpus: int, rows: int, context: int) -> float:
    """Of MLA KV, which each TP rank has; experts that are hit where tokens choose at random."""
    split = ("q_b_proj", "kv_b_proj", "o_proj", "shared_experts", "lm_head", ".experts.", "gate_proj", "up_proj",
             "down_proj")
    count = config["n_routed_experts"]
    hit = 1 - (1 - config["num_experts_per_tok"] / count) ** rows
    nbytes = 0.0
    for name, shape in families.tensor_shapes(config):
        if len(shape) == 2 and "embed_tokens" not in name:
            of_one = shape[0] * shape[1] * (1 if "quantization_config" in config and quantises(name) else 2)
            nbytes += of_one * (hit if ".experts." in name else 1) / (gpus if any(x in name for x in split) else 1)
    entry, key = 2 * (config["kv_lora_rank"] + config["qk_rope_head_dim"]), 2 * config["index_head_dim"]
    nbytes += config["num_hidden_layers"] * rows * (key * context + config["index_topk"] * entry)
    return 1e3 * nbytes / hbm_bytes_s()


def ask(server: Server, prompt: list[int], new: int) -> tuple[float, dict[str, Any], list[int]]:
    """Seconds until the answer is there, where its prompt's KV was, and its tokens."""
    body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=120) as answer:
        found = json.load(answer)
    return time.perf_counter() - began, found["usage"]["prompt_tokens_details"], found["choices"][0]["token_ids"]


def shared(server: Server, tokens: int) -> tuple[dict[str, Any], list[list[int]]]:
    """The row, and answers: each prompt's, computed, and of another end, found."""
    rng, whole, again, hits, answers = random.Random(1), list[float](), list[float](), list[Any](), list[list[int]]()

    def drawn(count: int) -> list[int]:
        return [rng.randrange(300, 30000) for _ in range(count)]
    for _ in range(2):
        ask(server, drawn(tokens), 1)                           # compiles, and what is slow once
    for _ in range(ROUNDS):
        begin, others = drawn(tokens - END), [drawn(tokens) for _ in range(3)]
        for prompt in (begin + drawn(END), *others):
            whole.append(ask(server, prompt, 1)[0])
        prompt = begin + drawn(END)
        took, found, _ = ask(server, prompt, 1)
        again.append(took)
        hits.append(found)
        answers += [ask(server, each, NEW)[2] for each in (prompt, others[-1])]
    share = median(again) / median(whole)
    return {"computed_s": spread(whole), "shared_s": spread(again), "share": share, "hits": hits}, answers


def equal(answers: list[list[int]], want: list[list[int]]) -> dict[str, int]:
    both = list(zip(answers, want, strict=True))
    return {"answers": len(both), "equal": sum(a == b for a, b in both),
            "first_equal": sum(a[0] == b[0] for a, b in both)}


async def loaded(url: str, until: float, clients: int = 6) -> int:
    """Requests of all lengths, one after the other, of so many clients; how many tokens have come."""
    async def one(rng: random.Random) -> int:
        tokens = 0
        while time.perf_counter() < until:
            times: list[float] = []
            await stream(url, of(rng, rng.randrange(20, SHORT), rng.randrange(1, 200)), times)
            tokens += len(times) - 1
        return tokens
    return sum(await asyncio.gather(*(one(random.Random(i)) for i in range(clients))))


def memory(servers: list[Server]) -> list[float]:
    """MiB now: of the processes of each server, then of each GPU."""
    found = []
    for server in servers:
        kib = 0
        for pid in family(server.process.pid):
            with contextlib.suppress(OSError):
                kib += sum(int(line.split()[1]) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                           if line.startswith("RssAnon"))
        found.append(kib / 1024)
    for gpu in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(gpu)
        found.append((total - free) / 2**20)
    return found


def growth(args: argparse.Namespace) -> list[dict[str, Any]]:
    with contextlib.ExitStack() as until_over, ThreadPoolExecutor(2 * len(args.layouts)) as pool:
        def start(layout: str) -> Server:
            folder = Path(until_over.enter_context(tempfile.TemporaryDirectory()))
            log = until_over.enter_context(open(args.out / f"growth-{layout}.log", "w"))
            return until_over.enter_context(started(folder, args.server, *LAYOUTS[layout], *args.flags, stderr=log))
        servers = list(pool.map(start, args.layouts))
        for name, server in zip(args.layouts, servers, strict=True):
            print(name, f"ready in {server.ready_s:.1f} s", flush=True)
        until, seen = time.perf_counter() + args.growth, list[list[float]]()
        load = [pool.submit(asyncio.run, loaded(server.url, until)) for server in servers]
        while time.perf_counter() < until:
            time.sleep(1)
            seen.append(memory(servers))
        tokens = [each.result() for each in load]
    quarter = len(seen) // QUARTERS
    names = [*args.layouts, *(f"GPU {i}" for i in range(torch.cuda.device_count()))]
    second, last = ([median(of) for of in zip(*part, strict=True)] for part in (seen[quarter:2 * quarter],
                                                                                seen[-quarter:]))
    return [{"of": name, "second_quarter": a, "last_quarter": b, "grown": b - a, "tokens": said, "seconds": args.growth}
            for name, a, b, said in zip(names, second, last, [*tokens, *[None] * len(names)], strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=["one", "pp", "one-4096", "pp-4096"])
    parser.add_argument("--server", choices=list(SERVERS), default="latent-offloaded")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--shared", type=int, metavar="TOKENS")
    parser.add_argument("--growth", type=float, metavar="SECONDS")
    args, args.flags = parser.parse_known_args()
    rows: list[dict[str, Any]] = []
    args.out.mkdir(parents=True, exist_ok=True)
    if args.growth:
        rows = growth(args)
        write("growth", args.out, rows)
        return
    first: list[list[int]] = []
    with tempfile.TemporaryDirectory() as folder, watching() as busy:
        for layout in args.layouts:
            with open(args.out / f"stages-{layout}.log", "w") as log, started(
                    Path(folder), args.server, *LAYOUTS[layout], *args.flags, stderr=log) as server:
                row: dict[str, Any] = {"layout": layout, "server": args.server, "ready_s": server.ready_s}
                if args.shared:
                    told, answers = shared(server, args.shared)
                    first = first or answers
                    row |= told | equal(answers, first)
                else:
                    row |= asyncio.run(measure(server.url, layout, args.rows, busy))
            if "index_topk" in (config := SERVERS[args.server][0]) and not args.shared and torch.cuda.is_available():
                row |= {f"bound_{n}_ms": bound_ms(config, 2 if "tp" in layout else 1, n, PROMPT if n == 1 else SHORT)
                        for n in args.rows if "pp" not in layout}
            rows.append(row)
            print(json.dumps(rows[-1], default=lambda x: round(x, 3)), flush=True)
            write("stages", args.out, rows, shown=False)
    for row in rows:
        print(row["layout"], *(f"{name} {found['median']:.3f} {found.get('busy', '')}" for name, found in row.items()
                               if isinstance(found, dict)))


if __name__ == "__main__":
    main()
