"""Traces of `penstock plan`: what is read from files, and what agents send."""
from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from penstock.cli.main import main
from penstock.config.base.errors import ConfigError
from penstock.plan.agents import Agents, agents
from penstock.plan.trace import Session, Span, Text, Trace, Turn, largest_hits, read


def write(folder: Path, *lines: object, name: str = "trace.jsonl") -> str:
    path = folder / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def prompts(trace: Trace) -> list[list[int]]:
    """Of single requests."""
    text = Text(1_000)
    return [text.tokens(session.turns[0].spans) for session in trace.sessions]


def test_mooncake_prompts_with_the_same_hash_ids_begin_alike(tmp_path: Path) -> None:
    lines = [{"timestamp": 500 + 1_000 * i, "input_length": 1_000, "output_length": 5, "hash_ids": [7, i]}
             for i in range(2)]
    trace = read(write(tmp_path, *lines))
    a, b = prompts(trace)
    assert len(a) == len(b) == 1_000 and a[:512] == b[:512] and a[512:] != b[512:]
    assert [session.start_s for session in trace.sessions] == [0.0, 1.0]
    assert trace.num_turns == 2 and [session.turns[0].output for session in trace.sessions] == [5, 5]


def test_mooncake_last_block_shares_the_beginning_of_a_full_one(tmp_path: Path) -> None:
    short, full = ({"input_length": n, "output_length": 1, "hash_ids": [3]} for n in (100, 512))
    a, b = prompts(read(write(tmp_path, short, full)))
    assert a == b[:100]


def test_mooncake_lines_of_a_session_are_a_closed_loop(tmp_path: Path) -> None:
    [session] = read(write(
        tmp_path, {"session_id": "s", "timestamp": 3, "input_length": 40, "output_length": 10},
        {"session_id": "s", "delay": 2_500, "input_length": 20, "output_length": 10})).sessions
    assert [(turn.continues, turn.pause_s) for turn in session.turns] == [(False, 0.0), (True, 2.5)]
    assert list(Trace("", (session,)).prompts()) == [40, 70]


def test_csv_columns_become_requests_and_sessions(tmp_path: Path) -> None:
    trace = read(write(tmp_path, "session,arrival_s,input_tokens,output_tokens,pause_s", ",4,100,9,", "a,2,50,5,",
                       "a,0,20,5,1.5", name="trace.csv"))
    assert [session.start_s for session in trace.sessions] == [0.0, 2.0]
    assert list(trace.prompts()) == [50, 75, 100]
    one = prompts(trace)
    assert one[0][:50] != one[1][:50]                   # no row shares tokens with another


def test_scale_divides_lengths_and_not_times(tmp_path: Path) -> None:
    trace = read(write(tmp_path, *({"timestamp": t, "input_length": 1_024, "output_length": 80, "hash_ids": [1, t]}
                                   for t in (0, 8_000))), scale=8)
    assert list(trace.prompts()) == [128, 128] and trace.sessions[1].start_s == 8.0
    a, b = prompts(trace)
    assert a[:64] == b[:64] and a[64:] != b[64:]


@pytest.mark.parametrize(("line", "message"), [
    ("[", "line 1: not JSON"), ("[]", "line 1: an object"),
    ('{"output_length": 1}', "input_length is None: a number"),
    ('{"input_length": 0, "output_length": 1}', "input_length is 0: at least 1"),
    ('{"input_length": 600, "output_length": 1, "hash_ids": [1]}', "one number for each 512 tokens"),
    ("", "no request")])
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(write(tmp_path, line))


def test_a_missing_column_or_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="output_tokens is missing"):
        read(write(tmp_path, "arrival_s,input_tokens", name="a.csv"))
    with pytest.raises(ConfigError, match=r"--trace .*nothing\.jsonl"):
        read(str(tmp_path / "nothing.jsonl"))


def test_tokens_of_a_span_stay_below_the_vocabulary_and_are_always_the_same() -> None:
    span = Span("a", 2_000)
    assert Text(50).tokens((span,)) == Text(50).tokens((span,)) and set(Text(50).tokens((span,))) == set(range(50))


def test_agents_have_the_lengths_of_the_published_traces() -> None:
    trace = agents(Agents(sessions=6))
    contexts = list(trace.prompts())
    assert trace.num_turns == 6 * 43 and min(contexts) == 24_000
    assert abs(max(contexts) - 265_000) < 20_000 and abs(median(contexts) - 142_000) < 8_000
    pauses = [turn.pause_s for session in trace.sessions for turn in session.turns[1:]]
    assert abs(sum(pauses) / len(pauses) - 8.0) < 1.5


def test_agents_share_their_first_prompt_and_nothing_else() -> None:
    trace, text = agents(Agents(sessions=2, turns=2, one_shots=3), scale=8), Text(10_000)
    a, b, one = (text.tokens(session.turns[0].spans) for session in trace.sessions)
    assert a[:1_000] == b[:1_000] and a[1_000:1_010] != b[1_000:1_010] and one[:10] != a[:10]
    assert len(trace.sessions[2].turns) == 3 and not any(turn.continues for turn in trace.sessions[2].turns)


def test_largest_hits_are_full_pages_of_what_was_seen() -> None:
    begin, more = Turn((Span("a", 40),), 9), Turn((Span("b", 20),), 9, continues=True)
    # Of the second prompt, 40 + 9 + 20 tokens, 48 have KV: three pages of 16.
    assert largest_hits(Trace("", (Session(0, (begin, more)),)), 16) == 48 / (40 + 69)
    # A prompt that comes again is cached but for its last page, which is full: one token must be computed.
    again = Session(0, (Turn((Span("c", 32),), 1),))
    assert largest_hits(Trace("", (again, again)), 16) == 16 / 64


def test_the_command_describes_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--agents", "2", "--turns", "4", "--scale", "40"]) == 0
    shown = capsys.readouterr().out
    assert "2 sessions, 8 requests, prompts of 600 to" in shown and "has: 0." in shown


@pytest.mark.parametrize(("words", "message"), [
    (["--agents", "0"], "--agents is 0: at least 1"), (["--agents", "1", "--scale", "0"], "--scale is 0: at least 1"),
    (["--trace", "x", "--turns", "2"], "--turns is for --agents"),
    (["--agents", "1", "--one-shots", "-1"], "--one-shots is -1: at least 0")])
def test_the_command_refuses_what_has_no_effect(words: list[str], message: str,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert message in capsys.readouterr().err
