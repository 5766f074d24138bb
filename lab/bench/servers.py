"""Servers side by side, a request to each in turns: what a commit or a flag changes.

    python lab/bench/servers.py --rounds 20 --before ../old/src

Three comparisons, each the median and the quartiles of the ratio of neighbouring requests:

- without a selection, this source against that of --before (a folder with the package of another commit):
  64 prompt tokens and 48 new ones, tokens/s, decode and all;
- dense requests of a server that has --sparse-top-k, against one without, the same way;
- decode through host pages (--sparse-kv always) against dense decode, both behind --context tokens that are
  cached: time between tokens.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import pydoc_data.topics
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx

HERE = Path(__file__).resolve().parents[2] / "src"
TEXT = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))


@contextlib.contextmanager
def server(source: Path, model: str, threads: int, *flags: str) -> Iterator[httpx.Client]:
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.serve.cli.main", "serve", model, "--port", "0",
         "--threads", str(threads), *flags],
        env=os.environ | {"PYTHONPATH": str(source)}, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"ready on (http://\S+) ", process.stdout.readline())
        assert found, f"{source} {flags}: no server"
        with httpx.Client(base_url=found.group(1), timeout=600) as http:
            yield http
    finally:
        process.kill()
        process.wait()


def whole(http: httpx.Client, **body: object) -> float:
    """Seconds of one request with 48 new tokens."""
    prompt = random.choices(range(1000, 40000), k=64)
    began = time.perf_counter()
    reply = http.post("/v1/completions", json={
        "prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": True, **body})
    assert reply.status_code == 200, reply.text
    return time.perf_counter() - began


def between(http: httpx.Client, context: int, new: int = 32) -> float:
    """Seconds a token behind the first, of one request whose prompt is cached."""
    times: list[float] = []
    tokens: list[int] = []
    with http.stream("POST", "/v1/completions", json={
            "prompt": TEXT[:context * 39 // 10], "max_tokens": new, "temperature": 0, "ignore_eos": True,
            "stream": True, "return_token_ids": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {") and (ids := json.loads(line[6:])["choices"][0].get("token_ids")):
                times.append(time.perf_counter())
                tokens.append(len(ids))
    assert sum(tokens) == new
    return (times[-1] - times[0]) / sum(tokens[1:])


def compare(name: str, rounds: int, one: Callable[[], float], other: Callable[[], float]) -> None:
    """Prints how much faster `one` is than `other`."""
    pairs = []
    for n in range(rounds + 1):
        first, second = (one, other) if n % 2 else (other, one)
        a, b = first(), second()
        pairs.append((a, b) if n % 2 else (b, a))
    pairs = pairs[1:]                                               # the first warms up
    ratios = sorted(b / a for a, b in pairs)
    low, _, high = statistics.quantiles(ratios, n=4)
    a, b = (statistics.median(side) * 1000 for side in zip(*pairs, strict=True))
    print(f"{name}: {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}) of {rounds} pairs; "
          f"medians {a:.1f} and {b:.1f} ms", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=6000)
    parser.add_argument("--budget", type=int, default=512)
    args = parser.parse_args(argv)
    random.seed(0)
    gib, sparse = str(1 << 30), ("--sparse-top-k", str(args.budget))
    with contextlib.ExitStack() as stack:
        def start(source: Path, *flags: str) -> httpx.Client:
            return stack.enter_context(server(source, args.model, args.threads, "--hbm-bytes", gib, *flags))
        plain, selecting = start(HERE), start(HERE, *sparse, "--dram-bytes", gib)
        hosted = start(HERE, *sparse, "--dram-bytes", gib, "--sparse-kv", "always")
        if args.before is not None:
            old = start(args.before.resolve())
            compare("no selection, this source over the one before", args.rounds,
                    lambda: whole(plain), lambda: whole(old))
        compare("dense request, server with over server without --sparse-top-k", args.rounds,
                lambda: whole(selecting, top_k_tokens=0), lambda: whole(plain))
        compare(f"decode behind {args.context} tokens, hosted with budget {args.budget} over dense",
                args.rounds, lambda: between(hosted, args.context),
                lambda: between(plain, args.context))


if __name__ == "__main__":
    main()
