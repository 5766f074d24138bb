"""The flight recorder: what its ring keeps, what a dump of it shows and what it cannot show."""
from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
from recorded import recorded

from penstock.core.core import Core
from penstock.core.pair.messages import End
from penstock.core.plan import (
    Aborted,
    Arrived,
    Flushed,
    Moved,
    PeerJoined,
    Received,
    RequestId,
    Retired,
    Say,
    SessionEnded,
    StepPlan,
    Tier,
)
from penstock.core.settings import CoreConfig
from penstock.engine.shown import shown
from penstock.replay import flight
from penstock.replay.exact import exact
from penstock.replay.recorder import Recorder
from penstock.replay.redact import redact

SECRET = 7_654_321                  # a token id that is nowhere else
CFG = CoreConfig(page_size=4, rows=4, hbm_pages=200, dram_pages=50, max_len=600)


def arrived(rid, prompt, max_new=4, **kwargs):
    return Arrived(RequestId(rid), tuple(prompt), max_new, **kwargs)


def run(recorder, events, answer=lambda rid, at: SECRET + at):
    """Until nothing is planned; every token is a secret."""
    plan = recorded(recorder, events).plan
    while plan is not None:
        tokens = tuple((answer(rid, start),) for rid, start, samples
                       in zip(plan.rids, plan.start, plan.samples, strict=True) if samples)
        plan = recorded(recorder, [Retired(plan.step, tokens)]).plan


def dump(recorder):
    return "".join(flight.write(redact(recorder), "0"))


def read(recorder):
    return flight.read(dump(recorder).splitlines())


def test_the_ring_keeps_the_last_turns_and_counts_the_others():
    recorder = Recorder(Core(CFG), turns=10)
    for _ in range(25):
        recorded(recorder, [Flushed()])
    recorded(recorder, [Aborted(RequestId(3))])
    assert (len(recorder.turns), recorder.lost, recorder.complete) == (10, 16, False)
    assert recorder.turns[-1].events == (Aborted(RequestId(3)),)
    assert (read(recorder).lost, len(read(recorder).turns)) == (16, 10)


def test_who_looks_seldom_sees_every_phase_of_a_request_that_came_and_went():
    recorder = Recorder(Core(CFG))
    run(recorder, [arrived(1, range(5))])
    for _ in range(40):
        recorded(recorder, [Flushed()])
    turns = shown(1, recorder).turns
    assert [(rid, to) for turn in turns for rid, _, to in turn.edges] == [
        (1, phase) for phase in ("loading", "prefill", "decode.device", "done")]
    assert [turn.number for turn in turns] == sorted(turn.number for turn in turns)
    assert len(turns) < 40 and turns[-1].number == len(recorder.turns) - 1


def test_calls_in_which_nothing_happens_take_no_room():
    recorder = Recorder(Core(CFG), turns=10)
    recorded(recorder, [Flushed()])
    for _ in range(25):
        recorded(recorder, ())
    assert len(recorder.turns) == 1 and recorder.turns[0].idle == 25


def test_long_prompts_leave_the_ring_before_they_fill_memory():
    recorder = Recorder(Core(CFG), tokens_max=1000)
    for rid in range(1, 20):
        run(recorder, [arrived(rid, range(500))])
    assert sum(turn.tokens for turn in recorder.turns) <= 1000 and recorder.lost


def test_no_token_stop_id_namespace_or_identity_of_a_user_is_in_a_dump():
    recorder = Recorder(Core(CFG))
    kwargs = {"namespace": SECRET, "attention": SECRET, "session": SECRET}
    run(recorder, [arrived(1, [SECRET + i for i in range(30)], 9,
                           stop=frozenset((SECRET + 32, SECRET + 999)), **kwargs)])
    recorded(recorder, [arrived(2, [SECRET] * 20, **kwargs), SessionEnded(SECRET)])
    text = dump(recorder)
    assert str(SECRET)[:-3] not in text and '["SessionEnded",1]' in text
    assert "Finished" in text and '"stop"' in text, "the stop id was hit: this tests nothing"


def test_nothing_of_a_user_is_in_a_dump_without_its_beginning_or_of_a_turn_that_failed():
    core = Core(CFG)
    recorder = Recorder(core, turns=3)
    run(recorder, [arrived(1, [SECRET] * 9)])
    plan = recorded(recorder, [arrived(2, [SECRET + 1] * 9, 50), arrived(3, [SECRET] * 9)]).plan
    for _ in range(5):
        plan = recorded(recorder, [Retired(plan.step, ((SECRET,),) * sum(plan.samples))]).plan
    with pytest.raises(AssertionError):
        recorded(recorder, [Retired(plan.step, ((SECRET,),) * sum(plan.samples)), Retired(99, ())])
    text = dump(recorder)
    assert str(SECRET)[:-3] not in text
    log = flight.read(text.splitlines())
    assert [(h.arrived.rid, len(h.outputs), h.phase) for h in log.held] == [
        (2, 3, "decode.device"), (3, 3, "decode.device")]             # the second has ended since
    assert [turn.returned for turn in log.turns] == [True] * 3 + [False]


