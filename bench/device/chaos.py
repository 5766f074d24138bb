"""Two pairs of prefill and decode instances under load, whose processes are killed one after the other.

    PYTHONPATH=src:bench/device python bench/device/chaos.py OUT MODEL [--seconds 540] [--clients 32] [--every 6]

MODEL: the recall model (tests/data/recall), whose answers a wrong row of KV changes. Each of two servers is a prefill
and a decode instance, on a GPU of its own where there are two; decode reads KV from host memory behind small hot
buffers, an MTP layer drafts, device and host hold a part of the prompts, and both write pages to one folder. Clients
ask greedily for known prompts, streamed and not, some leave at once; what a server refuses or breaks off is asked of
any again. Every few seconds, while both serve, one process of one server is killed: its engines, ranks and helpers, or
the server itself, which is then started again. Answers must be those of one engine before that, which reads all KV from
its device in the same type, up to the first token whose two best are close, as GPUs round by what runs together; at the
end nothing may be held by a server, and none of its processes, no shared memory and no unfinished file may be left.
"""
from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import signal
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from direct import spread, write
from serving import Server, serving

from penstock.eval import tasks

HOSTED = ("--kv-cache-memory-bytes", "4M", "--kv-offloading-size", "24M", "--hot-buffer-tokens", "272",
          "--host-decode", "always", "--speculative-method", "mtp", "--prefill-replicas", "1", "--decode-replicas", "1",
          "--max-waiting", "200", "--kv-storage-policy", "wait_complete")
LEFT = re.compile("in_use|in_flight|fenced|requests_(running|waiting)")
NEW, LEAVES = 24, .1
CLEAR = .25             # of the two best logprobs, what they are apart where rounding decides nothing


def prompts(seed: int) -> list[str]:
    """Of contexts that several questions share, 200 to 900 words."""
    size = tasks.Size(contexts=(200, 500, 900), samples=4, questions=4, seed=seed, tokens_of=lambda t: len(t.split()))
    return [one.prompt for task in ("recall", "tracking") for one in tasks.in_words(task, size)]


