"""The loop, driven without sockets over a core that echoes prompts."""
from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.config.request.grammar import Grammar
from penstock.config.request.params import SamplingParams
from penstock.config.request.selection import Selection, attention_identity, indexer_selection
from penstock.config.streams.frames import ProtocolError
from penstock.core.plan import Aborted, Arrived, Entered, Flushed, Started, Stopped
from penstock.engine import process as engine_main
from penstock.engine import wire
from penstock.engine.loop import EngineLoop
from penstock.engine.record import EventLog
from penstock.engine.shown import EDGES_MAX, REQUESTS_MAX, TURNS_MAX
from penstock.engine.traces.timeline import Timelines

_spec = importlib.util.spec_from_file_location(
    "engine_fake", Path(__file__).with_name("engine_fake.py"))
fake = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake)


class Rig:
    def __init__(self, depth=1, **kwargs):
        self.core = fake.FakeCore(depth)
        self.executor = fake.FakeExecutor()
        self.loop = EngineLoop(self.core, self.executor, vocab_size=fake.VOCAB,
                               max_model_len=fake.CONTEXT, **kwargs)
        self.tokens, self.ends, self.chunks = {}, {}, []

    def submit(self, rid=1, prompt=(5, 6, 7), max_new=4, **kwargs):
        params = kwargs.pop("params", SamplingParams(n=8))
        self.loop.handle(wire.Submit(rid=rid, prompt=list(prompt), params=params,
                                     max_new=max_new, **{"stop_ids": [], **kwargs}))

    def turn(self):
        for chunk in self.loop.turn(block=True):
            self.chunks.append(chunk)
            got = self.tokens.setdefault(chunk.rid, [])
            assert chunk.index == len(got) or not chunk.tokens
            assert chunk.rid not in self.ends, "news after the end"
            got += chunk.tokens
            if chunk.finish:
                self.ends[chunk.rid] = chunk.finish

    def run(self):
        while not self.loop.idle:
            self.turn()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tokens_arrive_once_and_in_order(depth):
    rig = Rig(depth)
    rig.submit(1, (5, 6, 7), max_new=5)
    rig.submit(2, (8, 9), max_new=3)
    rig.run()
    assert rig.tokens == {1: [5, 6, 7, 5, 6], 2: [8, 9, 8]}
    assert rig.ends == {1: "length", 2: "length"}
    assert rig.loop.num_tokens == 8


TOP = Selection(selector="bounds", version=1, unit=8, budget=512, sinks=16, window=64)
HALF = SamplingParams(sparse_top_k=256)
NATIVE = indexer_selection(256)


def test_what_a_submit_says_of_attention_reaches_the_core():
    rig = Rig(selection=TOP)
    half = attention_identity(TOP.within(256))
    rig.submit(1, selects=True, attention=half, params=HALF)
    rig.submit(2, params=SamplingParams(sparse_top_k=0))
    rig.submit(3)
    rig.run()
    assert [(e.selects, e.attention, e.transfer)
            for e in rig.core.seen if isinstance(e, Arrived)] == [
                (True, half, 0), (False, 0, 0), (False, 0, 0)]
    assert [c.kv_reads for c in rig.chunks if c.finish] == [{"hot_hits": 2, "hot_misses": 256}, None, None]
    assert all(c.kv_reads is None for c in rig.chunks if not c.finish)


def test_every_request_of_a_model_with_an_indexer_selects_and_shares_all_pages():
    rig = Rig(selection=NATIVE)
    rig.submit(1, selects=True, params=HALF)
    rig.run()
    [arrived] = [e for e in rig.core.seen if isinstance(e, Arrived)]
    assert arrived.selects and arrived.attention == 0


@pytest.mark.parametrize("top, fields, said", [
    (NATIVE, {}, "every request of this model does"),
    (NATIVE, {"selects": True, "params": SamplingParams(sparse_top_k=128)}, "256 to 256"),
    (NATIVE, {"selects": True, "params": HALF, "attention": 5}, "not the identity"),
    (None, {"selects": True}, "no selector"), (TOP, {"attention": 5}, "reads all KV"),
    (None, {"params": HALF}, "reads all KV"),
    (TOP, {"selects": True, "params": SamplingParams(sparse_top_k=520)}, "96 to 512, a multiple of 8"),
    (TOP, {"selects": True, "params": SamplingParams(sparse_top_k=88)}, "96 to 512, a multiple of 8"),
    (TOP, {"selects": True, "params": SamplingParams(sparse_top_k=257)}, "96 to 512, a multiple of 8"),
    (TOP, {"selects": True}, "96 to 512"),
    (TOP, {"selects": True, "params": HALF, "attention": attention_identity(TOP)}, "not the identity"),
    (TOP, {"selects": True, "params": HALF, "attention": -1}, "not the identity")])
