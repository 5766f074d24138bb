"""One API request while it runs: its choices in the engine, their text, their usage.

Owns the way from chunks of tokens to pieces of text: stop strings, log-probabilities beside their
tokens, one order over all choices. Knows no JSON and no HTTP.
"""
from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec.structs import replace

from penstock.config.request.params import SamplingParams
from penstock.config.request.scores import Scores
from penstock.engine.client.client import ChoiceStream, EngineDied
from penstock.engine.client.metrics import Metrics
from penstock.engine.wire import NO_ORIGIN, BootstrapRoom, Origin, OutputChunk, TokenLogprob
from penstock.text.detokenize import Detokenizer, TextDelta
from penstock.text.tokenizer import Tokenizer


class Engine(Protocol):
    """What a request needs of `client.EngineClient`, or of several."""

    @property
    def ready(self) -> Any: ...
    def submit(self, prompt: Sequence[int], params: SamplingParams, *,
               eos_ids: Sequence[int] = (), namespace: int = 0,
               room: BootstrapRoom | None = None,
               origin: Origin = NO_ORIGIN) -> list[ChoiceStream]: ...


@dataclass(slots=True)
class ChoicePiece:
    """What one choice adds. Tokens may come before their text, never after it."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob]
    offsets: list[int]              # characters decoded before each token that has logprobs
    finish: str | None = None       # "stop" or "length"
    stop_reason: str | None = None  # the stop string that ended it
    prompt: Scores | None = None    # with the first tokens of a prompt's first choice


class Ended(Exception):
    """The engine gave up a choice: `refused` it, ended it by `abort`, or was `unavailable`, one of a pair
    without the other. An abort that the client did not ask for has a `reason`."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason or outcome)
        self.outcome = outcome
        self.reason = reason


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    kv_reads: dict[str, int] = field(default_factory=dict)      # of choices that selected, by name
    peer_tokens: int = 0             # of the prompt, computed by the other engine of a pair
    draft_tokens: int = 0            # that were proposed,
    accepted_draft_tokens: int = 0   # and those that are part of an answer
    clipped_max_tokens: int | None = None   # what was left of a maximum that did not fit the context


