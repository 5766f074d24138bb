"""Who answers: a model in an engine of our own, or a running server over HTTP. The same questions to both."""
from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from penstock.bench.report import optional
from penstock.config.base.errors import ConfigError
from penstock.config.request.params import SamplingParams
from penstock.eval.tasks import Question
from penstock.llm.llm import AsyncLLM
from penstock.llm.outputs import Logprob

_Asked = TypeVar("_Asked")
_Answer = TypeVar("_Answer")


class Asker(Protocol):
    async def tokens(self, text: str) -> int:
        """How many tokens a text has."""
        ...

    async def answer(self, question: Question) -> str:
        """The model's greedy answer. Raises ConfigError if it cannot be asked."""
        ...


@dataclass(frozen=True, slots=True)
class Library:
    """An engine of our own; only here can outputs be given (teacher forcing)."""

    llm: AsyncLLM

    async def tokens(self, text: str) -> int:
        return len(self.llm.encode(text))

    async def answer(self, question: Question) -> str:
        params = SamplingParams(temperature=0.0, max_tokens=question.max_tokens,
                                sparse_top_k=question.budget)
        if question.chat and self.llm.has_chat_template:
            [result] = await self.llm.chat([{"role": "user", "content": question.prompt}], params)
        else:
            [result] = await self.llm.generate(question.prompt, params)
        return result.outputs[0].text

    async def forced(self, prompt: Sequence[int], given: Sequence[int],
                     budget: int | None = None) -> list[Logprob]:
        """Return, for each given token, how likely it was, and which rank it had. budget: `sparse_top_k`."""
        params = SamplingParams(temperature=0.0, max_tokens=len(given), forced=tuple(given), logprobs=0,
                                ignore_eos=True, sparse_top_k=budget)
        [result] = await self.llm.generate({"prompt_token_ids": list(prompt)}, params)
        rows = result.outputs[0].logprobs or []
        assert len(rows) == len(given), f"{len(rows)} tokens came of {len(given)}"
        return [row[token] for row, token in zip(rows, given, strict=True)]


class Server:
    """A running server; `async with`. `model`: its name there."""

    def __init__(self, base_url: str, bearer: str | None) -> None:
        self.httpx = optional("httpx")
        headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
        self._url = base_url
        self.client = self.httpx.AsyncClient(base_url=base_url, headers=headers,
                                             limits=self.httpx.Limits(max_connections=None),
                                             timeout=self.httpx.Timeout(600, connect=10))
        self.model = ""

    async def __aenter__(self) -> Server:
        try:
            reply = await self.client.get("/v1/models")
            reply.raise_for_status()
            self.model = str(reply.json()["data"][0]["id"])
        except (self.httpx.HTTPError, KeyError, IndexError, ValueError) as e:
            await self.client.aclose()
            raise ConfigError(f"{self._url} does not answer /v1/models: {e}") from e
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()

    async def tokens(self, text: str) -> int:
        reply = await self._post("/v1/completions", {"prompt": text, "max_tokens": 1})
        return int(reply["usage"]["prompt_tokens"])

    async def answer(self, question: Question) -> str:
        budget = {} if question.budget is None else {"sparse_top_k": question.budget}
        if question.chat:
            message = {"role": "user", "content": question.prompt}
            reply = await self._post("/v1/chat/completions", {
                "messages": [message], "max_tokens": question.max_tokens, **budget})
            return str(reply["choices"][0]["message"]["content"] or "")
        reply = await self._post("/v1/completions", {
            "prompt": question.prompt, "max_tokens": question.max_tokens, **budget})
        return str(reply["choices"][0]["text"])

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            reply = await self.client.post(path, json={"model": self.model, "temperature": 0, **body})
        except self.httpx.HTTPError as e:
            raise ConfigError(f"{self._url}: {type(e).__name__}: {e}") from None
        if reply.status_code != 200:
            raise ConfigError(f"{self._url} answers HTTP {reply.status_code}: {reply.text[:300]}")
        found: dict[str, Any] = reply.json()
        return found


async def all_of(ask: Callable[[_Asked], Awaitable[_Answer]], asked: Sequence[_Asked], *, concurrency: int,
                 unit: str, quiet: bool) -> list[_Answer]:
    """Every answer, in order, with a progress bar."""
    bar = optional("tqdm").tqdm(total=len(asked), unit=unit, disable=quiet or None)
    gate = asyncio.Semaphore(concurrency)

    async def one(item: _Asked) -> _Answer:
        async with gate:
            answer = await ask(item)
        bar.update()
        return answer

    try:
        return await asyncio.gather(*(one(item) for item in asked))
    finally:
        bar.close()