def test_what_this_engine_cannot_do_is_refused(top, fields, said):
    rig = Rig(selection=top)
    rig.submit(1, **fields)
    rig.run()
    assert rig.ends == {1: "refused"} and said in rig.chunks[0].reason
    assert not any(isinstance(e, Arrived) for e in rig.core.seen)


def test_the_first_chunk_says_what_was_cached():
    rig = Rig()
    rig.submit()
    rig.run()
    assert rig.chunks[0].cached_tokens == 3
    assert rig.chunks[0].cached_by_tier == {"hbm": 2, "dram": 1}
    assert all(c.cached_tokens is None for c in rig.chunks[1:])


def test_tokens_cached_in_storage_count_and_entering_a_phase_is_no_news():
    rig = Rig()
    rig.submit(max_new=1)
    core = rig.loop._core
    core.advance, real = lambda events: seen(real(events)), core.advance

    def seen(advance):
        outputs = [Started(1, 2, 1, disk_tokens=5) if isinstance(o, Started) else o
                   for o in advance.outputs]
        return replace(advance, outputs=(*(Entered(1, "queued", 1) for _ in outputs), *outputs)
                       if any(isinstance(o, Started) for o in outputs) else tuple(outputs))

    rig.run()
    assert rig.chunks[0].cached_tokens == 8
    assert rig.chunks[0].cached_by_tier == {"hbm": 2, "dram": 1, "disk": 5}
    assert rig.ends == {1: "length"}


def test_overlap_submits_the_next_plan_before_the_first_retires():
    rig = Rig(depth=2)
    rig.submit()
    rig.turn()
    assert rig.loop.steps_in_flight == 2 and not any(c.tokens for c in rig.chunks)


def test_it_blocks_only_when_a_step_is_in_flight_and_nothing_waits():
    rig = Rig()
    rig.submit()
    rig.turn()                      # nothing was in flight
    rig.turn()                      # one step is
    rig.loop.handle(wire.Abort(1))
    rig.turn()                      # a message waits for the core
    assert rig.executor.polls == [False, True, False]


def test_abort_and_stop_reach_the_core_once_each():
    rig = Rig()
    rig.submit(1, max_new=100)
    rig.submit(2, max_new=100)
    rig.turn()
    rig.turn()
    rig.loop.handle(wire.Abort(1))
    rig.loop.handle(wire.StopAt(2, 1))
    rig.loop.handle(wire.Flush())
    rig.run()
    rig.loop.handle(wire.Abort(1))
    rig.loop.handle(wire.StopAt(2, 1))
    rig.loop.handle(wire.Abort(99))
    assert rig.loop.idle
    assert [e for e in rig.core.seen if isinstance(e, (Aborted, Stopped, Flushed))] == [
        Aborted(1), Stopped(2, 1), Flushed()]
    assert rig.ends == {1: "abort", 2: "stop"}
    assert rig.executor.prompts == {}


def test_a_stop_id_ends_it_and_the_executor_forgets_it():
    rig = Rig()
    rig.submit(1, (5, 6, 7), max_new=50, stop_ids=[7])
    rig.run()
    assert rig.tokens[1] == [5, 6, 7] and rig.ends[1] == "stop"
    assert rig.executor.prompts == {}


def test_logprobs_travel_with_their_tokens():
    rig = Rig()
    rig.submit(1, (5, 6), max_new=2, params=SamplingParams(logprobs=1))
    rig.submit(2, (5, 6), max_new=2)
    rig.run()
    logprob = wire.TokenLogprob(-0.5, 1, [(5, -0.5)])
    assert [c.logprobs for c in rig.chunks if c.rid == 1 and c.tokens] == [[logprob]] * 2
    assert all(c.logprobs is None for c in rig.chunks if c.rid == 2)