def test_a_message_that_standins_know_nothing_of_loses_every_list():
    end = End(7, 2, 30, (SECRET, SECRET))
    recorder = Recorder(Core(CFG))
    recorded(recorder, [Received(end), Aborted(RequestId(9), damaged=True)])
    first, second = redact(recorder).legs[0].events
    assert first == Received(replace(end, first=(-1, -1))) and second == Aborted(RequestId(9), True)
    assert str(SECRET) not in dump(recorder)
    assert '["Received",["End",7,2,30,[-1,-1]],0]' in dump(recorder)


def run_pair(requests, turns=512):
    """Both engines of a pair until nobody has anything to do; every token is a secret."""
    engines = {role: Recorder(Core(replace(CFG, role=role)), turns) for role in ("prefill", "decode")}
    mail = {role: [PeerJoined(), *requests] for role in engines}
    while any(mail.values()):
        for role, other in (("prefill", "decode"), ("decode", "prefill")):
            events, mail[role] = mail[role], []
            while True:
                answer = recorded(engines[role], events)
                mail[other] += [Received(o.what) for o in answer.outputs if isinstance(o, Say)]
                if (plan := answer.plan) is None:
                    break
                got = tuple((SECRET + start,) for start, samples
                            in zip(plan.start, plan.samples, strict=True) if samples)
                events = [Retired(plan.step, got),
                          *(Moved(m.id, True) for m in plan.moves if m.src is not Tier.PEER)]
    return engines


def test_nothing_of_a_user_is_in_a_dump_of_an_engine_of_a_pair():
    requests = [arrived(rid, [SECRET + rid] * 9, 5, transfer=rid, stop=frozenset((SECRET + 11, SECRET)),
                        namespace=SECRET) for rid in (1, 2, 3)]
    for turns in (512, 3):
        for role, recorder in run_pair(requests, turns).items():
            text = dump(recorder)
            assert str(SECRET)[:-3] not in text
            if turns == 512:
                assert '["End",' in text
                ends = [e.message for turn in read(recorder).turns for e in turn.events
                        if isinstance(e, Received) and isinstance(e.message, End)]
                assert len(ends) == 3 * (role == "decode"), "no prompt was sent: this tests nothing"
                assert all(len(end.first) == 1 and end.first[0] >= 0 for end in ends)
                same, said = exact(read(recorder))
                assert same, said


def test_a_new_field_of_a_message_with_content_must_be_looked_at():
    """Of these the stand-ins replace some fields by name: say here what a new one may tell."""
    assert {f.name for f in fields(Arrived)} == {
        "rid", "prompt", "max_new", "stop", "min_new", "namespace", "priority", "leader",
        "selects", "attention", "transfer", "peer", "cached_max", "drafts", "session", "warms",
        "retains"}
    assert {f.name for f in fields(Retired)} == {"step", "tokens"}
    assert {f.name for f in fields(StepPlan)} == {
        "step", "rows", "rids", "start", "count", "samples", "tokens", "grows", "binds", "moves", "remaps",
        "waits", "resizes"}


def test_the_reason_of_a_refusal_is_not_quoted():
    recorder = Recorder(Core(CFG))
    recorded(recorder, [arrived(1, [SECRET] * 5000)])            # refused, with a reason
    assert "device pool" not in dump(recorder) and "refused" in dump(recorder)


def test_standins_are_equal_as_far_as_prompts_are_and_no_further():
    a = [5] * 100 + [6] * 50
    prompts = {1: a, 2: a[:100] + [7] * 50, 3: a, 4: [9, *a], 5: a[:40]}
    recorder = Recorder(Core(CFG))
    recorded(recorder, [arrived(rid, p) for rid, p in prompts.items()] + [arrived(6, a, namespace=1)])
    got = {e.rid: e.prompt for e in read(recorder).turns[0].events}
    assert got[1] == got[3] and got[5] == got[1][:40]
    assert got[1][:100] == got[2][:100] and not {*got[1][100:]} & {*got[2][100:]}
    assert not {*got[1]} & {*got[4]}, "the same tokens behind another one are something else"
    assert not {*got[1]} & {*got[6]}, "another tenant's"
    assert len({*got[1]}) == 150, "repeats within a prompt are not visible"


