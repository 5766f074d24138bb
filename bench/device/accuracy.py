"""Answers of trained weights by what reads their KV, how it is stored and which ranks compute: paired by problem.

    PYTHONPATH=src python bench/device/accuracy.py OUT MODEL [--device cpu] [--arms dense 1/8 hosted ...]
        [--tasks needles recall variables common] [--contexts 4096,32768] [--gsm8k FILE --problems 400]

Each arm is `penstock serve` and `penstock eval --base-url`, so each answers the same problems. A share, such as 1/8,
is what a step reads of each context (of 1,024 tokens for GSM8K, which is left out where that is below 128). The gate:
hosted arms of other layouts, after preemption, of a found prefix and of storage, must be within two standard errors of
`hosted`; arms with a fault of a change report put in again must not, or the ranks refuse its plans. Without a chat
template, or below about a billion weights, GSM8K says nothing.

Arms start in the order of --arms, behind what they are compared with. OUT has the answers and the table of the arms
that have ended, also while others run.

The recall model chooses its tokens itself: what it answers on other layouts and in other types must be what one rank
on a CPU answers. `accuracy.py OUT tests/data/recall --tasks recall --dtype float32 --base cpu --contexts 1024,4000
--hot 272 --device-kv 256M --hosted-kv 64M --host-kv 256M --tight-kv 16M`.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import re
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
SHORT = 1024                            # tokens that a problem of GSM8K is counted with
LEAST = 128                             # of a budget
COUNTED = {                             # beginnings of names of /server_info's numbers
    "misses": ("hot_misses_total",), "deliveries": ("pair_delivered_total",), "pauses": ("pauses",),
    "prefix hits": ("prefix_hbm_hits", "prefix_dram_hits", "prefix_disk_hits"),
    "bytes of storage": ("storage_read_bytes_total",)}
REFUSED = re.compile(r"penstock: (AssertionError.*)")      # by an engine or a rank, in a server's log
Problem = tuple[str, int]               # task, context; GSM8K: 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One server, or two in turns. share: what a step reads; 0: all. place: "device", "host", or "tight": a device
    with room for a part of the requests, of which some go on from the host and some pause. again: the second answers
    of one server count. restarted: those of a second server on the storage of the first."""

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
    wanted = {"misses": arm.place != "device", "pauses": arm.place == "tight",
              "deliveries": PAIR[0] in arm.flags, "prefix hits": arm.again, "bytes of storage": arm.restarted}
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
        self.ends = time.monotonic() + args.seconds if args.seconds else math.inf
        config = Path(args.model) / "config.json"
        self.native = config.exists() and "index_topk" in json.loads(config.read_text())

    def left(self) -> float:
        """Seconds that a server's start, or a task, may take. Raises TimeoutError."""
        left = self.ends - time.monotonic()
        if left <= 0:
            raise TimeoutError("--seconds are over")
        return min(float(self.args.limit), left)

    def problems(self, arm: Arm) -> list[Problem]:
        """What the arm is asked. Requests that hardly grow are not preempted."""
        a, chooses = self.args, arm.share > 0 and not self.native
        contexts = (() if arm.place == "tight" and a.gsm8k else
                    a.gate_contexts if arm.base == "hosted" else a.contexts)
        short: list[Problem] = [("gsm8k", 0)] * bool(a.gsm8k and not (chooses and arm.share * SHORT < LEAST))
        return short + [(task, context) for context in contexts for task in a.tasks]

    def flags(self, arm: Arm) -> tuple[str, ...]:
        a = self.args
        own = tuple(f for f in arm.flags if f.startswith("--"))
        found = [*arm.flags, "--max-num-seqs", str(a.rows), "--page-size", "16"]
        found += ["--threads", str(a.threads)] if a.threads else []
        for flag, value in (("--device", a.device), ("--dtype", a.dtype)):
            found += [] if flag in own else [flag, value]
        found += ["--kv-cache-memory-bytes",
                  {"device": a.device_kv, "host": a.hosted_kv, "tight": a.tight_kv}[arm.place]]
        if arm.place != "device":
            found += ["--kv-offloading-size", a.host_kv]
            found += ["--host-decode", "auto" if arm.place == "tight" else "always"]
            found += ["--hot-buffer-tokens", str(a.hot)] if a.hot else []
        elif arm.share or arm.restarted:
            found += ["--kv-offloading-size", a.host_kv, "--host-decode", "off"]
        if arm.share and not self.native:
            found += ["--sparse-top-k", str(max(budget_of(arm.share, context) for _, context in self.problems(arm)))]
        return tuple(found)

    def ask(self, url: str, arm: Arm, found: dict[str, list[dict[str, Any]]], took: dict[str, float]) -> None:
        """Note answers by problem, and seconds, as they come."""
        a = self.args
        for task, context in self.problems(arm):
            count = min(a.problems, a.tp_problems) if "--tp" in arm.flags else a.problems
            asked = ["--file", a.gsm8k, "--samples", "1", "--questions", str(count)] if not context else [
                "--contexts", str(context), "--samples", str(a.samples),
                *(() if task == "common" else ("--questions", str(a.questions)))]
            if arm.share and not self.native:
                asked += ["--budgets", str(budget_of(arm.share, context))]
            name, began = f"{task}, {context}" if context else task, time.monotonic()
            with tempfile.NamedTemporaryFile(suffix=".json") as out:
                run = subprocess.run(
                    [sys.executable, "-m", "penstock.cli.main", "eval", "--base-url", url, "--quiet", "--task", task,
                     "--concurrency", str(a.rows), "--output-json", out.name, *asked],
                    capture_output=True, text=True, timeout=self.left())
                if run.returncode:
                    raise RuntimeError(f"{name}: {run.stderr.strip()[-300:]}")
                found[name] = [{"score": float(one["right"]), "given": one["given"]}
                               for one in json.load(open(out.name))["answers"]]
            took[name] = round(time.monotonic() - began, 1)

    def arm(self, name: str) -> dict[str, Any]:
        """The arm, with what was given to each question; `error`: why something is missing, or how its server ended."""
        arm, began, took = ARMS[name], time.monotonic(), dict[str, float]()
        env = {"FAULT": arm.fault, "PYTHONPATH": os.pathsep.join(
            (str(Path(__file__).parents[1] / "patched"), os.environ.get("PYTHONPATH", "")))} if arm.fault else {}
        row: dict[str, Any] = {"arm": name, "against": self.args.base or arm.base, "seconds": took}
        with tempfile.TemporaryFile("w+") as log, tempfile.TemporaryDirectory() as folder:
            try:
                row["flags"] = self.flags(arm)
                flags = *row["flags"], *(("--kv-storage", f"file://{folder}/kv", "--kv-storage-policy",
                                          "wait_complete") if arm.restarted else ())
                for last in (False, True) if arm.restarted else (True,):
                    with serving(*flags, model=self.args.model, stderr=log, env=env, ready=self.left()) as server:
                        took["start"] = round(server.ready_s, 1)
                        if arm.again or not last:
                            self.ask(server.url, arm, {}, took)
                        if last:
                            self.ask(server.url, arm, row.setdefault("answers", {}), took)
                            stats = server.get("/server_info")["stats"]
                            row["told"] = {what: sum(v for k, v in stats.items() if k.startswith(names))
                                           for what, names in COUNTED.items()}
            except Exception as why:    # one arm that fails takes nothing from the others
                log.seek(0)
                text = log.read()
                row |= {"error": f"{why!r:.300}: {text[-3000:]}", "refused": REFUSED.findall(text)[:1]}
        took["all"] = round(time.monotonic() - began, 1)
        return row


