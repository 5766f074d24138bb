"""What hits by tier of a trace of prompts whose blocks repeat, and in perfect LRUs of the same size.

    python lab/bench/storage_trace.py TRACE.jsonl [--requests 2000] [--restarts 3] [--hbm 300] [--dram 1000]

The core, and an executor and a storage that answer at once; requests one after the other, with a token out. A
line of TRACE has `input_length` and `hash_ids`, of blocks of 512 tokens, as Mooncake's published traces
(github.com/kvcache-ai/Mooncake, FAST25-release) have: a block is a page of 16 tokens here. At a restart the
core begins anew and storage has what it had. The LRUs lose a prompt's last block first.
"""
from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.core.core import Core
from penstock.core.plan import (
    Arrived,
    Event,
    Finished,
    Listed,
    Lookup,
    Moved,
    RequestId,
    Retired,
    Started,
    Tier,
)
from penstock.core.settings import CoreConfig

PAGE, BLOCK = 16, 512
TIERS = "hbm", "dram", "disk"


@dataclass
class Instant:
    """An engine without a model: every step and every copy ends at once, every page of storage is whole."""

    cfg: CoreConfig
    stored: set[bytes]
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.core = Core(self.cfg)

    def ask(self, rid: int, prompt: Sequence[int]) -> Started:
        events: list[Event] = [Arrived(RequestId(rid), tuple(prompt), 1)]
        started: list[Started] = []
        ended = False
        while not ended or events:
            advance, events = self.core.advance(events), []
            for output in advance.outputs:
                if isinstance(output, Started):
                    started.append(output)
                elif isinstance(output, Lookup):
                    self.counts["look-ups"] += 1
                    known = itertools.takewhile(self.stored.__contains__, output.keys)
                    events.append(Listed(output.rid, output.visit, bytes([1]) * len(list(known))))
                ended |= isinstance(output, Finished)
            plan = advance.plan
            for move in () if plan is None else plan.moves:
                if move.dst is Tier.DISK:
                    self.counts["put again"] += len(self.stored.intersection(move.keys))
                    self.stored.update(move.keys)
                elif move.src is Tier.DISK:
                    assert self.stored.issuperset(move.keys)
                events.append(Moved(move.id, True))
            if plan is not None:
                self.counts["computed"] += sum(plan.count)
                events.append(Retired(plan.step, tuple((7,) for samples in plan.samples if samples)))
        return started[0]


class Lru:
    """Of blocks, the prefix of each of which is in it as well."""

    def __init__(self, size: int) -> None:
        self._size, self.blocks = size, OrderedDict[int, None]()

    def use(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.blocks.pop(block, None)
            self.blocks[block] = None
        while len(self.blocks) > self._size:
            self.blocks.popitem(last=False)


@dataclass
class Perfect:
    hbm: Lru
    dram: Lru
    stored: set[int]

    def ask(self, blocks: Sequence[int], may: int) -> Counter[str]:
        """Tokens by tier; `may`: blocks that may hit, for the last token is computed."""
        hits: Counter[str] = Counter()
        for block in blocks[:may]:
            tier = ("hbm" if block in self.hbm.blocks else "dram" if block in self.dram.blocks
                    else "disk" if block in self.stored else "")
            if not tier:
                break
            hits[tier] += PAGE
        for tier in (self.hbm, self.dram):
            tier.use(blocks)
        self.stored.update(blocks)
        return hits


def requests(lines: Iterable[str]) -> list[tuple[list[int], list[int]]]:
    """Blocks that are whole, and tokens, of each."""
    found = []
    for line in lines:
        said = json.loads(line)
        length = max(2, said["input_length"] * PAGE // BLOCK)
        tokens = [block * PAGE + i for block in said["hash_ids"] for i in range(PAGE)][:length]
        found.append((said["hash_ids"][:len(tokens) // PAGE], tokens))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trace")
    for name, default in (("requests", 2000), ("restarts", 3), ("hbm", 300), ("dram", 1000), ("disk", 65536)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with open(args.trace, encoding="utf-8") as file:
        asked = requests(itertools.islice(file, args.requests))
    cfg = CoreConfig(page_size=PAGE, rows=4, hbm_pages=args.hbm, dram_pages=args.dram, disk_pages=args.disk,
                     store_root=b"trace" if args.disk else b"", step_tokens=4096)
    stored, counts, began = set[bytes](), Counter[str](), time.process_time()
    perfect, blocks = Perfect(Lru(args.hbm), Lru(args.dram), set()), set[int]()
    ours, theirs, total = Counter[str](), Counter[str](), 0
    restarts = {len(asked) * (i + 1) // (args.restarts + 1) for i in range(args.restarts)}
    engine = Instant(cfg, stored)
    for rid, (whole, tokens) in enumerate(asked, 1):
        if rid in restarts:
            counts += engine.counts
            engine = Instant(cfg, stored)
            perfect.hbm, perfect.dram = Lru(args.hbm), Lru(args.dram)
        started = engine.ask(rid, tokens)
        ours.update(hbm=started.hbm_tokens, dram=started.dram_tokens, disk=started.disk_tokens)
        theirs += perfect.ask(whole, (len(tokens) - 1) // PAGE)
        if not args.disk:
            perfect.stored.clear()
        blocks.update(whole)
        total += len(tokens)
    counts += engine.counts
    print(f"{len(asked)} prompts, {total} tokens, {len(blocks)} different pages; {args.restarts} restarts")
    for name, hits in (("this core", ours), ("perfect LRUs", theirs)):
        print(f"{name}: {100 * sum(hits.values()) / total:.2f} % of the tokens hit: "
              + ", ".join(f"{tier} {hits[tier]} ({100 * hits[tier] / total:.2f} %)" for tier in TIERS))
    took_ms = 1e3 * (time.process_time() - began) / len(asked)
    print(f"{len(stored)} pages stored, {counts['put again']} put again, {counts['look-ups']} look-ups, "
          f"{counts['computed']} tokens computed; {took_ms:.2f} ms of processor a prompt")


if __name__ == "__main__":
    main()
