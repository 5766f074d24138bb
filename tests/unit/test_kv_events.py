"""KV events on the wire: bytes, sequence, replay, overflow."""
from __future__ import annotations

import msgspec
import pytest
import zmq
from events_reader import Subscriber, decode

from penstock.config.base.errors import ConfigError
from penstock.config.settings.kv_events import KvEvents, is_wrong, kv_events, shown_events, with_rank
from penstock.core.kv.prefix_tree import pack
from penstock.core.plan import Cached, Republish, StoredPages, Tier
from penstock.engine import kv_events as wire
from penstock.engine.kv_events import AGAIN_S, Encoder, KvPublisher, check_events, warning

STORED = StoredPages(Tier.HBM, 0, 7, (8, 1 << 62), (pack((1, 2)), pack((3, 70_000))))
CLEARED = Cached(True, (), ())
NEWS = Cached(False, ((Tier.DISK, (5,)), (Tier.DRAM, (6, 5))),
              (STORED, StoredPages(Tier.DRAM, 255, None, (9,), (pack((4, 5)),))))

# [1.5, [removed, removed, stored, stored], 3]: maps, with the keys of vLLM's classes and their order.
GOLDEN = bytes.fromhex(
    "93cb3ff800000000000094"
    "83a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739105a66d656469756da753544f52414745"
    "83a474797065ac426c6f636b52656d6f766564ac626c6f636b5f686173686573920605a66d656469756da3435055"
    "88a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739208cf4000000000000000"
    "b1706172656e745f626c6f636b5f6861736807a9746f6b656e5f69647394010203ce00011170aa626c6f636b5f73697a6502"
    "a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0"
    "89a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739109b1706172656e745f626c6f636b5f68617368c0"
    "a9746f6b656e5f696473920405aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3435055"
    "a96c6f72615f6e616d65c0aa63616368655f73616c74b030303030303030303030303030306666"
    "03")


def test_the_bytes_of_a_batch_are_those_of_vllm() -> None:
    payload = Encoder(2, 3, "vllm").payload(NEWS, 1.5)
    assert payload == GOLDEN, payload.hex()
    batch = decode(payload)
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 3)
    assert [type(event).__name__ for event in batch.events] == ["BlockRemoved"] * 2 + ["BlockStored"] * 2
    assert batch.events[2].token_ids == [1, 2, 3, 70_000]
    cleared = msgspec.msgpack.decode(Encoder(2, 0, "off").payload(CLEARED, 0.0))
    assert cleared == [0.0, [{"type": "AllBlocksCleared"}], 0]


def test_sglang_has_other_names_for_media() -> None:
    events = decode(Encoder(2, 0, "sglang").payload(NEWS, 0.0)).events
    assert [event.medium for event in events] == ["DISK", "CPU_PINNED", "GPU", "CPU_PINNED"]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def made(tmp_path):
    """Publishers at an endpoint of this test's, each for a while; and a subscriber."""
    address, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    open_: list = []

    class Made:
        clock, woken = Clock(), list[int]()
        reader = Subscriber(address, replay)

        def publisher(self, **more) -> KvPublisher:
            events = KvEvents(endpoint=address, replay_endpoint=replay, **more)
            open_.append(KvPublisher(events, 2, "vllm", lambda: self.woken.append(1), unix=self.clock,
                                     clock=self.clock))
            return open_[-1]

        def meet(self, publisher: KvPublisher) -> None:
            """Until the subscriber is connected: what is published before is lost, if nothing follows."""
            before = self.reader.next
            while self.reader.next <= before:
                publisher.put(CLEARED)
                self.reader.poll(0.05)

    made = Made()
    yield made
    for one in open_:
        one.close()
    made.reader.close()


def test_a_subscriber_that_comes_late_gets_the_rest_by_a_replay(made) -> None:
    publisher = made.publisher(topic="kv@pod@model")
    publisher.put(CLEARED)
    for n in range(5):
        publisher.put(Cached(False, (), (StoredPages(Tier.HBM, 0, n or None, (n + 1,), (pack((n, n)),)),)))
        if n == 2:
            made.reader.poll(0.2)              # connected by now, and has missed some perhaps
    made.reader.until(lambda: made.reader.index.media.get("GPU") == {1, 2, 3, 4, 5})
    assert made.reader.topics == {b"kv@pod@model"} and made.reader.next == int(made.clock.now * 1e6) + 6
    assert made.reader.index.cached([0, 0, 1, 1, 2, 2, 9], 2) == 6
    assert publisher.news() == () and publisher.wait_s is None


def test_an_engine_that_is_started_again_goes_on_with_higher_numbers(made) -> None:
    old = made.publisher()
    made.meet(old)
    old.put(Cached(False, (), (STORED._replace(parent=None),)))
    made.reader.until(lambda: made.reader.index.media)
    old.close()
    made.clock.now += 1
    made.meet(made.publisher())
    assert not made.reader.index.media and made.reader.next > int(made.clock.now * 1e6)


