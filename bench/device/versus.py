"""The same checkpoint, prompts and arrivals over HTTP to penstock and to other servers, in turns and crossed over.

    PYTHONPATH=src python bench/device/versus.py OUT --scene a|b|b64|c|d|small MODEL [--peers penstock vllm sglang]
        [--peer 'NAME=COMMAND with {model} {port} {gpu}'] [--path vllm=FOLDER] [--gpus 0 | 0,1] [--rounds 2]

A peer's command is run by a shell; one that a scene has none for is left out. With a GPU for each peer all run from the
start, take turns, and change GPUs in the next round; with fewer one is started after the other, and the next round
begins with the last. Prints a table with versions, card, medians and spread; OUT/versus.json has every measurement.
MODEL: a folder with config.json, and weights unless the scene makes dummy ones (`--shape` writes such a config.json);
one without a tokenizer gets one.
"""
from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from penstock.bench.load import Answer, send
from penstock.bench.report import Spread, percentile, table, write_json
from penstock.eval.ask import Server

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288,
    "vocab_size": 151936, "max_position_embeddings": 140000, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False, "torch_dtype": "bfloat16",
    "eos_token_id": 0}
QWEN3_30B_A3B = QWEN3_8B | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                            "weight_block_size": [128, 128]}}
TINY = QWEN3_8B | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                   "head_dim": 16, "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 16384}
SHAPES = {"qwen3-8b": QWEN3_8B, "qwen3-30b-a3b-fp8": QWEN3_30B_A3B, "tiny": TINY}
SERVED = f"{shlex.quote(sys.executable)} -m penstock.cli.main serve {{model}} --port {{port}}"
VLLM = "CUDA_VISIBLE_DEVICES={gpu} python3 -m vllm.entrypoints.openai.api_server --model {model} --port {port}"
SGLANG = "CUDA_VISIBLE_DEVICES={gpu} python3 -m sglang.launch_server --model-path {model} --port {port}"
OURS = "CUDA_VISIBLE_DEVICES={gpu} " + SERVED


@dataclass(frozen=True, slots=True)
class Work:
    """Requests of `low` to `high` prompt tokens and `new` tokens, `rate` a second by chance; 0: all at once."""

    requests: int
    low: int
    high: int
    new: int
    rate: float = 0.0

    def __str__(self) -> str:
        tokens = f"{self.low:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}"
        at = f", {self.rate:g} a second" if self.rate else ""
        return f"{self.requests} of {tokens} tokens, {self.new} new{at}"


@dataclass(frozen=True, slots=True)
class Scene:
    """commands: of each peer that it is for. agents: sessions of `penstock bench agentx`, in place of works."""

    about: str
    works: tuple[Work, ...]
    commands: Mapping[str, str]
    agents: tuple[int, ...] = ()


KV_A = 16_000_000_000
TOKENS_A = KV_A // (2 * 36 * 8 * 128 * 2)                   # of full attention in that memory
LEN_A = 108_000                         # vLLM starts only if one request of its longest fits
HISPARSE = """'{{"top_k": 2048, "device_buffer_size": 4096, "host_to_device_ratio": 8}}'"""
DSA = ("--kv-cache-dtype bfloat16 --page-size 64 --context-length 163840 --chunked-prefill-size 8192 "
       "--disable-radix-cache --dsa-prefill-backend flashmla_sparse --dsa-decode-backend flashmla_sparse "
       "--cuda-graph-max-bs-decode {rows} --max-running-requests {rows}")
HOSTED = "--page-size 64 --host-decode always --no-prefix-cache --max-num-seqs {rows}"


def _w1(rows: int, ours: str) -> dict[str, str]:
    theirs = f"{SGLANG} {DSA} --enable-hisparse --hisparse-config {HISPARSE} --max-total-tokens 320000 "
    return {"penstock": f"{OURS} {HOSTED} {ours}".replace("{rows}", str(rows)),
            "sglang": f"{theirs} --mem-fraction-static 0.6".replace("{rows}", str(rows))}


