"""Pipeline stages on two GPUs beside one GPU, over HTTP: a decode step of 1 and of 32 requests, a long prompt.

    PYTHONPATH=src python bench/device/stages.py OUT [--layouts one pp ...] [--server latent-offloaded]

Six layers of DeepSeek-V3.2's shape with MLA KV in host memory (first_steps.py's `latent-offloaded`), dummy weights,
prompts as token ids. A row has of each layout the first token of a prompt of 32,768 tokens, and the gap between
tokens while all requests of its kind decode.
"""
from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from direct import spread, write
from first_steps import SERVERS, of, repeating, started, stream

LAYOUTS = {
    "one": (), "one-4096": ("--max-num-batched-tokens", "4096"),
    "pp": ("--pp", "2"), "pp-4096": ("--pp", "2", "--max-num-batched-tokens", "4096"),
    "pp-launched": ("--pp", "2", "--enforce-eager"),
    "pp-drafts": ("--pp", "2", "--speculative-method", "ngram"), "one-drafts": ("--speculative-method", "ngram"),
    "pair-pp": ("--prefill-replicas", "1", "--decode-replicas", "1", "--pp", "2"),
}
PROMPT, TURNS = 32_768, 5


async def gaps(url: str, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """Between tokens of a request, from when the last has begun until the first has ended."""
    times: list[list[float]] = [[] for _ in bodies]
    await asyncio.gather(*(stream(url, body, at) for body, at in zip(bodies, times, strict=True)))
    since, until = max(at[1] for at in times), min(at[-1] for at in times)
    found = [1e3 * (b - a) for at in times for a, b in pairwise(at[1:]) if since <= a and b <= until]
    return spread(found) | {"gaps": len(found), "first_ms": 1e3 * max(at[1] - at[0] for at in times),
                            "tokens_s": sum(since <= x <= until for at in times for x in at) / (until - since)}


async def measure(url: str, layout: str) -> dict[str, Any]:
    rng, took = random.Random(1), list[float]()
    make = repeating if "drafts" in layout else of
    for turn in range(-2, TURNS):
        times: list[float] = []
        await stream(url, of(rng, PROMPT, 4), times)
        if turn >= 0:
            took.append(times[1] - times[0])
    row: dict[str, Any] = {"prompt_s": spread(took)}
    # A prefill instance begins the last of 32 prompts when 400 tokens of the first would have been decoded.
    new = 2000 if "pair" in layout else 400
    await gaps(url, [make(rng, 4000 + 16 * i, new) for i in range(32)])     # compiles what is not compiled yet
    row["step_1_ms"] = await gaps(url, [make(rng, PROMPT, new)])
    row["step_32_ms"] = await gaps(url, [make(rng, 4000 + 16 * i, new) for i in range(32)])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=["one", "pp", "one-4096", "pp-4096"])
    parser.add_argument("--server", choices=list(SERVERS), default="latent-offloaded")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for layout in args.layouts:
            with open(args.out / f"stages-{layout}.log", "w") as log, started(
                    Path(folder), args.server, *LAYOUTS[layout], stderr=log) as server:
                row = {"layout": layout, "server": args.server, "ready_s": server.ready_s}
                rows.append(row | asyncio.run(measure(server.url, layout)))
            print(json.dumps(rows[-1], default=lambda x: round(x, 3)), flush=True)
            write("stages", args.out, rows, shown=False)
    for row in rows:
        print(row["layout"], *(round(row[what]["median"], 3) for what in ("prompt_s", "step_1_ms", "step_32_ms")))


if __name__ == "__main__":
    main()
