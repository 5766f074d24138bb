"""Make a failure small: fix one dimension after another, for as long as the finding is the same.

Works on the mode alone, so what is left is one line that replays. Knows no engine.
"""
from __future__ import annotations

import re
from dataclasses import fields

from penstock.core.core import Core
from penstock.sim.programs.sweeps import describe
from penstock.sim.world.pair import start
from penstock.sim.world.scenario import Scenario, draw
from penstock.sim.world.world import MakeCore

# What is gone in one go, the largest first.
WITHOUT = (
    "pair=0", "deaths=0", "push_fail=0", "aborts=0", "stops=0",
    "pauses=0", "drops=0", "spills=0", "flushes=0", "abort=0", "stop=0", "turns=0", "again=0", "expire=0",
    "fail=0", "hang=0", "full=0", "lie=0", "damages=0", "jumps=0", "straggle=0", "hold=0", "shy=0",
    "aims=0", "cuts=0", "keep=0", "delay=0",
    "report=0", "ranks=1", "overlap=0", "pp_size=1",
    "prefix_cache=0", "disk_pages=0", "model=1", "hot_pages=0", "always_hosted=0", "wait_pages=0",
    "alike=0", "draft_tokens=0", "dram_pages=0", "step_tokens=64")
# What is halved, down to 1.
LESS = ("requests", "new_max", "prompt_max", "spills", "pauses", "drops", "aborts", "stops", "flushes",
        "deaths", "rows", "pp_size", "ranks", "span")


def shrink(seed: int, mode: str = "", make: MakeCore = Core, command: str = "penstock sim", *,
           blind: bool = False) -> str:
    """The replay line of a simpler mode in which `seed` fails in the same way; empty if it passes."""
    failure, before = _failure(draw(seed, mode), make, command, blind), ""
    while failure and failure != before:
        before = failure
        for change in WITHOUT:
            mode, failure = _try(seed, mode, change, failure, make, command, blind)
        for name in LESS:
            while (value := int(_value(draw(seed, mode), name))) > 1:
                shorter = _try(seed, mode, f"{name}={value // 2}", failure, make, command, blind)
                if shorter[0] == mode:
                    break
                mode, failure = shorter
    return failure


def _try(seed: int, mode: str, change: str, failure: str, make: MakeCore, command: str,
         blind: bool) -> tuple[str, str]:
    """Mode and failure after `change`, or as they were."""
    name = change.split("=")[0]
    sc = draw(seed, mode)
    if _value(sc, name) == _value(draw(seed, change), name):
        return mode, failure                       # it is so already
    rest = [item for item in mode.split(",") if item and not item.startswith(f"{name}=")]
    simpler = ",".join([*rest, change])
    found = _failure(draw(seed, simpler), make, command, blind)
    return (simpler, found) if found and _kind(found) == _kind(failure) else (mode, failure)


def _kind(failure: str) -> tuple[str, str]:
    """What was found: the exception, and the end of its text without its numbers."""
    error, _, text = failure.partition("    # ")[2].partition(": ")
    return error, re.sub(r"\d+", "", text.rpartition(": ")[2])


def _value(sc: Scenario, name: str) -> float:
    part = next(part for part in (sc.cfg, sc, sc.speeds, sc.net)
                if name in {f.name for f in fields(part)})
    return float(getattr(part, name))


def _failure(sc: Scenario, make: MakeCore, command: str, blind: bool) -> str:
    try:
        start(sc, make, blind=blind).play()
    except Exception as error:
        return describe(sc, error, command)
    return ""