def test_a_prompt_that_goes_on_from_an_answer_still_does():
    recorder = Recorder(Core(CFG))
    run(recorder, [arrived(1, range(10), 4)], lambda rid, at: 1000 + at)
    answer = [1000, 1010, 1011, 1012]
    recorded(recorder, [arrived(2, [*range(10), *answer, 77])])
    log = read(recorder)
    first, second = (e for turn in log.turns for e in turn.events if isinstance(e, Arrived))
    outputs = [t for turn in log.turns for e in turn.events if isinstance(e, Retired)
               for row in e.tokens for t in row]
    assert second.prompt[:14] == (*first.prompt, *outputs) and len(outputs) == 4


def test_numbers_are_given_anew_for_each_dump():
    recorder = Recorder(Core(CFG), turns=2)
    recorded(recorder, [arrived(1, [8] * 20, 90)])
    first = dump(recorder)
    recorded(recorder, [arrived(2, [9] * 20), Aborted(RequestId(1))])
    recorded(recorder, [Flushed()])
    recorded(recorder, [Flushed()])
    assert "[[0,20]]" in first and [h.arrived.prompt for h in read(recorder).held] == [tuple(range(20))]


def test_an_answer_that_began_at_the_other_engine_is_told_apart_like_any_other():
    recorder = run_pair([arrived(1, range(9), 3, transfer=1)])["decode"]
    recorded(recorder, [arrived(2, [*range(9), SECRET, SECRET + 9, 77])])
    first, second = (e for turn in read(recorder).turns for e in turn.events if isinstance(e, Arrived))
    (end,) = (e.message for turn in read(recorder).turns for e in turn.events
              if isinstance(e, Received) and isinstance(e.message, End))
    assert second.prompt[:10] == (*first.prompt, *end.first)


def test_a_result_after_a_stop_has_no_standin_also_where_the_plan_of_the_stop_has_left_the_ring():
    for turns, known in ((9, True), (2, False)):
        recorder = Recorder(Core(replace(CFG, overlap=True)), turns=turns)
        recorded(recorder, [arrived(1, range(5), 9, stop=frozenset((7,)))])
        recorded(recorder, [])
        recorded(recorder, [Retired(1, ((7,),)), Retired(2, ((7,),))])
        stop, after = (token for e in read(recorder).turns[-1].events for (token,) in e.tokens)
        assert not recorder.core.live and (stop >= 0) is known and after == -1


def test_large_decode_steps_share_columns_and_small_ones_are_whole():
    for whole_rows, keeps in ((2, False), (3, True)):
        recorder = Recorder(Core(CFG), whole_rows=whole_rows)
        run(recorder, [arrived(rid, range(rid, rid + 5), 20) for rid in (1, 2, 3)])
        plans = [turn.plan for turn in recorder.turns if turn.plan is not None and turn.plan.rows]
        assert all(plan.rids == (1, 2, 3) for plan in plans)
        assert any(not plan.start for plan in plans) is not keeps
        if not keeps:
            assert plans[5].rids is plans[6].rids
        assert len(read(recorder).turns) == len(recorder.turns)


@pytest.mark.parametrize("text", [
    "", "{}", "[]", "null", "x", '{"format":99}', '{"format":1}',
    '{"format":1,"penstock":"0","error":"","config":{"page_size":4,"rows":1,"hbm_pages":4},'
    '"lost":0,"held":[],"turns":1}\n{"events":[["Nonsense",1]],"digest":""}'])
def test_what_is_not_a_flight_is_said_to_be_none(text):
    with pytest.raises(flight.FlightError):
        flight.read(text.splitlines())


def test_a_file_that_was_cut_says_so():
    recorder = Recorder(Core(CFG))
    run(recorder, [arrived(1, range(5))])
    with pytest.raises(flight.FlightError, match="was cut"):
        flight.read(dump(recorder).splitlines()[:-1])


def test_a_line_for_people_has_the_step_its_events_rows_and_edges():
    recorder = Recorder(Core(CFG))
    run(recorder, [arrived(1, range(5), 2)])
    lines = list(flight.pages(read(recorder)))
    assert "3 turns, complete" in lines[0]
    assert lines[2].split(" | ") == [
        "     1", "Arrived(1: 5+2)", "1[0:5] 1 binds",
        "1:queued-admit>loading 1:loading-landed>prefill 1:prefill-prefilled>decode.device",
        "Started(1, 0, 0, 0, 0)"]
    assert lines[3].startswith("     2 | Retired(1: 1) | decode 1")


def test_every_line_is_json():
    recorder = Recorder(Core(CFG))
    run(recorder, [arrived(1, range(5))])
    head, *turns = map(json.loads, dump(recorder).splitlines())
    assert head["complete"] is True and head["turns"] == len(turns)
    assert all(len(turn["digest"]) == 16 for turn in turns)
