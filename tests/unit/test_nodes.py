"""What nodes of one engine say to each other, who is none of them, and who is gone."""
from __future__ import annotations

import math
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pipeline_engine import checkpoint

from penstock.config.base.errors import ConfigError
from penstock.config.base.version import version
from penstock.config.settings.cli import from_options
from penstock.config.settings.plain import to_plain
from penstock.config.settings.resolve import TORCHRUN, of_torchrun
from penstock.config.settings.tree import Config
from penstock.config.streams.heartbeat import Beat
from penstock.core.plan import Group, StepId, StepPlan, Tier
from penstock.exec.pipeline import agent as agent_module
from penstock.exec.pipeline import nodes, remote_node
from penstock.exec.pipeline.agent import Agent
from penstock.exec.pipeline.nodes import NodeLink, weights_of
from penstock.exec.pipeline.remote_node import NodePages, Nodes
from penstock.exec.pipeline.workers import WorkerGroup
from penstock.exec.step.links import nodes_of
from penstock.memory.pool import PageLayout
from penstock.transfer.handshake import Opening, Stranger
from penstock.transfer.pages import Span
from penstock.transfer.streams import LinkSettings, dial

KEY = b"0123456789abcdef"
PEM = str(Path(__file__).parents[1] / "data" / "pair_tls.pem")
LIMIT_S = 60.0


def settings(listens: bool, **more: object) -> LinkSettings:
    return replace(LinkSettings(role="node", address="unix:x", listens=listens, key=KEY), **more)


