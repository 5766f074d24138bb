"""What every store must do: files and a bucket in memory here, real servers in `make sweep`. One suite.

A server that is not installed is a skip that says what to install.
"""
from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from stores import BUCKET, SECRETS, Proxy, Server, Stopper

from penstock.config.base.storage_url import StorageUrl
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
from penstock.memory.stores.files import Files, Folder
from penstock.memory.stores.objects import HEADER, Inventory, Store, Verdict, header_of
from penstock.memory.stores.s3 import Bucket
from penstock.memory.stores.valkey import Valkey

SIZES = [4096, 512]
BATCHES, BATCH = 200, 16
FP = "f" * 32
NETWORK = [pytest.param(kind, marks=pytest.mark.sweep) for kind in ("valkey", "s3", "mooncake")]
KINDS = ["file", "bucket", *NETWORK]
LIMIT_S = 60.0


class Place:
    """Where a store of one kind is, and a proxy before it, if it is a server."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder, self.server = kind, folder, None
        self.opened: list[Store] = []
        if kind == "bucket":                     # the client of S3 over a bucket in this process
            self.memory = pytest.importorskip("obstore.store", reason="pip install obstore").MemoryStore()
        elif kind != "file":
            self.server = Server(kind, folder)
            self.server.start()
            # Mooncake's client, while it is made, lets no other thread of this process run.
            self.proxy = Stopper(self.server) if kind == "mooncake" else Proxy(self.server.port)

    def open(self, *, fp: str = FP, readonly: bool = False, sizes=SIZES, via: int | None = None) -> Store:
        """via: a port; None: the proxy's."""
        self.opened.append(self._open(fp, readonly, sizes, via))
        return self.opened[-1]

    def _open(self, fp: str, readonly: bool, sizes, via: int | None) -> Store:
        if self.kind == "file":
            return Files(self.folder, fp, sizes, readonly=readonly)
        if self.kind == "bucket":
            bucket = self._bucket(0, fp, readonly, sizes)
            bucket._bucket = self.memory
            return bucket
        port = via or self.proxy.port
        if self.kind == "valkey":
            return Valkey(StorageUrl("valkey", "127.0.0.1", "", port), fp, sizes, readonly=readonly)
        if self.kind == "mooncake":
            from penstock.memory.stores.mooncake import MooncakeStore
            return MooncakeStore(StorageUrl("mooncake", "127.0.0.1", "", port), fp, sizes, readonly=readonly)
        return self._bucket(port, fp, readonly, sizes)

    def _bucket(self, port: int, fp: str, readonly: bool, sizes) -> Bucket:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**SECRETS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}.items():
                patch.setenv(name, value)
            return Bucket(StorageUrl("s3", BUCKET, "/some/where"), fp, sizes, readonly=readonly)

    def spoil(self, key: bytes, group: int, data: bytes) -> None:
        """Put something else in the place of an object."""
        store = self.open()
        if isinstance(store, Files):
            (self.folder / "v1" / FP / key[:1].hex() / f"{key[1:].hex()}.{group}").write_bytes(data)
        elif isinstance(store, Valkey):
            store._client.set(store._name(key, group), data)
        elif isinstance(store, Bucket):
            store._obstore.put(store._bucket, store._name(key, group), data)
        else:
            [name] = store._names([key], group)
            store.delete([key], group)
            assert store._client.put(name, data) == 0

    def close_stores(self) -> None:
        while self.opened:
            self.opened.pop().close()

    def inventory(self) -> Inventory:
        found = Folder(self.folder) if self.kind == "file" else self.open()
        assert isinstance(found, Inventory)
        return found

    def close(self) -> None:
        if self.server is not None:
            self.proxy.close()
            self.server.kill()


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Iterator[dict[str, Place]]:
    found: dict[str, Place] = {}
    yield found
    for place in found.values():
        place.close()


@pytest.fixture
def place(request, places, tmp_path_factory) -> Iterator[Place]:
    """One server for all tests of a kind: their keys differ."""
    if request.param not in places:
        places[request.param] = Place(request.param, tmp_path_factory.mktemp(request.param))
    yield places[request.param]
    places[request.param].close_stores()


