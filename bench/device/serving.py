"""The demo model over HTTP on the GPU beside the same on the CPU, of one machine: `penstock serve` twice.

Greedy and seeded answers in float32 must be equal; in the GPU's own type (bfloat16) the best token at each
position of the CPU's answers, given what came before it, must be the CPU's in 99 of 100.

    PYTHONPATH=src python bench/device/serving.py OUT [--chats tests/data/demo_chats.json]

    PYTHONPATH=src python bench/device/serving.py OUT --layouts MODEL [--device cpu]

The second: forty prompts of 20 to 900 tokens, answers of 32 in float32, by one rank, two stages and a pair,
all on one GPU, their KV on the device or in host pages. Tokens of each must be those of the first.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

NEW = 32
# A host tier of a size of its own: by itself each server takes half of the memory that it finds free.
SMALL = ("--kv-cache-memory-bytes", "256M", "--kv-offloading-size", "2G")
SELECTS = ("--sparse-top-k", "256", *SMALL)
HOSTED = (*SELECTS, "--host-decode", "always")
LAYOUTS = {"one": (), "pp 2": ("--pp", "2"), "pair": ("--prefill-replicas", "1", "--decode-replicas", "1")}
PLACES = {"all of the KV": SMALL, "256 tokens of it": (*SELECTS, "--host-decode", "off"),
          "256 tokens of it, hosted": HOSTED}
NATIVE = {"256 tokens of it": SMALL,                           # of a model that chooses itself
          "256 tokens of it, hosted": ("--kv-cache-memory-bytes", "64M", "--kv-offloading-size", "256M",
                                       "--host-decode", "always",
                                       "--hot-buffer-tokens", "272")}


class Server:
    """`penstock serve` as a user starts it; `ready_s` from start to its line. One that has not said it after `ready`
    seconds is ended."""

    def __init__(self, *flags: str, model: str = "demo", stderr: IO[str] | None = None,
                 env: Mapping[str, str] | None = None, ready: float = 600) -> None:
        started = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", "serve", model, "--port", "0", *flags],
            stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ, **(env or {})})
        assert self.process.stdout is not None
        late = threading.Timer(ready, self.process.kill)
        late.start()
        line = self.process.stdout.readline()
        late.cancel()
        found = re.search(r"ready on (http://\S+) ", line)
        assert found, f"the server did not become ready: {line}{flags}"
        self.url, self.ready_s = found[1], time.perf_counter() - started

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.load(answer)

    def chat(self, messages: Any, **more: object) -> dict[str, Any]:
        body = {"messages": messages, "max_tokens": NEW, "temperature": 0, **more}
        request = urllib.request.Request(self.url + "/v1/chat/completions", json.dumps(body).encode(),
                                         {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            found: dict[str, Any] = json.load(answer)["choices"][0]
            return found

    def answer(self, prompt: list[int]) -> list[int]:
        body = {"prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True}
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(),
                                         {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            found: list[int] = json.load(answer)["choices"][0]["token_ids"]
            return found

    def chats(self, chats: list[Any], **more: object) -> list[str]:
        """Sixteen at a time."""
        with ThreadPoolExecutor(16) as pool:
            return [a["message"]["content"] for a in pool.map(lambda m: self.chat(m, **more), chats)]


@contextlib.contextmanager
def serving(*flags: str, model: str = "demo", stderr: IO[str] | None = None,
            env: Mapping[str, str] | None = None, ready: float = 600) -> Iterator[Server]:
    server = Server(*flags, model=model, stderr=stderr, env=env, ready=ready)
    try:
        yield server
    finally:
        server.process.terminate()
        late = threading.Timer(60, server.process.kill)
        late.start()
        code = server.process.wait()
        late.cancel()
        assert code == 0, f"{flags}: the server ended with {code}"


def refused(*flags: str) -> str:
    """What a server that cannot start says."""
    run = subprocess.run([sys.executable, "-m", "penstock.cli.main", "serve", "demo", "--port", "0",
                          *flags], capture_output=True, text=True, env=os.environ, timeout=120)
    assert run.returncode != 0, flags
    return run.stderr.strip().splitlines()[-1]


def teacher_forced(chats: list[Any]) -> dict[str, float]:
    """Best tokens of the GPU in bfloat16 at the positions of the CPU's float32 answers."""
    from penstock import LLM, SamplingParams
    with LLM("demo", device="cpu", dtype="float32") as llm:
        first = [out.outputs[0].token_ids for out in llm.chat(
            chats, SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True))]
    with LLM("demo", device="cuda", dtype="auto") as llm:
        outs = llm.chat(chats, [SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=1,
                                               forced=tuple(tokens)) for tokens in first])
    same = total = 0
    for tokens, out in zip(first, outs, strict=True):
        got = out.outputs[0]
        assert list(got.token_ids) == list(tokens)
        for token, step in zip(tokens, got.logprobs, strict=True):
            total += 1
            same += step[token].rank == 1
    return {"positions": total, "argmax_equal": same / total}