def family(root: int) -> dict[int, str]:
    """Processes below this one and itself, and what each is."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
    found, fresh = dict[int, str](), {root} & parents.keys()
    while fresh:
        for pid in fresh:
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            found[pid] = "server" if pid == root else next((w for w in words if "penstock" in w or "tracker" in w),
                                                           words[0])[-60:]
        fresh = {pid for pid, parent in parents.items() if parent in fresh} - found.keys()
    return found


def left_in_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "penstock" in name or name.startswith(("psm_", "sem."))}


class Site:
    """One server that is started again whenever it has ended."""

    def __init__(self, number: int, model: str, flags: tuple[str, ...], out: Path) -> None:
        self.number, self.model, self.flags, self.out = number, model, flags, out
        self.server: Server | None = None
        self.starts, self.pids = list[float](), set[int]()

    def start(self) -> None:
        gpus = torch.cuda.device_count()
        env = {"CUDA_VISIBLE_DEVICES": str(self.number % gpus)} if gpus else {}
        with open(self.out / f"server-{self.number}.log", "a") as log:
            self.server = Server(*self.flags, model=self.model, stderr=log, env=env)
        self.starts.append(self.server.ready_s)

    def keep(self, over: threading.Event, errors: list[str]) -> None:
        while not over.wait(.2):
            if self.server is not None and self.server.process.poll() is not None:
                self.server = None
                try:
                    self.start()
                except AssertionError as e:     # what it printed in place of its line
                    errors.append(f"server {self.number} did not start: {e}")
                    return


def reference(url: str, asked: list[str]) -> dict[str, tuple[int, str]]:
    """Of each prompt that has any: how many tokens are clear, and their text."""
    def clear(prompt: str) -> int:
        body = {"prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, "logprobs": 2}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(),
                                         {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            best = [sorted(one.values())[-2:] for one in json.load(answer)["choices"][0]["logprobs"]["top_logprobs"]]
        return next((n for n, (other, top) in enumerate(best) if top - other < CLEAR), NEW)
    with ThreadPoolExecutor(8) as pool:
        tokens = {prompt: n for prompt, n in zip(asked, pool.map(clear, asked), strict=True) if n}
        given = [*pool.map(lambda prompt: ask(url, prompt, tokens[prompt]), tokens)]
    assert given and all(what == "answered" for what, _ in given), given
    return {prompt: (tokens[prompt], text) for prompt, (_, text) in zip(tokens, given, strict=True)}


def ask(url: str, prompt: str, new: int, *, streamed: bool = False, leaves: bool = False) -> tuple[str, str]:
    """What became of it, and the answer of `new` tokens."""
    link = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    try:
        link.request("POST", "/v1/completions", json.dumps({
            "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": streamed}),
            {"content-type": "application/json"})
        answer = link.getresponse()
        if answer.status != 200:
            return f"status {answer.status}", answer.read().decode()[:200]
        if leaves:
            answer.read(40)
            return "left", ""
        text = answer.read().decode()
    except TimeoutError:
        return "silent for 120 s", ""
    except (OSError, http.client.HTTPException) as e:
        return f"broken: {type(e).__name__}", ""
    finally:
        link.close()
    if not streamed:
        return "answered", json.loads(text)["choices"][0]["text"]
    *events, last = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")] or [""]
    chunks = [json.loads(event) for event in events]
    if last != "[DONE]" or any("error" in chunk for chunk in chunks):
        return "stream cut off", ""
    return "answered", "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk.get("choices"))


def client(number: int, sites: list[Site], want: dict[str, tuple[int, str]], over: threading.Event, seen: Counter[str],
           errors: list[str]) -> None:
    rng = random.Random(number)
    while not over.is_set():
        prompt = rng.choice(list(want))
        new, right = want[prompt]
        while not over.is_set():
            server = rng.choice(sites).server
            if server is None:
                time.sleep(.05)
                continue
            what, text = ask(server.url, prompt, new, streamed=rng.random() < .5, leaves=rng.random() < LEAVES)
            if what == "answered" and text != right:
                what = "wrong"
            seen[what] += 1
            if what in ("wrong", "silent for 120 s") or re.match("status [45]0[0-24-9]", what):
                errors.append(f"{what}: {text[:200]!r}, not {right[:200]!r}")
            if what in ("answered", "left", "wrong"):
                break
            time.sleep(rng.random() / 5)


def hunt(sites: list[Site], rng: random.Random, every: float, until: float) -> Counter[str]:
    """Kill one process after the other. Return how many of each."""
    killed: Counter[str] = Counter()
    while time.perf_counter() < until:
        time.sleep(rng.uniform(.5, 1.5) * every)
        server = (site := rng.choice(sites)).server
        if any(one.server is None for one in sites) or server is None or time.perf_counter() > until:
            continue
        found = family(server.process.pid)
        site.pids |= found.keys()
        if not found:
            continue
        kind = rng.choice(sorted(set(found.values())))      # alike, however many processes there are of one
        try:
            os.kill(rng.choice([pid for pid, name in found.items() if name == kind]), signal.SIGKILL)
            killed[kind] += 1
        except ProcessLookupError:
            continue
    return killed


def held(server: Server, limit_s: float = 60) -> dict[str, float]:
    """What is still in use when nothing is asked any more."""
    end = time.perf_counter() + limit_s
    while True:
        try:
            stats = server.get("/server_info")["stats"]
            found = {k: v for k, v in stats.items() if LEFT.search(k) and isinstance(v, int | float) and v}
        except OSError as e:
            found = {f"no answer: {e}": 1}
        if not found or time.perf_counter() > end:
            return found
        time.sleep(.5)


def alive(pids: set[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()
            and ") Z " not in Path(f"/proc/{pid}/stat").read_text()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--every", type=float, default=6, help="seconds between kills, on average")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.device_count() else "cpu"
    kept, memory = ("--device", device, "--dtype", "float32", "--max-model-len", "1024"), left_in_memory()
    asked, began = prompts(args.seed), time.perf_counter()
    seen: Counter[str] = Counter()
    errors: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        store = ("--kv-storage", f"file://{folder}/pages")
        sites = [Site(n, args.model, (*kept, *HOSTED, *store), args.out) for n in (0, 1)]
        with ThreadPoolExecutor(2) as pool:
            starts = pool.map(Site.start, sites)
            with serving(*kept, "--kv-cache-memory-bytes", "64M", "--kv-offloading-size", "0", model=args.model) as one:
                want = reference(one.url, asked)
            tokens = sum(new for new, _ in want.values())
            print(f"{len(want)} prompts, {len(set(want.values()))} answers of {tokens} tokens", flush=True)
            list(starts)
        print(f"both serve after {time.perf_counter() - began:.0f} s", flush=True)
        over, closed = threading.Event(), threading.Event()
        threads = [threading.Thread(target=client, args=(n, sites, want, over, seen, errors))
                   for n in range(args.clients)]
        keepers = [threading.Thread(target=site.keep, args=(closed, errors)) for site in sites]
        for thread in (*threads, *keepers):
            thread.start()
        until = began + args.seconds
        killed = hunt(sites, random.Random(args.seed), args.every, until)
        over.set()
        for thread in threads:
            thread.join()
        time.sleep(2)
        end = time.perf_counter() + 60
        while any(site.server is None for site in sites) and time.perf_counter() < end:
            time.sleep(.5)
        closed.set()
        for thread in keepers:
            thread.join()
        kept_on = {site.number: held(site.server) if site.server else {"not running": 1} for site in sites}
        for site in sites:
            if site.server is not None:
                site.pids |= family(site.server.process.pid).keys()
                site.server.process.terminate()
                site.server.process.wait(60)
        time.sleep(3)
        unfinished = [str(path) for path in Path(folder).rglob("*.tmp")]
    row: dict[str, Any] = {
        "seconds": time.perf_counter() - began, "clients": args.clients, "seen": dict(seen), "killed": dict(killed),
        "starts_s": [spread(site.starts) | {"starts": len(site.starts)} for site in sites], "held": kept_on,
        "alive": alive(set().union(*(site.pids for site in sites))),
        "shared_memory": sorted(left_in_memory() - memory), "unfinished_files": unfinished[:5], "errors": errors[:8]}
    write("chaos", args.out, [row])
    assert seen["answered"] and not errors, errors[:3]
    assert not any(kept_on.values()) and not any(row[name] for name in ("alive", "shared_memory", "unfinished_files"))


if __name__ == "__main__":
    main()
