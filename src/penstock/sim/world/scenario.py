"""What one seed means: engine sizes, speeds, the mix of faults. All of it drawn from the seed.

Every seed draws its own sizes and rates: a race that needs an unusual ratio of them is then found
by some seeds often instead of by all seeds almost never.
"""
from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import product
from random import Random
from typing import Any

from penstock.core.settings import CacheGroup, CoreConfig
from penstock.sim.ranks.executor import Speeds

# Disjoint: a mixed-up id fails at once.
HBM_BASE, DRAM_BASE, ROW_BASE, DISK_BASE = 1_000, 2_000, 3_000, 4_000
GROUP_BASE = 10_000


# The dimensions of a mode: pp_size, overlap, pair, prefix_cache, model, (host, storage, sparse). Every
# third seed takes the next of their combinations, whatever else it draws.
TIERS = ((0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1))
MODES = tuple(product((1, 2, 3), (0, 1), (0, 1), (0, 1), (1, 3), TIERS))
EVERY, STRIDE = 3, 101                     # the stride has no factor in common with len(MODES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """How bad it is between the engines of a pair."""

    delay: float = 0.1        # of a message, behind those before it
    write: float = 0.2        # of what is written, the same
    push_fail: float = 0.0    # chance that a push fails
    deaths: int = 0
    cuts: int = 0             # times that the connection breaks
    keep: float = 0.0         # chance that an answer waits until its request is somewhere else
    patience: float = 1000.0  # upper bound of what a transfer may take before `Expired` comes
    rooms: float = 0.0        # chance that a router sends a prompt to the prefill engine as well, by itself


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
    pauses: int               # forced Paused events, aimed at phases; without them, drops and aborts,
                              # no forced event is followed by another
    drops: int
    flushes: int
    deadline: float           # upper bound of what a fetch may take before `Expired` comes
    expire: float             # chance that a queued request has a deadline
    hold: float               # chance that the loop turns late and sees events in batches
    spills: int               # Spilled and Promoted events, aimed at phases
    aims: int                 # events that wait for a request in a short phase
    model: int                # cache groups: 1 (full) or 3 (full, window, snapshot)
    alike: int                # 1: requests often get the same tokens
    steps: int                # so many steps and answers are no longer extended by later prompts
    pair: int = 0             # 1: a prefill engine and a decode engine, with `net` between them
    net: Network = Network()
    named: int = 0            # 1: pages in storage are named by what they hold, and it is asked for them;
                              # 2: two engines have it together
    damages: int = 0          # requests whose KV is found to be damaged
    republishes: int = 0      # times that a reader of KV events has missed some
    sessions: int = 0         # that requests belong to, besides none
    ends: int = 0             # times that one of them ends
    warms: int = 0            # requests for what storage has of an earlier prompt
    retains: float = 0.0      # chance that a request asks for its session's pages to go last
    jumps: int = 0            # the clock leaps: every deadline and reminder comes at once
    mode: str = ""            # overrides, for the line that replays it

    @property
    def replay(self) -> str:
        """The options of `penstock sim` that run it again."""
        mode = f" --mode {self.mode}" if self.mode else ""
        return f"--seed {self.seed}{mode}"