def test_a_replay_older_than_the_ring_publishes_all_again_now_and_then(made) -> None:
    publisher = made.publisher(buffer_steps=2)
    for _ in range(4):
        publisher.put(CLEARED)
    made.reader.until(lambda: publisher.num_batches == 4)
    first = int(made.clock.now * 1e6)
    assert [number for number, _ in made.reader.replayed(first)] == [first + 2, first + 3]
    made.reader.until(lambda: made.woken)
    assert publisher.news() == (Republish(),) and publisher.news() == ()
    made.reader.replayed(first)
    made.reader.until(lambda: publisher.wait_s is not None)
    assert publisher.wait_s == AGAIN_S and publisher.news() == ()
    made.clock.now += AGAIN_S
    assert publisher.news() == (Republish(),)
    made.reader.replayed(first + 2)
    assert publisher.wait_s is None, "it had all"


def test_a_full_queue_is_cleared_until_all_is_published_again(made, monkeypatch) -> None:
    monkeypatch.setattr(KvPublisher, "_run", lambda self: None)     # a thread that does not get on
    publisher = made.publisher(max_queue_size=3)
    for _ in range(4):
        publisher.put(NEWS)
    assert list(publisher._queue) == [CLEARED]
    publisher.put(NEWS)
    assert list(publisher._queue) == [CLEARED] and publisher.news() == (Republish(),)
    publisher.put(CLEARED)
    publisher.put(NEWS)
    assert list(publisher._queue) == [CLEARED, CLEARED, NEWS] and publisher.wait_s is None


def test_requests_of_another_form_are_no_end_of_the_thread(made) -> None:
    publisher = made.publisher()
    publisher.put(CLEARED)
    socket = made.reader._context.socket(zmq.DEALER)
    socket.connect(made.reader._replay)
    for parts in ((b"",), (b"", b"short"), (b"", b"12345678", b"more"), (b"x",)):
        socket.send_multipart(parts)
    made.reader.until(lambda: made.reader.replayed(0))
    socket.close(0)


# ---------------------------------------------------------------- the flag
def test_the_flag_is_on_as_vllm_and_as_sglang_have_it() -> None:
    assert kv_events(None) is None and kv_events("{}") is None
    assert kv_events('{"enable_kv_cache_events": true}') is not None and kv_events('{"publisher": "zmq"}') is not None
    assert kv_events('{"enable_kv_cache_events": true, "publisher": "null"}') is None
    assert kv_events('{"enable_kv_cache_events": false, "publisher": "zmq"}') is None


@pytest.mark.parametrize("text", [
    "", "[]", "{", '{"endpoints": "tcp://*:1"}', '{"endpoint": "udp://*:1"}', '{"endpoint": "tcp://*"}',
    '{"endpoint": "tcp://*:65536"}', '{"media": ["CPU"]}', '{"media": []}', '{"media": ["GPU", "STORAGE"]}',
    '{"buffer_steps": 0}', '{"hwm": -1}', '{"publisher": "nats"}', '{"replay_endpoint": "inproc://x"}',
    '{"endpoint": "tcp://*:65535", "data_parallel_rank": 1}'])
def test_another_flag_is_refused(text) -> None:
    assert is_wrong(text)


def test_each_engine_has_an_endpoint_of_its_own() -> None:
    text = '{"publisher": "zmq", "endpoint": "tcp://[::1]:5557", "replay_endpoint": "ipc:///tmp/r"}'
    third = kv_events(with_rank(text, 2))
    assert third is not None and third.data_parallel_rank == 2
    assert (third.at(third.endpoint), third.at(third.replay_endpoint)) == ("tcp://[::1]:5559", "ipc:///tmp/r_dp2")
    assert with_rank(None, 1) is None
    [shown] = shown_events(text, 16, 4).values()
    assert shown == {
        "publisher": "zmq", "endpoint": "tcp://[::1]:5557", "endpoint_host": "[::1]", "endpoint_port_base": 5557,
        "replay_endpoint": "ipc:///tmp/r", "replay_endpoint_port_base": None, "topic": "", "block_size": 16,
        "dp_size": 4}
    assert shown_events("{}", 16, 1) == {}


def test_the_flag_without_pyzmq_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(wire.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pyzmq is not installed: pip install '\.\[events\]'"):
        check_events('{"publisher": "zmq"}')
    assert check_events("{}") is None


def test_an_endpoint_that_is_in_use_is_refused(made) -> None:
    with pytest.raises(ConfigError, match="give another endpoint"):
        KvPublisher(KvEvents(endpoint="ipc:///no/such/folder/x"), 2, "vllm", lambda: None)


@pytest.mark.parametrize(("endpoint", "is_open"), [
    ("tcp://*:5557", True), ("tcp://kv-indexer:5557", True), ("tcp://10.0.0.1:1", True), ("tcp://127.0.0.1:1", False),
    ("tcp://[::1]:1", False), ("tcp://localhost:1", False), ("ipc:///tmp/x", False)])
def test_an_endpoint_beyond_this_machine_is_warned_of(endpoint, is_open) -> None:
    assert bool(warning(KvEvents(endpoint=endpoint))) is is_open
