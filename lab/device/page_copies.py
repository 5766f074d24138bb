"""Load-back alone: pages of 16 tokens of 12 layers of Qwen3-30B-A3B, one GPU's whole ones and a TP rank's half of the
heads: by torch's copies of what has gaps, page by page, and one call for pages that follow each other, which is all of
them here.

    PYTHONPATH=src python lab/device/page_copies.py OUT
"""
from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from penstock.core.plan import DramPage, Group, HbmPage, Move, MoveId, StepId, Tier
from penstock.memory import copying
from penstock.memory.copying import Copier
from penstock.memory.dram import DramPool
from penstock.memory.hbm import HbmPool
from penstock.memory.pool import PageLayout, PoolPart

PAGES, WHOLE = 1008, PageLayout(num_layers=12, num_kv_heads=4, page_size=16, head_dim=128, dtype=torch.bfloat16)


def measure(heads: int, way: str) -> dict[str, Any]:
    own = PageLayout(num_layers=12, num_kv_heads=heads, page_size=16, head_dim=128, dtype=torch.bfloat16)
    memory = torch.zeros(PAGES * WHOLE.page_bytes, dtype=torch.uint8, pin_memory=True)
    hbm = HbmPool(own, PAGES, memory=torch.zeros(PAGES * own.page_bytes, dtype=torch.uint8, device="cuda"))
    dram = DramPool(own, PAGES, base=10000, memory=memory, page_stride=WHOLE.page_bytes,
                    part=PoolPart(WHOLE, head=4 - heads))
    copier = Copier({(p.tier, p.group): p for p in (hbm, dram)})
    if way != "together":
        dram.together = lambda page: 1          # type: ignore[method-assign]
    if way == "torch":
        copying.copy_rows = lambda target, source, stream: target.copy_(source, non_blocking=True)  # type: ignore
    found: dict[str, Any] = {"heads": heads, "way": way}
    for name, src, dst in (("up", (Tier.DRAM, 10000), (Tier.HBM, 0)), ("down", (Tier.HBM, 0), (Tier.DRAM, 10000))):
        took = []
        for turn in range(4):
            kinds = {Tier.HBM: HbmPage, Tier.DRAM: DramPage}
            move = Move(MoveId(turn), Group(0), src[0], tuple(kinds[src[0]](src[1] + i) for i in range(PAGES)), dst[0],
                        tuple(kinds[dst[0]](dst[1] + i) for i in range(PAGES)), PAGES * 16, StepId(0))
            torch.cuda.synchronize()
            began = time.perf_counter()
            assert copier(move).ok
            took.append(time.perf_counter() - began)
        found[name + "_ms"] = 1e3 * min(took[1:])
        found[name + "_gb_s"] = PAGES * own.page_bytes / min(took[1:]) / 1e9
    print(found, flush=True)
    return found


real_copy_rows = copying.copy_rows
if __name__ == "__main__":
    rows = []
    for heads in (4, 2, 1):
        for way in ("together", "page by page", "torch"):
            rows.append(measure(heads, way))
            copying.copy_rows = real_copy_rows
    Path(sys.argv[1], "page-copies.json").write_text(json.dumps(rows, indent=1) + "\n")
