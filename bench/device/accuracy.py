"""Answers of trained weights by what reads their KV, how it is stored and which ranks compute: paired by problem.

    PYTHONPATH=src python bench/device/accuracy.py OUT MODEL [--device cpu] [--arms dense 1/8 hosted ...]
        [--tasks needles recall variables common] [--contexts 4096,32768] [--gsm8k FILE --problems 400]

Each arm is `penstock serve` and `penstock eval --base-url`, so each answers the same problems. A share, such as 1/8,
is what a step reads of each context (of 512 tokens where a problem is short). The gate: hosted arms of other layouts,
after preemption, of a found prefix and of storage, must be within two standard errors of `hosted`; arms with a fault
of a change report put in again must not, or the ranks refuse its plans. Without a chat template, or below about a
billion weights, GSM8K says nothing.

The recall model chooses its tokens itself: what it answers on other layouts and in other types must be what one rank
on a CPU answers. `accuracy.py OUT tests/data/recall --tasks recall --dtype float32 --base cpu --contexts 1024,4000
--hot 272 --device-kv 256M --hosted-kv 64M --host-kv 256M --tight-kv 16M`.
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
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from direct import write
from serving import serving

from penstock.bench.report import table

PAIR = ("--prefill-replicas", "1", "--decode-replicas", "1")
SHORT = 512                             # tokens that a problem of GSM8K is counted with
LEAST = 128                             # of a budget
COUNTED = ("hot_misses_total", "pair_delivered_total", "num_preemptions_total", "storage_read_bytes_total",
           "prefix_cache_hit_tokens")
# name: a task's contexts and questions do not count for GSM8K, which has one length
Problem = tuple[str, int]               # task, context; GSM8K: 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One server, or two in turns. share: what a step reads; 0: all. place: "device", "host", or "tight", which is the
    host with room for a part of the requests. again: the second answers of one server count. restarted: those of a
    second server on the storage of the first."""

    base: str
    share: float = 0.0
    place: str = "device"
    flags: tuple[str, ...] = ()
    again: bool = False
    restarted: bool = False
    fault: str = ""


def _hosted(*flags: str, **more: Any) -> Arm:
    return Arm(**({"base": "hosted", "share": 1 / 8, "place": "host", "flags": flags} | more))


ARMS = {
    "cpu": Arm(base="cpu", flags=("--device", "cpu")),
    "dense": Arm(base="dense"),
    "1/4": Arm(base="dense", share=1 / 4), "1/8": Arm(base="dense", share=1 / 8),
    "1/16": Arm(base="dense", share=1 / 16),
    "fp8 KV": Arm(base="dense", flags=("--kv-cache-dtype", "fp8_e4m3")),
    "packed weights": Arm(base="dense", flags=("--dtype", "gguf")),
    "hosted": _hosted(base="1/8"),
    "hosted, fp8 KV": _hosted("--kv-cache-dtype", "fp8_e4m3"),
    "hosted, pp 2": _hosted("--pp", "2"), "hosted, tp 2": _hosted("--tp", "2"), "hosted, pair": _hosted(*PAIR),
    "hosted, pair, pp 2": _hosted(*PAIR, "--pp", "2"),
    "hosted, prefix found": _hosted(again=True),
    "hosted, preempted": _hosted(place="tight"),
    "hosted, from storage": _hosted(restarted=True),
    "fault: resumed without a hot buffer": _hosted(place="tight", fault="hot-buffer-skipped-on-resume"),
    "fault: delivered row not admitted": _hosted(*PAIR, fault="row-of-a-delivered-request-not-bound"),
}


def with_bases(names: Sequence[str], base: str | None) -> list[str]:
    """Arms, and in front of them those that they are compared with, and so on."""
    found = dict[str, None]()

    def add(name: str) -> None:
        if (against := base or ARMS[name].base) != name and against not in found:
            add(against)
        found[name] = None

    for name in names:
        add(name)
    return [*found]


