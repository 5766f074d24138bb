"""`penstock sim`: run the core against fake ranks, judge it, print what happened.

Exit code 1 if anything failed. Every failure is one line that replays it.
"""
from __future__ import annotations

import argparse
import sys
import time
import traceback

from penstock.core.core import Core
from penstock.sim.mutants import MUTANTS, hunt
from penstock.sim.programs import (
    ANOMALIES,
    MUST_FIRE,
    Report,
    anomaly,
    never_met,
    never_taken,
    shrink,
    sweep,
)
from penstock.sim.scenario import draw
from penstock.sim.trace import dump, record
from penstock.sim.world import MakeCore, World


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=600, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this seed alone, with a traceback")
    parser.add_argument("--mode", default="", metavar="NAME=NUMBER,...",
                        help="fix dimensions of every scenario, e.g. pp_size=2,overlap=1,ranks=1")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="run with this seeded bug")
    parser.add_argument("--mutants", action="store_true",
                        help="seeds until each seeded bug is caught, --seeds at most")
    parser.add_argument("--blind", action="store_true",
                        help="judge only what a user could see: tokens, outcomes, progress")
    parser.add_argument("--anomaly", choices=sorted(ANOMALIES),
                        help="break the n-th of a kind, n = 1, 2, ..., for every seed")
    parser.add_argument("--shrink", action="store_true",
                        help="with --seed: look for a simpler mode in which it still fails")
    parser.add_argument("--record", metavar="FILE",
                        help="write the event traces of the seeds, one JSON line each")
    parser.add_argument("--edges", action="store_true", help="print how often each edge was taken")
    parser.add_argument("--report", action="store_true", help="print how often each fault fired")


def run(config: object, args: argparse.Namespace) -> int:
    """Exit code. `config` is not used: a simulation draws its own engines."""
    began = time.monotonic()
    try:
        draw(0, args.mode)
    except ValueError as error:
        print(f"penstock sim: {error}", file=sys.stderr)
        return 2
    if args.seed is not None and args.anomaly is None and not args.mutants:
        return _one(args)
    if args.mutants:
        return _mutants(args)
    seeds = range(args.first, args.first + args.seeds) if args.seed is None else (args.seed,)
    if args.record is not None:
        with open(args.record, "w", encoding="ascii") as file:
            file.writelines(dump(record(seed, args.mode)) + "\n" for seed in seeds)
        return 0
    if args.anomaly is not None:
        report = Report()
        for seed in seeds:
            _add(report, anomaly(args.anomaly, seed, args.mode))
    else:
        make = MUTANTS[args.mutant] if args.mutant else Core
        extra = f" --mutant {args.mutant}" if args.mutant else ""
        report = sweep(seeds, args.mode, make, blind=args.blind, extra=extra)
    _print(report, time.monotonic() - began)
    if args.report:
        _faults(report)
    if args.edges:
        for edge in sorted(report.edges, key=lambda e: (e[0].value, e[1].value)):
            print(f"  {edge[0].value:9s} --{edge[1].value}: {report.edges[edge]}")
        for phase, trigger in never_taken(report.edges):
            print(f"  {phase.value:9s} --{trigger.value}: never taken")
        for pair in never_met(report.pairs):
            print(f"  {pair[0].value:9s} {pair[1].__name__}: never met")
    return 1 if report.failures else 0


def _one(args: argparse.Namespace) -> int:
    make: MakeCore = MUTANTS[args.mutant] if args.mutant else Core
    if args.shrink:
        extra = f" --mutant {args.mutant}" if args.mutant else ""
        failure = shrink(args.seed, args.mode, make, extra)
        print(failure or f"seed {args.seed} passes")
        return 1 if failure else 0
    sc = draw(args.seed, args.mode)
    world = World(sc, make, blind=args.blind, record=True)
    print(sc)
    try:
        world.play()
    except Exception:              # print it like any crash, then say where in the run it was
        traceback.print_exc()
        print(f"failed at time {world.clock.now:.2f}, step {world.judge.issued}")
        return 1
    print(f"passed: {world.judge.issued} steps, digest {world.digest()}")
    return 0


def _mutants(args: argparse.Namespace) -> int:
    missed, names = 0, list(MUTANTS) if args.mutant is None else [args.mutant]
    for name in names:
        began = time.monotonic()
        seeds, line = hunt(name, range(args.first, args.first + args.seeds), blind=args.blind)
        missed += line is None
        print(f"{name:32s} {seeds:5d} seeds {time.monotonic() - began:6.1f} s  "
              f"{line or 'NOT CAUGHT'}", flush=True)
    print(f"{len(names) - missed} of {len(names)} seeded bugs caught")
    return 1 if missed else 0


def _add(total: Report, part: Report) -> None:
    total.runs += part.runs
    total.steps += part.steps
    total.failures += part.failures
    total.fired.update(part.fired)
    total.seeds.update(part.seeds)
    total.edges.update(part.edges)
    total.pairs.update(part.pairs)


def _print(report: Report, seconds: float) -> None:
    for line in report.failures[:20]:
        print(line)
    if len(report.failures) > 20:
        print(f"... and {len(report.failures) - 20} more")
    print(f"{report.runs} runs, {report.steps} steps, {len(report.failures)} failures; "
          f"{seconds:.1f} s, {60 * report.runs / seconds:.0f} runs a minute, "
          f"{1e6 * seconds / max(1, report.steps):.0f} us a step")


def _faults(report: Report) -> None:
    for name in sorted({*MUST_FIRE, *report.fired}):
        share = 100 * report.seeds[name] / max(1, report.runs)
        print(f"  {name:24s} {report.fired[name]:8d} times, in {share:5.1f} % of the runs")
