"""First tokens of long prompts, whole and with a shared prefix: layouts, with a host tier and without.

    PYTHONPATH=src:bench/device python lab/device/first_token.py OUT [--cells one pp2 pair ...] [--tokens 32768]

Qwen3-8B's shape with random weights, `penstock serve` with a device that holds one and a half of the prompts,
so that the next one takes the pages of the last. A round: a prompt, another, the first's with another end.
"""
from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from direct import QWEN3_8B, spread, write
from serving import Server, serving

END = 256                   # of a prompt with the first one's beginning, its own tokens
CELLS = {                   # flags, parts of a page that each pool has, whether there is a host tier
    "one": ((), 1, True), "one, no host tier": ((), 1, False),
    "pp 2": (("--pp", "2"), 2, True), "pp 2, no host tier": (("--pp", "2"), 2, False),
    "pair": (("--prefill", "1", "--decode", "1"), 1, False),
    "pair, hosted": (("--prefill", "1", "--decode", "1", "--sparse-top-k", "2048", "--sparse-kv", "always"),
                     1, True)}


def first(server: Server, ids: list[int]) -> tuple[float, dict[str, Any]]:
    """Seconds until an answer of one token is there, and what of its prompt was where."""
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=120) as answer:
        found = json.load(answer)
    return time.perf_counter() - began, found["usage"]["prompt_tokens_details"]


def of_pair(server: Server) -> dict[str, float]:
    """What both ends have counted so far, and bytes moved between tiers."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return {name: float(value) for name, value in re.findall(
        r"^penstock:((?:prefill_)?(?:pair_|moved_bytes)\S+) (\S+)$", text, re.MULTILINE)}


def measure(cell: str, args: argparse.Namespace) -> dict[str, Any]:
    flags, parts, tier = CELLS[cell]
    token = args.layers * 4096 // parts
    pools = ["--hbm-bytes", str(int(1.5 * args.tokens * token)),
             "--dram-bytes", str(4 * args.tokens * token * parts if tier else 0)]
    rng = random.Random(1)

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(10, 150000) for _ in range(tokens)]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(
            QWEN3_8B | {"num_hidden_layers": args.layers, "torch_dtype": "bfloat16", "eos_token_id": 0}))
        with serving("--load-format", "dummy", "--seed", "1", "--device", "cuda", "--max-num-seqs", "8",
                     "--page-size", "64", "--max-model-len", str(args.tokens + END), *flags, *pools,
                     model=folder) as server:
            for tokens in (args.tokens, args.tokens, END):         # compiles, and what is slow once
                first(server, prompt(tokens))
            whole, again, found, before = [], [], {}, of_pair(server)
            for _ in range(args.rounds):
                one, other = prompt(args.tokens), prompt(args.tokens)
                whole += [first(server, one)[0], first(server, other)[0]]
                took, found = first(server, one[:-END] + prompt(END))
                again.append(took)
            counted = {name: value - before.get(name, 0.0) for name, value in of_pair(server).items()
                       if value != before.get(name, 0.0)}
            ready = server.ready_s
    tail, sent = (counted.get(f"prefill_pair_{name}_total", 0.0) for name in ("tail_bytes", "sent_bytes"))
    if sent:
        counted |= {"to_go": tail / sent,        # of its bytes, when a prompt's last chunk had ended
                    "push_share": counted["prefill_pair_tail_seconds_total"] / sum(whole + again),
                    "push_bytes_s": sent / counted["prefill_pair_send_seconds_total"]}
    row = {"cell": cell, "tokens": args.tokens, "layers": args.layers, "whole_s": spread(whole),
           "shared_prefix_s": spread(again), "hits": found, "counted": counted, "ready_s": ready}
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--cells", nargs="+", default=list(CELLS))
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rows = []
    for cell in args.cells:
        try:
            rows.append(measure(cell, args))
        except Exception as why:            # one cell that fails takes nothing from the others
            rows.append({"cell": cell, "error": repr(why)[:300]})
            print(rows[-1], flush=True)
        write("first_token", args.out, rows, shown=False)


if __name__ == "__main__":
    main()
