"""The seeded bugs by hand: how many seeds each survives, or one of them in one seed.

    python tests/sim/hunt.py                                   # all; --first, --seeds, --blind
    python tests/sim/hunt.py NAME --seed 5 --mode pp_size=2    # as `penstock sim --seed`; --blind, --shrink
"""
from __future__ import annotations

import argparse
import sys
import time

from mutants import BUDGET, COMMAND, COUNTER, MUTANTS, hunt

from penstock.sim import main as command
from penstock.sim.programs import waste


def main(argv: list[str]) -> int:
    """The exit code: 1 if a bug was not caught, or the one seed fails."""
    parser = argparse.ArgumentParser(prog="hunt.py")
    parser.add_argument("names", nargs="*", metavar="NAME", help="one of: " + " ".join(MUTANTS))
    parser.add_argument("--seeds", type=int, help="at most; the default is the bug's budget")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--mode", default="")
    parser.add_argument("--waste", action="store_true", help="what the bug's counter has")
    for name in ("--blind", "--shrink"):
        parser.add_argument(name, action="store_true")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.names if name not in MUTANTS]:
        parser.error(f"no seeded bug is called {unknown[0]!r}: --help lists them")
    if args.seed is not None or args.waste:
        if len(args.names) != 1:
            parser.error("--seed and --waste take one NAME")
        [name] = args.names
        if args.seed is not None:
            return command.one(args, MUTANTS[name], COMMAND.format(name))
        for line in waste.findings(MUTANTS[name], (COUNTER[name],), COMMAND.format(name)):
            print(line)
        return 0
    missed = 0
    for name in args.names or MUTANTS:
        began = time.monotonic()
        seeds = BUDGET[name] if args.seeds is None else range(args.first, args.first + args.seeds)
        runs, line = hunt(name, seeds, blind=args.blind)
        missed += line is None
        print(f"{name:32s} {runs:5d} seeds {time.monotonic() - began:6.1f} s  {line or 'NOT CAUGHT'}",
              flush=True)
    print(f"{missed} not caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
