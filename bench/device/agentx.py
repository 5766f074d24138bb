"""Coding agents on one server by host memory and concurrency, and what `penstock plan` had said of each.

    PYTHONPATH=src python bench/device/agentx.py OUT MODEL [--hosts 0,32G,64G] [--agents 1,4,16,64] [--turns 12]
        [--scale 4] [--rates FILE] [-- FLAGS of serve ...]

For each size of host memory a server; on it each number of agents with `penstock bench agentx`, from an empty cache.
The plan has the same trace, flags and pauses, and the speeds of `penstock bench rates` (OUT/rates.json, measured here
with the last host memory unless --rates has them). MODEL may be a folder with config.json alone: add `--load-format
dummy` to the flags. OUT/agentx.json is written anew after each row; a row without measurements has `error`.
"""
from __future__ import annotations

import argparse
import json
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from serving import Server, serving

from penstock.bench.report import percentile, table, write_json
from penstock.cli.main import parsed
from penstock.plan.agents import Agents, agents
from penstock.plan.rates import Rates, read_rates
from penstock.plan.shape import plan_engine
from penstock.plan.trace import Trace
from penstock.plan.world import World

PENSTOCK = (sys.executable, "-m", "penstock.cli.main")
HEADER = ("host", "agents", "hits", "of possible", "plan's hits", "first token p50, p95 (s)", "plan's",
          "gap p50, p95 (ms)", "tokens/s", "plan's", "failed")


def trace_of(sessions: int, turns: int, scale: float) -> Trace:
    """What `bench agentx` plays: it divides lengths and the time of tools by scale, and not the machine."""
    trace = agents(Agents(sessions=sessions, turns=turns), scale)
    return Trace(trace.name, tuple(replace(
        session, start_s=session.start_s / scale,
        turns=tuple(replace(turn, pause_s=turn.pause_s / scale) for turn in session.turns))
        for session in trace.sessions))


def planned(flags: Sequence[str], rates: Rates, trace: Trace) -> dict[str, Any]:
    found = parsed("plan", [*flags, "--agents", "1"])
    assert found is not None and found[0] is not None
    engine = plan_engine(found[0], rates)
    result = World(trace, engine, rates).run()
    return {"vocab": engine.vocab, "hits": result.hits, "first_s": [percentile(result.ttft_s, p) for p in (50, 95)],
            "tokens_s": result.output_tokens / result.seconds}


def played(server: Server, count: int, vocab: int, args: argparse.Namespace) -> dict[str, Any]:
    urllib.request.urlopen(urllib.request.Request(server.url + "/flush_cache", b"", method="POST"), timeout=60).read()
    out = args.out / "played.json"
    out.unlink(missing_ok=True)
    run = subprocess.run([*PENSTOCK, "bench", "agentx", "--base-url", server.url, "--agents", str(count), "--turns",
                          str(args.turns), "--scale", str(args.scale), "--token-id-max", str(min(1000, vocab)),
                          "--quiet", "--output-json", str(out)], capture_output=True, text=True)
    if run.returncode:                  # 1 with measurements: some requests failed
        print((run.stdout + run.stderr)[-800:], flush=True)
        if not out.exists():
            return {"error": f"bench agentx ended with {run.returncode}: {(run.stdout + run.stderr)[-800:]}"}
    found = json.loads(out.read_text())
    series = found["series"]
    return {"hits": found["hits"], "hits_largest": found["hits_largest"], "seconds": found["seconds"],
            "failed": found["failed"],
            "prompt_tokens": found["prompt_tokens"],
            "first_s": [percentile(series["time to first token"], p) for p in (50, 95)],
            "gaps_s": [percentile(series["inter-token latency"], p) for p in (50, 95)],
            "tokens_s": found["output_tokens"] / found["seconds"]}


def line(row: dict[str, Any]) -> tuple[str, ...]:
    got, said = row["played"], row["plan"]
    if "error" in got:
        return (row["host"], str(row["agents"]), *("-" * (len(HEADER) - 3)), "all")
    return (row["host"], str(row["agents"]), f"{got['hits']:.3f}",
            f"{got['hits'] / got['hits_largest']:.3f}" if got["hits_largest"] else "-", f"{said['hits']:.3f}",
            ", ".join(f"{s:.2f}" for s in got["first_s"]), ", ".join(f"{s:.2f}" for s in said["first_s"]),
            ", ".join(f"{1e3 * s:.1f}" for s in got["gaps_s"]), f"{got['tokens_s']:.1f}", f"{said['tokens_s']:.1f}",
            str(got["failed"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("model")
    parser.add_argument("--hosts", default="0,32G,64G", help="sizes of host memory; 0: none")
    parser.add_argument("--agents", default="1,4,16,64")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--scale", type=float, default=4.0)
    parser.add_argument("--rates", type=Path)
    parser.add_argument("--rates-context", type=int, default=8192)
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, flags = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1:]
    args.out.mkdir(parents=True, exist_ok=True)
    hosts = args.hosts.split(",")

    def of(host: str) -> list[str]:     # 0 as well: a selection takes host memory where no flag says
        return [*flags, "--kv-offloading-size", host]

    if args.rates is None:
        args.rates = args.out / "rates.json"
        subprocess.run([*PENSTOCK, "bench", "rates", args.model, "--output-json", str(args.rates), "--runs", "3",
                        "--context", str(args.rates_context), *of(hosts[-1])], check=True)
    rates, rows = read_rates(str(args.rates)), list[dict[str, Any]]()
    for host in hosts:
        with serving(*of(host), model=args.model) as server:
            for count in map(int, args.agents.split(",")):
                trace = trace_of(count, args.turns, args.scale)
                plan = planned([args.model, *of(host)], rates, trace)
                rows.append({"host": host, "agents": count, "plan": plan,
                             "played": played(server, count, plan["vocab"], args)})
                print(*line(rows[-1]), flush=True)
                write_json(str(args.out / "agentx.json"), {
                    "command": sys.argv[1:], "rates": json.loads(args.rates.read_text()), "rows": rows})
    print(table(HEADER, map(line, rows)))
    if off := [abs(r["played"]["hits"] - r["plan"]["hits"]) for r in rows if "error" not in r["played"]]:
        print(f"hits: the plan is off by {median(off):.3f} (median), {max(off):.3f} at most")


if __name__ == "__main__":
    main()
