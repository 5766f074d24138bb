"""`penstock sim`: run the core against fake ranks, judge it, print what happened.

Exit code 1 if anything failed. Every failure is one line that replays it.
"""
from __future__ import annotations

import argparse
import gc
import json
import sys
import textwrap
import time
import traceback

from penstock.core.core import Core
from penstock.replay import flight
from penstock.replay.exact import exact
from penstock.sim import jobs
from penstock.sim.programs import rerun, waiting, waste
from penstock.sim.programs.shrink import shrink
from penstock.sim.programs.sweeps import ANOMALIES, MUST_FIRE, RARE, Report, anomaly, never_met, never_taken, sweep
from penstock.sim.programs.trace import dump, record
from penstock.sim.world.pair import start
from penstock.sim.world.scenario import draw
from penstock.sim.world.world import MakeCore

MEDIUM, LONG = 600, 6_000         # runs that must see each fault but the rare ones, and that must see each


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=600, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=0, help="processes; the default is one for each core")
    parser.add_argument("--seed", type=int, help="run this seed alone, with a traceback")
    parser.add_argument("--mode", default="", metavar="NAME=NUMBER,...",
                        help="fix dimensions of every scenario, e.g. pp_size=2,overlap=1,ranks=1")
    parser.add_argument("--blind", action="store_true",
                        help="judge only what a user could see: tokens, outcomes, progress")
    parser.add_argument("--anomaly", choices=sorted(ANOMALIES),
                        help="break the n-th of a kind, n = 1, 2, ..., for every seed")
    parser.add_argument("--shrink", action="store_true",
                        help="with --seed: look for a simpler mode in which it still fails")
    parser.add_argument("--record", metavar="FILE",
                        help="write the event traces of the seeds, one JSON line each")
    parser.add_argument("--print", metavar="FILE",
                        help="show what a flight recorder wrote, one line a turn")
    parser.add_argument("--replay", metavar="FILE",
                        help="do again what a flight recorder wrote: exactly if it is complete, else "
                             "with the same requests and events from outside")
    parser.add_argument("--fair", action="store_true",
                        help="storms of calm requests: how long each waits for the work ahead of it")
    parser.add_argument("--waste", action="store_true",
                        help="sixty calm workloads: what is copied, computed or left idle in vain")
    parser.add_argument("--edges", action="store_true", help="print how often each edge was taken")
    parser.add_argument("--strict", action="store_true",
                        help="fail too if some fault did not fire, or some edge was not taken")
    parser.add_argument("--json", action="store_true", help="print all that was counted as one JSON value")


# What each thing to do takes; anything else would be accepted and ignored.
_COUNTED = {"seeds", "first", "mode"}
_SHOWN = {"edges", "strict", "json"}
TAKES: dict[str, set[str]] = {
    "print": set(),
    "replay": set(),
    "fair": _COUNTED | {"seed"},
    "waste": set(),
    "record": _COUNTED | {"seed"},
    "anomaly": _COUNTED | _SHOWN | {"seed"},
    "seed": {"mode", "blind", "shrink"},
    "seeds": _COUNTED | _SHOWN | {"jobs", "blind"},
}


