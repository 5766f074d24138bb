"""What a sum over two GPUs costs in a captured step: ours, NCCL's, NCCL's in symmetric windows, and torch's
symmetric memory; and whether both have the same bits.

    PYTHONPATH=src:bench/device python lab/device/sums.py OUT [--kib 8,64,512,1024] [--sums 72]
"""
from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from direct import write
from penstock.exec.pipeline.near import Near

from penstock.exec.pipeline import nccl
from penstock.model.parts import Lane

RANKS, WAIT = 2, timedelta(seconds=40)
WAYS = ("near", "nccl", "windows", "torch")


class Meeting:
    def __init__(self, folder: str, rank: int) -> None:
        self.store, self.rank, self._turn = dist.FileStore(f"{folder}/store", RANKS), rank, 0
        self.store.set_timeout(WAIT)

    def exchange(self, key: str, value: bytes) -> list[bytes]:
        self._turn += 1
        self.store.set(f"{self._turn} {key} {self.rank}", value.hex() or "-")
        told = [self.store.get(f"{self._turn} {key} {i}").decode() for i in range(RANKS)]
        return [b"" if one == "-" else bytes.fromhex(one) for one in told]


def ours(meeting: Meeting, most: int) -> Callable[[torch.Tensor], object]:
    return Near(Lane(meeting.rank, RANKS), meeting.exchange).add


def by_nccl(meeting: Meeting, most: int) -> nccl.Communicator:
    unique = meeting.exchange("id", nccl.unique_id() if not meeting.rank else b"")[0]
    return nccl.Communicator(unique, meeting.rank, RANKS)


def windows(meeting: Meeting, most: int) -> Callable[[torch.Tensor], object]:
    """As a lane would: into the window and out of it, as a product's output lies elsewhere."""
    comm, lib = by_nccl(meeting, most), ctypes.CDLL("libnccl.so.2")
    at, window = ctypes.c_void_p(), ctypes.c_void_p()
    assert not lib.ncclMemAlloc(ctypes.byref(at), ctypes.c_size_t(most))
    found = lib.ncclCommWindowRegister(comm._comm, at, ctypes.c_size_t(most), ctypes.byref(window), 1)
    assert not found and window.value, f"no window: {found}"
    memory = type("Memory", (), {"__cuda_array_interface__": {
        "shape": (most,), "typestr": "|u1", "data": (at.value, False), "version": 3}})()
    bytes_ = torch.as_tensor(memory, device="cuda")

    def add(x: torch.Tensor) -> None:
        there = bytes_[:x.nbytes].view(x.dtype).view(x.shape)
        there.copy_(x)
        comm.add(there)
        x.copy_(there)
    return add


def symmetric(meeting: Meeting, most: int) -> Callable[[torch.Tensor], object]:
    import torch.distributed._symmetric_memory as symm

    dist.init_process_group("nccl", store=meeting.store, rank=meeting.rank, world_size=RANKS)
    memory = symm.empty(most, dtype=torch.uint8, device="cuda")
    symm.rendezvous(memory, dist.group.WORLD.group_name)

    def add(x: torch.Tensor) -> None:
        there = memory[:x.nbytes].view(x.dtype).view(x.shape)
        there.copy_(x)
        x.copy_(torch.ops.symm_mem.one_shot_all_reduce(there, "sum", dist.group.WORLD.group_name))
    return add


def checked(add: Callable[[torch.Tensor], object], meeting: Meeting, kib: int) -> str:
    """The sum's bits, equal to torch's of what both had, in float32."""
    random = torch.Generator("cuda").manual_seed(kib)
    both = torch.randn(RANKS, 64, kib * 8, device="cuda", generator=random).bfloat16()
    for again in range(5):
        x = both[meeting.rank].clone() * (again + 1)
        add(x)
        want = sum(one.float() for one in both * (again + 1))
        assert torch.equal(x, want.bfloat16()), f"{kib} KiB: another sum"
    return str(x.view(torch.int16).long().cumsum(0).sum().item())


def timed(add: Callable[[torch.Tensor], object], x: torch.Tensor, sums: int) -> list[float]:
    """us a sum, of twenty replays of so many."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        add(x)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(sums):
                add(x)
        found = []
        for _ in range(25):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            stream.synchronize()
            found.append(1e3 * begin.elapsed_time(end) / sums)
    return found[5:]


def rank_main(way: str, folder: str, rank: int, kibs: list[int], sums: int) -> None:
    torch.cuda.set_device(rank if way == "torch" else 0)
    meeting, most = Meeting(folder, rank), 1024 * max(kibs)
    add = {"near": ours, "nccl": lambda *a: by_nccl(*a).add, "windows": windows, "torch": symmetric}[way](
        meeting, most)
    for kib in kibs:
        bits = meeting.exchange("bits", checked(add, meeting, kib).encode())
        assert len(set(bits)) == 1, f"{kib} KiB: other bits"
        found = timed(add, torch.zeros(64, kib * 8, device="cuda", dtype=torch.bfloat16), sums)
        if not rank:
            print(json.dumps({"way": way, "kib": kib, "us": median(found), "least": min(found),
                              "most": max(found)}), flush=True)
    meeting.exchange("done", b"")
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--kib", default="8,64,512,1024")
    parser.add_argument("--sums", type=int, default=72)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        way, folder, rank = args.rank
        rank_main(way, folder, int(rank), [int(n) for n in args.kib.split(",")], args.sums)
    rows: list[dict[str, Any]] = []
    for way in args.ways.split(","):
        with tempfile.TemporaryDirectory() as folder:
            ranks = [subprocess.Popen(
                [sys.executable, __file__, str(args.out), "--kib", args.kib, "--sums", str(args.sums),
                 "--rank", way, folder, str(i)], stdout=subprocess.PIPE, text=True,
                env=os.environ | ({} if way == "torch" else {"CUDA_VISIBLE_DEVICES": str(i)}))
                for i in range(RANKS)]
            try:
                told = [rank.communicate(timeout=60)[0] for rank in ranks]
            except subprocess.TimeoutExpired:
                told = [""]
            for rank in ranks:
                rank.kill()
            rows += [json.loads(line) for line in told[0].splitlines() if line.startswith("{")]
            print(way, *(row for row in rows if row["way"] == way), sep="\n  ", flush=True)
    write("sums", args.out, rows)


if __name__ == "__main__":
    main()
