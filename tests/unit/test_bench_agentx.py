"""Sessions of `penstock bench agentx`: what they send after an answer, and what a cache without a limit would find."""
from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from penstock.bench import agentx
from penstock.bench.agentx import WORDS, Played
from penstock.bench.load import Answer
from penstock.bench.report import write_json
from penstock.cli.main import main
from penstock.plan.trace import Seen, Session, Span, Text, Trace, Turn

SESSION = Session(0.0, (Turn((Span("a", 64),), 32), Turn((Span("b", 48),), 32, continues=True)))


def played(monkeypatch: pytest.MonkeyPatch, answers: list[Answer], *, text: bool = False,
           ) -> tuple[list[Sequence[int] | str], Played]:
    sent: list[Sequence[int] | str] = []

    async def send(_: object, prompt: Sequence[int] | str, output_len: int, *, ids: bool = False,
                   more: Mapping[str, object]) -> Answer:
        assert not more
        assert output_len == 32 and ids != text
        sent.append(prompt)
        return answers[len(sent) - 1]

    monkeypatch.setattr(agentx, "send", send)
    bar = Namespace(update=lambda: None)
    found = Played(None, Text(50), Seen(1 if text else 16), Namespace(
        scale=1.0, text=text, session_retain_s=None), bar)  # type: ignore[arg-type]
    asyncio.run(found.session(0, SESSION))
    return sent, found


def test_a_turn_begins_with_the_prompt_before_it_and_the_servers_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list(range(100, 132))
    sent, found = played(monkeypatch, [Answer(tokens=said), Answer(tokens=said)])
    assert list(sent[1][:96]) == [*sent[0], *said] and len(sent[1]) == 144
    assert found.seen.share == 80 / (64 + 144)         # the last token of an answer has no KV


def test_an_answer_without_ids_is_not_expected_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, found = played(monkeypatch, [Answer(), Answer()])
    assert sent[1][:64] == sent[0] and len(sent[1]) == 144
    assert found.seen.share == 64 / (64 + 144)


def test_a_turn_of_text_has_the_servers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, found = played(monkeypatch, [Answer(text=" not a word"), Answer(text="")], text=True)
    first, second = sent
    assert isinstance(first, str) and isinstance(second, str)
    assert second.startswith(f"{first} not a word ") and set(first.split()) <= set(WORDS)
    assert found.seen.share == 64 / (64 + 64 + 1 + 48)


def test_a_session_ends_with_a_turn_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, found = played(monkeypatch, [Answer(error="HTTP 503")])
    assert len(sent) == 1 and [a.error for a in found.answers] == ["HTTP 503"]


def test_what_no_answer_has_a_value_for_is_a_dash_and_null(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = played(monkeypatch, [Answer(error="HTTP 503")])
    out = tmp_path / "out.json"
    assert agentx.report(Trace("t", (SESSION,)), found, 1.0, Namespace(output_json=str(out))) == 1
    shown = capsys.readouterr().out
    assert "nan" not in shown and "| - " in shown
    write_json(str(out), {"a": float("nan"), "b": [1.5, (float("inf"),)]})
    assert json.loads(out.read_text()) == {"a": None, "b": [1.5, [None]]}


@pytest.mark.parametrize(("words", "message"), [
    (["--agents", "0"], "--agents is 0"), (["--agents", "1", "--token-id-max", "0"], "--token-id-max is 0"),
    (["--agents", "1"], "does not answer"), (["--trace", "nowhere.csv"], "nowhere.csv")])
def test_what_cannot_be_measured_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "agentx", "--base-url", "http://127.0.0.1:1", *words]) == 2
    assert message in capsys.readouterr().err


def test_sessions_of_several_turns_ask_to_be_retained_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Mapping[str, object]] = []
    ended: list[tuple[str, object]] = []

    async def send(_: object, prompt: object, output_len: int, *, ids: bool, more: Mapping[str, object]) -> Answer:
        asked.append(more)
        return Answer(tokens=[1] * output_len)

    async def post(path: str, json: object) -> None:
        ended.append((path, json))

    monkeypatch.setattr(agentx, "send", send)
    server = Namespace(client=Namespace(post=post))
    found = Played(server, Text(50), Seen(16), Namespace(  # type: ignore[arg-type]
        scale=1.0, text=False, session_retain_s=60), Namespace(update=lambda: None))
    asyncio.run(found.session(4, SESSION))
    asyncio.run(found.session(5, Session(0.0, SESSION.turns[:1])))
    assert asked == [{"session_id": "agentx-4", "session_retain_s": 60}] * 2 + [{}]
    assert ended == [("/v1/sessions/agentx-4", {"end": True})]