def paired(scores: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """Mean of the differences by problem, and its standard error; that of one problem is not known: inf."""
    differences = [a - b for a, b in zip(scores, base, strict=True)]
    mean = math.fsum(differences) / len(differences)
    if len(differences) < 2:
        return mean, math.inf
    return mean, statistics.stdev(differences) / math.sqrt(len(differences))


def budget_of(share: float, context: int) -> int:
    """Tokens that a step reads; 0: all."""
    return max(LEAST, int(share * (context or SHORT))) if share else 0


def idle(arm: Arm, told: dict[str, float]) -> str:
    """What the arm is for and did not do, by the server's counters: then it proves nothing."""
    wanted = {"hot_misses_total": arm.place != "device", "num_preemptions_total": arm.place == "tight",
              "pair_delivered_total": PAIR[0] in arm.flags, "prefix_cache_hit_tokens": arm.again,
              "storage_read_bytes_total": arm.restarted}
    return ", ".join(f"no {name}" for name, wants in wanted.items() if wants and not told.get(name))


def verdict(arm: Arm, scores: Sequence[float], base: Sequence[float]) -> str:
    mean, error = paired(scores, base)
    if arm.fault:
        return "found" if mean <= -4 * error and mean < 0 else "NOT FOUND"
    return "" if abs(mean) <= 2 * error or mean == 0 else "below" if mean < 0 else "above"


class Asked:
    """The servers of a run, and what they answer."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.problems: list[Problem] = [(task, context) for task in args.tasks for context in args.contexts]
        if args.gsm8k:
            self.problems.append(("gsm8k", 0))
        config = Path(args.model) / "config.json"
        self.native = config.exists() and "index_topk" in json.loads(config.read_text())

    def flags(self, arm: Arm) -> tuple[str, ...]:
        a = self.args
        own = tuple(f for f in arm.flags if f.startswith("--"))
        found = [*arm.flags, "--max-num-seqs", str(a.rows), "--page-size", "16"]
        found += ["--threads", str(a.threads)] if a.threads else []
        for flag, value in (("--device", a.device), ("--dtype", a.dtype)):
            found += [] if flag in own else [flag, value]
        found += ["--kv-cache-memory-bytes", a.device_kv if arm.place == "device" else a.hosted_kv]
        if arm.place != "device":
            host = a.tight_kv if arm.place == "tight" else a.host_kv
            found += ["--kv-offloading-size", host, "--host-decode", "always"]
            found += ["--hot-buffer-tokens", str(a.hot)] if a.hot else []
        elif arm.share or arm.restarted:
            found += ["--kv-offloading-size", a.host_kv, "--host-decode", "off"]
        if arm.share and not self.native:
            found += ["--sparse-top-k", str(max(budget_of(arm.share, context) for _, context in self.problems))]
        return tuple(found)

    def answers(self, url: str, arm: Arm) -> dict[Problem, list[dict[str, Any]]]:
        a, found = self.args, dict[Problem, list[dict[str, Any]]]()
        for problem in self.problems:
            task, context = problem
            if arm.place == "tight" and a.gsm8k and context:
                continue                # requests that hardly grow are not preempted
            asked = ["--file", a.gsm8k, "--samples", "1", "--questions", str(a.problems)] if not context else [
                "--contexts", str(context), "--samples", str(a.samples),
                *(() if task == "common" else ("--questions", str(a.questions)))]
            if arm.share and not self.native:
                asked += ["--budgets", str(budget_of(arm.share, context))]
            with tempfile.NamedTemporaryFile(suffix=".json") as out:
                run = subprocess.run(
                    [sys.executable, "-m", "penstock.cli.main", "eval", "--base-url", url, "--quiet", "--task", task,
                     "--concurrency", str(a.rows), "--output-json", out.name, *asked],
                    capture_output=True, text=True, timeout=a.limit)
                if run.returncode:
                    raise RuntimeError(f"{task}, {context}: {run.stderr.strip()[-300:]}")
                found[problem] = json.load(open(out.name))["answers"]
        return found

    def arm(self, name: str) -> dict[str, Any]:
        """The arm, with what was given to each question; `error`: why there is nothing."""
        arm, began = ARMS[name], time.perf_counter()
        env = {"FAULT": arm.fault, "PYTHONPATH": os.pathsep.join(
            (str(Path(__file__).parents[1] / "patched"), os.environ.get("PYTHONPATH", "")))} if arm.fault else {}
        row: dict[str, Any] = {"arm": name, "against": self.args.base or arm.base, "flags": self.flags(arm)}
        with tempfile.TemporaryFile("w+") as log, tempfile.TemporaryDirectory() as folder:
            flags = *row["flags"], *(("--kv-storage", f"file://{folder}/kv", "--kv-storage-policy", "wait_complete")
                                     if arm.restarted else ())
            try:
                for last in (False, True) if arm.restarted else (True,):
                    with serving(*flags, model=self.args.model, stderr=log, env=env) as server:
                        for _ in range(1 + arm.again):
                            answers = self.answers(server.url, arm)
                        stats = server.get("/server_info")["stats"] if last else {}
                row["told"] = {c: sum(v for k, v in stats.items() if k.startswith(c)) for c in COUNTED}
                row["answers"] = {f"{task}, {context}" if context else task: [
                    {"score": float(a["right"]), "given": a["given"]} for a in given]
                    for (task, context), given in answers.items()}
            except Exception as why:    # one arm that fails takes nothing from the others
                log.seek(0)
                row["error"] = f"{why!r:.300}: {log.read()[-1500:]}"
        print({k: v for k, v in row.items() if k != "answers"} | {"seconds": time.perf_counter() - began}, flush=True)
        return row


def compared(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Lines of the table: each arm and problem beside the arm that it is compared with."""
    by_name, lines = {row["arm"]: row for row in rows}, []
    for row in rows:
        arm, base = ARMS[row["arm"]], by_name.get(row["against"], {}).get("answers", {})
        if "error" in row:
            lines.append((row["arm"], "all", "-", "-", "-", "refused" if arm.fault else "FAILED"))
        elif missing := idle(arm, row.get("told", {})):
            lines.append((row["arm"], "all", "-", "-", "-", missing))
        for problem, given in row.get("answers", {}).items():
            scores = [a["score"] for a in given]
            right = f"{sum(scores):.4g} of {len(scores)}"
            if row["arm"] == row["against"] or problem not in base:
                lines.append((row["arm"], problem, right, "", "", "NO BASE" * (row["arm"] != row["against"])))
                continue
            other = [a["score"] for a in base[problem]]
            mean, error = paired(scores, other)
            same = sum(a["given"] == b["given"] for a, b in zip(given, base[problem], strict=True))
            lines.append((row["arm"], problem, right, f"{mean:+.3f} ({2 * error:.3f})", f"{same} of {len(given)}",
                          verdict(arm, scores, other)))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[name for name in ARMS if name != "cpu"])
    parser.add_argument("--base", choices=ARMS, help="compare every arm with this one (default: each with its own); "
                        "what arms are compared with runs too")
    parser.add_argument("--tasks", nargs="*", default=["needles", "recall", "variables", "common"])
    parser.add_argument("--contexts", default="4096,32000", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--samples", type=int, default=8, help="contexts of each length")
    parser.add_argument("--questions", type=int, default=8, help="of each context")
    parser.add_argument("--gsm8k", metavar="FILE", help="JSON lines of GSM8K")
    parser.add_argument("--problems", type=int, default=400, help="of GSM8K")
    parser.add_argument("--rows", type=int, default=16, help="requests at once")
    parser.add_argument("--threads", type=int, default=0, help="of each server on a CPU")
    parser.add_argument("--hot", type=int, default=0, help="tokens of a hot buffer")
    parser.add_argument("--device-kv", default="16G", help="of arms with all KV on the device")
    parser.add_argument("--hosted-kv", default="1G", help="on the device, of hosted arms")
    parser.add_argument("--host-kv", default="20G")
    parser.add_argument("--tight-kv", default="256M", help="host memory of arms that are preempted; they answer GSM8K "
                        "alone if that is given")
    parser.add_argument("--at-once", type=int, default=2,
                        help="servers; each takes --host-kv of host memory, a pair twice that")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a task of an arm")
    args = parser.parse_args()
    asked = Asked(args)
    rows, names = list[dict[str, Any]](), with_bases(args.arms, args.base)
    with ThreadPoolExecutor(args.at_once) as pool:
        for done in as_completed([pool.submit(asked.arm, name) for name in names]):
            rows = sorted([*rows, done.result()], key=lambda row: names.index(row["arm"]))
            write("accuracy", args.out, rows, shown=False)
    print(table(("arm", "problems", "right", "difference (two standard errors)", "same answers", ""), compared(rows)))


if __name__ == "__main__":
    main()