def compared(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Lines of the table: each arm and problem beside the arm that it is compared with."""
    by_name, lines = {row["arm"]: row for row in rows}, []
    for row in rows:
        arm, base = ARMS[row["arm"]], by_name.get(row["against"], {}).get("answers", {})
        if "error" in row:
            lines.append((row["arm"], "all", "-", "-", "-",
                          "refused" if arm.fault and row.get("refused") else "FAILED"))
        elif missing := idle(arm, row.get("told", {})):
            lines.append((row["arm"], "all", "-", "-", "-", missing))
        for problem, given in row.get("answers", {}).items():
            scores = [a["score"] for a in given]
            right = f"{sum(scores):.4g} of {len(scores)}"
            if row["arm"] == row["against"] or problem not in base:
                lines.append((row["arm"], problem, right, "", "", "NO BASE" * (row["arm"] != row["against"])))
                continue
            others = base[problem][:len(given)]         # who is asked fewer is asked the first
            other = [a["score"] for a in others]
            mean, error = paired(scores, other)
            same = sum(a["given"] == b["given"] for a, b in zip(given, others, strict=True))
            lines.append((row["arm"], problem, right, f"{mean:+.3f} ({2 * error:.3f})", f"{same} of {len(given)}",
                          verdict(arm, scores, other)))
    return lines


def shown(row: dict[str, Any]) -> str:
    """A line of an arm that has ended."""
    right = (f"{problem} {sum(a['score'] for a in given):.4g}/{len(given)}"
             for problem, given in row.get("answers", {}).items())
    took, told = ({k: f"{v:.6g}" for k, v in row.get(name, {}).items() if v} for name in ("seconds", "told"))
    error = row.get("error", "")
    words = (", ".join(right), *(", ".join(f"{k} {v}" for k, v in pairs.items()) for pairs in (told, took)),
             *row.get("refused", []), error if len(error) < 500 else f"{error[:200]} ... {error[-300:]}")
    return f"{row['arm']}: {'; '.join(filter(None, words))}"


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
    parser.add_argument("--gate-contexts", type=lambda text: [int(n) for n in text.split(",")],
                        help="those that arms are asked with that are compared with `hosted` (default: all)")
    parser.add_argument("--samples", type=int, default=8, help="contexts of each length")
    parser.add_argument("--questions", type=int, default=8, help="of each context")
    parser.add_argument("--gsm8k", metavar="FILE", help="JSON lines of GSM8K")
    parser.add_argument("--problems", type=int, default=400, help="of GSM8K")
    parser.add_argument("--tp-problems", type=int, default=100, help="of those, of TP ranks: on one GPU each of their "
                        "sums goes by way of the host")
    parser.add_argument("--rows", type=int, default=16, help="requests at once")
    parser.add_argument("--threads", type=int, default=0, help="of each server on a CPU")
    parser.add_argument("--hot", type=int, default=0, help="tokens of a hot buffer")
    parser.add_argument("--device-kv", default="16G", help="of arms with all KV on the device")
    parser.add_argument("--hosted-kv", default="1G", help="on the device, of hosted arms")
    parser.add_argument("--host-kv", default="20G")
    parser.add_argument("--tight-kv", default="256M", help="on the device, of arms that are preempted; they "
                        "answer GSM8K alone if that is given")
    parser.add_argument("--at-once", type=int, default=2,
                        help="servers; each takes --host-kv of host memory, a pair twice that")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a server's start, and for a task of an "
                        "arm")
    parser.add_argument("--seconds", type=float, help="what has not ended by then is given up, and the table shown")
    args = parser.parse_args()
    args.gate_contexts = args.gate_contexts or args.contexts
    if not {*args.gate_contexts} <= {*args.contexts}:
        parser.error("--gate-contexts: of those of --contexts")
    asked = Asked(args)
    rows, names = list[dict[str, Any]](), with_bases(args.arms, args.base)
    with ThreadPoolExecutor(args.at_once) as pool:
        for done in as_completed([pool.submit(asked.arm, name) for name in names]):
            row = done.result()
            rows = sorted([*rows, row], key=lambda row: names.index(row["arm"]))
            write("accuracy", args.out, rows, shown=False)
            text = table(("arm", "problems", "right", "difference (two standard errors)", "same answers", ""),
                         compared(rows))
            (args.out / "accuracy.txt").write_text(text + "\n")
            print(" ".join(shown(row).split()), flush=True)
    print(text)


if __name__ == "__main__":
    main()