def test_a_leader_that_is_gone_is_not_waited_for():
    rig = Rig()
    rig.submit(1, max_new=50)
    rig.submit(2, leader=1, choice=1)
    rig.submit(3, leader=77, choice=1)
    rig.run()
    assert [e.leader for e in rig.core.seen if isinstance(e, Arrived)] == [None, 1, None]


@pytest.mark.parametrize("bad", [
    {"prompt": ()}, {"prompt": (100,)}, {"prompt": (-1,)}, {"prompt": (5,) * 1000}, {"max_new": 0},
    {"max_new": 998}, {"stop_ids": [100]}, {"choice": 8}, {"choice": -1}, {"rid": 0},
    {"params": SamplingParams(logit_bias={100: 1.0})}, {"params": SamplingParams(temperature=-1)},
    {"params": SamplingParams(n=10**6), "choice": 10**5}, {"params": SamplingParams(stop=("",))},
    {"params": SamplingParams(min_tokens=1), "stop_ids": list(range(100))},
], ids=str)
def test_what_the_engine_cannot_run_is_refused_and_touches_nothing(bad):
    rig = Rig()
    rig.submit(**{"rid": 1, **bad})
    rig.submit(2, max_new=1)
    rig.run()
    assert rig.ends == {bad.get("rid", 1): "refused", 2: "length"}
    assert rig.chunks[0].reason
    assert [e.rid for e in rig.core.seen if isinstance(e, Arrived)] == [2]


def test_a_submit_that_comes_twice_counts_once():
    rig = Rig()
    rig.submit(1)
    rig.submit(1)
    rig.run()
    assert rig.tokens[1] == [5, 6, 7, 5]


def test_a_submit_that_comes_again_after_its_end_has_one_timeline():
    rig = Rig()
    rig.loop.timelines = lines = Timelines()
    for repeat in range(2):
        rig.submit(1, origin=wire.Origin(trace="00-1-2-01"))
        rig.run()
        assert len(lines.ended(rig.chunks, {})) == 1 - repeat and not lines._open
    rig.submit(2, origin=wire.Origin(trace="00-1-2-01"), prompt=())
    rig.loop.handle(wire.Abort(2))
    assert len(lines.ended([], {})) == 1 and not lines._open


def test_stats_of_all_parts_and_checks_when_asked():
    rig = Rig(check=True)
    rig.submit()
    rig.run()
    answer = rig.loop.handle(wire.AskStats(9))
    assert answer.id == 9
    assert answer.values.items() >= {"rows_used": 0.0, "steps_total": 3.0,
                                     "generation_tokens_total": 4.0}.items()
    assert rig.core.checks > 4


def test_what_a_page_sees_has_no_token_and_an_end():
    """Numbers and phases of some requests and turns, however many there are."""
    rig = Rig(check=True)
    rig.submit()
    for _ in range(3):
        rig.turn()
    seen = rig.loop.handle(wire.AskShown(9))
    [request] = seen.requests
    assert (seen.id, seen.live, request.rid, request.phase, request.prompt) == (9, 1, 1, "decode.device", 3)
    assert 0 < request.output < 4
    turn = next(t for t in seen.turns if t.step)
    assert turn.rows == turn.tokens == 1 and [t.number for t in seen.turns] == list(range(len(seen.turns)))
    rig.run()
    for rid in range(2, 302):
        rig.submit(rid)
    for _ in range(2):
        rig.turn()
    seen = rig.loop.handle(wire.AskShown(10))
    assert seen.live == 300 and len(seen.requests) == REQUESTS_MAX and len(seen.turns) <= TURNS_MAX
    assert all(len(t.edges) <= EDGES_MAX for t in seen.turns)


def test_hello_in_the_middle_is_a_protocol_error():
    with pytest.raises(ProtocolError):
        Rig().loop.handle(wire.Hello(1, {}))