SCENES = {
    "a": Scene("Qwen3-8B's shape, random weights, 16 GB for KV; prompts of at most 100,000 tokens, which all take", (
        Work(1, 65_536, 65_536, 128), Work(8, 65_536, 65_536, 256), Work(6, 65_536, 100_000, 256),
        Work(8, 65_536, 98_304, 256, 0.2)), {
        "penstock": f"{OURS} --load-format dummy --kv-cache-memory-bytes {KV_A} --kv-offloading-size 100G "
                    "--sparse-top-k 2048 --no-prefix-cache --max-num-seqs 16",
        "penstock-dense": f"{OURS} --load-format dummy --kv-cache-memory-bytes {KV_A} --kv-offloading-size 100G "
                          "--no-prefix-cache --max-num-seqs 16",
        "vllm": f"{VLLM} --load-format dummy --kv-cache-memory-bytes {KV_A} --max-model-len {LEN_A} "
                "--no-enable-prefix-caching --max-num-seqs 16",
        "sglang": f"{SGLANG} --load-format dummy --max-total-tokens {TOKENS_A} --context-length 140000 "
                  "--disable-radix-cache --max-running-requests 16"}),
    "b": Scene("W1 or W1b, as MODEL is: decode from host memory, hot buffers of 4,096", tuple(
        Work(n, 32_768, 32_768, 192) for n in (1, 8, 16)),
        _w1(16, "--kv-cache-memory-bytes 8G --kv-offloading-size 24G --hot-buffer-tokens 4096")),
    "b64": Scene("W1 or W1b, as MODEL is: 64 requests, 4 GB for KV", (Work(64, 32_768, 32_768, 192),),
        _w1(64, "--kv-cache-memory-bytes 4G --kv-offloading-size 24G --hot-buffer-tokens 4096 "
                "--sparse-metadata-dtype fp8_e4m3")),
    "c": Scene("Qwen3-30B-A3B's shape in fp8 blocks, random weights", (
        Work(1, 512, 512, 256), Work(8, 8_192, 8_192, 128), Work(32, 8_192, 8_192, 128), Work(64, 512, 512, 256)), {
        "penstock": f"{OURS} --load-format dummy --no-prefix-cache --max-num-seqs 64",
        "vllm": f"{VLLM} --load-format dummy --max-model-len 40960 --no-enable-prefix-caching --max-num-seqs 64",
        "sglang": f"{SGLANG} --load-format dummy --context-length 40960 --disable-radix-cache "
                  "--max-running-requests 64"}),
    "d": Scene("Qwen3-8B's shape, random weights, 16 GB for KV, 64 GB of host memory: coding agents", (), {
        "penstock": f"{OURS} --load-format dummy --kv-cache-memory-bytes {KV_A} --kv-offloading-size 64G",
        "vllm": f"VLLM_SERVER_DEV_MODE=1 {VLLM} --load-format dummy --kv-cache-memory-bytes {KV_A} "
                f"--max-model-len {LEN_A} --kv-offloading-size 64 --kv-offloading-backend native",
        "sglang": f"{SGLANG} --load-format dummy --max-total-tokens {TOKENS_A} --context-length 140000 "
                  "--enable-hierarchical-cache --hicache-size 64"}, agents=(4, 16)),
    "small": Scene("to try this program", (Work(1, 64, 64, 8), Work(4, 64, 128, 8), Work(4, 64, 64, 8, 4.0)), {
        "penstock": f"{SERVED} --load-format dummy --kv-cache-memory-bytes 64M --max-num-seqs 4"}),
}
PACKAGES = ("vllm", "sglang")                               # a command with neither runs penstock


# ---------------------------------------------------------------- arithmetic
def orders(peers: Sequence[str], gpus: Sequence[str], rounds: int) -> list[list[tuple[str, str]]]:
    """For each round which peer runs on which GPU, in the order of their turns: forwards, then backwards; with a GPU
    for each they change places every round."""
    found = []
    for n in range(rounds):
        placed = [(peer, gpus[(i + n) % len(gpus)] if len(gpus) > 1 else gpus[0]) for i, peer in enumerate(peers)]
        found.append(placed[::-1] if n % 2 else placed)
    return found