class Generation:
    """The choices of all prompts of one request. `batches` once, then `usage`; `close` always."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, metrics: Metrics, *,
                 began: float | None = None, shown: frozenset[int] = frozenset(),
                 silent: bool = False) -> None:
        """shown: special tokens that are text all the same. silent: answers are not wanted."""
        self._shown, self.silent = shown, silent
        self._engine = engine
        self._tokenizer = tokenizer
        self.metrics = metrics
        self.began = time.monotonic() if began is None else began
        self._choices: list[_Choice] = []
        self.usage = Usage()
        self.first_s: float | None = None       # seconds to the first tokens
        self.finishes: list[str] = []           # of choices that have ended

    def submit(self, prompt: list[int], params: SamplingParams, *, eos_ids: Sequence[int],
               namespace: int, context: Sequence[int] = (), room: BootstrapRoom | None = None,
               origin: Origin = NO_ORIGIN) -> None:
        """Start `params.n` choices of one more prompt. room: of the request's first choice. Raises
        RequestError, EngineDied."""
        if room is not None:
            room = replace(room, index=len(self._choices))
        streams = self._engine.submit(prompt, params, eos_ids=eos_ids, namespace=namespace, room=room,
                                      origin=origin)
        hidden = frozenset() if params.include_stop_str_in_output else frozenset(
            {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)})
        self.usage.prompt_tokens += len(prompt)
        self.metrics.prompt_lengths.observe(len(prompt))
        for n, stream in enumerate(streams):
            detokenizer = Detokenizer(
                self._tokenizer, skip_special=params.skip_special_tokens, stop=params.stop,
                include_stop=params.include_stop_str_in_output, min_tokens=params.min_tokens,
                context=context, shown=self._shown)
            self._choices.append(_Choice(self, len(self._choices), stream, detokenizer, hidden,
                                         bare=not params.stop and params.logprobs is None,
                                         counts_cache=n == 0))

    async def batches(self) -> AsyncGenerator[list[ChoicePiece], None]:
        """Pieces of every choice as they come, those together that have come at once. Raises Ended or
        EngineDied; then the rest of the choices are aborted by `close`."""
        if len(self._choices) == 1:
            async for batch in self._choices[0].batches():
                yield batch
        else:
            async for batch in self._merged():
                yield batch
        self.metrics.e2e.observe(time.monotonic() - self.began)
        self.metrics.prompt_tokens.inc(self.usage.prompt_tokens)
        self.metrics.cached_tokens.inc(self.usage.cached_tokens)

    async def _merged(self) -> AsyncIterator[list[ChoicePiece]]:
        arrived: asyncio.Queue[list[ChoicePiece] | asyncio.Task[None]] = asyncio.Queue()

        async def forward(choice: _Choice) -> None:
            async for batch in choice.batches():
                arrived.put_nowait(batch)

        tasks = [asyncio.create_task(forward(c)) for c in self._choices]
        for task in tasks:
            task.add_done_callback(arrived.put_nowait)
        try:
            running = len(tasks)
            while running:
                item = await arrived.get()
                if isinstance(item, asyncio.Task):
                    item.result()                # raises what ended it
                    running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()

    async def close(self) -> None:
        """Abort what is still running. Idempotent."""
        for choice in self._choices:
            await choice.close()

    @property
    def tells_at_end(self) -> bool:
        """Whether the engine may have kv_reads or drafts to tell."""
        ready = self._engine.ready
        return ready.selection is not None or ready.info.get("speculative_method", "none") != "none"

    def count_tokens(self, count: int) -> None:
        self.usage.completion_tokens += count
        self.metrics.tokens.count += count

    def count_cached(self, chunk: OutputChunk) -> None:
        self.usage.cached_tokens += chunk.cached_tokens or 0
        self.usage.peer_tokens += chunk.peer_tokens
        for tier, tokens in (chunk.cached_by_tier or {}).items():
            self.usage.cached_by_tier[tier] = self.usage.cached_by_tier.get(tier, 0) + tokens

    def count_end(self, chunk: OutputChunk) -> None:
        """What a last chunk tells of what its choice has cost."""
        for name, count in (chunk.kv_reads or {}).items():
            self.usage.kv_reads[name] = self.usage.kv_reads.get(name, 0) + count
        proposed, accepted = chunk.drafts or (0, 0)
        self.usage.draft_tokens += proposed
        self.usage.accepted_draft_tokens += accepted

    def choice_ended(self, finish: str) -> None:
        self.finishes.append(finish)
        self.metrics.finished.labels(finish).inc()


ENDS = (None, "stop", "length")                   # of a choice that ends well
_DRAINING: set[asyncio.Task[None]] = set()       # asyncio itself holds tasks weakly


class _Choice:
    def __init__(self, generation: Generation, index: int, stream: ChoiceStream,
                 detokenizer: Detokenizer, hidden: frozenset[int], *, bare: bool,
                 counts_cache: bool) -> None:
        self._generation = generation
        self._index = index
        self._stream = stream
        self._detokenizer = detokenizer
        self._bare = bare                        # no stop strings, and no logprobs: only text and tokens
        self._hidden = hidden                    # stop ids that end the text and are not shown
        self._counts_cache = counts_cache
        self._asked = time.monotonic()
        self._started: float | None = None       # when the engine took it
        self._first = self._last = 0.0           # when its first and its last tokens came
        self._num_tokens = 0
        self._draining: asyncio.Task[None] | None = None     # of a choice that a stop string has ended
        self._done = False

    async def batches(self) -> AsyncIterator[list[ChoicePiece]]:
        async for first in self._stream:
            batch: list[ChoicePiece] = []
            chunk: OutputChunk | None = first
            while chunk is not None:
                if chunk.cached_tokens is not None and self._counts_cache:
                    self._counts_cache = False       # a choice that was dropped starts again
                    self._generation.count_cached(chunk)
                if chunk.cached_tokens is not None and self._started is None:
                    self._started = time.monotonic()
                    self._generation.metrics.queue.observe(self._started - self._asked)
                self._generation.count_end(chunk)
                if chunk.finish not in ENDS:
                    self._done = True
                    self._generation.choice_ended(chunk.finish or "")
                    if batch:
                        yield batch
                    raise Ended(chunk.finish or "", chunk.reason)
                piece = self._take(chunk)
                if piece.tokens or piece.text or piece.finish or piece.prompt is not None:
                    batch.append(piece)
                chunk = None if self._done else self._stream.here()
            if batch:
                yield batch
            if self._done:
                await self._rest()
                return

    def _take(self, chunk: OutputChunk) -> ChoicePiece:
        if chunk.tokens:
            self._observe_time()
        if self._generation.silent:
            return self._nothing(chunk)
        if self._bare and chunk.finish is None and chunk.prompt is None:
            self._generation.count_tokens(len(chunk.tokens))
            self._num_tokens += len(chunk.tokens)
            return ChoicePiece(self._index, self._detokenizer.push(chunk.tokens).text, chunk.tokens, [], [])
        piece = ChoicePiece(self._index, "", [], [], [])
        delta: TextDelta | None = None
        shown = chunk.tokens
        if chunk.finish == "stop" and shown and shown[-1] in self._hidden:
            shown = shown[:-1]
        for token in shown:
            piece.offsets.append(self._detokenizer.chars)
            delta = self._detokenizer.push((token,))
            piece.text += delta.text
            if delta.stop is not None:
                break
        else:
            if chunk.finish:
                delta = self._detokenizer.flush()
                piece.text += delta.text
            piece.offsets += [self._detokenizer.chars] * (len(chunk.tokens) - len(shown))
        if delta is not None and delta.stop is not None:
            self._stop_at(piece, chunk, delta.stop)
        else:
            piece.finish = chunk.finish
        count = len(piece.offsets)
        piece.tokens = chunk.tokens[:count]
        piece.prompt = chunk.prompt
        piece.logprobs = (chunk.logprobs or [])[:count]
        self._generation.count_tokens(count)
        self._num_tokens += count
        if piece.finish is not None:
            self._end(piece.finish)
        return piece

    def _end(self, finish: str) -> None:
        """It has said all that is shown of it."""
        self._done = True
        self._generation.choice_ended(finish)
        self._generation.metrics.output_lengths.observe(self._num_tokens)
        if self._first:
            self._generation.metrics.decode.observe(self._last - self._first)

    def _nothing(self, chunk: OutputChunk) -> ChoicePiece:
        """Return the prompt's part and the end of an answer that the client did not ask for."""
        if chunk.finish is not None:
            self._end("length")
        return ChoicePiece(self._index, "", [], [], [], "length" if self._done else None, prompt=chunk.prompt)

    def _stop_at(self, piece: ChoicePiece, chunk: OutputChunk, stop: str) -> None:
        piece.finish, piece.stop_reason = "stop", stop
        if chunk.finish is None:
            # The answer is complete; the engine hears of it and ends the choice a step later, in
            # its own way, which keeps the pages for later prompts. Leaving the stream would abort.
            self._stream.stop_at(self._detokenizer.count)
            self._draining = asyncio.create_task(self._drain())
            _DRAINING.add(self._draining)
            self._draining.add_done_callback(_DRAINING.discard)

    async def _drain(self) -> None:
        with contextlib.suppress(EngineDied):    # reported elsewhere
            async for chunk in self._stream:
                self._generation.count_end(chunk)

    async def _rest(self) -> None:
        """What the engine says last belongs to the usage of a request that may have selected."""
        if self._draining is not None and self._generation.tells_at_end:
            await asyncio.shield(self._draining)

    def _observe_time(self) -> None:
        now, metrics = time.monotonic(), self._generation.metrics
        if self._first:
            metrics.tokens.gap(now - self._last)
        else:
            self._first = now
            ttft = now - self._generation.began
            if self._generation.first_s is None:
                self._generation.first_s = ttft
            metrics.ttft.observe(ttft)
            metrics.prefill.observe(now - (self._started or self._asked))
        self._last = now

    async def close(self) -> None:
        if not self._done:
            self._done = True
            self._generation.choice_ended("abort")
            await self._stream.aclose()
