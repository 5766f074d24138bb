"""The threads between host pages and a store that is slow, hung, full, dead or lying."""
from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from penstock.core.plan import (
    DiskPage,
    DramPage,
    Group,
    Listed,
    Lookup,
    Move,
    Moved,
    MoveId,
    RequestId,
    StepId,
    Tier,
)
from penstock.memory.dram import DramPool
from penstock.memory.pool import PageLayout
from penstock.memory.storage import Storage
from penstock.memory.stores.files import Files
from penstock.memory.stores.objects import Verdict

LAYOUT = PageLayout(num_layers=2, num_kv_heads=1, page_size=4, head_dim=8)
PART = Files.part
PAGES = 3 * PART
KEYS = tuple(bytes([i]) * 16 for i in range(PAGES))
LIMIT_S = 60.0


class Broken(Files):
    """A store that does what a test says before it does anything."""

    before: Callable[[str, bytes], None] = staticmethod(lambda what, key: None)

    def _get(self, key: bytes, group: int, page: memoryview) -> Verdict:
        self.before("get", key)
        return super()._get(key, group, page)

    def _put(self, key: bytes, group: int, page: memoryview) -> int:
        self.before("put", key)
        return super()._put(key, group, page)

    def present(self, keys: Sequence[bytes]) -> Iterator[int]:
        for key in keys:
            self.before("present", key)
            yield from super().present([key])


class Bench:
    """Two pools' worth of pages: the first half is written, the second half read into."""

    def __init__(self, root, **settings) -> None:
        self.files = Broken(root, "f" * 32, [LAYOUT.page_bytes], readonly=settings.pop("readonly", False))
        self.pool = DramPool(LAYOUT, 2 * PAGES)
        self.woken = threading.Event()
        self.storage = Storage(self.files, [self.pool], self.woken.set, **settings)
        self.moves = 0
        for i in range(PAGES):
            self.pool.page(i).fill_(float(i + 1))

    def move(self, n: int, *, up: bool) -> MoveId:
        self.moves += 1
        disk, dram = tuple(map(DiskPage, range(n))), tuple(DramPage(i + PAGES * up) for i in range(n))
        sides = (Tier.DISK, disk, Tier.DRAM, dram) if up else (Tier.DRAM, dram, Tier.DISK, disk)
        self.storage.start(Move(MoveId(self.moves), Group(0), *sides, n * LAYOUT.page_size, StepId(0),
                                keys=KEYS[:n]))
        return MoveId(self.moves)

    def end(self) -> object:
        [event] = self.storage.collect(wait=True)
        return event

    def write(self, n: int = PAGES) -> Moved:
        self.move(n, up=False)
        return self.end()

    def read(self, n: int = PAGES) -> Moved:
        self.move(n, up=True)
        return self.end()

    def look(self, n: int = PAGES) -> bytes:
        self.storage.ask(Lookup(RequestId(1), 3, KEYS[:n]))
        event = self.end()
        assert isinstance(event, Listed) and (event.rid, event.visit) == (1, 3)
        return event.present

    def stat(self, name: str) -> float:
        return self.storage.stats()[f"storage_{name}"]


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path / "store")


def until(condition) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_what_was_written_is_listed_and_read_by_another_engine(bench, tmp_path):
    assert bench.look() == b""
    assert bench.write() == Moved(MoveId(1), True)
    assert bench.look() == b"\x01" * PAGES
    other = Bench(tmp_path / "store", readonly=True)
    assert other.read() == Moved(MoveId(1), True)
    for i in range(PAGES):
        assert bytes(other.pool.bytes_of(PAGES + i)) == bytes(bench.pool.bytes_of(i))
    assert other.woken.wait(LIMIT_S) and other.stat("read_objects_total") == PAGES
    assert bench.write() == Moved(MoveId(2), True) and bench.stat("known_objects_total") == PAGES
    assert bench.stat("written_bytes_total") == PAGES * (LAYOUT.page_bytes + 64)
    assert bench.storage.collect(wait=True) == [], "nothing is in flight"


@pytest.mark.parametrize("at", [0, 1, PART, PART + 3, PAGES - 1])
def test_pages_before_one_that_is_missing_or_damaged_have_arrived(bench, at):
    bench.write()
    [path] = [p for p in (bench.files.root / "v1").rglob(f"{KEYS[at][1:].hex()}.0")]
    path.write_bytes(bytes(path.stat().st_size))
    assert bench.look() == b"\x01" * PAGES, "a listing knows no more than names and lengths"
    assert bench.read() == Moved(MoveId(2), False, at)
    assert bench.stat("bad_total") == 1 and not path.exists(), "it is removed, once"
    assert bench.look() == b"\x01" * at
    assert bench.read() == Moved(MoveId(3), False, at) and bench.stat("gone_total") >= 1
    assert bench.write().ok and bench.read().ok, "and may be stored again"


