"""The recall model, asked the same on every layout and in every format: a wrong row is a wrong answer.

    PYTHONPATH=src python bench/device/recall.py OUT [--device cpu] [--contexts 1024,4000] [--at-once 6]

Each arm is `penstock serve` and `penstock eval --base-url`; hot buffers of 272 tokens, 1.06 of `index_topk`.
Answers in float32 must be those of one rank on a CPU; in other formats as many of them right.
"""
from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from direct import write
from serving import serving

MODEL = str(Path(__file__).parents[2] / "tests" / "data" / "recall")
ON_DEVICE = ("--kv-cache-memory-bytes", "256M")
HOSTED = ("--kv-cache-memory-bytes", "64M", "--kv-offloading-size", "256M", "--host-decode", "always",
          "--hot-buffer-tokens", "272")
ARMS: dict[str, tuple[str, ...]] = {
    "resident": ON_DEVICE, "hosted": HOSTED, "pp 2": ("--pp", "2", *ON_DEVICE),
    "pp 2, hosted": ("--pp", "2", *HOSTED), "pair": ("--prefill-replicas", "1", "--decode-replicas", "1", *ON_DEVICE),
    "pair, hosted": ("--prefill-replicas", "1", "--decode-replicas", "1", *HOSTED)}
FORMATS = {"bfloat16": ("--dtype", "bfloat16"),
           "fp8 rows": ("--dtype", "bfloat16", "--kv-cache-dtype", "fp8_e4m3")}


def ask(name: str, flags: tuple[str, ...], args: argparse.Namespace) -> dict[str, Any]:
    """The arm, with what was given to each question; `error`: why there is nothing."""
    log = tempfile.TemporaryFile("w+")
    try:
        with serving(*flags, "--max-num-seqs", "16", model=MODEL, stderr=log) as server, \
                tempfile.NamedTemporaryFile(suffix=".json") as out:
            subprocess.run(
                [sys.executable, "-m", "penstock.cli.main", "eval", "--base-url", server.url, "--quiet",
                 "--task", args.task, "--contexts", args.contexts, "--samples", str(args.samples),
                 "--questions", str(args.questions), "--concurrency", "16", "--output-json", out.name],
                check=True, stdout=subprocess.PIPE, timeout=args.limit)
            found = json.load(open(out.name))["answers"]
            told = {k: v for k, v in server.get("/server_info")["stats"].items()
                    if k.startswith(("hot_misses_total", "pair_delivered_total", "hot_window"))}
    except Exception as why:                # one arm that fails takes nothing from the others
        log.seek(0)
        print(name, repr(why)[:300], log.read()[-1500:], sep="\n", flush=True)
        return {"arm": name, "error": repr(why)[:300]}
    row = {"arm": name, "right": sum(a["right"] for a in found), "asked": len(found), "told": told}
    print(row, flush=True)
    return row | {"given": [a["given"] for a in found]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--arms", nargs="+", help="the first is what others are compared with")
    parser.add_argument("--task", default="recall")
    parser.add_argument("--contexts", default="1024,4000")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--at-once", type=int, default=6, help="servers")
    parser.add_argument("--limit", type=float, default=120, help="seconds for the questions of an arm")
    args = parser.parse_args()
    exact = ("--device", args.device, "--dtype", "float32")
    arms = {"cpu": ("--device", "cpu", "--dtype", "float32", *ON_DEVICE)}
    arms |= {name: (*exact, *flags) for name, flags in ARMS.items()}
    arms |= {f"{kind}, {name}": ("--device", args.device, *form, *ARMS[name])
             for kind, form in FORMATS.items() for name in ("resident", "hosted")}
    arms = {name: flags for name, flags in arms.items() if name in args.arms} if args.arms else arms
    with ThreadPoolExecutor(args.at_once) as pool:
        rows = list(pool.map(lambda arm: ask(*arm, args), arms.items()))
    want = rows[0].get("given")
    for row in rows:
        row["as_the_cpu"] = sum(a == b for a, b in zip(row.pop("given", []), want or [], strict=False))
        print(row, flush=True)
    write("recall", args.out, rows)


if __name__ == "__main__":
    main()
