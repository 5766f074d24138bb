"""Selection by bounds beside other choices that need no training, at equal tokens read: perplexity and retrieval.

    PYTHONPATH=src python bench/selection.py MODEL --text FILE [--context 2048] [--budgets 256,128]
        [--output-json FILE] [-- FLAGS of serve ...]

Each choice is `penstock eval` twice: windows of the text, whose last quarter is forced token by token, and codes of
named things in lists (`--task recall`), from the second character on read by what is chosen. Every choice keeps the
first 16 and the last 64 tokens and reads the same number of others, in blocks of the same size; all of them run in the
reference of `select`, changed by bench/patched. Differences are in nats a token, paired by blocks of 64 tokens.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from penstock.bench.report import table, write_json

CHOICES = {"bounds": "", "quest": "quest", "mean keys": "mean", "sinks and window": "window"}
BLOCK = 64                              # tokens: neighbours depend on each other


def paired(losses: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """Mean of the differences a token and its standard error, by blocks."""
    each = [a - b for a, b in zip(losses, base, strict=True)]
    means = [statistics.fmean(each[i:i + BLOCK]) for i in range(0, len(each) - BLOCK + 1, BLOCK)]
    return statistics.fmean(each), statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.inf


def asked(model: str, choice: str, flags: Sequence[str], *words: str) -> dict[str, Any]:
    paths = (str(Path(__file__).with_name("patched")), os.environ.get("PYTHONPATH", ""))
    env = {**os.environ, "CHOICE": choice, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        run = subprocess.run([sys.executable, "-m", "penstock.cli.main", "eval", model, *flags, *words, "--quiet",
                              "--output-json", out.name], env=env, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"{choice}: {run.stderr[-800:]}")
        found: dict[str, Any] = json.load(open(out.name))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--budgets", default="256,128")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--samples", type=int, default=2, help="lists")
    parser.add_argument("--questions", type=int, default=16, help="of each list")
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument("--at-once", type=int, default=1, help="choices that run beside each other")
    parser.add_argument("--output-json", metavar="FILE")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:at])
    budgets = [int(n) for n in args.budgets.split(",")]
    common = ["--backends", "select=reference,write_kv=reference", "--sparse-top-k", str(max(budgets)), "--host-decode",
              "off", "--concurrency", "2", "--contexts", str(args.context), *sys.argv[at + 1:]]
    losses, right = dict[tuple[str, int], list[float]](), dict[tuple[str, int], tuple[float, int]]()

    def of(name: str) -> tuple[str, list[int], dict[str, Any], dict[str, Any]]:
        choice = CHOICES[name]
        own = budgets if choice else [0, *budgets]              # what reads all is the same for all
        words = [*common, "--budgets", ",".join(map(str, own))]
        text = asked(args.model, choice, words, "--text", args.text, "--prefix", "0.75", "--questions",
                     str(args.windows))
        print(name, "text", [(c["budget"], math.exp(c["loss"])) for c in text["contexts"]], flush=True)
        return name, own, text, asked(args.model, choice, words, "--task", "recall", "--samples", str(args.samples),
                                      "--questions", str(args.questions))

    with ThreadPoolExecutor(args.at_once) as pool:
        for name, own, text, lists in pool.map(of, args.choices):
            for found in text["contexts"]:
                losses[name, found["budget"]] = [loss for window in found["losses"] for loss in window]
            for budget, group in zip(own, lists["groups"], strict=True):
                right[name, budget] = group["right"], group["asked"]
    dense, rows = losses.get(("bounds", 0)), []
    for (name, budget), each in losses.items():
        mean, error = paired(each, dense) if dense else (math.nan, math.nan)
        rows.append((budget or "all", name if budget else "-", f"{math.exp(statistics.fmean(each)):.3f}",
                     f"{mean:+.4f} ({2 * error:.4f})" if budget else "",
                     "{:g} of {}".format(*right[name, budget])))
    rows.sort(key=lambda row: -math.inf if row[0] == "all" else -int(row[0]))
    print(table(("tokens read", "choice", "perplexity", "loss above reading all (two standard errors)",
                 "codes right"), rows))
    if args.output_json:
        write_json(args.output_json, {"command": sys.argv[1:], "rows": rows, "losses": {
            f"{name}, {budget}": each for (name, budget), each in losses.items()}})


if __name__ == "__main__":
    main()
