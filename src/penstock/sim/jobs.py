"""One sweep in several processes: each runs `penstock sim` on a part of the seeds and prints what it
saw as JSON. The sum does not depend on how many there are. Knows nothing of what a run is.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from penstock.sim.programs.sweeps import Report

COMMAND = (sys.executable, "-m", "penstock.cli.main", "sim", "--jobs", "1", "--json")
SMALL = 24               # fewer seeds are not worth a process


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parts(seeds: range, jobs: int) -> Iterator[range]:
    """Large ones first, for each is a process that starts; then smaller and smaller ones, for a slow part
    at the end would leave the other cores idle."""
    first, least = seeds.start, max(SMALL, len(seeds) // 100)
    while first < seeds.stop:
        size = max(least, (seeds.stop - first) // (2 * jobs))
        yield range(first, min(first + size, seeds.stop))
        first += size


def spread(seeds: range, jobs: int, argv: Sequence[str]) -> Report:
    """The report of a sweep over `seeds`; `argv` are the flags that every part gets."""
    report = Report()
    with ThreadPoolExecutor(jobs) as pool:
        for part in pool.map(lambda part: _run(part, argv), parts(seeds, jobs)):
            report.merge(part)
    return report


def _run(seeds: range, argv: Sequence[str]) -> Report:
    where = ("--first", str(seeds.start), "--seeds", str(len(seeds)))
    done = subprocess.run([*COMMAND, *where, *argv], stdout=subprocess.PIPE, check=False)
    try:
        return Report.of(json.loads(done.stdout))
    except ValueError:
        line = f"penstock sim {' '.join((*where, *argv))}    # ended with {done.returncode}, without a report"
        return Report(failures=[line])