def test_nobody_waits_for_a_store_that_hangs_and_it_is_asked_again_once_it_answers(bench, monkeypatch):
    monkeypatch.setattr("penstock.memory.storage.LOOK_S", 0.05)
    bench.write()
    hangs = threading.Event()
    bench.files.before = lambda what, key: None if what != "present" else hangs.wait(LIMIT_S)
    assert bench.look() == b"" and bench.stat("up") == 0
    for _ in range(100):
        assert bench.look() == b""
    assert bench.stat("lookups_late_total") == 1, "of 101 requests one has waited"
    hangs.set()
    until(lambda: bench.stat("up"))
    monkeypatch.setattr("penstock.memory.storage.LOOK_S", LIMIT_S)
    assert bench.look() == b"\x01" * PAGES
    assert bench.storage.collect() == [], "what it had to say late, nobody hears"


def test_a_look_up_that_is_late_tells_what_it_has_found(bench, monkeypatch):
    monkeypatch.setattr("penstock.memory.storage.LOOK_S", 0.5)
    bench.write()
    hangs = threading.Event()
    at = "present", KEYS[5]
    bench.files.before = lambda what, key: None if (what, key) != at else hangs.wait(LIMIT_S)
    assert bench.look() == b"\x01" * 5
    assert bench.stat("lookups_late_total") == 1 and bench.stat("pages_found_total") == 5
    assert bench.stat("up") == 1, "it has answered, so others ask it"
    assert bench.look(4) == b"\x01" * 4, "in another thread"
    hangs.set()
    until(lambda: bench.stat("lookups_total") == 2)
    assert bench.storage.collect() == []


def test_look_ups_do_not_wait_for_each_other(bench):
    bench.write()
    held, reached = threading.Event(), threading.Semaphore(0)

    def before(what: str, key: bytes) -> None:
        if what == "present":
            reached.release()
            held.wait(LIMIT_S)

    bench.files.before = before
    for rid in range(Files.readers):
        bench.storage.ask(Lookup(RequestId(rid), 0, KEYS[:1]))
    for _ in range(Files.readers):
        assert reached.acquire(timeout=LIMIT_S), "all are asked at once"
    held.set()
    while bench.storage.in_flight:
        bench.storage.collect(wait=True)


def test_of_a_page_that_is_used_storage_hears_once_a_minute(tmp_path):
    now, told = [0.0], []
    bench = Bench(tmp_path / "store", clock=lambda: now[0])
    bench.files.used = told.append
    for keys in (KEYS[:3], KEYS[:2], KEYS[:5]):
        bench.storage.used(keys)
    until(lambda: len(told) == 2)
    now[0] += 59
    bench.storage.used(KEYS[:4])
    bench.storage.used(KEYS[9:10])
    until(lambda: len(told) == 3)
    now[0] += 2
    bench.storage.used(KEYS[:1])
    until(lambda: len(told) == 4)
    assert told == [KEYS[:3], KEYS[3:5], KEYS[9:10], KEYS[:1]]


def test_a_store_that_hangs_is_told_of_no_more_uses_than_it_can_take(bench, monkeypatch):
    hangs, told = threading.Event(), []
    bench.files.used = lambda keys: (told.append(keys), hangs.wait(LIMIT_S))
    for key in [*KEYS[:1], *[bytes([1, *i.to_bytes(15, "little")]) for i in range(1000)]]:
        bench.storage.used((key,))
    assert bench.look() == b"", "nobody waits for it"
    hangs.set()
    until(lambda: bench.storage._uses.qsize() == 0)
    assert len(told) <= 70


def test_what_people_see_of_it(tmp_path):
    now = [0.0]
    bench = Bench(tmp_path / "store", clock=lambda: now[0])
    assert bench.look(5) == b"" and bench.write(3).ok and bench.look(5) == b"\x01" * 3
    assert [bench.stat(f"pages_{name}_total") for name in ("asked", "found", "missed")] == [10, 3, 7]
    hangs = threading.Event()
    bench.files.before = lambda what, key: None if what != "get" else hangs.wait(LIMIT_S)
    bench.move(3, up=True)
    assert (bench.stat('queued_pages{way="read"}'), bench.stat('queued_pages{way="write"}')) == (3, 0)
    hangs.set()
    assert bench.end().ok and bench.stat('queued_pages{way="read"}') == 0

    def late(what: str, key: bytes) -> None:
        raise OSError(errno.ETIMEDOUT, "Connection timed out")

    bench.files.before = late
    for _ in range(3):
        bench.read(1)
    assert (bench.stat("timed_out_total"), bench.stat("failed_total"), bench.stat("up")) == (3, 3, 0)
    assert bench.stat("paused_seconds") == 1.0
    now[0] += 2
    assert bench.stat("paused_seconds") == 0.0 and bench.stat("up") == 1


