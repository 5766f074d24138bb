"""Layouts on two GPUs beside one GPU, over HTTP: decode steps of so many requests, a long prompt.

    PYTHONPATH=src python bench/device/stages.py OUT [--layouts one pp ...] [--server latent-offloaded] [--rows 1 32]

Six layers of DeepSeek-V3.2's shape with MLA KV in host memory (first_steps.py's `latent-offloaded`), dummy weights,
prompts as token ids. A row has of each layout the first token of a prompt of 32,768 tokens, and the gap between
tokens while all requests of its kind decode; `first_32` is the mean of the 32 gaps behind a request's first token,
`busy`: the percentage of that time in which each GPU computed, as its driver says.
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
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeAlias

from direct import spread, write
from first_steps import SERVERS, of, repeating, started, stream

PAIR = ("--prefill-replicas", "1", "--decode-replicas", "1")
LAYOUTS = {
    "one": (), "one-4096": ("--max-num-batched-tokens", "4096"),
    "pp": ("--pp", "2"), "pp-4096": ("--pp", "2", "--max-num-batched-tokens", "4096"),
    "pp-launched": ("--pp", "2", "--enforce-eager"),
    "pp-drafts": ("--pp", "2", "--speculative-method", "ngram"), "one-drafts": ("--speculative-method", "ngram"),
    "tp": ("--tp", "2"), "pair": PAIR, "pair-pp": (*PAIR, "--pp", "2"), "pair-tp": (*PAIR, "--tp", "2"),
}
PROMPT, TURNS = 32_768, 5
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
    await gaps(url, [make(rng, 4000 + 16 * i, 400) for i in range(32)], busy)   # compiles what is not compiled yet
    for count in rows:
        row[f"step_{count}_ms"] = await gaps(
            url, [make(rng, PROMPT if count == 1 else 4000 + 16 * i, new) for i in range(count)], busy)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=["one", "pp", "one-4096", "pp-4096"])
    parser.add_argument("--server", choices=list(SERVERS), default="latent-offloaded")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 32])
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, watching() as busy:
        for layout in args.layouts:
            with open(args.out / f"stages-{layout}.log", "w") as log, started(
                    Path(folder), args.server, *LAYOUTS[layout], stderr=log) as server:
                row = {"layout": layout, "server": args.server, "ready_s": server.ready_s}
                rows.append(row | asyncio.run(measure(server.url, layout, args.rows, busy)))
            print(json.dumps(rows[-1], default=lambda x: round(x, 3)), flush=True)
            write("stages", args.out, rows, shown=False)
    for row in rows:
        print(row["layout"], *(f"{name} {found['median']:.3f} {found.get('busy', '')}" for name, found in row.items()
                               if isinstance(found, dict)))


if __name__ == "__main__":
    main()