def steady(requests: Sequence[tuple[float, Answer]]) -> float:
    """Tokens a second of all requests while each of them decodes: from the last first token to the first end. NaN if
    they never all do. Each request with when it was sent, in seconds; a chunk counts with its share of the tokens."""
    tokens, begin, end, came = 0.0, 0.0, float("inf"), []
    for sent, answer in requests:
        times = [*accumulate([sent + answer.ttft, *answer.gaps])]
        begin, end = max(begin, times[0]), min(end, times[-1])
        came.append((times, answer.output_tokens / len(times)))
    for times, each in came:
        tokens += each * sum(begin < at <= end for at in times)
    return tokens / (end - begin) if came and end > begin else float("nan")


def measured(requests: Sequence[tuple[float, Answer]], seconds: float) -> dict[str, float]:
    good = [(sent, a) for sent, a in requests if not a.error]
    firsts, gaps = [a.ttft for _, a in good], [gap for _, a in good for gap in a.gaps]
    return {"tokens/s": sum(a.output_tokens for _, a in good) / seconds, "while all decode": steady(good),
            "first token p50, ms": 1e3 * percentile(firsts, 50), "first token p95, ms": 1e3 * percentile(firsts, 95),
            "gap p50, ms": 1e3 * percentile(gaps, 50), "gap p95, ms": 1e3 * percentile(gaps, 95),
            "failed": float(len(requests) - len(good))}


def lines(runs: Sequence[Mapping[str, Any]], first: str) -> list[tuple[str, ...]]:
    """Lines of the table: each work and measure, medians over rounds of each peer, and the ratio of `first` to
    each other in the same round. Of a peer that failed in a round, that round has no ratio."""
    by: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for run in runs:
        for name, value in run["measured"].items():
            if value == value:
                by.setdefault((run["work"], name), {}).setdefault(run["peer"], {})[run["round"]] = value
    found = []
    for (work, name), peers in by.items():
        for peer, values in peers.items():
            pairs = [peers[first][n] / v for n, v in values.items() if n in peers.get(first, {}) and v]
            ratio = str(Spread.of(pairs)) if pairs and peer != first and name != "failed" else ""
            found.append((work, name, peer, str(Spread.of([*values.values()])), ratio))
    return found


# ---------------------------------------------------------------- servers
def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def running(peer: str, command: str, env: Mapping[str, str], log: Path, limit: float) -> Iterator[tuple[str, float]]:
    """The server's address, and the seconds until it answered. command: all but its {port} filled in.

    Raises RuntimeError if it does not answer."""
    port, began = free_port(), time.perf_counter()
    url = f"http://127.0.0.1:{port}"
    with log.open("a") as out:
        process = subprocess.Popen(command.replace("{port}", str(port)), shell=True, stdout=out, stderr=out,
                                   start_new_session=True, env={**os.environ, "HF_HUB_OFFLINE": "1", **env})
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(url + "/v1/models", timeout=5).read()
                break
            if process.poll() is not None or time.perf_counter() - began > limit:
                raise RuntimeError(f"{peer} is not ready: {log.read_text()[-1500:]}")
            time.sleep(0.2)
        yield url, time.perf_counter() - began
    finally:
        for stop in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, stop)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)


def version_of(command: str, env: Mapping[str, str]) -> str:
    """Of the package that a command runs; penstock's commit."""
    package = next((name for name in PACKAGES if name in command), None)
    code = ["git", "rev-parse", "--short", "HEAD"] if package is None else [
        sys.executable, "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    if package is None and os.environ.get("COMMIT"):
        return os.environ["COMMIT"]
    run = subprocess.run(code, capture_output=True, text=True, env={**os.environ, **env})
    return run.stdout.strip() or "unknown"


def card() -> str:
    with contextlib.suppress(OSError):
        run = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                             capture_output=True, text=True)
        return ", ".join(sorted({*run.stdout.strip().splitlines()})) or "no GPU"
    return "no GPU"