def layouts(model: str, device: str, at_once: int) -> list[dict[str, Any]]:
    """A row of each place and layout, with how many of its answers are those of one rank."""
    rng = random.Random(0)
    prompts = [[rng.randrange(10, 90) for _ in range(rng.randrange(20, 900))] for _ in range(40)]
    native = model != "demo" and "index_topk" in json.loads((Path(model) / "config.json").read_text())

    def measured(cell: tuple[str, str]) -> dict[str, Any]:
        place, layout = cell
        row: dict[str, Any] = {"place": place, "layout": layout, "of": len(prompts)}
        flags = (*(NATIVE if native else PLACES)[place], *LAYOUTS[layout])
        with tempfile.TemporaryFile("w+") as log:
            try:
                with serving("--device", device, "--dtype", "float32", "--max-num-seqs", "16", *flags,
                             model=model, stderr=log) as server, ThreadPoolExecutor(16) as pool:
                    row["given"] = list(pool.map(server.answer, prompts))
                    stats = server.get("/server_info")["stats"]
                row |= {"ready_s": server.ready_s, "words": len({t for one in row["given"] for t in one})}
                row |= {name: sum(v for k, v in stats.items() if k.startswith(name))
                        for name in ("hot_hits_total", "hot_misses_total", "pair_delivered_total")}
            except Exception as why:    # one layout that fails takes nothing from the others
                log.seek(0)
                row["error"] = f"{why!r:.300}: {log.read()[-800:]}"
        print({k: v for k, v in row.items() if k != "given"}, flush=True)
        return row
    with ThreadPoolExecutor(at_once) as pool:
        rows = list(pool.map(measured, [(p, x) for p in (NATIVE if native else PLACES) for x in LAYOUTS]))
    # One rank answers alike wherever it finds what it selects.
    want = {row["place"].removesuffix(", hosted"): row["given"] for row in reversed(rows)
            if row["layout"] == "one" and "given" in row}
    for row in rows:
        wanted = want.get(row["place"].removesuffix(", hosted"), [])
        row["equal"] = sum(a == b for a, b in zip(row.pop("given", []), wanted, strict=False))
        print(f"{row['place']}, {row['layout']}: {row['equal']} of {row['of']}", flush=True)
    return rows


def main() -> None:
    from direct import write
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layouts", metavar="MODEL")
    parser.add_argument("--device", default="cuda", help="of --layouts")
    parser.add_argument("--at-once", type=int, default=5, help="servers of --layouts")
    parser.add_argument("--chats", type=Path, default=Path("tests/data/demo_chats.json"))
    args = parser.parse_args()
    if args.layouts:
        write("layouts", args.out, layouts(args.layouts, args.device, args.at_once), shown=False)
        return
    by_language = json.loads(args.chats.read_text(encoding="utf-8"))
    chats = [messages for several in by_language.values() for messages in several]
    seeded = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 7}
    row: dict[str, Any] = {"chats": len(chats), "new_tokens": NEW}
    with serving("--device", "cpu", "--dtype", "float32") as cpu, \
            serving("--device", "auto", "--dtype", "float32") as gpu:
        row["ready_s_cold_float32"] = gpu.ready_s
        info = gpu.get("/server_info")
        told = ("gpu", "device", "dtype", "backend", "hbm", "workspace", "capture", "start")
        row["server_info"] = {k: info[k] for k in sorted(info) if k.startswith(told)}
        for name, more in (("greedy", {}), ("seeded", seeded)):
            a, b = cpu.chats(chats, **more), gpu.chats(chats, **more)
            row[f"{name}_equal"] = sum(x == y for x, y in zip(a, b, strict=True)) / len(chats)
            pairs = enumerate(zip(a, b, strict=True))
            row[f"{name}_differ"] = [(i, x, y) for i, (x, y) in pairs if x != y][:3]
            print(name, row[f"{name}_equal"], row[f"{name}_differ"], flush=True)
    with serving("--device", "auto") as gpu:
        row["ready_s_warm_bfloat16"] = gpu.ready_s
        row["dtype_auto"] = gpu.get("/server_info")["dtype"]
        row["first_answer"] = gpu.chats(chats[:1])
    row |= {f"bfloat16_{k}": v for k, v in teacher_forced(chats).items()}
    write("serving", args.out, [row])
    row["refused"] = [refused("--gpu-memory-utilization", "0.004"), refused("--kv-cache-memory-bytes", "500GiB")]
    write("serving", args.out, [row])


if __name__ == "__main__":
    main()
