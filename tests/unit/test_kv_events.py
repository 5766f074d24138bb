"""KV events on the wire: bytes, sequence, replay, overflow."""
from __future__ import annotations

import socket
import threading
import time
from collections import deque
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from events_reader import Subscriber, decode

from penstock.api import server
from penstock.config.base.errors import ConfigError
from penstock.config.settings.cli import from_options
from penstock.config.settings.kv_events import KvEvents, is_wrong, kv_events, listens, shown_events, with_rank
from penstock.core.kv.prefix_tree import pack
from penstock.core.plan import Cached, Republish, StoredPages, Tier
from penstock.engine import kv_events as wire
from penstock.engine import process as engine_main
from penstock.engine.kv_events import AGAIN_S, CLEARED, PORTION, Encoder, KvPublisher, check_events, shown
from penstock.engine.record import EventLog
from penstock.exec.start import build

STORED = StoredPages(Tier.HBM, 0, 7, (8, 1 << 62), (pack((1, 2)), pack((3, 70_000))))
NEWS = Cached(False, ((Tier.DISK, (5,)), (Tier.DRAM, (6, 5))),
              (STORED, StoredPages(Tier.DRAM, 0, None, (9,), (pack((4, 5)),))))

# [1.5, [stored, stored, removed, removed], 3]: maps, with the keys of vLLM's classes and their order.
GOLDEN = bytes.fromhex(
    "93cb3ff800000000000094"
    "88a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739208cf4000000000000000"
    "b1706172656e745f626c6f636b5f6861736807a9746f6b656e5f69647394010203ce00011170aa626c6f636b5f73697a6502"
    "a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0"
    "88a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739109b1706172656e745f626c6f636b5f68617368c0"
    "a9746f6b656e5f696473920405aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3435055"
    "a96c6f72615f6e616d65c0"
    "83a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739105a66d656469756da753544f52414745"
    "83a474797065ac426c6f636b52656d6f766564ac626c6f636b5f686173686573920605a66d656469756da3435055"
    "03")


def test_the_bytes_of_a_batch_are_those_of_vllm() -> None:
    encoder = Encoder(2, 3, "vllm")
    payload = encoder.payload(encoder.events(NEWS), 1.5)
    assert payload == GOLDEN, payload.hex()
    batch = decode(payload)
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 3)
    assert [type(event).__name__ for event in batch.events] == ["BlockStored"] * 2 + ["BlockRemoved"] * 2
    assert batch.events[0].token_ids == [1, 2, 3, 70_000]
    cleared = msgspec.msgpack.decode(encoder.payload(encoder.events(CLEARED), 0.0))
    assert cleared == [0.0, [{"type": "AllBlocksCleared"}], 3]


def test_pages_of_a_key_or_a_salt_are_left_out_stored_and_removed() -> None:
    encoder = Encoder(2, 0, "vllm")
    salted = StoredPages(Tier.HBM, 255, None, (20, 21), (pack((4, 5)), pack((6, 7))))
    [stored] = encoder.events(Cached(False, (), (salted, STORED)))
    assert stored.block_hashes == STORED.hashes
    assert encoder.events(Cached(False, ((Tier.HBM, (20,)),), ())) == []
    [removed] = encoder.events(Cached(False, ((Tier.HBM, (21, 8)),), ()))
    assert removed.block_hashes == (8,)
    assert not any(encoder._salted.values())


def test_sglang_has_other_names_for_media() -> None:
    events = Encoder(2, 0, "sglang").events(NEWS)
    assert [event.medium for event in events] == ["GPU", "CPU_PINNED", "DISK", "CPU_PINNED"]


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
        clock, woken, log = Clock(), list[int](), list[str]()
        reader = Subscriber(address, replay)

        def publisher(self, **more) -> KvPublisher:
            events = KvEvents(endpoint=address, replay_endpoint=replay, **more)
            open_.append(KvPublisher(events, log=self.log.append, unix=self.clock, clock=self.clock))
            open_[-1].start(2, "vllm", lambda: self.woken.append(1))
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


@pytest.fixture
def still(made, monkeypatch):
    """A publisher whose thread does nothing, with three portions of batches; and a client of its replays."""
    monkeypatch.setattr(KvPublisher, "_run", lambda self: None)
    publisher = made.publisher(buffer_steps=3 * PORTION)
    for _ in range(3 * PORTION):
        publisher._publish(CLEARED)
    client = made.reader._context.socket(zmq.DEALER)
    client.set_hwm(1)
    client.connect(made.reader._replay)
    yield publisher, client
    client.close(0)