# ---------------------------------------------------------------- work
async def one_work(url: str, work: Work, vocab: int, seed: int) -> dict[str, float]:
    """Prompts are the same for each peer and differ between rounds, so that nothing is cached."""
    rng, at, requests = random.Random(f"{seed} {work}"), 0.0, []
    for _ in range(work.requests):
        prompt = rng.choices(range(10, vocab), k=rng.randint(work.low, work.high))
        requests.append((at, prompt))
        at += rng.expovariate(work.rate) if work.rate else 0.0
    async with Server(url, None) as server:
        began = time.perf_counter()

        async def one(delay: float, prompt: list[int]) -> tuple[float, Answer]:
            await asyncio.sleep(delay)
            sent = time.perf_counter() - began
            return sent, await send(server, prompt, work.new)

        answers = await asyncio.gather(*(one(*request) for request in requests))
        took = time.perf_counter() - began
    for error in {a.error for _, a in answers if a.error}:
        print(f"  failed: {error[:300]}", flush=True)
    return measured(answers, took)


def forget(url: str) -> None:
    """Empty the server's prefix cache, by the first of the routes that it has."""
    for path in ("/flush_cache", "/reset_prefix_cache"):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(urllib.request.Request(url + path, b"", method="POST"), timeout=60).read()
            return
    print("  the prefix cache could not be emptied", flush=True)


def agents(url: str, count: int, turns: int, out: Path) -> dict[str, float]:
    """Raises RuntimeError: nothing was measured."""
    out.unlink(missing_ok=True)
    run = subprocess.run([sys.executable, "-m", "penstock.cli.main", "bench", "agentx", "--base-url", url, "--agents",
                          str(count), "--turns", str(turns), "--scale", "4", "--quiet", "--output-json", str(out)],
                         capture_output=True, text=True)
    if run.returncode:                  # 1 with measurements: some requests failed
        print(f"  failed: {(run.stderr or run.stdout)[-400:]}", flush=True)
        if not out.exists():
            raise RuntimeError(f"bench agentx ended with {run.returncode}")
    found = json.loads(out.read_text())
    firsts, gaps = found["series"]["time to first token"], found["series"]["inter-token latency"]
    return {"tokens/s": found["output_tokens"] / found["seconds"],
            "realised / theoretical hits": found["hits"] / found["hits_largest"] if found["hits_largest"] else 1.0,
            "first token p50, ms": 1e3 * percentile(firsts, 50), "first token p95, ms": 1e3 * percentile(firsts, 95),
            "gap p50, ms": 1e3 * percentile(gaps, 50), "gap p95, ms": 1e3 * percentile(gaps, 95),
            "failed": float(found["failed"])}


