"""The Python library: LLM and AsyncLLM over the same engine process that the HTTP server uses.

Owns one engine each and its end: nothing is left running after `close`, an exception or a Ctrl-C.
Knows no HTTP. The model runs in the engine process; the caller's never imports torch.
"""
from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from penstock.config.base.errors import ConfigError, RequestError
from penstock.config.base.machine import probe
from penstock.config.request.defaults import params as default_params
from penstock.config.request.params import SamplingParams
from penstock.config.settings.cli import from_options
from penstock.config.settings.resolve import resolve
from penstock.config.settings.tree import SERVE_ONLY, Config
from penstock.engine.client.client import EngineClient, checked_limits
from penstock.engine.client.generation import ChoicePiece, Ended, Generation
from penstock.engine.client.metrics import Metrics
from penstock.engine.client.namespaces import check_session, session_number
from penstock.engine.wire import NO_ORIGIN, Origin
from penstock.llm.outputs import (
    CompletionOutput,
    Delta,
    Logprob,
    Message,
    Params,
    Prompt,
    RequestOutput,
    Session,
    conversations,
    one_each,
    one_or_many,
    text_or_ids,
)
from penstock.model.source.hub import pull
from penstock.model.weights.locate import files_of
from penstock.text.model_text import ModelText, open_text

_log = logging.getLogger("penstock")
_T = TypeVar("_T")