all_kinds = pytest.mark.parametrize("place", KINDS, indirect=True)
servers = pytest.mark.parametrize("place", NETWORK, indirect=True)


def keys(n: int) -> list[bytes]:
    return [random.randbytes(16) for _ in range(n)]


def page(key: bytes, group: int = 0) -> memoryview:
    return memoryview(bytearray(random.Random(key).randbytes(SIZES[group])))


def put(store: Store, names: list[bytes], group: int = 0) -> list[int]:
    return list(store.put(names, group, [page(key, group) for key in names]))


def get(store: Store, names: list[bytes], group: int = 0) -> list[Verdict]:
    pages = [memoryview(bytearray(SIZES[group])) for _ in names]
    found = list(store.get(names, group, pages))
    for key, into, verdict in zip(names, pages, found, strict=True):
        assert verdict is not Verdict.GOOD or into == page(key, group)
    return found


@all_kinds
def test_batches_that_were_stored_are_found_and_read_by_others(place):
    writer, reader = place.open(), place.open(readonly=True)
    every = [keys(BATCH) for _ in range(BATCHES)]
    for batch in every:
        assert put(writer, batch) == [SIZES[0] + HEADER.size] * BATCH
        assert put(writer, batch[:3], 1) == [SIZES[1] + HEADER.size] * 3
    for batch in every:
        assert list(reader.present(batch)) == [3] * 3 + [1] * (BATCH - 3)
        assert get(reader, batch) == [Verdict.GOOD] * BATCH
        assert get(reader, batch[:4], 1) == [Verdict.GOOD] * 3 + [Verdict.GONE]
    long = [key for batch in every for key in batch][:1024]
    assert sum(map(bool, reader.present(long))) == 1024
    assert list(place.open(fp="e" * 32).present(long[:20])) == [0] * 20, "another kind of engine"


@all_kinds
def test_what_is_there_is_not_written_again_and_what_was_deleted_is_gone(place):
    store, names = place.open(), keys(BATCH)
    put(store, names[:5])
    assert put(store, names) == [0] * 5 + [SIZES[0] + HEADER.size] * (BATCH - 5)
    store.delete(names[2:4], 0)
    store.delete(names[2:4], 0)
    store.delete([], 0)
    assert list(store.present(names[:5])) == [1, 1, 0, 0, 1]
    assert get(store, names[:5]) == [Verdict.GOOD] * 2 + [Verdict.GONE] * 2 + [Verdict.GOOD]
    assert put(store, names[2:4]) == [SIZES[0] + HEADER.size] * 2


@all_kinds
def test_a_use_is_told_of_what_is_there_and_of_what_is_not(place):
    store, names = place.open(), keys(200)
    put(store, names[:50])
    put(store, names[:3], 1)
    store.used(names)
    store.used([])
    place.open(readonly=True).used(names)
    assert list(store.present(names)) == [3] * 3 + [1] * 47 + [0] * 150
    assert get(store, names[:50]) == [Verdict.GOOD] * 50


@pytest.mark.parametrize("place", [pytest.param("valkey", marks=pytest.mark.sweep)], indirect=True)
def test_a_use_keeps_valkey_from_taking_a_page_for_old(place):
    store, names = place.open(), keys(3)
    put(store, names)
    objects = [store._name(key, 0) for key in names]
    end = time.monotonic() + LIMIT_S
    while not all(store._idle_s(objects)):
        assert time.monotonic() < end
        time.sleep(0.2)
    store.used(names[:1])
    idle = store._idle_s(objects)
    assert idle[0] < idle[1] <= idle[2] + 1


@all_kinds
def test_what_is_not_what_was_stored_is_bad_whatever_is_wrong_with_it(place):
    store, names = place.open(), keys(BATCH)
    put(store, names)
    good = [whole(place, key) for key in names[:2]]
    wrongs = [good[0][:70] + bytes([good[0][70] ^ 1]) + good[0][71:], good[0][:-1], good[0] + b"x",
              good[1], bytes(len(good[0])), b"x", good[0] * 1000,
              bytes([good[0][6] ^ 1]) + good[0][1:], good[0][:6] + b"\1" + good[0][7:]]
    for wrong in wrongs:
        place.spoil(names[0], 0, wrong)
        into = memoryview(bytearray(SIZES[0]))
        assert list(store.get(names[:1], 0, [into])) == [Verdict.BAD]
        hint = place.kind == "mooncake"                # it knows no lengths
        assert list(store.present(names[:1])) == [int(hint or len(wrong) == len(good[0]))]
    store.delete(names[:1], 0)
    assert put(store, names[:1]) == [SIZES[0] + HEADER.size] and get(store, names) == [Verdict.GOOD] * BATCH