def with_tokenizer(model: Path, shape: str | None) -> int:
    """Write what the folder lacks: a config.json of `shape`, a tokenizer of one word an id. Return its vocabulary."""
    model.mkdir(parents=True, exist_ok=True)
    if shape and not (model / "config.json").exists():
        (model / "config.json").write_text(json.dumps(SHAPES[shape]))
    vocab = int(json.loads((model / "config.json").read_text())["vocab_size"])
    if not (model / "tokenizer.json").exists():
        (model / "tokenizer.json").write_text(json.dumps({
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
            "model": {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(vocab)}, "unk_token": "w1"}}))
        (model / "tokenizer_config.json").write_text(json.dumps({
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w0", "model_max_length": 1 << 20}))
    return vocab


def _or_failed(measure: Callable[[], dict[str, float]], requests: int) -> dict[str, float]:
    try:
        return measure()
    except Exception as why:
        print(f"  failed: {why!r:.300}", flush=True)
        return {"failed": float(requests)}


class Run:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.scene = args, SCENES[args.scene]
        commands = dict(self.scene.commands) | dict(given.split("=", 1) for given in args.peer)
        self.commands = {name: command for name, command in commands.items()
                         if not args.peers or name in args.peers}
        self.vocab, self.runs = with_tokenizer(Path(args.model), args.shape), list[dict[str, Any]]()
        self.ready: dict[str, list[float]] = {}
        self.paths = dict(given.split("=", 1) for given in args.path)

    def env(self, peer: str) -> dict[str, str]:
        return {"PYTHONPATH": self.paths[peer]} if peer in self.paths else {}

    def work(self, n: int, peer: str, url: str) -> Iterator[None]:
        """Every work of the scene on a server, one at each `next`. One that raises, as when the server is gone, has
        failed with all of its requests."""
        for work in self.scene.works:
            self.note(n, peer, str(work), _or_failed(functools.partial(self.requests, n, url, work), work.requests))
            yield
        for count in self.scene.agents:
            self.note(n, peer, f"{count} agents", _or_failed(
                functools.partial(self.sessions, url, count), count * self.args.turns))
            yield

    def requests(self, n: int, url: str, work: Work) -> dict[str, float]:
        if n == 0:                              # each server's first of a kind compiles
            asyncio.run(one_work(url, Work(min(2, work.requests), work.low, work.low, 8), self.vocab, -1))
        return asyncio.run(one_work(url, work, self.vocab, n))

    def sessions(self, url: str, count: int) -> dict[str, float]:
        forget(url)
        return agents(url, count, self.args.turns, self.args.out / "agents.json")

    def note(self, n: int, peer: str, work: str, found: dict[str, float]) -> None:
        print(n, peer, work, {k: round(v, 2) for k, v in found.items()}, flush=True)
        self.runs.append({"round": n, "peer": peer, "work": work, "measured": found})
        write_json(str(self.args.out / "versus.json"), {
            "scene": self.scene.about, "card": card(), "commands": self.commands, "ready_s": self.ready,
            "versions": self.versions, "runs": self.runs})

    def all(self) -> None:
        gpus = self.args.gpus.split(",")
        self.versions = {name: version_of(command, self.env(name)) for name, command in self.commands.items()}
        together = len(gpus) >= len(self.commands)
        for n, order in enumerate(orders([*self.commands], gpus, self.args.rounds)):
            with contextlib.ExitStack() as stack:
                turns = []
                for peer, gpu in order:
                    with contextlib.ExitStack() if not together else contextlib.nullcontext(stack) as own:
                        try:
                            url, ready = own.enter_context(running(
                                peer, self.commands[peer].format(
                                    model=shlex.quote(self.args.model), gpu=gpu, port="{port}"),
                                self.env(peer), self.args.out / f"{peer}.log", self.args.ready))
                        except RuntimeError as why:     # one that does not start takes nothing from the others
                            print(why, flush=True)
                            continue
                        self.ready.setdefault(peer, []).append(ready)
                        turns.append(self.work(n, peer, url))
                        if not together:
                            for _ in turns.pop():
                                pass
                while turns:                            # work by work, in turns
                    turns = [turn for turn in turns if next(turn, self) is not self]
        ready = "; ".join(f"{peer} ready after {statistics.median(s):.0f} s" for peer, s in self.ready.items())
        print(f"\n{self.scene.about}. {card()}. " + ", ".join(
            f"{name} {version}" for name, version in self.versions.items()) + f". {ready}.\n")
        first = next(iter(self.commands))
        print(table(("work", "measure", "server", "median (spread)", f"{first} to it, by round"),
                    lines(self.runs, first)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("model")
    parser.add_argument("--scene", choices=SCENES, required=True)
    parser.add_argument("--shape", choices=SHAPES, help="write MODEL/config.json of this shape")
    parser.add_argument("--peers", nargs="+", help="of the scene's servers, these (default: all)")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--path", action="append", default=[], metavar="NAME=FOLDER", help="PYTHONPATH of a server")
    parser.add_argument("--gpus", default="0", help="as many as servers: each has one, and they change")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--turns", type=int, default=8, help="of an agent")
    parser.add_argument("--ready", type=float, default=300, help="seconds until a server must answer")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    Run(args).all()


if __name__ == "__main__":
    main()
