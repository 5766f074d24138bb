"""What one seed means: engine sizes, speeds, the mix of faults. All of it drawn from the seed.

Every seed draws its own sizes and rates: a race that needs an unusual ratio of them is then found
by some seeds often instead of by all seeds almost never.
"""
from __future__ import annotations

from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

from penstock.core.settings import CoreConfig
from penstock.sim.executor import Speeds

# Disjoint: a mixed-up id fails at once.
HBM_BASE, DRAM_BASE, ROW_BASE, DISK_BASE = 1_000, 2_000, 3_000, 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    seed: int
    cfg: CoreConfig
    ranks: int
    speeds: Speeds
    requests: int
    span: float               # virtual time over which they arrive
    prompt_max: int           # tokens, of an ordinary request
    new_max: int              # output tokens, of an ordinary request
    abort: float              # chance for a request to be aborted at a random moment
    aborts: int               # Aborted events, aimed at phases
    stops: int                # Stopped events, aimed at phases
    stop: float               # chance for a request to meet a stop string
    turns: float              # chance that a finished answer is extended by a later prompt
    again: float              # chance that a prompt extends an earlier one, with or without its answer
    pauses: int               # forced Paused events, aimed at phases
    drops: int
    flushes: int
    deadline: float           # upper bound of what a fetch may take before `Expired` comes
    expire: float             # chance that a queued request has a deadline
    hold: float               # chance that the loop turns late and sees events in batches
    mode: str = ""            # overrides, for the line that replays it

    @property
    def replay(self) -> str:
        mode = f" --mode {self.mode}" if self.mode else ""
        return f"penstock sim --seed {self.seed}{mode}"


def draw(seed: int, mode: str = "") -> Scenario:
    """The scenario of `seed`. `mode` fixes dimensions: 'pp_size=2,overlap=1,dram_pages=0,ranks=1'.

    Raises ValueError if `mode` names something that is not a number of CoreConfig, Scenario or
    Speeds.
    """
    rng = Random(f"scenario {seed}")
    # storm: decoding rows outgrow the pool together. reload: what was evicted is wanted again.
    # fetch: even the host has forgotten it, storage has not.
    profile = rng.choice(("mixed", "mixed", "storm", "reload", "fetch"))
    storm, fetch = profile == "storm", profile == "fetch"
    reload = fetch or profile == "reload"
    size = rng.choice((1, 2, 3, 4, 4, 4, 8))
    prompt_max = rng.choice((6, 12) if storm else (20, 32) if fetch else (6, 12, 20, 32))
    new_max = rng.choice((20, 40) if storm else (2, 6) if fetch else (2, 6, 12, 20, 40))
    largest = -(-(prompt_max + new_max) // size) + 1
    hbm = max(2, int(largest * rng.choice((1.0, 1.1, 1.3) if storm or reload
                                          else (0.7, 1.0, 1.1, 1.5, 2.0, 4.0))))
    dram = max(1, int(hbm * rng.choice((0.5, 0.8, 1.2) if fetch else (2.0, 4.0, 8.0) if reload
                                       else (0.3, 1.0, 2.0, 4.0))))
    host = reload or rng.random() < 0.7
    disk = fetch or (host and rng.random() < 0.5)
    cfg = CoreConfig(
        page_size=size, rows=rng.choice((3, 4, 6, 12) if storm else (1, 2, 3, 4, 6, 12)), hbm_pages=hbm,
        dram_pages=dram if host else 0,
        disk_pages=hbm * rng.choice((8, 32) if fetch else (1, 4, 16)) if disk else 0, disk_base=DISK_BASE,
        step_tokens=rng.choice((1, 2, 3, 5, 8, 16, 64)),
        max_len=rng.choice((1 << 20, 1 << 20, prompt_max + new_max // 2)),
        overlap=rng.random() < 0.6, pp_size=rng.choice((1, 1, 1, 2, 3)),
        draft_tokens=rng.choice((0, 0, 1, 3)),
        prefix_cache=reload or rng.random() < 0.85, hbm_base=HBM_BASE, dram_base=DRAM_BASE,
        row_base=ROW_BASE)
    speeds = Speeds(
        step=rng.choice((0.3, 1.0, 1.0)), report=rng.choice((0.0, 0.2, 1.0, 4.0)),
        copy=rng.choice((0.1, 0.5, 2.0, 8.0)), straggle=rng.choice((0.0, 0.0, 0.2)),
        fail=rng.choice((0.0, 0.0, 0.1, 0.5)), shy=rng.choice((0.0, 0.2, 0.7)),
        disk=rng.choice((0.2, 1.0, 5.0, 40.0)))
    busy = 0.0 if storm else rng.choice((2.0, 5.0) if fetch else (0.0, 0.3, 1.0, 3.0))
    requests = rng.randint(12, 20) if fetch else rng.randint(4, 14)
    heavy = rng.choice((0, 1, 1, 4))
    sc = Scenario(
        seed=seed, cfg=cfg, ranks=rng.choice((1, 1, 2, 3)), speeds=speeds, requests=requests,
        span=requests * busy * 3 + 1, prompt_max=prompt_max, new_max=new_max,
        abort=rng.choice((0.0, 0.1, 0.4)), aborts=rng.choice((0, 0, 1, 4)), stops=rng.choice((0, 1, 3, 6)),
        stop=rng.choice((0.0, 0.2, 0.5)), turns=0.7 if reload else rng.choice((0.0, 0.3, 0.7)),
        again=0.7 if fetch else 0.17,
        pauses=heavy * rng.randint(0, 5), drops=heavy * rng.randint(0, 3),
        deadline=rng.choice((1.0, 10.0, 1000.0)), expire=rng.choice((0.0, 0.0, 0.3)),
        flushes=rng.choice((0, 0, 1, 4)), hold=rng.choice((0.0, 0.3, 0.8)))
    return override(sc, mode)


def override(sc: Scenario, mode: str) -> Scenario:
    for item in filter(None, mode.split(",")):
        name, _, text = item.partition("=")
        for part in (sc.cfg, sc, sc.speeds):
            old = getattr(part, name, None) if name in {f.name for f in fields(part)} else None
            if isinstance(old, int | float) and name != "seed":
                value = type(old)(float(text))
                break
        else:
            raise ValueError(f"mode {item!r}: not a number of CoreConfig, Scenario or Speeds")
        change: dict[str, Any] = {name: value}
        if part is sc.cfg:
            sc = replace(sc, cfg=replace(sc.cfg, **change))
        elif part is sc.speeds:
            sc = replace(sc, speeds=replace(sc.speeds, **change))
        else:
            sc = replace(sc, **change)
    return replace(sc, mode=mode)