def draw(seed: int, mode: str = "") -> Scenario:
    """The scenario of `seed`. `mode` fixes dimensions: 'pp_size=2,overlap=1,dram_pages=0,ranks=1'.

    Raises ValueError if `mode` names something that is not a number of CoreConfig, Scenario, Speeds
    or Network.
    """
    sc = _mode(_draw(seed))
    damages = Random(f"damage {seed}").choice((0, 0, 0, 0, 0, 0, 1, 4))
    rng = Random(f"lapses {seed}")
    speeds = replace(sc.speeds, hang=rng.choice((0.0, 0.0, 0.0, 0.1)), full=rng.choice((0.0, 0.0, 0.0, 0.4)),
                     lie=rng.choice((0.0, 0.0, 0.0, 0.3)))
    if sc.again > 0.5:                     # what only storage has is wanted: more of it is read
        speeds = replace(speeds, lie=Random(f"lies {seed}").choice((0.1, 0.3, speeds.lie)))
    parts = Random(f"take {seed}")
    sc = replace(sc, cfg=replace(sc.cfg, take_pages=parts.choice((1, 2, 5, 512)),
                                 load_pages=parts.choice((1, 3, 64)),
                                 save_pages=Random(f"saves {seed}").choice((1, 3, 256, 256))))
    sc = replace(sc, cfg=replace(sc.cfg, hit_pages=2 * sc.cfg.take_pages))
    if sc.pair and seed % 5 == 3:
        sc = replace(sc, net=replace(sc.net, rooms=Random(f"rooms {seed}").choice((0.3, 0.8))))
    sc = replace(sc, damages=damages, speeds=speeds, jumps=rng.choice((0, 0, 0, 0, 1, 3)))
    if sc.model == 3:                      # only states are computed in blocks, of which a step has one at least
        blocks = [n for n in (2, 4, 8, 16, 64) if n <= sc.cfg.step_tokens]
        sc = replace(sc, cfg=replace(sc.cfg, chunk_multiple=Random(f"blocks {seed}").choice((1, 1, 1, *blocks))))
    return finish(override(_sessions(_named(sc)), mode))


def _sessions(sc: Scenario) -> Scenario:
    """Requests of sessions, which end, and ask for what storage has of them."""
    rng = Random(f"has sessions {sc.seed}")
    if not sc.cfg.prefix_cache or rng.random() >= 0.5:
        return sc
    cfg = replace(sc.cfg, sessions_max=rng.choice((1, 3, 4096)))
    sc = replace(sc, cfg=cfg, sessions=rng.choice((1, 2, 4)), ends=rng.choice((2, 5, 12)),
                 warms=rng.choice((0, 1, 4)) if cfg.disk_pages else rng.choice((0, 0, 1)))
    if rng.random() < 0.5:
        return sc
    share = rng.choice((0.1, 0.3, 1.0)) * (cfg.dram_pages or cfg.hbm_pages)
    return replace(sc, cfg=replace(cfg, retained_pages=max(1, int(share))), retains=rng.choice((0.3, 1.0)))


def _named(sc: Scenario) -> Scenario:
    """Storage that outlives what the core knows of it. Flushes are what a restart is: the tree is empty, and
    the store is not."""
    rng = Random(f"named {sc.seed}")
    if sc.pair or not sc.cfg.disk_pages or rng.random() < 0.5:
        return sc
    flushes = sc.flushes + (rng.choice((1, 3)) if sc.again > 0.5 else 0)
    gone, more = rng.choice((0.0, 0.0, 0.1)), Random(f"several {sc.seed}")
    return replace(sc, named=2 if more.random() < 0.3 else 1, flushes=flushes,
                   speeds=replace(sc.speeds, gone=gone, dead=more.choice((0.0, 0.0, 0.03))))


