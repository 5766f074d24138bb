"""Long texts in turns: a tenant has one open at a time, a bounded number waits, and short ones do not."""
from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest

from penstock.api import completions
from penstock.config.base.errors import CONTEXT_EXCEEDED, RequestError
from penstock.text.chat import LONG_CHARS, LONG_MAX, LONG_MESSAGES, ChatTemplate, is_long
from penstock.text.turns import TooManyTexts, Turns

SOURCE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def talk(count, content="x"):
    return [{"role": "user", "content": content}] * count


async def begun(event):
    while not event.is_set():
        await asyncio.sleep(0.001)


def test_the_second_of_a_tenant_waits_behind_anothers_first():
    order, gate, first = [], threading.Event(), threading.Event()

    def held():
        first.set()
        assert gate.wait(60)
        order.append("a1")

    async def go():
        turns = Turns("test", 6)
        running = [asyncio.ensure_future(turns.run(b"a", held))]
        await begun(first)
        for tenant, name in ((b"a", "a2"), (b"a", "a3"), (b"b", "b1")):
            running.append(asyncio.ensure_future(turns.run(tenant, lambda name=name: order.append(name))))
            await asyncio.sleep(0)
        with pytest.raises(TooManyTexts):           # half of the places, and others still have some
            await turns.run(b"a", int)
        running += [asyncio.ensure_future(turns.run(b"c", lambda: order.append("c1"))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(TooManyTexts):
            await turns.run(b"d", int)
        gate.set()
        await asyncio.gather(*running)
        await asyncio.sleep(0)
        assert turns.num_open == 0 and turns._open == {}
        turns.close()
    asyncio.run(go())
    assert order == ["a1", "b1", "c1", "a2", "c1", "a3"]


@pytest.mark.parametrize("messages, long", [
    (talk(LONG_MESSAGES), False), (talk(LONG_MESSAGES + 1), True), (talk(1, "x" * (LONG_CHARS + 1)), True),
    (talk(2, [{"type": "text", "text": "x" * (LONG_CHARS // 2)}]), True),
    (talk(1, [7] * (LONG_CHARS + 1)), True)])
def test_what_is_long(messages, long):
    assert is_long(messages) is long


@pytest.fixture
def chat():
    made = ChatTemplate(SOURCE)
    yield made
    made.close()


def take(chat, messages, tenant=b"", context=1 << 20):
    return chat.take(messages, tenant=tenant, context=context)


def test_a_short_conversation_does_not_wait_for_long_ones(chat):
    async def go():
        with chat._long._lock:              # a long one is being rendered
            waiting = [asyncio.ensure_future(take(chat, talk(1000), b"%d" % i)) for i in range(LONG_MAX)]
            await asyncio.sleep(0)
            assert await take(chat, talk(1), b"other") == "user: x\n"
            with pytest.raises(TooManyTexts):
                await take(chat, talk(1000), b"other")
            assert not any(work.done() for work in waiting)
        assert {len(text) for text in await asyncio.gather(*waiting)} == {8000}
    asyncio.run(go())


def test_they_are_refused_before_their_body_is_decoded(monkeypatch):
    api = object.__new__(completions.OpenAI)
    api.engine, api.routed = SimpleNamespace(ready=SimpleNamespace(max_model_len=8)), completions.ALONE
    monkeypatch.setattr(completions, "parse", None)
    with pytest.raises(RequestError, match=r"context length is 8 tokens.* more messages"):
        asyncio.run(api.chat(json.dumps({"messages": talk(9)}).encode(), b"", None))
    quoting = json.dumps({"messages": talk(1, '"role"' * 100)}).encode()
    with pytest.raises(TypeError):                  # to be decoded: `parse` is None
        asyncio.run(api.chat(quoting, b"", None))


def test_more_messages_than_tokens_are_refused_before_they_are_rendered(chat, monkeypatch):
    monkeypatch.setattr(chat, "render", None)
    with pytest.raises(RequestError, match=r"context length is 8192 tokens.* more messages") as e:
        asyncio.run(take(chat, talk(118_000), context=8192))
    assert (e.value.param, e.value.code) == ("messages", CONTEXT_EXCEEDED)