class AsyncLLM:
    """A model in an engine process, for one asyncio loop. `async with`, or `start` and `close`.

    model     'demo', a folder, a .gguf file, or a hub id in the local cache
    options   flags of the command line but the HTTP server's, dashes as `_`; vLLM's and SGLang's
              spellings too
    config    a resolved Config instead of both
    Raises    ConfigError here, and from `start` for what only the engine can see.
    """

    def __init__(self, model: str = "demo", *, config: Config | None = None,
                 **options: object) -> None:
        self.config = config or resolve(
            from_options(model, options, without=SERVE_ONLY), probe())
        self._client = EngineClient(self.config, log=_log.info)
        self._metrics = Metrics()
        self._text: ModelText | None = None

    async def start(self) -> None:
        """Load the model. Raises ConfigError or EngineDied; nothing is left running then."""
        model = self.config.model
        # On threads: the demo may be fetched, a large tokenizer takes a second to read, and the
        # loop has other users.
        await asyncio.to_thread(pull, self.config, _log.warning)
        files = await asyncio.to_thread(files_of, model)
        starting = asyncio.create_task(self._client.start())
        try:
            self._text = await asyncio.to_thread(open_text, self.config, files)
            await starting
        except BaseException:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await self.close()
            raise

    async def close(self) -> None:
        """End the engine; what still runs is aborted. Idempotent."""
        if self._text is not None:
            self._text.close()
        await self._client.close()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together."""
        return self._client.ready.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 .. vocab_size-1."""
        return self._client.ready.vocab_size

    @property
    def default_sampling_params(self) -> SamplingParams:
        """Parameters of a request that is given none: the values of the model's generation_config.json."""
        return default_params(self._opened.sampling)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can be asked."""
        return self._opened.template is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt. Raises RequestError: this model has no tokenizer."""
        return self._opened.encode(text)

    # ------------------------------------------------------------ whole answers
    async def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, *,
                       use_tqdm: bool = False, session: Session | None = None) -> list[RequestOutput]:
        """Answers to every prompt, in their order; all run at once as far as memory allows.

        session: of all of them. Raises RequestError before anything has started if one of the prompts is wrong.
        """
        found = one_or_many(prompts)
        text = self._opened
        texts = [text_or_ids(p) for p in found]
        ids = [text.encode(t) if isinstance(t, str) else t for t in texts]
        return await self._all(ids, [t if isinstance(t, str) else None for t in texts],
                               one_each(sampling_params, len(ids), self.default_sampling_params), use_tqdm,
                               self._origin(session))

    async def chat(self, messages: Sequence[Message] | Sequence[Sequence[Message]],
                   sampling_params: Params = None, *, use_tqdm: bool = False,
                   session: Session | None = None) -> list[RequestOutput]:
        """The assistant's next message in a conversation, or in each of several."""
        text = self._opened
        rendered = [await asyncio.to_thread(text.chat, c) for c in conversations(messages)]
        ids = [text.encode(r, special=False) for r in rendered]
        return await self._all(ids, list(rendered), one_each(
            sampling_params, len(ids), self.default_sampling_params), use_tqdm, self._origin(session), is_chat=True)

    async def _all(self, ids: list[list[int]], texts: list[str | None],
                   params: list[SamplingParams], use_tqdm: bool, origin: Origin, *,
                   is_chat: bool = False) -> list[RequestOutput]:
        for prompt, p in zip(ids, params, strict=True):
            self._check(prompt, p)
        for p in params:
            await self._opened.check(p)
        progress = _progress(len(ids)) if use_tqdm else None
        # Enough for the core to choose from, few enough that its queue stays short.
        gate = asyncio.Semaphore(4 * self.config.schedule.max_num_seqs)

        async def one(at: int) -> RequestOutput:
            async with gate:
                output = await self._one(ids[at], texts[at], params[at],
                                         () if is_chat else ids[at], origin)
            if progress is not None:
                progress.update()
            return output

        tasks = [asyncio.create_task(one(at)) for at in range(len(ids))]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if progress is not None:
                progress.close()

    async def _one(self, ids: list[int], text: str | None, params: SamplingParams,
                   context: Sequence[int], origin: Origin) -> RequestOutput:
        logprobs = params.logprobs is not None
        outputs = [CompletionOutput(i, logprobs=[] if logprobs else None) for i in range(params.n)]
        generation = self._submit(ids, params, context, origin)
        prompt: list[dict[int, Logprob] | None] | None = None
        async for piece in _pieces(generation):
            if piece.prompt is not None:
                prompt = [*([None] * piece.prompt.first), *(
                    self._logprob(token, *scores) for token, scores in
                    zip(ids[piece.prompt.first:], piece.prompt.rows(), strict=True))]
            output = outputs[piece.index]
            output.text += piece.text
            output.token_ids += piece.tokens
            output.finish_reason = piece.finish or output.finish_reason
            output.stop_reason = piece.stop_reason or output.stop_reason
            if output.logprobs is not None:
                output.logprobs += self._logprobs(piece)
        usage = generation.usage
        return RequestOutput(text, ids, outputs, usage.cached_tokens, usage.kv_reads, usage.draft_tokens,
                             usage.accepted_draft_tokens, prompt)

    # ------------------------------------------------------------ streams
    async def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None, *,
                     session: Session | None = None) -> AsyncGenerator[Delta, None]:
        """The answer as it comes. Leaving the iterator ends the request (`aclose`, or dropping it)."""
        text, given = self._opened, text_or_ids(prompt)
        ids = text.encode(given) if isinstance(given, str) else given
        async with aclosing(self._stream(ids, sampling_params, self._origin(session), context=ids)) as deltas:
            async for delta in deltas:
                yield delta

    async def stream_chat(self, messages: Sequence[Message],
                          sampling_params: SamplingParams | None = None, *,
                          session: Session | None = None) -> AsyncGenerator[Delta, None]:
        """The assistant's next message as it comes."""
        text = self._opened
        rendered = await asyncio.to_thread(text.chat, conversations(messages)[0])
        ids = text.encode(rendered, special=False)
        async with aclosing(self._stream(ids, sampling_params, self._origin(session), context=())) as deltas:
            async for delta in deltas:
                yield delta

    async def _stream(self, ids: list[int], params: SamplingParams | None, origin: Origin, *,
                      context: Sequence[int]) -> AsyncGenerator[Delta, None]:
        [params] = one_each(params, 1, self.default_sampling_params)
        self._check(ids, params)
        await self._opened.check(params)
        generation = self._submit(ids, params, context, origin)
        async with aclosing(_pieces(generation)) as pieces:
            async for piece in pieces:
                yield Delta(piece.text, piece.tokens, piece.finish, piece.index)

    def end_session(self, session_id: str) -> None:
        """Its cached pages are evicted before all others. Nothing happens if it is not known. Raises RequestError."""
        self._client.of_session(self._origin(Session(session_id)).session, ends=True)

    # ------------------------------------------------------------ parts
    def _origin(self, session: Session | None) -> Origin:
        if session is None:
            return NO_ORIGIN
        check_session(session.id, session.retain_s, int(self._client.ready.info.get("retained_pages_max") or 0))
        return Origin(session=session_number(b"", b"", session.id), retain_s=session.retain_s)

    def _submit(self, ids: list[int], params: SamplingParams,
                context: Sequence[int], origin: Origin) -> Generation:
        # `context`: tokens that the answer's text continues; a chat message begins afresh.
        text = self._opened
        generation = Generation(self._client, text.tokenizer, self._metrics)
        generation.submit(ids, params, eos_ids=text.eos_ids, namespace=0, context=context,
                          origin=origin)
        return generation

    def _check(self, ids: list[int], params: SamplingParams) -> None:
        if params.stop and self._opened.tokenizer is None:
            raise RequestError("this model has no tokenizer: use stop_token_ids", "stop")
        checked_limits(self._client.ready, ids, params, self._opened.eos_ids)

    @property
    def _opened(self) -> ModelText:
        if self._text is None:
            raise RuntimeError("the engine is not started: use `async with`, or await start()")
        return self._text

    def _logprobs(self, piece: ChoicePiece) -> list[dict[int, Logprob]]:
        return [self._logprob(token, of.logprob, of.rank, of.top)
                for token, of in zip(piece.tokens, piece.logprobs, strict=True)]

    def _logprob(self, token: int, logprob: float, rank: int,
                 top: Sequence[tuple[int, float]]) -> dict[int, Logprob]:
        row = {t: Logprob(p, place, self._opened.token(t)) for place, (t, p) in enumerate(top, 1)}
        row.setdefault(token, Logprob(logprob, rank, self._opened.token(token)))
        return row