def _doing(args: argparse.Namespace) -> tuple[str, list[str]]:
    """What is asked for, and the options that have no effect on that."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = {name for name, value in vars(parser.parse_args([])).items() if getattr(args, name) != value}
    doing = next((name for name in TAKES if name in given), "seeds")
    return doing, sorted(given - TAKES[doing] - {doing})


def run(config: object, args: argparse.Namespace) -> int:
    """Exit code. `config` is not used: a simulation draws its own engines."""
    began = time.monotonic()
    doing, idle = _doing(args)
    if idle:
        print(f"penstock sim: --{idle[0]} has no effect on --{doing}", file=sys.stderr)
        return 2
    try:
        draw(0, args.mode)
    except ValueError as error:
        print(f"penstock sim: {error}", file=sys.stderr)
        return 2
    seeds = range(args.first, args.first + args.seeds) if args.seed is None else (
        range(args.seed, args.seed + 1))
    match doing:
        case "print" | "replay":
            return _flight(args)
        case "fair":
            return 1 if waiting.report(seeds, args.mode, print) else 0
        case "waste":
            return waste.report(print)
        case "seed":
            return one(args)
        case "record":
            with open(args.record, "w", encoding="ascii") as file:
                file.writelines(dump(trace) + "\n" for seed in seeds for trace in record(seed, args.mode))
            return 0
    gc.set_threshold(200_000, 20, 20)          # a run makes much that lives as long as it does
    report = _sweep(args, seeds)
    silent = [name for name in MUST_FIRE if not report.fired[name]]
    # Whoever fixes dimensions turns faults off; a short sweep meets not all of them.
    whole = doing == "seeds" and not args.mode
    holes = [name for name in silent if whole and report.runs >= (LONG if name in RARE else MEDIUM)]
    never = _never(report) if args.strict else []
    missing = [f"{name}: never fired" for name in silent] + never
    if args.json:
        print(json.dumps(report.plain() | {"missing": missing}))
    else:
        _print(report, time.monotonic() - began)
        if args.edges:
            _edges(report)
        for line in never:
            print(line)
        if silent:
            print(f"never fired: {', '.join(silent)}")
        if holes and not args.strict:
            print(f"{report.runs} runs should have seen: {', '.join(holes)}")
    return 1 if report.failures or holes or (missing and args.strict) else 0


def _sweep(args: argparse.Namespace, seeds: range) -> Report:
    if args.anomaly is not None:
        report = Report()
        for seed in seeds:
            report.merge(anomaly(args.anomaly, seed, args.mode))
        return report
    blind = ["--blind"] if args.blind else []
    workers = min(args.jobs or jobs.cores(), len(seeds) // jobs.SMALL)
    if workers > 1:
        mode = ["--mode", args.mode] if args.mode else []
        return jobs.spread(seeds, workers, [*mode, *blind])
    return sweep(seeds, args.mode, blind=args.blind, command=" ".join(("penstock sim", *blind)))


def _never(report: Report) -> list[str]:
    """Edges and meetings that a long sweep must have seen, and this one did not."""
    return [*(f"{role} {tiers} {phase} --{trigger}: never taken"
              for role, tiers, phase, trigger in never_taken(report.edges)),
            *(f"{role} {phase}, {event}: never met" for role, phase, event in never_met(report.met))]


def one(args: argparse.Namespace, make: MakeCore = Core, command: str = "penstock sim") -> int:
    """`args.seed` alone, with a traceback, or the simplest mode in which it fails. The exit code."""
    if args.shrink:
        command += " --blind" * args.blind
        failure = shrink(args.seed, args.mode, make, command, blind=args.blind)
        print(failure or f"seed {args.seed} passes")
        return 1 if failure else 0
    sc = draw(args.seed, args.mode)
    run = start(sc, make, blind=args.blind, record=True)
    print(sc)
    try:
        run.play()
    except Exception:              # print it like any crash, then say where in the run it was
        traceback.print_exc()
        steps = ", ".join(f"{world.sc.cfg.role} step {world.judge.issued}" for world in run.worlds)
        print(f"failed at time {run.clock.now:.2f}, {steps}")
        return 1
    print(f"passed: {sum(world.judge.issued for world in run.worlds)} steps, digest {run.digest()}")
    return 0


def _flight(args: argparse.Namespace) -> int:
    """0: shown, or replayed as recorded without a finding."""
    path = args.replay if args.print is None else args.print
    try:
        with open(path, encoding="ascii") as file:
            log = flight.read(file)
    except (OSError, ValueError) as error:
        print(f"penstock sim: {path}: {error}", file=sys.stderr)
        return 2
    if args.print is not None:
        for line in flight.pages(log):
            print(line)
        return 0
    if log.complete:
        same, said = exact(log)
        print(said)
        return 0 if same else 1
    print(f"{log.lost} earlier turns are lost: not an exact replay")
    if log.cfg.role != "unified":
        print("penstock sim: of one engine of a pair nothing else can be done again: --print shows it",
              file=sys.stderr)
        return 2
    try:
        said, notes = rerun.alike(log)
    except Exception:              # a finding, or the crash that was recorded
        traceback.print_exc()
        return 1
    print(said)
    for note in notes:
        print(f"  not done again: {note}")
    return 0


def _print(report: Report, seconds: float) -> None:
    for line in report.failures[:20]:
        print(line)
    if len(report.failures) > 20:
        print(f"... and {len(report.failures) - 20} more")
    print(f"{report.runs} runs ({report.fired['pairs']} of a pair), {report.steps} steps, "
          f"{len(report.failures)} failures; {seconds:.1f} s, "
          f"{60 * report.runs / seconds:.0f} runs a minute, "
          f"{1e6 * seconds / max(1, report.steps):.0f} us a step")

    fired = ", ".join(f"{name} {report.fired[name]}" for name in sorted({*MUST_FIRE, *report.fired}))
    print(textwrap.fill(f"fired: {fired}", 110, subsequent_indent="  "))


def _edges(report: Report) -> None:
    for edge in sorted(report.edges):
        role, tiers, state, trigger = edge
        print(f"  {role:8s} {tiers:16s} {state:16s} --{trigger}: {report.edges[edge]}")
    for line in _never(report):
        print(f"  {line}")
