"""Traces of `penstock plan`: what is read from files, and what agents send."""
from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from penstock.cli.main import main
from penstock.config.base.errors import ConfigError
from penstock.plan.agents import Agents, agents
from penstock.plan.trace import CONTEXT_MAX, Session, Span, Text, Trace, Turn, largest_hits, part_of, read


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
    ('{"output_length": 1}', "input_length is None: a whole number"),
    ('{"input_length": 0, "output_length": 1}', "input_length is 0: 1 to 16,777,216"),
    ('{"input_length": 600, "output_length": 1, "hash_ids": [1]}', "one number for each 512 tokens"),
    ("", "no request")])
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(write(tmp_path, line))


@pytest.mark.parametrize("column", ["arrival_s", "input_tokens", "output_tokens", "pause_s"])
@pytest.mark.parametrize("value", ["1e18", "-1", "nan", "inf", "-inf", "x", "9" * 500])
def test_a_number_that_no_request_has_is_refused_with_its_line(tmp_path: Path, column: str, value: str) -> None:
    row = {"arrival_s": "0", "input_tokens": "5", "output_tokens": "5", "pause_s": "0"}
    lines = [",".join(row), ",".join(row.values()), "", ",".join((row | {column: value}).values())]
    with pytest.raises(ConfigError, match=f"line 4: {column} is "):
        read(write(tmp_path, *lines, name="a.csv"))


@pytest.mark.parametrize("name", ["timestamp", "input_length", "output_length", "delay"])
@pytest.mark.parametrize("value", ["1e18", "-1", "NaN", "Infinity", "true", "[1]", "9" * 500])
def test_a_number_that_no_line_of_json_has_is_refused_too(tmp_path: Path, name: str, value: str) -> None:
    row = {"timestamp": "0", "input_length": "5", "output_length": "5", "delay": "0"} | {name: value}
    line = "{" + ", ".join(f'"{key}": {number}' for key, number in row.items()) + "}"
    with pytest.raises(ConfigError, match=f"line 1: {name} is "):
        read(write(tmp_path, line))


def test_tokens_are_whole_and_a_session_has_no_more_than_a_context(tmp_path: Path) -> None:
    head = "session,arrival_s,input_tokens,output_tokens"
    assert list(read(write(tmp_path, head, ",0.5,1e2,9.0", name="a.csv")).prompts()) == [100]
    with pytest.raises(ConfigError, match=r"line 2: input_tokens is '1\.5': a whole number"):
        read(write(tmp_path, head, ",0,1.5,9", name="a.csv"))
    half = CONTEXT_MAX // 2
    assert len(read(write(tmp_path, head, f"a,0,{half},1", f"b,0,{half},1", name="a.csv")).sessions) == 2
    with pytest.raises(ConfigError, match="line 3: prompt and answer have 16,777,218 tokens: at most 16,777,216"):
        read(write(tmp_path, head, f"a,0,{half},1", f"a,0,{half},1", name="a.csv"))


def test_a_session_may_be_number_0_and_none_is_no_session(tmp_path: Path) -> None:
    lines = [{"session_id": name, "input_length": 5, "output_length": 5} for name in (0, 0, None, None, "", 1)]
    assert [len(session.turns) for session in read(write(tmp_path, *lines)).sessions] == [2, 1, 1, 1, 1]


@pytest.mark.parametrize(("name", "lines"), [
    ("a.csv", ["arrival_s,input_tokens,output_tokens", "0,5,5"]),
    ("a.jsonl", ['{"input_length": 5, "output_length": 5}'])])
def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path: Path, name: str, lines: list[str]) -> None:
    assert read(write(tmp_path, "\ufeff" + lines[0], *lines[1:], name=name)).num_turns == 1


def test_a_row_with_a_comma_in_a_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 2: more values than the 3 columns"):
        read(write(tmp_path, "arrival_s,input_tokens,output_tokens", "0,1,000,5", name="a.csv"))
    assert read(write(tmp_path, "arrival_s,input_tokens,output_tokens", "0,100,5,", name="a.csv")).num_turns == 1


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
    a, b, one, *_ = (text.tokens(session.turns[0].spans) for session in trace.sessions)
    assert a[:1_000] == b[:1_000] and a[1_000:1_010] != b[1_000:1_010] and one[:10] != a[:10]
    assert [len(session.turns) for session in trace.sessions] == [2, 2, 1, 1, 1]
    starts = [session.start_s for session in trace.sessions[2:]]
    assert starts == sorted(set(starts))


def test_a_sample_of_a_fleet_has_its_share_of_the_one_shots() -> None:
    sample = part_of(agents(Agents(sessions=20, turns=4, one_shots=40)), 0.5)
    assert [sum(len(s.turns) == n for s in sample.sessions) for n in (4, 1)] == [10, 20]


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
    assert "2 sessions, 8 requests, prompts of 600 to" in shown and "without a limit: 0." in shown


@pytest.mark.parametrize(("words", "message"), [
    (["--agents", "0"], "--agents is 0: at least 1"),
    (["--agents", "1", "--scale", "0"], "--scale is 0: 1 to 1,000,000"),
    (["--agents", "1", "--scale", "inf"], "--scale is inf"), (["--agents", "1", "--scale", "nan"], "--scale is nan"),
    (["--agents", "10000000000"], "430,000,000,000 requests: at most 10,000,000"),
    (["--trace", "x", "--turns", "2"], "--turns is for --agents"),
    (["--agents", "1", "--one-shots", "-1"], "--one-shots is -1: at least 0")])
def test_the_command_refuses_what_has_no_effect(words: list[str], message: str,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert message in capsys.readouterr().err