def whole(place: Place, key: bytes) -> bytes:
    return header_of(key, 0, page(key)) + page(key)


@pytest.mark.parametrize("place", [kind for kind in KINDS if "mooncake" not in str(kind)], indirect=True)
def test_people_see_what_there_is_read_it_and_make_room(place):
    store, names, there = place.open(), keys(BATCH), place.inventory()
    put(store, names)
    mine = {o.name: o for o in there.objects() if any(key.hex()[4:] in o.name for key in names)}
    size = SIZES[0] + HEADER.size
    assert len(mine) == BATCH and {(o.kind, o.temporary) for o in mine.values()} == {(FP, False)}
    assert all(size <= o.bytes < 2 * size for o in mine.values()), "a server may tell what it takes"
    assert all(abs(o.used - time.time()) < 30 for o in mine.values())
    assert [there.examine(o) for o in mine.values()] == [Verdict.GOOD] * BATCH
    place.spoil(names[0], 0, whole(place, names[1]))
    [spoilt] = [o for o in mine.values() if names[0].hex()[4:] in o.name]
    assert there.examine(spoilt) is Verdict.BAD
    there.remove([spoilt])
    assert there.examine(spoilt) is Verdict.GONE
    last = keys(1)
    time.sleep(2.5)                                   # servers count uses in seconds
    put(store, last)
    left, gone = there.sweep(3 * size)
    assert gone and left <= 3 * size and list(store.present(last)) == [1]
    assert sum(o.bytes for o in there.objects()) == left
    there.purge()
    assert list(there.objects()) == [] and list(store.present([*names, *last])) == [0] * (BATCH + 1)
    assert put(store, last) == [size], "it goes on"


class Bench:
    """Storage over a store, with host pages of which the first half is written."""

    def __init__(self, store: Store, num: int) -> None:
        self.layout = PageLayout(num_layers=2, num_kv_heads=1, page_size=4, head_dim=8)
        self.pool, self.num, self.keys, self.moves = DramPool(self.layout, 2 * num), num, tuple(keys(num)), 0
        self.storage = Storage(store, [self.pool], lambda: None)
        for i in range(num):
            self.pool.page(i).fill_(float(i + 1))

    def move(self, *, up: bool) -> Moved:
        self.moves += 1
        disk = tuple(map(DiskPage, range(self.num)))
        dram = tuple(DramPage(i + self.num * up) for i in range(self.num))
        sides = (Tier.DISK, disk, Tier.DRAM, dram) if up else (Tier.DRAM, dram, Tier.DISK, disk)
        self.storage.start(Move(MoveId(self.moves), Group(0), *sides, 4 * self.num, StepId(0),
                                keys=self.keys))
        [event] = self.storage.collect(wait=True)
        return event

    def look(self) -> int:
        self.storage.ask(Lookup(RequestId(1), 3, self.keys))
        [event] = self.storage.collect(wait=True)
        assert isinstance(event, Listed)
        return len(event.present)


def bench_of(place: Place, num: int = 40, **more) -> Bench:
    size = PageLayout(num_layers=2, num_kv_heads=1, page_size=4, head_dim=8).page_bytes
    return Bench(place.open(sizes=[size], **more), num)


def until(condition) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@all_kinds
def test_moves_of_many_pages_go_there_and_come_back(place):
    bench = bench_of(place)
    assert bench.look() == 0 and bench.move(up=False).ok
    assert bench.look() == bench.num and bench.move(up=True).ok
    for i in range(bench.num):
        assert bytes(bench.pool.bytes_of(i)) == bytes(bench.pool.bytes_of(bench.num + i))
    assert bench.storage.stats()["storage_read_objects_total"] == bench.num