def turns(publisher: KvPublisher, client: zmq.Socket, most: int) -> list[int]:
    """Of so many turns, how many messages each has sent to a client that reads them."""
    sent = []
    for _ in range(most):
        publisher._replies.poll(1000 if not sent else 0)
        publisher._replay(publisher._replies)
        sent.append(0)
        while client.poll(100):
            client.recv_multipart()
            sent[-1] += 1
    return sent


def test_a_turn_sends_a_portion_of_one_replay_however_many_are_requested(still) -> None:
    publisher, client = still
    for _ in range(2):
        client.send_multipart((b"", bytes(8)))
    assert turns(publisher, client, 6) == 2 * [PORTION, PORTION, PORTION + 1]


def test_a_client_that_reads_nothing_or_has_gone_ends_its_replay(still) -> None:
    publisher, client = still
    client.send_multipart((b"", bytes(8)))
    assert publisher._replies.poll(5000)
    for _ in range(2000):                      # more than what the sockets between them hold
        publisher._publish(CLEARED)
        publisher._answer = publisher._answer and wire._Answer(publisher._answer.client, 0, publisher._next, 0.0)
        publisher._replay(publisher._replies)
    assert publisher._answer is None
    client.send_multipart((b"", bytes(8)))
    assert publisher._replies.poll(5000)
    client.close(0)                            # time stands still: its end ends the replay, if that is seen
    until = time.monotonic() + 5
    while publisher._replay(publisher._replies) and publisher._answer is not None and time.monotonic() < until:
        time.sleep(0.01)
    if publisher._answer is not None:          # it is not always: then what does not go on ends
        publisher._answer = wire._Answer(publisher._answer.client, publisher._answer.next, publisher._next, 0.0)
        publisher._replay(publisher._replies)
    assert publisher._answer is None


def test_a_request_with_a_large_part_ends_the_connection(made) -> None:
    publisher = made.publisher()
    made.meet(publisher)
    socket = made.reader._context.socket(zmq.DEALER)
    socket.connect(made.reader._replay)
    socket.send_multipart((b"x" * 2048, bytes(8)))
    assert not socket.poll(300) and made.reader.replayed(0)
    socket.close(0)


def test_a_queue_that_is_cleared_under_the_thread_is_no_end_of_it(made) -> None:
    class Raced(deque):
        raced = False

        def popleft(self):
            if self and not self.raced:
                self.raced = True
                self.clear()
            return super().popleft()

    publisher = made.publisher()
    publisher._queue = Raced()
    publisher.put(CLEARED)
    made.reader.until(lambda: publisher._queue.raced)
    made.meet(publisher)
    assert publisher._thread.is_alive() and not made.log


def test_a_batch_that_cannot_be_published_publishes_all_pages_again(made) -> None:
    publisher = made.publisher()
    made.meet(publisher)
    for failures in (1, 2):
        publisher.put(Cached(False, (), (STORED._replace(keys=(None,)),)))
        made.reader.until(lambda: publisher.wait_s is not None)
        assert len(made.log) == 1 and "all pages are published again" in made.log[0], failures
        assert publisher.news() == (Republish(),) and made.woken
        made.clock.now += AGAIN_S
        made.meet(publisher)


def test_failures_without_an_end_turn_events_off_and_nothing_waits(made, monkeypatch) -> None:
    publisher = made.publisher()
    monkeypatch.setattr(publisher, "_publish", lambda cached: 1 / 0)
    publisher.put(CLEARED)
    made.reader.until(lambda: not publisher._thread.is_alive())
    assert "ZeroDivisionError" in made.log[-1] and "off until" in made.log[-1]
    publisher.put(CLEARED)
    assert not publisher._queue


def test_the_end_waits_for_no_thread_that_hangs(made, monkeypatch) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(KvPublisher, "_run", lambda self: hangs.wait())
    monkeypatch.setattr(wire, "CLOSE_S", 0.05)
    publisher = made.publisher()
    ends = threading.Thread(target=publisher.close, daemon=True)
    ends.start()
    ends.join(5)
    assert not ends.is_alive() and publisher._thread.is_alive()
    hangs.set()


def test_an_engine_that_ends_publishes_what_is_queued(made, monkeypatch) -> None:
    publisher, ended = made.publisher(), []
    made.meet(publisher)

    def run(engine, link) -> None:
        engine.publisher.put(Cached(False, (), (STORED._replace(parent=None),)))

    parts = SimpleNamespace(publisher=publisher, workers=None, ready=None)
    for name, double in {"hello": lambda link: from_options("demo", {}), "build": lambda config, log: parts, "run": run,
                         "ApiLink": lambda sock: SimpleNamespace(send=lambda message: None)}.items():
        monkeypatch.setattr(engine_main, name, double)
    monkeypatch.setattr(engine_main.collector, "spare", lambda full: None)
    monkeypatch.setattr(engine_main.os, "_exit", ended.append)
    monkeypatch.setattr(engine_main.signal, "signal", lambda *_: None)
    ours, _theirs = socket.socketpair()
    engine_main.main([str(ours.detach())])
    assert ended == [0] and not publisher._thread.is_alive()
    made.reader.until(lambda: made.reader.index.media == {"GPU": set(STORED.hashes)})


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
    '{"endpoint": "tcp://*:65535", "data_parallel_rank": 1}',
    '{"hwm": 3000000000}', '{"buffer_steps": 1e20}', '{"max_queue_size": 16777217}'])