async def _pieces(generation: Generation) -> AsyncGenerator[ChoicePiece, None]:
    """Pieces until the end; the rest is aborted however this is left. Raises RequestError."""
    try:
        async with aclosing(generation.batches()) as batches:
            async for batch in batches:
                for piece in batch:
                    yield piece
    except Ended as e:
        raise RequestError(f"the engine gave up the request: {e}") from e
    finally:
        await generation.close()


def _progress(total: int) -> Any:
    try:
        tqdm = importlib.import_module("tqdm")
    except ImportError:
        raise ConfigError("use_tqdm needs the package tqdm: pip install tqdm") from None
    return tqdm.tqdm(total=total, unit="prompt", disable=None)


class LLM:
    """AsyncLLM for code without asyncio; same arguments, same errors. Loads the model at once.

    A context manager; without `with`, the engine ends with `close`, with this object, or with the
    process, whichever comes first. Calls from several threads run side by side.
    """

    def __init__(self, model: str = "demo", *, config: Config | None = None,
                 **options: object) -> None:
        self._inner = AsyncLLM(model, config=config, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True,
                                        name="penstock-llm")
        self._thread.start()
        self._finish = weakref.finalize(self, _finish, self._inner, self._loop, self._thread)
        try:
            self._run(self._inner.start())
        except BaseException:
            self.close()
            raise

    @property
    def config(self) -> Config:
        """The resolved configuration."""
        return self._inner.config

    @property
    def default_sampling_params(self) -> SamplingParams:
        """As of AsyncLLM."""
        return self._inner.default_sampling_params

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together."""
        return self._inner.max_model_len

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, *,
                 use_tqdm: bool = False, session: Session | None = None) -> list[RequestOutput]:
        """See AsyncLLM.generate. A Ctrl-C aborts every request of the call."""
        return self._run(self._inner.generate(prompts, sampling_params, use_tqdm=use_tqdm, session=session))

    def chat(self, messages: Sequence[Message] | Sequence[Sequence[Message]],
             sampling_params: Params = None, *, use_tqdm: bool = False,
             session: Session | None = None) -> list[RequestOutput]:
        """See AsyncLLM.chat."""
        return self._run(self._inner.chat(messages, sampling_params, use_tqdm=use_tqdm, session=session))

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None, *,
               session: Session | None = None) -> Iterator[Delta]:
        """The answer as it comes. Leaving the loop, or a Ctrl-C, ends the request."""
        return self._iterate(self._inner.stream(prompt, sampling_params, session=session))

    def stream_chat(self, messages: Sequence[Message],
                    sampling_params: SamplingParams | None = None, *,
                    session: Session | None = None) -> Iterator[Delta]:
        """The assistant's next message as it comes."""
        return self._iterate(self._inner.stream_chat(messages, sampling_params, session=session))

    def end_session(self, session_id: str) -> None:
        """See AsyncLLM.end_session."""
        async def end() -> None:
            self._inner.end_session(session_id)

        self._run(end())

    def close(self) -> None:
        """End the engine. Idempotent."""
        self._finish()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        if not self._finish.alive:
            work.close()
            raise RuntimeError("this LLM is closed")
        call = _Call(work, self._loop)
        try:
            return call.start().result()
        except BaseException:
            # A Ctrl-C in this thread: the work on the other one must end too.
            call.cancel()
            raise

    def _iterate(self, deltas: AsyncIterator[Delta]) -> Iterator[Delta]:
        # One task and a queue: a call across threads for each token would cost twice as much.
        arrived: queue.SimpleQueue[Delta | BaseException | None] = queue.SimpleQueue()

        async def forward() -> None:
            try:
                async for delta in deltas:
                    arrived.put(delta)
                arrived.put(None)
            except BaseException as e:          # raised in the reader's thread
                arrived.put(e)

        if not self._finish.alive:
            raise RuntimeError("this LLM is closed")
        call = _Call(forward(), self._loop)
        try:
            call.start()
            while (item := arrived.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            call.cancel()


class _Call(Generic[_T]):
    """Work on the loop's thread that the caller's can cancel whatever it was doing when the Ctrl-C
    came: the future of `run_coroutine_threadsafe` may never have reached it, while the work runs."""

    def __init__(self, work: Coroutine[Any, Any, _T], loop: asyncio.AbstractEventLoop) -> None:
        self._work, self._loop = work, loop
        self._task: asyncio.Task[_T] | None = None
        self._cancelled = False

    def start(self) -> Future[_T]:
        return asyncio.run_coroutine_threadsafe(self._main(), self._loop)

    async def _main(self) -> _T:
        if self._cancelled:
            raise asyncio.CancelledError
        self._task = asyncio.current_task()
        return await self._work

    def cancel(self) -> None:
        """From any thread, any number of times, also after the end."""
        self._cancelled = True
        with contextlib.suppress(RuntimeError):        # the loop is closed: nothing runs any more
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._task is None:
            self._work.close()
        else:
            self._task.cancel()


def _finish(inner: AsyncLLM, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Close the engine from any thread, then the loop. Runs once."""
    async def end() -> None:
        try:
            await inner.close()
            # Calls of other threads: they end by themselves, now that the engine is gone.
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*others, return_exceptions=True)
        finally:
            loop.stop()

    closing = end()
    if threading.current_thread() is thread:    # the last reference went in a callback of the loop
        loop.create_task(closing)
        return
    asyncio.run_coroutine_threadsafe(closing, loop)
    thread.join()
    loop.close()
