"""`penstock plan`: what a trace has, and what engines would make of it."""
from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from penstock.bench.report import check_output, write_json
from penstock.config.base.errors import ConfigError
from penstock.config.settings.tree import Config
from penstock.plan import report
from penstock.plan.agents import Agents, agents
from penstock.plan.grid import Point, points
from penstock.plan.trace import Trace, largest_hits, part_of, read

if TYPE_CHECKING:
    from penstock.plan.rates import Rates
    from penstock.plan.shape import Planned

SCALE_MAX = 1_000_000
REQUESTS_MAX = 10_000_000
PAGE_TOKENS = 16                # of the share of a prompt that was seen before, without a MODEL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("plan")
    add_source(group)
    group.add_argument("--scale", type=float, default=1.0, metavar="X", help="divide lengths, pools and speeds by "
                       "this: a run takes less time, and means the same but for the size of a page")
    group.add_argument("--rates", metavar="FILE", help="speeds of the machine: a JSON file, or h200 (default: h200)")
    group.add_argument("--grid", metavar="KEY=VALUES,...", help="combinations to try, e.g. host=64G..1T,engines=1..8,"
                       "budget=0,2048; keys: device, host, storage, engines, budget")
    group.add_argument("--routing", choices=("affinity", "round-robin"), help="how prompts reach several engines "
                       "(default: affinity, as --data-parallel-size routes)")
    group.add_argument("--fleet", type=int, metavar="N", help="the trace and the storage are those of N engines: "
                       "simulate fewer, e.g. engines=25,50,100 in --grid, with their share")
    group.add_argument("--output-json", metavar="FILE", help="file for all numbers of all grid points")


def add_source(group: argparse._ArgumentGroup) -> None:
    """Flags that `trace_of` reads, but --scale."""
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", metavar="FILE", help="requests: Mooncake JSONL, or CSV with arrival_s, "
                        "input_tokens, output_tokens")
    source.add_argument("--agents", type=int, metavar="N", help="N sessions of a coding agent whose context grows")
    group.add_argument("--turns", type=int, metavar="N", help="turns of an agent (default: 43)")
    group.add_argument("--one-shots", type=int, metavar="N", help="single prompts of 32,000 tokens next to the agents")
    group.add_argument("--trace-seed", type=int, metavar="N", help="seed of --agents (default: 0)")


def run(config: Config | None, args: argparse.Namespace) -> int:
    """Return the exit code. `config` is not resolved. Raises ConfigError."""
    trace = trace_of(args)
    if config is None:
        for name in ("rates", "grid", "routing", "fleet", "output_json"):
            if getattr(args, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} needs a MODEL")
        print(report.of_trace(trace, largest_hits(trace, PAGE_TOKENS)))
        return 0
    check_output("--output-json", args.output_json)
    return planned(config, args, trace)


def planned(config: Config, args: argparse.Namespace, trace: Trace) -> int:
    """Run each grid point. Raises ConfigError before the first one if one of them could not start."""
    from dataclasses import replace

    from penstock.plan.rates import read_rates
    from penstock.plan.shape import divided
    from penstock.plan.world import Result, Routing, World

    rates, scale = read_rates(args.rates or "h200"), args.scale
    grid, fleet = points(args.grid), args.fleet
    routing: Routing = args.routing or "affinity"
    if fleet is not None and fleet < max(point.engines for point in grid):
        raise ConfigError(f"--fleet is {fleet}: at least the engines of --grid")
    engines = [_engine(config, point, rates, args.grid) for point in grid]
    done: list[tuple[Point, Result]] = []
    for point, engine in zip(grid, engines, strict=True):
        core = engine.core
        if point.storage:
            core = replace(core, disk_pages=1 << 16, store_root=b"plan")
        share = point.engines / fleet if fleet else 1.0
        world = World(part_of(trace, share), replace(engine, core=divided(core, scale)), rates, engines=point.engines,
                      routing=routing, storage_bytes=point.storage, scale=scale,
                      storage_share=share)
        done.append((point, world.run()))
        print(report.progress(point, done[-1][1]), file=sys.stderr, flush=True)
    if args.output_json:
        write_json(args.output_json, report.plain(trace, rates, done, scale, fleet, routing))
    refusals = report.refusals(engines, done)
    if all(r.refused == r.num_requests for _, r in done):
        raise ConfigError("nothing was planned. " + "; ".join(refusals))
    print(report.of_grid(trace, engines[0], rates, done, scale, fleet))
    for line in refusals:
        print(f"penstock: warning: {line}", file=sys.stderr)
    return 0


def _engine(config: Config, point: Point, rates: Rates, grid: str | None) -> Planned:
    """Raises ConfigError, with the grid as it was typed where that is what cannot be."""
    from penstock.plan.shape import plan_engine

    try:
        engine = plan_engine(point.settings(config), rates)
    except ConfigError as e:
        if grid is not None and _starts(config, rates):
            raise ConfigError(f"--grid {grid}: {e}") from None
        raise
    if point.storage and not engine.core.dram_pages:
        raise ConfigError(f"--grid {grid}: storage needs a host tier: give host=SIZE")
    return engine


def _starts(config: Config, rates: Rates) -> bool:
    """Whether an engine without the grid could."""
    from penstock.plan.shape import plan_engine

    try:
        plan_engine(config, rates)
    except ConfigError:
        return False
    return True


def trace_of(args: argparse.Namespace) -> Trace:
    """The trace that the flags name. Raises ConfigError."""
    if not 1 <= args.scale <= SCALE_MAX:
        raise ConfigError(f"--scale is {args.scale:g}: 1 to {SCALE_MAX:,}")
    given = {name: value for name in ("turns", "one_shots") if (value := getattr(args, name)) is not None}
    if args.trace is not None:
        for name in (*given, *(["trace_seed"] if args.trace_seed is not None else [])):
            raise ConfigError(f"--{name.replace('_', '-')} is for --agents")
        return read(args.trace, args.scale)
    for name, value in (("agents", args.agents), *given.items()):
        if value < (name != "one_shots"):
            raise ConfigError(f"--{name.replace('_', '-')} is {value}: at least {int(name != 'one_shots')}")
    a = Agents(sessions=args.agents, seed=args.trace_seed or 0, **given)
    if (num := a.sessions * a.turns + a.one_shots) > REQUESTS_MAX:
        raise ConfigError(f"--agents {a.sessions} of {a.turns} turns are {num:,} requests: at most {REQUESTS_MAX:,}")
    return agents(a, args.scale)
