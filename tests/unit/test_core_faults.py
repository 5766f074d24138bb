"""Requests whose KV is damaged beside others: which are computed again, and which pages stay."""
from __future__ import annotations

from driver import Driver

from penstock.core.lifecycle import Phase
from penstock.core.pair.messages import Grant
from penstock.core.plan import (
    Aborted,
    Dropped,
    Event,
    Finished,
    Listed,
    Moved,
    Outcome,
    PeerJoined,
    Received,
    RequestId,
    Retired,
    Started,
    StepId,
    Unstore,
)
from penstock.core.settings import CacheGroup

SHARED = [*range(8)]
STATES = (CacheGroup(name="full", page_bytes=0), CacheGroup(name="state", page_bytes=100, snapshot=True,
                                                            page_tokens=8))


def fail(d: Driver, rid: int) -> None:
    """The next step shows that the logits of `rid` are not finite."""
    plan = d.plans.pop(0)
    rids = [at for at, samples in zip(plan.rids, plan.samples, strict=True) if samples]
    new = tuple([() if at == rid else (7,) for at in rids])
    d.tell(Retired(plan.step, new), Aborted(RequestId(rid), damaged=True))


def cached(d: Driver, rid: int) -> int:
    [tokens] = [o.hbm_tokens + o.dram_tokens + o.disk_tokens for o in d.out
                if isinstance(o, Started) and o.rid == rid]
    return tokens


def test_one_bad_prompt_leaves_a_shared_beginning_and_its_readers_as_they_are() -> None:
    d = Driver()
    d.arrive(1, [*SHARED, 50], max_new=20)
    d.retire()
    d.arrive(2, [*SHARED, 60, 61], max_new=20)
    d.retire()
    d.arrive(3, [*SHARED, 70, 71], max_new=20)
    d.retire()
    assert cached(d, 2) == cached(d, 3) == 8
    bad = d.core.live[RequestId(3)]
    fail(d, 3)
    assert bad.origin.retried and not bad.path, "it may have read a bad page"
    fail(d, 3)
    assert d.finished() == {3: Outcome.ABORT} and d.core.stats()["computed_again"] == 1
    assert all(r.kv_epoch == 0 for r in d.core.live.values()), "a request with its beginning starts anew"
    assert not any(node.banished for node in d.core.kv.tree.nodes())
    d.arrive(4, [*SHARED, 80], max_new=1)
    d.run()
    ended = d.finished()
    assert cached(d, 4) == 8 and ended == {3: Outcome.ABORT, **dict.fromkeys((1, 2, 4), Outcome.LENGTH)}


def test_a_sound_request_that_fails_by_cached_pages_is_computed_without_them_and_they_go() -> None:
    d = Driver()
    d.arrive(1, [*SHARED, 50], max_new=1)
    d.run()
    pages = list(d.core.kv.tree.nodes())
    d.arrive(2, [*SHARED, 60], max_new=3)
    fail(d, 2)
    assert d.plans[0].start == (0,) and not any(node.banished for node in pages)
    d.run()
    assert d.finished() == dict.fromkeys((1, 2), Outcome.LENGTH) and all(node.banished for node in pages)
    d.arrive(3, [*SHARED, 60], max_new=3)
    d.run()
    assert cached(d, 3) == 0


def test_a_request_that_fails_while_it_pins_cached_pages_to_get_a_row_begins_with_none() -> None:
    d = Driver(hbm_pages=40, hit_pages=2)
    d.arrive(1, [*range(24), 50], max_new=20)
    d.retire()
    d.arrive(2, [*range(24), 60], max_new=9)
    bad = d.core.live[RequestId(2)]
    while not bad.started:
        d.retire()
    assert cached(d, 2) == 24
    d.tell(Dropped(bad.rid))
    while not bad.path:
        d.retire()
    assert bad in d.core.kv.entering, "all is pinned in one turn"
    d.tell(Aborted(bad.rid, damaged=True))
    while bad.row is None:
        d.retire()
    assert bad.retired == 0 and not bad.path
    d.run()
    assert d.finished() == dict.fromkeys((1, 2), Outcome.LENGTH)


