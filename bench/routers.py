"""What a router in front costs a request, and what several engines find cached beside one large one.

`PYTHONPATH=src:tests/doubles python bench/routers.py` with `sglang-router` and `smg` on the path; one that is
not there is left out. A tiny model: the first figure is the router's own time, the second counts tokens.
"""
from __future__ import annotations

import contextlib
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import printable
from clients import free_port
from pair_server import Server
from pipeline_engine import CONFIG, checkpoint

WARM, PAIRS = 20, 400
ROUTERS: dict[str, int] = {}            # by its address, the process of each
CONVERSATIONS, TURNS, SYSTEM, SAID = 64, 4, 200, 100


@contextlib.contextmanager
def routing(name: str, *flags: str):
    """The URL of a router, once it answers."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    process = subprocess.Popen(
        [name, "launch", "--port", str(port), "--prometheus-port", str(free_port()), *flags],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ROUTERS[url] = process.pid
        for _ in range(300):
            with contextlib.suppress(httpx.HTTPError, KeyError):
                ask(httpx.Client(base_url=url), "ready?")
                break
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


def processor_s(url: str) -> float:
    """Seconds of processor that the router at this address has used."""
    return sum(map(float, Path(f"/proc/{ROUTERS[url]}/stat").read_text().rsplit(")", 1)[1].split()[11:13])) \
        / os.sysconf("SC_CLK_TCK")


def ask(http: httpx.Client, prompt: str, tokens: int = 1) -> dict:
    answer = http.post("/v1/completions", timeout=120, json={
        "model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True})
    return {**answer.json(), "text": answer.json()["choices"][0]["text"]}


def text(draw: random.Random, length: int) -> str:
    return "".join(draw.choices(printable.CHARACTERS[1:], k=length))


def cost(model: str, folder: Path, router: str) -> None:
    server = Server(model, folder / "log", "--kv-cache-memory-bytes", "64M", "--router-dialect", "sglang")
    try:
        with routing(router, "--worker-urls", server.url) as url:
            arms = [httpx.Client(base_url=server.url), httpx.Client(base_url=url)]
            more, direct = [], []
            for n in range(WARM + PAIRS):                   # in turns: a busy machine is busy for both
                took, used = [0.0, 0.0], processor_s(url)
                for arm in (0, 1) if n % 2 else (1, 0):
                    began = time.perf_counter()
                    ask(arms[arm], "x" * 50)
                    took[arm] = 1e3 * (time.perf_counter() - began)
                if n == WARM:
                    before = used
                if n >= WARM:
                    direct.append(took[0])
                    more.append(took[1] - took[0])
            own = 1e3 * (processor_s(url) - before) / PAIRS
            more.sort()
            middle, aside = PAIRS // 2, round(0.98 * PAIRS ** 0.5)      # 95 %: quantiles of a binomial
            low, high, alone = more[middle - aside], more[middle + aside], statistics.median(direct)
            print(f"{router}: {more[middle]:+.2f} ms more (median of {PAIRS} pairs; 95 %: {low:+.2f} to "
                  f"{high:+.2f}), {own:.2f} ms of processor; direct {alone:.1f} ms", flush=True)
    finally:
        server.close()


def hits(url: str) -> tuple[int, int]:
    """Prompt tokens found cached, and all, of conversations in turns, eight at a time."""
    found = [0, 0]

    def talk(n: int) -> None:
        draw, http = random.Random(n), httpx.Client(base_url=url)
        said = text(random.Random("system"), SYSTEM)
        for _ in range(TURNS):
            said += text(draw, SAID)
            answer = ask(http, said, 16)
            usage = answer["usage"]
            found[0] += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            found[1] += usage["prompt_tokens"]
            said += answer["text"]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(talk, range(CONVERSATIONS)))
    return found[0], found[1]


def shares(model: str, folder: Path, size: int, routers: list[str]) -> None:
    """size: MiB of each of two engines."""
    flags = ("--router-dialect", "sglang", "--max-num-seqs", "8")
    with contextlib.ExitStack() as stack:
        def serving(name: str, *more: str) -> str:
            server = Server(model, folder / name, *flags, *more)
            stack.callback(server.close)
            return server.url

        one = serving("large", "--kv-cache-memory-bytes", f"{2 * size}M")
        large, num = hits(one)
        print(f"one engine of {2 * size} MiB: {large} of {num} prompt tokens cached", flush=True)
        both = hits(serving("dp", "--kv-cache-memory-bytes", f"{size}M", "--dp", "2"))
        print(f"--dp 2 of {size} MiB: {both[0] / large:.3f} of that", flush=True)
        for router in routers:
            workers = [serving(f"{router}{n}", "--kv-cache-memory-bytes", f"{size}M") for n in range(2)]
            with routing(router, "--policy", "cache_aware", "--worker-urls", *workers) as url:
                print(f"two of {size} MiB behind {router}: {hits(url)[0] / large:.3f} of that", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = checkpoint(folder / "model", {**CONFIG, "max_position_embeddings": 2048})
        Path(model, "tokenizer.json").write_text(printable.vocabulary().tokenizer)
        Path(model, "tokenizer_config.json").write_text("{}")
        routers = [name for name in ("sglang-router", "smg") if shutil.which(name)]
        for router in routers:
            cost(model, folder, router)
        for size in map(int, sys.argv[1:] or ["64", "32"]):
            shares(model, folder, size, routers)


if __name__ == "__main__":
    main()
