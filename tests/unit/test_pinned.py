"""Host memory that is registered while it is used, with a runtime that registers nothing; flying copies."""
from __future__ import annotations

import gc
import threading

import pytest
import torch

from penstock.memory import pinned
from penstock.memory.copying import Copied, CopyThread
from penstock.memory.dram import DramPool
from penstock.memory.pool import PageLayout

MIB = 1 << 20


class Runtime:
    """Registers when `go` allows one more; `fails` at the n-th region."""

    def __init__(self, fails=99):
        self.go, self.fails, self.regions, self.gone = threading.Semaphore(0), fails, [], []

    def cudaHostRegister(self, address, nbytes, flags):
        self.go.acquire()
        self.regions.append((address, nbytes))
        return len(self.regions) > self.fails

    def cudaHostUnregister(self, address):
        self.gone.append(address)


@pytest.fixture
def runtime(monkeypatch):
    found = Runtime()
    monkeypatch.setattr(pinned, "_runtime", lambda: found)

    def check(error):
        if error:
            raise RuntimeError("out of memory\nsecond line")
    monkeypatch.setattr(torch.cuda, "check_error", check)
    return found


def test_the_first_pages_are_usable_before_the_last_are_registered(runtime):
    stride = 3 * MIB // 2
    memory = pinned.Pinned(10 * stride, stride, region_bytes=4 * MIB)
    runtime.go.release()
    memory.wait(2 * stride)                             # one region: two whole pages
    late = threading.Thread(target=memory.wait, args=(2 * stride + 1,))
    late.start()
    late.join(0.1)
    assert late.is_alive() and len(runtime.regions) == 1
    for _ in range(4):
        runtime.go.release()
    late.join()
    memory.wait(10 * stride)
    layout = PageLayout(num_layers=1, num_kv_heads=1, page_size=256, head_dim=256)          # a third of the stride
    pool = DramPool(layout, 30, base=10, memory=memory.memory, page_stride=stride // 3, pinned=memory)
    assert [pool.together(page) for page in (10, 11, 15, 16, 38)] == [6, 5, 1, 6, 2], "no copy crosses a border"
    start = memory.memory.data_ptr()
    assert runtime.regions == [(start + i * 2 * stride, 2 * stride) for i in range(5)]
    del memory, pool
    gc.collect()
    assert runtime.gone == [address for address, _ in runtime.regions]


def test_memory_that_cannot_be_registered_is_told_to_who_waits(runtime):
    runtime.fails = 1
    memory = pinned.Pinned(4 * MIB, MIB, region_bytes=MIB)
    runtime.go.release()
    runtime.go.release()
    memory.wait(MIB)
    with pytest.raises(RuntimeError, match=r"after 1048576 bytes: out of memory$"):
        memory.wait(2 * MIB)


def test_copies_in_flight_end_in_their_order():
    """Three begin before the first is waited for; the fourth begins when it has ended."""
    said, let = [], threading.Semaphore(0)

    def begin(move):
        said.append(("begins", move))

        def end():
            let.acquire()
            said.append(("ends", move))
            return Copied(move, True, 1, 0.0)
        return end
    thread = CopyThread(begin, flying=3)
    for move in range(5):
        thread.start(move)
    for _ in range(5):
        let.release()
    ended = []
    while len(ended) < 5:
        ended += thread.collect(wait=True)
    assert [copied.move for copied in ended] == list(range(5))
    assert [move for what, move in said if what == "begins"] == list(range(5))
    assert max(sum(w == "begins" for w, _ in said[:i]) - sum(w == "ends" for w, _ in said[:i])
               for i in range(len(said) + 1)) <= 3