def test_another_flag_is_refused(text) -> None:
    assert is_wrong(text)


def test_ports_of_several_engines_are_far_enough_apart() -> None:
    near = KvEvents(endpoint="tcp://*:5557", replay_endpoint="tcp://*:5558")
    assert near.has_room(1) and not near.has_room(2)
    far = KvEvents(endpoint="tcp://*:5557", replay_endpoint="tcp://*:5657")
    assert far.has_room(100) and not far.has_room(101)
    assert KvEvents(endpoint="tcp://indexer:5557", replay_endpoint="tcp://*:5557").has_room(64)
    assert KvEvents(endpoint="tcp://*:65535").has_room(1) and not KvEvents(endpoint="tcp://*:65535").has_room(2)
    assert not KvEvents(endpoint="ipc:///tmp/x", replay_endpoint="ipc:///tmp/x").has_room(1)


def test_no_other_machine_can_connect_unless_the_flag_says_so() -> None:
    events = kv_events('{"enable_kv_cache_events": true}')
    assert events is not None and events.endpoint == "tcp://127.0.0.1:5557" and listens(events.endpoint)
    assert shown(events) == ["KV events: the engine listens at tcp://127.0.0.1:5557"]


@pytest.mark.parametrize(("endpoint", "here"), [
    ("tcp://*:1", True), ("tcp://0.0.0.0:1", True), ("tcp://[::1]:1", True), ("ipc:///tmp/x", True),
    ("tcp://192.0.2.1:1", False), ("tcp://localhost:1", False), ("tcp://indexer:1", False)])
def test_the_engine_listens_at_addresses_of_this_machine_and_says_so(endpoint, here) -> None:
    assert listens(endpoint) is here
    said = shown(KvEvents(endpoint=endpoint))[0]
    assert ("listens at" if here else "connects to a subscriber at") in said


def test_an_address_of_this_machine_has_a_subscriber(made) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    publisher, reader = KvPublisher(KvEvents(endpoint=endpoint), log=print), Subscriber(endpoint)
    publisher.start(2, "vllm", lambda: None)
    reader.meet(lambda: publisher.put(CLEARED) or True)
    publisher.close()
    reader.close()


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
        KvPublisher(KvEvents(endpoint="ipc:///no/such/folder/x"), log=print)


def test_an_endpoint_is_taken_before_a_model_is_loaded(monkeypatch) -> None:
    monkeypatch.setattr(build, "build_engine", lambda *_, **__: pytest.fail("the model is loaded"))
    config = from_options("demo", {"kv_events_config": '{"publisher": "zmq", "endpoint": "ipc:///no/such/folder/x"}'})
    with pytest.raises(ConfigError, match="give another endpoint"):
        engine_main.build(config, EventLog())


@pytest.mark.parametrize(("endpoint", "is_open"), [
    ("tcp://*:5557", True), ("tcp://0.0.0.0:5557", True),
    ("tcp://kv-indexer:5557", True), ("tcp://10.0.0.1:1", True), ("tcp://127.0.0.1:1", False),
    ("tcp://[::1]:1", False), ("tcp://localhost:1", False), ("ipc:///tmp/x", False)])
def test_an_endpoint_beyond_this_machine_is_warned_of(endpoint, is_open) -> None:
    assert any("other machines" in line for line in shown(KvEvents(endpoint=endpoint))) is is_open


def test_a_server_with_several_keys_says_that_it_publishes_no_page(monkeypatch) -> None:
    said = list[str]()
    for name, double in {"bind": lambda config: pytest.fail("the end"), "pull": lambda *_: None}.items():
        monkeypatch.setattr(server, name, double)
    monkeypatch.setattr(server.logs, "info", said.append)
    monkeypatch.setattr(server.logs, "set_up", lambda config: None)
    one = {"api_key": "a-key-of-one"}
    for options in ({}, one, {**one, "admin_api_key": "another-key"}):
        with pytest.raises(pytest.fail.Exception, match="the end"):
            server.run(from_options("demo", {"kv_events_config": '{"publisher": "zmq"}', **options}), None)
    assert [line for line in said if "every request" in line] == said[-1:]