def test_the_event_log_holds_no_prompts_or_tokens(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(str(path))
    rig = Rig(depth=2, event_log=log)
    for rid in range(1, 4):
        rig.submit(rid, (93, 94, 95), max_new=30, stop_ids=[96])    # 77 is the plans' input token
    rig.run()
    log.close()
    assert not any(str(secret) in path.read_text() for secret in (93, 94, 95, 96, 77))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = {line["kind"] for line in lines}
    assert kinds == {"Arrived", "StepPlan", "Retired", "Started", "Token", "Finished", "pools"}
    assert sum(line["kind"] == "Token" for line in lines) == 90
    assert lines[-1] == {"kind": "pools", "issued": 30, "retired": 30, "rows_used": 0.0}


def test_the_recorder_sees_every_turn_of_the_loop():
    rig = Rig(depth=2)
    rig.submit(1, (5, 6), max_new=3)
    rig.run()
    recorder = rig.loop.recorder
    assert [e for turn in recorder.turns for e in turn.events] == rig.core.seen
    assert [turn.plan.step for turn in recorder.turns if turn.plan] == [1, 2, 3]
    assert recorder.complete and recorder.now is None


def test_a_request_waits_for_its_grammar_and_keeps_nobody_waiting():
    rig, ready = Rig(), set()
    rig.executor.compiled = lambda grammar: grammar.text in ready
    slow, slower = (SamplingParams(grammar=Grammar("regex", text)) for text in ("a", "b"))
    rig.submit(1, max_new=2, params=slow)
    rig.submit(2, max_new=2, params=slower)
    rig.submit(3, max_new=2)
    for _ in range(6):
        rig.turn()
    assert rig.ends == {3: "length"} and set(rig.executor.prompts) == set()
    rig.submit(1, max_new=2, params=slow)                # a repeat
    rig.loop.handle(wire.Abort(2))
    ready |= {"a", "b"}
    rig.run()
    assert rig.ends == {1: "length", 3: "length"} and rig.tokens[1] == [5, 6]
    assert [e.rid for e in rig.core.seen if isinstance(e, Arrived)] == [3, 1]


def test_what_can_wait_is_begun_when_there_is_nothing_to_do_and_once(monkeypatch):
    monkeypatch.setattr(engine_main, "write_on_signal", lambda recorder: lambda: None)
    turns = iter([
        # wait_s, steps in flight, what comes meanwhile
        (None, 1, []), (0, 0, []), (9.0, 0, []), (None, 0, [wire.Flush()]), (None, 0, []), (None, 0, []),
        (None, 0, [wire.Shutdown()])])
    waits, begun, coming = [], [], []
    loop = SimpleNamespace(recorder=None, timelines=None, works_here=False, handle=lambda message: None,
                           turn=lambda block: turn())

    def turn():
        loop.wait_s, loop.steps_in_flight, coming[:] = next(turns)
        return []

    def receive(wait_s, wakes):
        waits.append(wait_s)
        return list(coming)

    turn()
    engine_main.run(SimpleNamespace(loop=loop, workers=None, peers=None, wakes=None,
                                    begin=lambda: begun.append(len(waits))),
                    SimpleNamespace(receive=receive))
    idle = engine_main.IDLE_S
    assert waits == [None, 0, 9.0, idle, idle, None, None] and begun == [5]


def test_choices_of_one_request_share_one_prompt(monkeypatch):
    """80 choices of a prompt of 128k tokens were 80 prompts: half a gigabyte."""
    rig, opened = Rig(), []
    monkeypatch.setattr(rig.executor, "open", lambda rid, prompt, params, **more: opened.append(prompt))
    rig.submit(1, (5, 6, 7), params=SamplingParams(n=80))
    for choice in range(1, 80):
        rig.submit(1 + choice, (), leader=1, choice=choice, params=SamplingParams(n=80))
    arrived = [event for event in rig.loop._events if isinstance(event, Arrived)]
    assert [e.leader for e in arrived] == [None, *[1] * 79] and not rig.loop._chunks
    assert all(e.prompt is arrived[0].prompt for e in arrived) and all(p is opened[0] for p in opened)
    assert arrived[0].prompt == (5, 6, 7)


def test_a_choice_without_a_prompt_names_the_request_before_it():
    rig = Rig()
    rig.submit(1, (5, 6, 7))
    rig.submit(2, (8, 9))
    rig.submit(3, (), leader=1, choice=1)           # not the last one that had a prompt
    rig.run()
    assert rig.ends[3] == "refused" and rig.tokens[1] == [5, 6, 7, 5]