@pytest.mark.parametrize("place", NETWORK[:2], indirect=True)
def test_a_server_that_is_slow_is_slow_and_no_more(place):
    bench = bench_of(place)
    place.proxy.delay_s = 0.02
    try:
        assert bench.move(up=False).ok and bench.move(up=True).ok
    finally:
        place.proxy.delay_s = 0.0


@servers
def test_nobody_waits_longer_than_a_time_out_for_a_server_that_does_not_answer(place):
    bench = bench_of(place)
    until(lambda: bench.move(up=False).ok)
    place.proxy.holds.set()
    try:
        began = time.monotonic()
        assert bench.look() == 0 and time.monotonic() - began < 2.0
        began = time.monotonic()
        assert bench.look() == 0 and time.monotonic() - began < 0.1, "it is not asked"
        began = time.monotonic()
        assert not bench.move(up=True).ok and time.monotonic() - began < 15.0
    finally:
        place.proxy.holds.clear()
    until(lambda: bench.look() == bench.num)
    assert bench.move(up=True).ok


@servers
def test_a_server_that_was_killed_is_left_alone_and_found_again(place):
    bench = bench_of(place)
    until(lambda: bench.move(up=False).ok)            # a busy machine may take too long to connect
    place.server.kill()
    try:
        for _ in range(4):
            began = time.monotonic()
            assert not bench.move(up=True).ok and time.monotonic() - began < 15.0
        assert bench.storage.stats()["storage_up"] == 0
        assert bench.look() == 0
    finally:
        place.server.start()
    if place.kind == "mooncake":                      # it has forgotten everything
        until(lambda: bench.move(up=False).ok)
    until(lambda: bench.look() == bench.num)
    assert bench.move(up=True).ok, "what it had acknowledged it has"


@servers
def test_a_server_that_is_not_there_at_first_is_an_error_of_the_world_and_soon(place):
    store = place.open(via=1)
    began = time.monotonic()
    with pytest.raises(OSError):
        store.check()
    assert time.monotonic() - began < 5.0
    names = keys(2)
    for call in (lambda: list(store.present(names)), lambda: get(store, names), lambda: put(store, names),
                 lambda: store.delete(names, 0)):
        with pytest.raises(OSError) as told:
            call()
        assert not any(key.hex() in str(told.value) for key in names), "keys are in no log"


WRITER = """
import ast, random, sys
sys.path[:0] = ast.literal_eval(sys.argv[4])
from pathlib import Path
from test_stores import FP, Place, put
place = Place.__new__(Place)
place.kind, place.folder, place.opened = sys.argv[1], Path(sys.argv[2]), []
place.server = None if place.kind == "file" else place
store, n = place.open(via=int(sys.argv[3])), 0
while True:
    names = [random.randbytes(16) for _ in range(8)]
    for name, _ in zip(names, put(store, names)):
        print(name.hex(), flush=True)
"""


@pytest.mark.parametrize("place, kills", [
    ("file", 3), *(pytest.param(kind, kills, marks=pytest.mark.soak)
                   for kind, kills in (("file", 100), ("valkey", 10), ("mooncake", 10)))], indirect=["place"])
def test_what_was_acknowledged_outlives_who_has_stored_it(place, kills):
    """Killed at any moment: all that it was told is stored is read again."""
    dice, counted, reader = random.Random(kills), 0, place.open(readonly=True)
    port = "0" if place.server is None else str(place.server.port)
    for _ in range(kills):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, place.kind, str(place.folder), port,
                                   repr([str(Path(__file__).parent), *sys.path])],
                                  stdout=subprocess.PIPE, text=True)
        told = [writer.stdout.readline()]                 # it has begun
        killer = threading.Timer(dice.random(), writer.kill)
        killer.start()
        told += writer.stdout.readlines()
        writer.wait()
        names = [bytes.fromhex(line) for line in told if line.endswith("\n")]
        assert names and get(reader, names) == [Verdict.GOOD] * len(names)
        counted += len(names)
    print(f"{place.kind}: {kills} kills, {counted} pages acknowledged and read again")
