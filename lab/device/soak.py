"""Random load on `penstock serve demo` on the GPU: mixed lengths, sampling, disconnects, few device pages.

At the end no page or request may be left, the memory of GPU and engine may not have grown, no answer failed.

    PYTHONPATH=src:bench/device python lab/device/soak.py OUT [--seconds 300]
"""
from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from serving import Server, serving

LEFT = "in_use|in_flight|requests$|running|waiting"


def used_mib(server: Server) -> int:
    """GPU memory of the engine; of everybody where the driver does not tell processes apart."""
    query = ["nvidia-smi", "--format=csv,noheader,nounits"]
    apps = subprocess.run([*query, "--query-compute-apps=pid,used_memory"], capture_output=True, text=True,
                          check=True).stdout
    family = subprocess.run(["ps", "-o", "pid=", "--ppid", str(server.process.pid)], capture_output=True,
                            text=True, check=True).stdout.split()
    for line in apps.splitlines():
        pid, _, used = line.partition(",")
        if pid.strip() in family and used.strip().isdigit():
            return int(used)
    out = subprocess.run([*query, "--query-gpu=memory.used"], capture_output=True, text=True, check=True)
    return int(out.stdout.split()[0])


def rss_mib(server: Server) -> float:
    """Of the server and its children."""
    total = 0.0
    children = subprocess.run(["ps", "-o", "rss=", "--pid", str(server.process.pid), "--ppid",
                               str(server.process.pid)], capture_output=True, text=True, check=True)
    for line in children.stdout.split():
        total += int(line) / 1024
    return total


def answered(text: str) -> bool:
    """Whether a stream came to its end without an error."""
    *events, done = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return done == "[DONE]" and not any("error" in json.loads(event) for event in events)


def client(server: Server, seed: int, until: float, seen: Counter[str], errors: list[str]) -> None:
    rng = random.Random(seed)
    host = server.url.removeprefix("http://")
    while time.perf_counter() < until:
        shared = [7] * rng.choice((0, 64, 700))
        prompt = shared + [rng.randrange(10, 40000) for _ in range(rng.choice((3, 60, 500, 1900)))]
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.choice((1, 16, 120)), "stream": True,
                                "temperature": rng.choice((0, 0, 0.8, 1.3)), "seed": rng.randrange(99),
                                "ignore_eos": True}
        if rng.random() < .3:
            body |= {"top_p": 0.9, "top_k": 50}
        if rng.random() < .2:
            body |= {"presence_penalty": 0.5, "logprobs": 2}
        leaves = rng.random() < .15
        try:
            link = http.client.HTTPConnection(host, timeout=120)
            link.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer = link.getresponse()
            if answer.status != 200:
                seen[f"status {answer.status}"] += 1
                if answer.status != 503:
                    errors.append(answer.read().decode()[:300])
                continue
            if leaves:
                answer.read(200)
                seen["left"] += 1
            else:
                text = answer.read().decode()
                whole = answered(text)
                seen["answered" if whole else "failed"] += 1
                if not whole:
                    errors.append(text[-300:])
            link.close()
        except OSError as e:
            errors.append(repr(e))


def main() -> None:
    from direct import write
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--clients", type=int, default=48)
    args = parser.parse_args()
    flags = ("--device", "auto", "--max-num-seqs", "32", "--step-tokens", "2048", "--hbm-bytes", "400MiB",
             "--dram-bytes", "1GiB", "--max-waiting", "200")
    seen: Counter[str] = Counter()
    errors: list[str] = []
    samples = []
    with serving(*flags) as server:
        began = time.perf_counter()
        threads = [threading.Thread(target=client, args=(server, i, began + args.seconds, seen, errors))
                   for i in range(args.clients)]
        for thread in threads:
            thread.start()
        while time.perf_counter() < began + args.seconds:
            time.sleep(min(15, max(.1, began + args.seconds - time.perf_counter())))
            samples.append((round(time.perf_counter() - began), used_mib(server), round(rss_mib(server))))
        for thread in threads:
            thread.join()
        time.sleep(2)
        stats = {k: v for k, v in server.get("/server_info")["stats"].items() if isinstance(v, int | float)}
    row = {"seconds": args.seconds, "clients": args.clients, "flags": " ".join(flags), "seen": dict(seen),
           "errors": errors[:5], "s_gpumib_rssmib": samples,
           "left": {k: v for k, v in stats.items() if re.search(LEFT, k)},
           "stats": {k: v for k, v in stats.items() if re.search(
               "pauses|drops|steps|tokens_total|moves_total|moved_bytes|outside|failed", k)}}
    write("soak", args.out, [row])
    assert not errors and not seen["failed"], errors[:3]
    assert not any(row["left"].values()), row["left"]
    settled = [sample for sample in samples if sample[0] > args.seconds / 4]
    for name, at, most in (("GPU", 1, 1.0), ("host", 2, 1.02)):
        first, last = settled[0][at], settled[-1][at]
        assert last <= first * most, f"{name} memory grew from {first} to {last} MiB"


if __name__ == "__main__":
    main()