def test_a_reader_of_a_damaged_state_snapshot_is_computed_again_from_none() -> None:
    d = Driver(step_tokens=8, max_len=96, hbm_pages=64, groups=STATES)
    d.arrive(1, range(24), max_new=9)
    d.retire()
    d.retire()
    d.arrive(2, [*range(16), 90, 91], max_new=3)     # from the state behind 16 tokens
    reader, space = d.core.live[RequestId(2)], d.core.kv.device[1]
    damaged = list(reader.path)
    assert len(damaged) == 4 and space in damaged[3].copies
    fail(d, 1)
    assert d.finished() == {1: Outcome.ABORT} and all(node.banished for node in damaged)
    assert reader.kv_epoch == 1 and not {*map(id, damaged)} & {*map(id, reader.path)}
    d.run()
    assert d.finished()[2] is Outcome.LENGTH and len(reader.tokens) == 21
    d.arrive(3, [*range(16), 95], max_new=1)
    d.run()
    assert cached(d, 3) == 16, "nothing of what was computed again serves others"
    assert not any(node.banished and node.refs for node in d.core.kv.tree.nodes())


def test_pages_that_were_stored_before_their_fault_is_known_are_given_up_in_storage() -> None:
    d = Driver(step_tokens=8, dram_pages=32, disk_pages=32, store_root=b"root", max_len=96)
    d.arrive(1, range(24), max_new=9)
    d.tell(Listed(RequestId(1), 0, b""))
    for _ in range(2):
        d.retire()
        while d.moves:
            d.land()                                     # to the host, and on to storage
    damaged = list(d.core.live[RequestId(1)].path)
    disk = d.core.kv.disk[0]
    assert len(damaged) == 4 and all(node.ready(disk) for node in damaged[:2])
    d.arrive(2, [*range(16), 90, 91], max_new=3)
    assert d.core.live[RequestId(2)].path == damaged
    names = {node.digest for node in damaged if disk in node.copies}
    fail(d, 1)
    [gone] = [o for o in d.out if isinstance(o, Unstore)]
    assert names <= {*gone.keys} and d.core.live[RequestId(2)].kv_epoch == 1
    d.run()
    assert d.finished() == {1: Outcome.ABORT, 2: Outcome.LENGTH}
    assert not any(disk in node.copies for node in damaged[:2])


def prefilling(*granted: int) -> Driver:
    """Of two prompts on a prefill instance the second begins with pages of the first. Those of `granted` are
    pushed as they are computed."""
    d = Driver(role="prefill", step_tokens=8, hbm_pages=32)
    d.tell(PeerJoined())
    d.arrive(1, range(24), transfer=5)
    d.retire()
    d.retire()
    d.arrive(2, [*range(16), *range(50, 66)], transfer=6)
    d.tell(*[Received(Grant(transfer, 1, 32 if transfer == 6 else 24)) for transfer in granted])
    return d


def test_a_prompt_that_reads_banished_pages_is_computed_again_or_if_some_were_pushed_by_its_decode_instance(
) -> None:
    for pushed in (False, True):
        d = prefilling(*[6] * pushed)
        reader = d.core.live[RequestId(2)]
        assert reader.path and (reader.remote.pushed > 0) == pushed
        events: list[Event] = [Moved(move.id, True) for move in d.moves]
        d.moves.clear()
        d.tell(*events)
        fail(d, 1)
        ended = {o.rid: o.outcome for o in d.out if isinstance(o, Finished)}
        if pushed:
            assert ended == {1: Outcome.ABORT, 2: Outcome.LOST}
            continue
        assert ended == {1: Outcome.ABORT} and reader.kv_epoch == 1
        while d.plans:
            d.retire()
        assert reader.phase is Phase.SENDING and reader.retired == 32


def test_a_fault_that_a_step_shows_whose_results_do_not_count_is_none() -> None:
    d = Driver(overlap=True)
    d.arrive(1, [*SHARED, 50], max_new=20)
    d.retire()
    d.arrive(2, [*SHARED, 60], max_new=20)
    while RequestId(2) not in d.plans[0].rids:
        d.retire()
    fail(d, 1)                                           # a step of the second has retired, and one flies
    reader = d.core.live[RequestId(2)]
    assert reader.kv_epoch == 1 and reader.invalid_through > StepId(0) and len(d.plans) > 0
    fail(d, 2)
    assert d.core.live[RequestId(2)] is reader and not reader.origin.retried
    d.run()
    assert d.finished() == {1: Outcome.ABORT, 2: Outcome.LENGTH}
