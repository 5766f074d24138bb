"""Pages that go to storage and come back, or do not: tokens equal a dense recompute whatever it does."""
from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hosted
import pytest
import ranks
from driven import PAGE
from prompts_engine import CONFIGS, PROMPTS, SHARED, Engine, dense, play

from penstock.core.plan import Flushed, Paused, RequestId
from penstock.memory import storage
from penstock.memory.stores.files import Files
from penstock.memory.stores.objects import Verdict

FAULTS = ("none", "gone", "bad", "fails", "slow", "all")
# Every family meets all faults together; one by one they come to one family in the sweep.
ALONE = {family: pytest.mark.sweep if family == "grouped" else pytest.mark.soak for family in CONFIGS}
CASES = [pytest.param(family, fault, id=f"{fault}-{family}", marks=[] if fault == "all" else ALONE[family])
         for family in CONFIGS for fault in FAULTS]


OPENED: list[Faulty] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """A store keeps a descriptor a folder, and there are as many as keys' first bytes."""
    yield
    while OPENED:
        OPENED.pop().close()


class Faulty(Files):
    """One call in three for a page finds it gone, damaged, not to be read or written, or takes its time."""

    fault = "none"

    def __init__(self, *args, **more) -> None:
        super().__init__(*args, **more)
        self.calls = Counter[bytes]()

    def strikes(self, fault: str, key: bytes) -> bool:
        """The same in every run: a key says what a page holds."""
        self.calls[key] += self.fault in (fault, "all")
        often = 8 if self.fault == "all" else 3
        return self.fault in (fault, "all") and (key[0] + self.calls[key]) % often == 0

    def _get(self, key: bytes, group: int, page: memoryview) -> Verdict:
        if self.strikes("slow", key):
            time.sleep(0.002)
        if self.strikes("fails", key):
            raise OSError(5, "Input/output error")
        if self.strikes("gone", key):
            self.delete([key], group)
        elif self.strikes("bad", key) and self._present(key):
            page[:] = bytes(b ^ 3 for b in page)     # what was read before it was found to be wrong
            return Verdict.BAD
        return super()._get(key, group, page)

    def _put(self, key: bytes, group: int, page: memoryview) -> int:
        if self.strikes("fails", key):
            raise OSError(5, "Input/output error")
        return super()._put(key, group, page)


def opened(root: Path, fault: str = "none"):
    """Makes the storage of an engine."""
    def made(pools) -> storage.Storage:
        files = Faulty(root, "f" * 32, [pool.layout.page_bytes for pool in pools])
        files.fault = fault
        OPENED.append(files)
        return storage.Storage(files, pools, lambda: None)

    return made


def engine(root: Path, family: str, fault: str, **more: object) -> Engine:
    return Engine(family=family, storage=opened(root, fault), disk_pages=400, **more)


@pytest.mark.usefixtures("stages")
@pytest.mark.parametrize("family, fault", CASES)
def test_tokens_are_the_same_whatever_storage_does(tmp_path, monkeypatch, family, fault):
    """Flushes and pauses while all is written; then other engines that have nothing else."""
    monkeypatch.setattr(storage, "FAILURES_MAX", 1 << 30)        # never left alone: more happens
    first = engine(tmp_path, family, "fails" if fault == "all" else "none", hbm_pages=24, dram_pages=40)
    play(first, lambda turn: {3: (Flushed(),), 0: (Paused(RequestId(turn % 7 + 1)),)}.get(turn % 5, ()))
    assert first.ex.stats()["storage_written_objects_total"] >= 5
    again = engine(tmp_path, family, fault, hbm_pages=24, dram_pages=40)
    play(again, lambda turn: (Flushed(),) if turn % 7 == 0 else ())
    last = engine(tmp_path, family, fault, hbm_pages=24, dram_pages=40)
    for _ in range(2):
        for rid, prompt in PROMPTS.items():
            last.inbox.append(Flushed())
            last.add(rid, prompt, 12)
            last.drain()
            assert tuple(last.got.pop(rid)) == dense(prompt, 12, family)
            del last.ended[rid]
    count = last.ex.stats()
    assert count["storage_read_objects_total"] > 5
    missed = {name for name in ("bad", "gone", "failed") if count[f"storage_{name}_total"]}
    if fault in ("none", "slow"):
        assert not missed and all(m.ok for m in last.moved)
    else:
        assert missed and (fault == "all" or missed == {"failed" if fault == "fails" else fault})


@pytest.mark.usefixtures("stages")
def test_a_hit_ends_where_the_first_page_is_missing(tmp_path):
    first = engine(tmp_path, "grouped", "none")
    first.add(1, SHARED * 3, 4)
    first.drain()
    objects = sorted((tmp_path / "v1").rglob("*.0"), key=lambda p: p.stat().st_mtime_ns)
    assert len(objects) == 9
    for missing in (objects[4], objects[2]):
        missing.unlink()
        again = engine(tmp_path, "grouped", "none")
        again.add(1, SHARED * 3, 4)
        again.drain()
        assert tuple(again.got[1]) == dense(SHARED * 3, 4)
        assert again.started[1].disk_tokens == 4 * objects.index(missing)
        assert missing.exists(), "it is stored again"
    assert tuple(first.got[1]) == dense(SHARED * 3, 4) and len(PROMPTS) == 7


# KV heads, all read or some selected, and MLA KV entries with an indexer; decoding from the device or the host.
CELLS = [("bounds", "device", 0), ("bounds", "device", None), ("bounds", "host", None),
         ("latent", "device", None), ("latent", "host", None)]


@pytest.mark.soak
@pytest.mark.parametrize("name, place, budget", CELLS)
@pytest.mark.parametrize("writer", [1, 2, 3])
def test_any_number_of_stages_reads_what_any_other_has_stored(
        tmp_path, monkeypatch, name, place, budget, writer):
    """Tokens are those of an engine that has no storage, every page hits, and none is stored twice."""
    monkeypatch.setattr(hosted, "KIND", [name])
    prompts = hosted.kind().prompts
    want = {rid: hosted.resident(prompt, hosted.NEW, budget) for rid, prompt in prompts.items()}
    pages = {"device": {"hbm_pages": 200, "hot_pages": 0}, "host": {"hbm_pages": 24, "always": True}}[place]

    def hits(stages: int) -> dict[int, int]:
        monkeypatch.setattr(ranks, "NUM", [stages])
        engine = hosted.Engine(**pages, storage=opened(tmp_path), disk_pages=4000)
        for rid, prompt in prompts.items():
            engine.inbox.append(Flushed())             # only storage has it
            engine.add(rid, prompt, hosted.NEW, budget)
            engine.drain()
            assert tuple(engine.got[rid]) == want[rid], (stages, rid)
        assert bool(engine.total("hot_misses")) == (place == "host")
        return {rid: engine.started[rid].disk_tokens for rid in prompts}

    shared = 96 // PAGE * PAGE if name == "bounds" else 128 // PAGE * PAGE
    assert hits(writer) == {1: 0, 2: 0, 3: shared, 4: 0}
    objects = sorted(p.name for p in (tmp_path / "v1").rglob("*.*") if p.name != "manifest.json")
    for reader in (1, 2, 3):
        assert hits(reader) == {rid: (len(p) - 1) // PAGE * PAGE for rid, p in prompts.items()}, reader
        assert sorted(p.name for p in (tmp_path / "v1").rglob("*.*") if p.name != "manifest.json") == objects