def test_a_read_that_hangs_is_answered_when_it_ends(bench):
    bench.write()
    hangs = threading.Event()
    bench.files.before = lambda what, key: None if key != KEYS[2] else hangs.wait(LIMIT_S)
    hung = bench.move(4, up=True)
    assert bench.storage.collect() == [] and bench.storage.in_flight == 1
    bench.storage.ask(Lookup(RequestId(1), 3, KEYS[:1]))
    assert isinstance(bench.end(), Listed)
    hangs.set()
    assert bench.end() == Moved(hung, True)


def test_a_store_that_fails_is_left_alone_for_longer_and_longer(tmp_path):
    now = [0.0]
    bench = Bench(tmp_path / "store", clock=lambda: now[0])
    bench.write(8)
    asked: list[str] = []

    def fails(what: str, key: bytes) -> None:
        asked.append(what)
        raise OSError(5, "Input/output error")

    bench.files.before = fails
    for pause in (1, 2, 4, 8, 16, 32, 60, 60):
        while bench.stat("up"):
            assert bench.read(1) == Moved(MoveId(bench.moves), False)
        num = len(asked)
        assert bench.look() == b"" and not bench.write(2).ok and not bench.read(1).ok
        assert len(asked) == num, "it is not asked"
        now[0] += pause - 0.01
        assert not bench.stat("up")
        now[0] += 0.02
    del bench.files.before
    assert bench.read(8).ok and bench.stat("up")
    bench.files.before = fails
    assert not bench.read(1).ok and bench.stat("up"), "one failure is none in a row"


def test_a_full_disk_stops_writes_for_a_while_and_reads_go_on(tmp_path):
    now = [0.0]
    bench = Bench(tmp_path / "store", clock=lambda: now[0])
    bench.write(2)

    def full(what: str, key: bytes) -> None:
        if what == "put":
            raise OSError(28, "No space left on device")

    bench.files.before = full
    assert bench.write(4) == Moved(MoveId(2), False)
    assert bench.read(2).ok and bench.stat("up")
    del bench.files.before
    assert not bench.write(4).ok and bench.stat("refused_full_total") >= 4
    now[0] += 31
    assert bench.write(4).ok


def test_a_quota_is_kept_by_forgetting_what_was_used_longest_ago(tmp_path):
    each = LAYOUT.page_bytes + 64
    bench = Bench(tmp_path / "store", quota=10 * each)
    used = lambda: sum(p.stat().st_size for p in (tmp_path / "store" / "v1").rglob("*.0"))  # noqa: E731
    until(lambda: bench.write(10).ok and used() == 10 * each)      # the first count may meet a page twice
    assert not bench.write(PAGES).ok
    until(lambda: used() <= 9 * each)
    until(lambda: bench.write(PAGES) and bench.stat("swept_bytes_total") >= 8 * each)
    until(lambda: used() <= 10 * each)


def test_damaged_pages_are_neither_shown_nor_read_nor_taken_again(bench):
    bench.write()
    bench.storage.deny(KEYS[3:5])
    assert bench.look() == b"\x01" * 3
    assert bench.read() == Moved(MoveId(2), False, 3)
    until(lambda: list(bench.files.present(KEYS[3:5])) == [0, 0])
    assert not bench.write().ok and list(bench.files.present(KEYS[3:6])) == [0, 0, 1]


def test_damaged_pages_are_removed_of_every_cache_group(tmp_path):
    """The next engine knows of no damage: it goes by what is there."""
    files = Files(tmp_path / "store", "f" * 32, [LAYOUT.page_bytes] * 3)
    pool = DramPool(LAYOUT, 1)
    storage = Storage(files, [pool] * 3, lambda: None)
    for group in range(3):
        assert list(files.put(KEYS[:2], group, [pool.bytes_of(0)] * 2))
    assert list(files.present(KEYS[:2])) == [7, 7]
    storage.deny(KEYS[:1])
    until(lambda: list(files.present(KEYS[:2])) == [0, 7])


def test_pages_found_to_be_damaged_while_they_are_written_or_read_are_not_kept(bench):
    threads = threading.active_count()
    bench.files.before = lambda what, key: bench.storage.deny(KEYS[:1]) if what == "put" else None
    assert not bench.write(1).ok
    until(lambda: list(bench.files.present(KEYS[:1])) == [0] and threading.active_count() == threads)    # all removed
    bench.files.before = lambda what, key: None
    bench.write(2)
    bench.files.before = lambda what, key: bench.storage.deny(KEYS[1:2]) if key == KEYS[1] else None
    bench.storage._denied.clear()
    list(bench.files.put(KEYS[:1], 0, [bench.pool.bytes_of(0)]))
    bench.storage._denied.clear()
    assert bench.read(2) == Moved(MoveId(bench.moves), False, 1)
