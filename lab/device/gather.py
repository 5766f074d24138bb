"""Units out of pinned host memory: random rows of 656 to 4,096 bytes, 512 rows and more, in graphs.

    PYTHONPATH=src:bench/device python lab/device/gather.py OUT
"""
from __future__ import annotations

import argparse
from pathlib import Path

import torch
from direct import LINK_BYTES_S, spread, write

from penstock.kernels.kv import gather
from penstock.memory.pinned import Pinned

HOST_BYTES, LISTS = 2 << 30, 8


def seconds(host: torch.Tensor, pool: torch.Tensor, rows: int, repeats: int) -> list[float]:
    """Of one gather: a graph of LISTS different ones, replayed. Checks what arrived."""
    places = [torch.randint(0, len(host), (rows,)) for _ in range(LISTS)]
    lists = [torch.stack((torch.zeros(rows), p, torch.arange(rows)), 1).int().cuda() for p in places]
    num = torch.tensor([rows], dtype=torch.int32, device="cuda")
    run = gather.OP.use("triton")

    def all_lists() -> None:
        for miss in lists:
            run(host, pool, miss, num, unit=1)
    all_lists()
    torch.cuda.synchronize()
    assert torch.equal(pool[:rows, 0, 0, 0].cpu(), host[places[-1], 0, 0, 0]), "a row did not arrive"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_lists()
    times = []
    for _ in range(repeats):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) / 1e3 / LISTS)
    return times[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--repeats", type=int, default=17)
    args = parser.parse_args()
    pinned = Pinned(HOST_BYTES, 1 << 20)
    pinned.wait(HOST_BYTES)
    memory = pinned.memory
    memory.view(torch.int64).random_()
    out = []
    for width in (656, 1001, 1024, 1152, 2048, 4096):
        host = memory[:HOST_BYTES // width * width].view(-1, 1, 1, 1, width)
        for rows in (512, 1024, 2048, 16384):
            pool = torch.zeros(rows, 1, 1, 1, width, dtype=torch.uint8, device="cuda")
            took = spread(seconds(host, pool, rows, args.repeats))
            rate = width * rows / took["median"]
            out.append({"row_bytes": width, "rows": rows, "us": {k: 1e6 * v for k, v in took.items()},
                        "gb_s": rate / 1e9, "share_of_50.4": rate / LINK_BYTES_S})
            print(out[-1], flush=True)
    write("gather", args.out, out)


if __name__ == "__main__":
    main()