def ends(ours: LinkSettings, theirs: LinkSettings) -> list[NodeLink | Exception]:
    """What the end that listens and the one that dials have come to."""
    server = socket.create_server(("127.0.0.1", 0))
    dialled, found = socket.create_connection(server.getsockname()), [None, None]
    accepted, _ = server.accept()
    server.close()

    def open_one(i: int, sock: socket.socket, one: LinkSettings) -> None:
        try:
            found[i] = NodeLink(sock, one)
        except (Stranger, OSError) as e:
            found[i] = e

    threads = [threading.Thread(target=open_one, args=(i, *args)) for i, args in enumerate(
        ((accepted, ours), (dialled, theirs)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("tls", [False, True])
def test_what_is_said_arrives_in_order_and_whole(tls):
    one, other = ends(settings(True, tls=tls, tls_cert=PEM if tls else ""), settings(False, tls=tls))
    body = bytes(range(256)) * 8192                                     # several messages
    sending = threading.Thread(target=lambda: [one.data(9, body), one.say(nodes.NodeStack(3))])
    sending.start()
    got = b""
    while isinstance(message := other.next(), nodes.Data):
        assert message.channel == 9
        got += message.body
    sending.join()
    assert got == body and message == nodes.NodeStack(3)
    one.close()
    with pytest.raises(ConnectionError, match="closed the connection"):
        other.next()


def test_another_key_is_no_node_of_this_engine():
    one, other = ends(settings(True), settings(False, key=KEY[::-1]))
    other.say(Beat())
    with pytest.raises(ConnectionError, match="key"):
        one.next()


def test_tls_at_one_end_only_is_told_as_that():
    one, other = ends(settings(True), settings(False, tls=True))
    assert isinstance(one, Stranger) and isinstance(other, OSError)
    assert "speaks TLS and this one does not: give --cluster-tls-cert to all machines" in str(one)


def test_another_version_of_the_protocol_is_named_with_both(monkeypatch):
    def keys(opening, stream, *args):
        sent = SimpleNamespace(binding=b"", sendall=lambda data: stream.sendall(
            data[:12] + (nodes.VERSION + 1).to_bytes(2, "little") + data[14:]))
        return real(opening, sent, *args)

    real = Opening.keys
    monkeypatch.setattr(Opening, "keys", keys)
    one, other = ends(settings(True), settings(False))
    for end in (one, other):
        assert isinstance(end, Stranger)
        assert f"{nodes.VERSION} here and {nodes.VERSION + 1} there" in str(end)


def test_who_says_nothing_is_gone_and_who_lives_is_not():
    one, other = ends(settings(True, silence_s=0.4), settings(False, silence_s=0.4))
    heard: list[object] = []
    one.live()
    other.live()
    ended = threading.Event()

    def run() -> None:
        heard.append(one.run(heard.append))
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    assert not ended.wait(1.2) and not heard            # three times the silence: it says that it lives
    other._beats.end()                                  # from now on it does not
    assert ended.wait(LIMIT_S) and "nothing was heard" in str(heard[-1])


# ---------------------------------------------------------------- who comes
@pytest.fixture(autouse=True, scope="module")
def model(tmp_path_factory) -> str:
    MODEL.append(checkpoint(tmp_path_factory.mktemp("nodes")))
    return MODEL[0]


MODEL: list[str] = []


def config(**options: object) -> Config:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return from_options(MODEL[0], {"nnodes": 2, "pp": 2, "dist_init_addr": address, "device": "cpu",
                                 "rank_timeout_s": 60, **options})


def meet(ours: Config, *joins: nodes.Join,
         after: threading.Event | None = None) -> tuple[object, list[object]]:
    """What node 0 says, and what the others hear. after: until which they do not come."""
    heard: list[object] = []

    def come(join: nodes.Join) -> None:
        own = nodes.settings_of(replace(ours, nodes=replace(ours.nodes, node_rank=1)))
        if after is not None:
            assert after.wait(LIMIT_S)
        while True:
            try:
                link = NodeLink(dial(own), own)
                break
            except OSError:
                continue
        link.say(join)
        link.patient(LIMIT_S)
        try:
            heard.append(link.next())
        except ConnectionError as e:
            heard.append(e)

    threads = [threading.Thread(target=come, args=(join,)) for join in joins]
    for thread in threads:
        thread.start()
    try:
        found = Nodes(ours, nodes_of(ours), lambda line: None)
        found.close()
    except ConfigError as e:
        found = e
    for thread in threads:
        thread.join()
    return found, heard


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("PENSTOCK_CLUSTER_KEY", KEY.decode())


def join(ours: Config, node: int = 1, **more: object) -> nodes.Join:
    made = nodes.Join(version(), node, to_plain(ours), weights_of(ours), 1, "127.0.0.1", 0)
    return replace_struct(made, **more)


def replace_struct(message: nodes.Join, **more: object) -> nodes.Join:
    return type(message)(**{**{f: getattr(message, f) for f in message.__struct_fields__}, **more})


def test_all_that_come_are_known_by_their_number():
    ours = config()
    found, _ = meet(ours, join(ours))
    assert [node.join.node for node in found.all] == [1] and found.of(1).mine == range(1, 2)


def test_silent_and_slow_strangers_keep_no_node_out(monkeypatch):
    """Three say nothing, three a byte now and then, each for longer than node 0 waits for any of them."""
    monkeypatch.setattr(remote_node, "CALLERS_MAX", 7)
    ours, connected, ended = config(), threading.Event(), threading.Event()
    links: list[socket.socket] = []

    def slow(link: socket.socket) -> None:
        while not ended.wait(0.3):
            try:
                link.sendall(b"P")
            except OSError:
                return

    def strangers() -> None:
        while len(links) < 6:
            try:
                links.append(dial(nodes.settings_of(ours)))
            except OSError:
                continue
            if len(links) % 2:
                threading.Thread(target=slow, args=(links[-1],), daemon=True).start()
        connected.set()

    threading.Thread(target=strangers, daemon=True).start()
    found, _ = meet(ours, join(ours), after=connected)
    try:
        assert [node.join.node for node in found.all] == [1]
        for link in links:                      # whoever still shakes hands then is let go
            link.settimeout(LIMIT_S)
            while link.recv(4096):
                pass
    finally:
        ended.set()


def test_a_handshake_has_one_deadline_however_often_it_sends(monkeypatch):
    monkeypatch.setattr(remote_node, "HANDSHAKE_S", 0.5)
    logged: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        callers = remote_node.Callers(server, settings(True), logged.append)
        with socket.create_connection(server.getsockname()) as link:
            link.settimeout(0.05)
            opening = b"penstocknode" + nodes.VERSION.to_bytes(2, "little") + bytes(32)
            for at in range(len(opening) - 1):              # whole after seconds
                try:
                    link.sendall(opening[at:at + 1])
                    if not link.recv(4096):
                        break
                except TimeoutError:
                    continue
                except OSError:
                    break
            else:
                raise AssertionError("it was never let go")
        callers.close()
    assert callers.joined.empty()


@pytest.mark.parametrize("change, words", [
    ({"version": "0.0.7"}, f"penstock {version()} on node 0 and 0.0.7 on node 1"),
    ({"weights": "ab-cd"}, " on node 0 and ab-cd on node 1"),
    ({"node": 5}, "there is no node 5 of 2"),
    ({"settings": {"max_num_seqs": 32}}, "--max-num-seqs is 16 on node 0 and 32 on node"),
    ({"settings": {"tp": 2, "nnodes": 4}}, "--nnodes is 2 on node 0 and 4 on node 1")])
def test_who_is_not_of_this_engine_is_refused_with_both_values(change, words):
    ours = config()
    if "settings" in change:
        change = {"settings": to_plain(replace(theirs := config(**change["settings"]), nodes=replace(
            theirs.nodes, node_rank=1)))}
    found, [heard] = meet(ours, join(ours, **change))
    assert isinstance(found, ConfigError) and words in str(found)
    assert isinstance(heard, nodes.Refuse) and words in heard.why


def test_who_does_not_come_is_named():
    found, _ = meet(config(rank_timeout_s=1, nnodes=3, pp=3))
    assert isinstance(found, ConfigError)
    assert "--nnodes 3: 1 have come" in str(found) and "not 1, 2" in str(found)


# ---------------------------------------------------------------- torchrun
def test_torchrun_says_who_is_who(monkeypatch):
    for name, value in zip(TORCHRUN, ("1", "2", "10.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    found = of_torchrun(from_options("demo", {})).nodes
    assert (found.num, found.rank, found.dist_init_addr) == (2, 1, "10.0.0.1:29501")
    given = from_options("demo", {"nnodes": 3})
    assert of_torchrun(given) is given
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert of_torchrun(from_options("demo", {})).nodes.num == 1


def test_a_plan_crosses_each_connection_once():
    said, sent = [], []
    remote_node = SimpleNamespace(mine=range(2, 4), link=SimpleNamespace(say=said.append))
    workers = WorkerGroup.__new__(WorkerGroup)                   # without its processes
    workers._encoded, workers.ranges = (None, b""), [range(2), remote_node.mine]
    workers._nodes = SimpleNamespace(of=lambda _: remote_node)
    plan = StepPlan(StepId(1), (), (), (), (), (), (), (), (), ())
    for index in range(4):
        workers.hand(SimpleNamespace(index=index, send=sent.append), plan)
    assert sent == [workers.encoded(plan)] * 2 and said == [nodes.ToAll(workers.encoded(plan))]


# ---------------------------------------------------------------- pages and ranks of other machines
def test_layers_of_a_page_are_counted_from_the_first_one_that_a_node_has():
    """Layers 0 and 1 are on node 1, layers 2 and 3 on node 2, which knows of no others."""
    whole = PageLayout(num_layers=4, num_kv_heads=2, page_size=8, head_dim=4)
    half = SimpleNamespace(parts=[SimpleNamespace(whole=replace(whole, num_layers=2))])
    kept: dict[tuple[int, tuple[int, ...]], bytes] = {}

    def node(number: int) -> SimpleNamespace:
        def ask(make):
            message = make(1)
            assert message.spans == [(5, 0, 1)]
            if isinstance(message, nodes.Write):
                kept[number, message.layers] = message.body
            return kept[number, message.layers]
        return SimpleNamespace(ask=ask)

    caches = [SimpleNamespace(**vars(half), origins=[(first, 0)]) for first in (0, 2)]
    pages = NodePages(SimpleNamespace(layouts=[whole]), [*zip(map(node, (1, 2)), caches, strict=True)], None)
    for layer in range(4):
        data = memoryview(bytearray([layer] * (whole.unit_bytes // 4)))
        pages.write(Tier.DRAM, Group(0), range(layer, layer + 1), [Span(5, 0, 1)], data)
        out = memoryview(bytearray(len(data)))
        pages.read(Tier.DRAM, Group(0), range(layer, layer + 1), [Span(5, 0, 1)], out)
        assert out == data
    assert list(kept) == [(1, (0, 1)), (1, (1, 1)), (2, (0, 1)), (2, (1, 1))]


@pytest.mark.parametrize("chunk, messages", [(1 << 19, [4]), (600, [2, 2]), (100, [1, 1, 1, 1])])
def test_pages_of_another_machine_go_several_in_a_message(chunk: int, messages: list[int], monkeypatch) -> None:
    """Two heads there, which are the last two of three; a part of a page is 144 bytes to 288."""
    monkeypatch.setattr(nodes, "CHUNK", chunk)
    whole = PageLayout(num_layers=3, num_kv_heads=3, page_size=8, head_dim=4, planes=1, dtype=torch.int16)
    there = SimpleNamespace(parts=[SimpleNamespace(whole=replace(whole, num_kv_heads=2))], origins=[(0, 1)])
    kept: list[nodes.Write] = []

    def ask(make):
        message = make(1)
        assert message.layers == (1, 2)
        if isinstance(message, nodes.Write):
            kept.append(message)
            return b""
        return next(write.body for write in kept if write.spans == message.spans)

    pages = NodePages(SimpleNamespace(layouts=[whole]), [(SimpleNamespace(ask=ask), there)], None)
    spans = [Span(9, 2, 6), Span(4, 0, 6), Span(5, 0, 6), Span(7, 0, 3)]
    data = bytearray(i % 251 for i in range(21 * 2 * 3 * 8))
    pages.write(Tier.DRAM, Group(0), range(1, 3), spans, memoryview(data))
    assert [len(write.spans) for write in kept] == messages
    assert [len(write.body) for write in kept] == [
        sum(units for _, _, units in write.spans) * 2 * 2 * 8 for write in kept]
    out = memoryview(bytearray(len(data)))
    monkeypatch.setattr(NodePages, "_having", lambda *_: [
        (None, range(1, 3), range(1), slice(0, 1)), (SimpleNamespace(ask=ask), range(1, 3), range(2), slice(1, 3))])
    pages._local = SimpleNamespace(read=lambda tier, group, own, some, found, heads: None)      # leaves zeros
    pages.read(Tier.DRAM, Group(0), range(1, 3), spans, out)
    at = 0
    for span in spans:
        shape = 2, 3, 1, span.units, 8
        size = math.prod(shape)
        was, has = (np.frombuffer(of, np.uint8, size, at).reshape(shape) for of in (data, out))
        assert (has[:, 1:] == was[:, 1:]).all() and not has[:, 0].any()
        at += size


def test_some_heads_of_a_page_go_to_the_machines_that_have_them() -> None:
    """Heads 1 to 3 of five: the last one of the first machine, which has two, and two of the other's three."""
    whole = PageLayout(num_layers=2, num_kv_heads=5, page_size=8, head_dim=4, planes=1, unit=8)
    kept: dict[tuple[int, tuple[int, int]], bytes] = {}

    def node(number: int) -> SimpleNamespace:
        def ask(make):
            message = make(1)
            if isinstance(message, nodes.Write):
                kept[number, message.heads] = message.body
            return kept[number, message.heads]
        return SimpleNamespace(ask=ask)

    caches = [SimpleNamespace(parts=[SimpleNamespace(whole=replace(whole, num_kv_heads=num))], origins=[(0, first)])
              for num, first in ((2, 0), (3, 2))]
    pages = NodePages(SimpleNamespace(layouts=[whole]), [*zip(map(node, (1, 2)), caches, strict=True)], None)
    data = memoryview(bytes(range(3 * 16)))
    pages.write(Tier.DRAM, Group(0), range(1, 2), [Span(5, 0, 1)], data, range(1, 4))
    assert kept == {(1, (1, 1)): data[:16], (2, (0, 2)): data[16:]}
    out = memoryview(bytearray(len(data)))
    pages.read(Tier.DRAM, Group(0), range(1, 2), [Span(5, 0, 1)], out, range(1, 4))
    assert out == data


def test_every_tensor_parallel_rank_of_the_last_stage_gets_the_vocabulary():
    sent: list[int] = []
    workers = WorkerGroup.__new__(WorkerGroup)
    workers.ranks = [SimpleNamespace(send=lambda body, i=i: sent.append(i)) for i in range(6)]
    workers.vocabulary(lambda: None, 3)
    assert sent == [3, 4, 5]


def test_an_agent_that_was_taken_says_that_it_lives_while_it_loads():
    one, other = ends(settings(True, silence_s=0.4), settings(False, silence_s=0.4))
    ours = config()
    agent = Agent(replace(ours, nodes=replace(ours.nodes, node_rank=1)), lambda line: None, lambda: True)
    one.say(nodes.Start(to_plain(ours), 2))
    assert agent._greet(other).num_layers == 2
    one.live()
    heard, ended = [], threading.Event()
    threading.Thread(target=lambda: (heard.append(one.run(heard.append)), ended.set()), daemon=True).start()
    assert not ended.wait(1.2), heard                   # three times the silence
    other.close()
    assert ended.wait(LIMIT_S) and isinstance(heard[0], nodes.Join) and len(heard) == 2


def test_agents_end_when_no_engine_of_node_0_is_left(monkeypatch):
    """Each engine takes its ranks here once, and dies. Its agent comes again, and waits while any engine may
    still come."""
    came: set[int] = set()

    class Once:
        def __init__(self, config, log, wanted, engine):
            self.wanted, self.engine = wanted, engine

        def run(self, joined):
            if self.engine not in came:
                came.add(self.engine)
                joined()
                return agent_module.EXIT_GONE
            for _ in range(300):
                if not self.wanted():
                    return agent_module.EXIT_GONE
                time.sleep(0.01)
            raise ConfigError("an engine may still come")

    monkeypatch.setattr(agent_module, "Agent", Once)
    log: list[str] = []
    assert agent_module._Several(config(dp=2), log.append).run() == agent_module.EXIT_GONE and not log
    assert came == {0, 1}