def _cell(seed: int) -> tuple[int, int, int, int, int, tuple[int, int, int]] | None:
    """The combination of a mode's dimensions that this seed is made to have."""
    return None if seed % EVERY else MODES[seed // EVERY * STRIDE % len(MODES)]


def _draw(seed: int) -> Scenario:
    rng = Random(f"scenario {seed}")
    # storm: decoding rows outgrow the pool together. reload: what was evicted is wanted again.
    # fetch: even the host has forgotten it, storage has not.
    profile = rng.choice(("mixed", "mixed", "storm", "reload", "fetch"))
    cell = _cell(seed)
    if cell is not None and cell[2] and cell[5][1] and rng.random() < 0.7:
        profile = "fetch"                      # else an engine of a pair hardly ever does
    storm, fetch = profile == "storm", profile == "fetch"
    reload = fetch or profile == "reload"
    size = rng.choice((1, 2, 3, 4, 4, 4, 8))
    prompt_max = rng.choice((6, 12) if storm else (20, 32) if fetch else (6, 12, 20, 32))
    new_max = rng.choice((20, 40) if storm else (2, 6) if fetch else (2, 6, 12, 20, 40))
    largest = -(-(prompt_max + new_max) // size) + 1
    hbm = max(2, int(largest * rng.choice((0.8, 1.0, 1.1) if fetch else (1.0, 1.1, 1.3) if storm or reload
                                          else (0.7, 1.0, 1.1, 1.5, 2.0, 4.0))))
    dram = max(1, int(hbm * rng.choice((0.3, 0.5, 1.0) if fetch else (2.0, 4.0, 8.0) if reload
                                       else (0.3, 1.0, 2.0, 4.0))))
    host = reload or rng.random() < 0.7
    disk = fetch or (host and rng.random() < 0.5)
    cfg = CoreConfig(
        page_size=size, rows=rng.choice((3, 4, 6, 12) if storm else (1, 2, 3, 4, 6, 12)), hbm_pages=hbm,
        dram_pages=dram if host else 0,
        disk_pages=hbm * rng.choice((8, 32) if fetch else (1, 4, 16)) if disk else 0, disk_base=DISK_BASE,
        step_tokens=rng.choice((3, 5, 8, 16) if fetch else (1, 2, 3, 5, 8, 16, 64)),
        max_len=rng.choice((1 << 20, 1 << 20, prompt_max + new_max // 2)),
        overlap=rng.random() < 0.6, pp_size=rng.choice((1, 1, 1, 2, 3)),
        draft_tokens=rng.choice((0, 0, 1, 3)),
        prefix_cache=reload or rng.random() < 0.85, hbm_base=HBM_BASE, dram_base=DRAM_BASE,
        row_base=ROW_BASE)
    speeds = Speeds(
        step=rng.choice((0.3, 1.0, 1.0)), report=rng.choice((0.0, 0.2, 1.0, 4.0)),
        copy=rng.choice((0.1, 0.5) if fetch else (0.1, 0.5, 2.0, 8.0)), straggle=rng.choice((0.0, 0.0, 0.2)),
        fail=rng.choice((0.0, 0.0, 0.1, 0.5)), shy=rng.choice((0.0, 0.2, 0.7)),
        disk=rng.choice((0.2, 1.0, 5.0) if fetch else (0.2, 1.0, 5.0, 40.0)))
    speeds = replace(speeds, write=speeds.disk)
    busy = 0.0 if storm else rng.choice((2.0, 5.0) if fetch else (0.0, 0.3, 1.0, 3.0))
    requests = rng.randint(14, 24) if fetch else rng.randint(4, 14)
    heavy = rng.choice((0, 1, 1, 4))
    sc = Scenario(
        seed=seed, cfg=cfg, ranks=rng.choice((1, 1, 2, 3)), speeds=speeds, requests=requests,
        span=requests * busy * 3 + 1, prompt_max=prompt_max, new_max=new_max,
        abort=rng.choice((0.0, 0.1, 0.4)), aborts=rng.choice((0, 0, 1, 4)), stops=rng.choice((0, 1, 3, 6)),
        stop=rng.choice((0.0, 0.2, 0.5)), turns=0.7 if reload else rng.choice((0.0, 0.3, 0.7)),
        again=0.7 if fetch else 0.17,
        pauses=heavy * rng.randint(0, 5), drops=heavy * rng.randint(0, 3),
        deadline=rng.choice((1.0, 10.0, 1000.0)), expire=rng.choice((0.0, 0.0, 0.3)),
        flushes=rng.choice((0, 0, 1, 4)), hold=rng.choice((0.0, 0.3, 0.8)),
        spills=0, model=1, alike=0, aims=0, steps=0)
    return _tiers(sc, storm=storm, largest=largest)


def _tiers(sc: Scenario, *, storm: bool, largest: int) -> Scenario:
    """Sparse decode, and a model of several cache groups. Drawn apart, so that a seed's other
    dimensions do not depend on these."""
    rng, cfg = Random(f"tiers {sc.seed}"), sc.cfg
    sparse = rng.random() < 0.6
    if sparse and not cfg.dram_pages:
        cfg = replace(cfg, dram_pages=cfg.hbm_pages)
    hot = rng.choice((1, 1, 2, 3)) if sparse else 0
    tight = sc.again > 0.5                          # what storage alone has is wanted: no more memory
    if sparse and rng.random() < 0.5 and not tight:       # prompts that the device could never hold
        cfg = replace(cfg, hbm_pages=max(2 + hot, cfg.hbm_pages // 2),
                      dram_pages=max(cfg.dram_pages, int(largest * rng.choice((1.0, 2.0, 4.0)))))
    cfg = replace(cfg, hot_pages=hot, always_hosted=sparse and rng.random() < 0.2,
                  wait_pages=rng.choice((0, 0, 1, 4, 1_000)), group_base=GROUP_BASE,
                  hot_pages_max=hot + sc.seed % 7 if sparse else 0,
                  draft_positions=(8, 32, 0)[sc.seed // 7 % 3] if sparse else 0,
                  budget=sc.seed % 3 and 1_000)     # all is read here; every third core thinks otherwise
    sc = replace(sc, cfg=cfg, model=rng.choice((1, 1, 3)), spills=rng.choice((0, 2, 8)) if sparse else 0)
    if sparse and rng.random() < 0.3 and not tight:       # long answers that go to the host and come back
        cfg = replace(cfg, always_hosted=False, page_size=min(cfg.page_size, 2),
                      hbm_pages=2 * cfg.hbm_pages, dram_pages=4 * cfg.dram_pages)
        sc = replace(sc, cfg=cfg, spills=30, pauses=sc.pauses // 4, new_max=max(sc.new_max, 20), turns=0.7)
    if sparse and rng.random() < 0.2:
        sc = replace(sc, cfg=replace(sc.cfg, page_size=4), alike=1, pauses=30, turns=0.0)
    return sc


def _mode(sc: Scenario) -> Scenario:
    """The next combination of the dimensions of a mode; the network, and how long all this goes on."""
    rng, cfg = Random(f"mode {sc.seed}"), sc.cfg
    if (cell := _cell(sc.seed)) is not None:
        pp_size, overlap, pair, prefix, model, (host, disk, sparse) = cell
        cfg = replace(
            cfg, pp_size=pp_size, overlap=bool(overlap), prefix_cache=bool(prefix),
            dram_pages=(cfg.dram_pages or cfg.hbm_pages * rng.choice((1, 2, 4))) if host else 0,
            disk_pages=(cfg.disk_pages or cfg.hbm_pages * rng.choice((1, 4))) if disk else 0,
            hot_pages=(cfg.hot_pages or rng.choice((1, 2))) if sparse else 0)
        sc = replace(sc, cfg=cfg, model=model, pair=pair, spills=sc.spills if sparse else 0)
    # Most are short: half of the time would else go to one run in twenty.
    steps = 400 if rng.random() < 0.01 else rng.choice((8, 14, 24))
    fits = (3 if sc.pair else 4) * steps * min(cfg.step_tokens, 8) // (sc.prompt_max + sc.new_max)
    if sc.pair:
        most = 8 if sc.again > 0.5 else 5
    else:
        many = sc.spills > 8               # long answers that go to the host and come back, if there is load
        most = (sc.requests + 2) // 2 if many else (sc.requests + 5) // 3
    sc = replace(sc, steps=steps, requests=min(most, max(4, fits)), aims=rng.choice((0, 5, 10)))
    late = rng.random() < 0.25         # what is said comes when the request is somewhere else
    net = Network(
        delay=rng.choice((20.0, 60.0) if late else (0.1, 1.0, 5.0)), write=rng.choice((0.2, 2.0, 10.0)),
        push_fail=rng.choice((0.0, 0.0, 0.1)), deaths=rng.choice((0, 0, 1, 3)),
        cuts=rng.choice((0, 0, 1, 3)), keep=rng.choice((0.0, 0.5)),
        patience=rng.choice((20.0, 60.0) if late else (100.0, 500.0, 2000.0)))
    sc = replace(sc, net=net)
    rare = cell is not None and (sc.pair or (cfg.sparse and rng.random() < 0.25))
    return _short_phases(sc, rng) if rare else sc


def _short_phases(sc: Scenario, rng: Random) -> Scenario:
    """Sizes and speeds at which engines, above all of a pair, meet phases that they else hardly ever have."""
    cfg, net = replace(sc.cfg, page_size=min(sc.cfg.page_size, 2)), replace(sc.net, deaths=0, keep=0.7)
    speeds = replace(sc.speeds, fail=rng.choice((0.0, 0.2, 0.4)))
    stored = sc.pair and cfg.disk_pages and cfg.prefix_cache
    if stored and rng.random() < (0.6 if cfg.sparse else 0.8):         # only storage has what is wanted
        cfg = replace(cfg, hbm_pages=rng.choice((10, 14)) if cfg.sparse else 10, disk_pages=200, wait_pages=0,
                      dram_pages=18 if cfg.sparse else 6, always_hosted=cfg.sparse and rng.random() < 0.2)
        speeds = replace(speeds, copy=0.2, disk=rng.choice((0.3, 1.0, 5.0)), write=0.2,
                         fail=rng.choice((0.0, 0.0, 0.2)))
        net = replace(net, patience=rng.choice((20.0, 100.0)), delay=min(net.delay, 1.0))
        return replace(sc, cfg=cfg, speeds=speeds, net=net, steps=60, requests=40, span=240.0, prompt_max=12,
                       new_max=2, turns=0.0, again=0.9, flushes=0, abort=0.0, hold=0.0,
                       deadline=rng.choice((3.0, 1000.0, 1000.0)), expire=rng.choice((0.0, 0.5)))
    if cfg.sparse and rng.random() < 0.9:      # rows go to the host and come back
        slow = not sc.pair or rng.random() < 0.3             # on their way back the device fills up again
        cfg = replace(cfg, hbm_pages=24 if slow else rng.choice((24, 40)), dram_pages=200, draft_tokens=0,
                      rows=max(cfg.rows, 4), wait_pages=0, always_hosted=False,
                      page_size=1 if slow else cfg.page_size)
        speeds = replace(speeds, copy=4.0, fail=0.0) if slow else replace(speeds, copy=0.5)
        net = replace(net, push_fail=0.0, cuts=min(net.cuts, 1), patience=1000.0,
                      delay=min(net.delay, 1.0), write=min(net.write, 2.0))
        sc = replace(sc, cfg=cfg, speeds=speeds, net=net, steps=30, requests=7, span=30.0, prompt_max=12,
                     new_max=20, turns=0.7, spills=30, pauses=1, drops=1, abort=0.0, aborts=0)
        if slow:
            sc = replace(sc, steps=40, requests=7, span=42.0, prompt_max=6, aims=0, stops=0, pauses=0,
                         drops=0)
        return sc
    return sc


def finish(sc: Scenario) -> Scenario:
    """The cache groups that the other dimensions ask for, and memory for them."""
    rng, cfg = Random(f"groups {sc.seed}"), sc.cfg
    if sc.named and cfg.disk_pages:
        cfg = replace(cfg, store_root=b"keys")
        sc = replace(sc, cfg=cfg)
    if sc.named == 2:                          # who reads what another has stored is told of no damage to it
        sc = replace(sc, damages=0)
    if cfg.prefix_cache and sc.seed // EVERY % 3:          # of every mode, some
        cfg = replace(cfg, published_tiers=2 + sc.seed // EVERY % 2,
                      published_turn=Random(f"published {sc.seed}").choice((4096, 4096, 1, 3)))
        sc = replace(sc, cfg=cfg, republishes=sc.seed % 2)
    slab = rng.choice((1, 1, 2)) if cfg.sparse or sc.model == 3 else 1
    groups = [CacheGroup(name="full", page_bytes=0, slab_pages=slab)]
    if sc.model == 3:
        groups.append(CacheGroup(name="window", page_bytes=0, window=rng.choice((1, 3, 5, 8)),
                                 keep=cfg.page_size * Random(f"keep {sc.seed}").choice((0, 1, 4, 16)),
                                 slab_pages=rng.choice((1, 2, 3))))
        groups.append(CacheGroup(name="snapshot", page_bytes=0, snapshot=True,
                                 page_tokens=cfg.page_size * rng.choice((1, 2, 3)),
                                 slab_pages=rng.choice((1, 2))))
    if cfg.sparse and rng.random() < 0.7:
        groups.append(CacheGroup(name="selector", page_bytes=0, selector=True,
                                 slab_pages=rng.choice((2, 4))))
    if len(groups) == 1:
        return sc
    more = (2 if sc.again > 0.5 else rng.choice((2, 4, 8))) * len(groups)
    cfg = replace(cfg, groups=tuple(groups), hbm_pages=_whole(cfg.hbm_pages + more, slab),
                  dram_pages=_whole(cfg.dram_pages + more, slab) if cfg.dram_pages else 0,
                  disk_pages=_whole(cfg.disk_pages + more, slab) if cfg.disk_pages else 0)
    return replace(sc, cfg=cfg)


def _whole(pages: int, slab: int) -> int:
    return -(-pages // slab) * slab


def of_role(sc: Scenario, role: str) -> Scenario:
    """The engine of one side: another page size, another pool, the same model."""
    cfg = replace(sc.cfg, role=role, peers=2 if role == "prefill" and sc.net.rooms else 1)
    if role == "prefill":
        rng = Random(f"prefill {sc.seed}")
        size = rng.choice((cfg.page_size, cfg.page_size, 1, 2, 2 * cfg.page_size))
        groups = tuple(replace(group, page_tokens=group.page_tokens // cfg.page_size * size,
                               keep=group.keep // cfg.page_size * size) for group in cfg.groups)
        more = -(-cfg.page_size // size)
        cfg = replace(cfg, page_size=size, groups=groups, hbm_pages=cfg.hbm_pages * more,
                      dram_pages=cfg.dram_pages * more, disk_pages=cfg.disk_pages * more)
        cfg = replace(cfg, pp_size=rng.choice((1, cfg.pp_size)), overlap=rng.random() < 0.5,
                      rows=rng.choice((1, 2, cfg.rows)), draft_tokens=0,
                      hbm_pages=cfg.hbm_pages * rng.choice((1, 1, 2)))
        if rng.random() < 0.15:                       # it refuses what the decode engine takes
            slab = cfg.groups[0].slab_pages
            small = max(2 + cfg.hot_pages, cfg.hbm_pages // 4)
            cfg = replace(cfg, hbm_pages=-(-small // slab) * slab, always_hosted=False,
                          hot_pages=0)
    return replace(sc, cfg=cfg, stops=sc.stops if role == "decode" else 0,
                   stop=sc.stop if role == "decode" else 0.0,
                   speeds=sc.speeds, ranks=sc.ranks)


ONLY = {"model": (1, 3), "pair": (0, 1), "named": (0, 1, 2)}


def override(sc: Scenario, mode: str) -> Scenario:
    for item in filter(None, mode.split(",")):
        name, _, text = item.partition("=")
        for owner in ("cfg", "", "speeds", "net"):
            part = getattr(sc, owner) if owner else sc
            old = getattr(part, name, None) if name in {f.name for f in fields(part)} else None
            if isinstance(old, int | float) and name != "seed":
                value = float(text)
                if (isinstance(old, int) and value != int(value)) or value not in ONLY.get(name, (value,)):
                    raise ValueError(f"mode {item!r}: not a value that {name} can have")
                changed: Any = replace(part, **{name: type(old)(float(text))})
                whole: dict[str, Any] = {owner: changed}
                sc = replace(sc, **whole) if owner else changed
                break
        else:
            raise ValueError(f"mode {item!r}: not a number of CoreConfig, Scenario, Speeds or Network")
    return replace(sc, mode=mode)
