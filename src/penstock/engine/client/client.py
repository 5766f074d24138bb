"""The API process's side of the engine: starts it by exec, speaks wire messages, hands out streams.

Owns the engine process and the fate of every open stream: one that the reader leaves is aborted, and
all end with EngineDied when the process does. Knows no text: tokens in, tokens out.
"""
from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from penstock.config.base import child
from penstock.config.base.errors import CONTEXT_EXCEEDED, ConfigError, RequestError, context_exceeded
from penstock.config.request.params import SamplingParams
from penstock.config.request.scores import ENTRIES_MAX, scores_fit
from penstock.config.request.selection import attention_identity
from penstock.config.settings.plain import to_plain
from penstock.config.settings.tree import Config
from penstock.engine import wire
from penstock.engine.client.gate import Gate
from penstock.engine.client.link import EngineLink, Inbox

TAIL_LINES = 20
EXIT_GRACE_S = 5.0


class EngineDied(RuntimeError):
    """The engine process is gone. `exit_code` as subprocess has it, `tail` its last log lines."""

    def __init__(self, exit_code: int | None, tail: Sequence[str] = ()) -> None:
        how = (f"was killed by signal {-exit_code}" if exit_code is not None and exit_code < 0
               else f"exited with code {exit_code}")
        super().__init__("\n  ".join([f"the engine process {how}", *tail]))
        self.exit_code = exit_code
        self.tail = tuple(tail)


class EngineClosed(EngineDied):
    """The engine process was asked to go, by `close`."""


class ChoiceStream:
    """Chunks of one choice, in order, until the one with `finish`; then StopAsyncIteration.

    One reader. Leaving early aborts the choice in the engine: `aclose()`, cancellation while waiting,
    or the object being collected. Raises EngineDied when that happened.
    """

    def __init__(self, client: EngineClient, inbox: Inbox) -> None:
        self.rid = inbox.rid
        self._client = client
        self._inbox = inbox

    def __aiter__(self) -> ChoiceStream:
        return self

    async def __anext__(self) -> wire.OutputChunk:
        inbox = self._inbox
        while not inbox.chunks:
            if inbox.error is not None:
                raise inbox.error
            if inbox.finished:
                raise StopAsyncIteration
            inbox.waiter = asyncio.get_running_loop().create_future()
            try:
                await inbox.waiter
            except asyncio.CancelledError:
                self._client.abort(self.rid)
                raise
            finally:
                inbox.waiter = None
        return inbox.chunks.popleft()

    def here(self) -> wire.OutputChunk | None:
        """The next chunk, if it has come already."""
        return self._inbox.chunks.popleft() if self._inbox.chunks else None

    def stop_at(self, count: int) -> None:
        """A stop string ended this choice after `count` output tokens; chunks go on until the
        engine's own `finish`, and what they hold past `count` is to be ignored."""
        self._client.stop_at(self.rid, count)

    async def aclose(self) -> None:
        """Abort unless finished. Idempotent."""
        self._client.abort(self.rid)

    def __del__(self) -> None:
        if not self._inbox.finished:
            self._client.abort_from_anywhere(self.rid)


class EngineClient:
    """Starts one engine process and multiplexes requests to it. Everything on one asyncio loop.

    `log` receives each line that the engine prints, on a thread of its own (None: only the tail is
    kept). `on_death` is called once, on the loop, when the engine goes without having been asked to.
    """

    def __init__(self, config: Config, *, log: Callable[[str], None] | None = None,
                 on_death: Callable[[EngineDied], None] | None = None,
                 fds: Sequence[int] = (), argv: Sequence[str] | None = None,
                 rids: Iterator[int] | None = None, env: dict[str, str] | None = None,
                 traced: Callable[[Sequence[wire.Timeline]], None] | None = None) -> None:
        """`fds`: descriptors that the engine gets under their numbers. `argv` replaces its command line; the
        socket's number is appended (tests). `rids`: rising numbers of requests (default: its own). `env`: its
        environment (default: ours). `traced`: takes the timelines of traced requests."""
        self.config = config
        self.on_death = on_death
        self.died: EngineDied | None = None
        self.peer_missing = "no connection yet"       # of a pair: why the other engine is not there, or ""
        self.peer_connected = False           # of a pair: whether one of the other end's engines is there
        self.peer_info: dict[str, str | int | float | bool | None] = {}
        self.num_waiting = 0                  # choices that the core has not admitted yet
        self._log, self._traced = log, traced
        self._fds, self._env = fds, env
        self._argv = argv or child.module("penstock.engine.process")
        self._gate = Gate()             # of answers that begin or end, which cost more than their text
        self._rids, self._asks = rids or itertools.count(1), itertools.count(1)
        self._inboxes: dict[int, Inbox] = {}
        self._asked: dict[int, asyncio.Future[wire.Stats | wire.Shown]] = {}
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._ready: wire.EngineReady | None = None
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[str] | None = None
        self._closing = False

    # ------------------------------------------------------------ life of the process
    async def start(self) -> wire.EngineReady:
        """Start the engine and wait until it is ready. Raises ConfigError (the engine refused the
        configuration) or EngineDied. Cancellable; nothing is left running when it raises."""
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[wire.EngineReady] = self._loop.create_future()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        # A socket pair is more private than a path: nothing to guess, to accept, or to clean up,
        # and the engine sees the end of this process at any moment, even while it loads.
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = child.start_logged([*self._argv, str(theirs.fileno())],
                                                   [theirs.fileno(), *self._fds], env=self._env)
            # No executor: at the end of a script it takes no work any more, and `close` may come then.
            self._exited, self._logged = asyncio.Event(), asyncio.Event()
            self._on_a_thread(self._process.wait, self._exited, "penstock-exit")
            self._on_a_thread(self._read_log, self._logged, "penstock-log")
            ours.setblocking(False)
            self._transport, _ = await self._loop.create_unix_connection(
                lambda: EngineLink(self), sock=ours)
            self._send(wire.Hello(version=wire.VERSION, config=to_plain(self.config)))
            self._ready = await self._started
        except BaseException:
            if self._transport is None:         # which would own it
                ours.close()
            await self.close()
            raise
        return self._ready

    async def close(self, store_s: float = 0.0) -> None:
        """Ask the engine to exit, wait, kill it if it does not. Idempotent; streams that are still
        open end with EngineDied. store_s: seconds that it may write cached pages to storage before."""
        self._closing = True
        if store_s:
            self._end_streams(EngineClosed(None))
        process = self._process
        if process is None:
            return
        try:
            if self._ready is not None:         # one that still loads does not listen: kill it
                self._send(wire.Shutdown(store_s))
                await _within(EXIT_GRACE_S + store_s, self._exited)
        finally:
            process.kill()                      # nothing, if it has exited
            if self._transport is not None:
                self._transport.close()
                await asyncio.wait([self._gone])
            await self._exited.wait()

    @property
    def ready(self) -> wire.EngineReady:
        assert self._ready is not None, "start() has not returned"
        return self._ready

    @property
    def num_running(self) -> int:
        """Choices that the core has admitted and not finished."""
        return len(self._inboxes) - self.num_waiting

    # ------------------------------------------------------------ requests
    def submit(self, prompt: Sequence[int], params: SamplingParams, *,
               eos_ids: Sequence[int] = (), namespace: int = 0,
               room: wire.BootstrapRoom | None = None,
               origin: wire.Origin = wire.NO_ORIGIN) -> list[ChoiceStream]:
        """Start one request; one Stream for each of `params.n` choices, in order of their index.

        Stop ids are `eos_ids` (unless `ignore_eos`) and `params.stop_token_ids`; `max_tokens` is
        clipped to the context. room: of the first choice, others have the next ones. Raises RequestError
        (nothing was started) or EngineDied.
        """
        if self.died is not None or self._closing:
            raise self.died or EngineClosed(None)
        max_new = checked_limits(self.ready, prompt, params, eos_ids)
        top = self.ready.selection
        selection = None if top is None else top.of(params, len(prompt), max_new)
        if top is not None:
            params = replace(params, sparse_top_k=0 if selection is None else selection.budget)
        stop_ids = sorted({*(() if params.ignore_eos else eos_ids), *params.stop_token_ids})
        streams: list[ChoiceStream] = []
        tokens = list(prompt)
        try:
            for choice in range(params.n):
                inbox = Inbox(next(self._rids))
                message = wire.Submit(
                    rid=inbox.rid, prompt=[] if streams else tokens, stop_ids=stop_ids,
                    params=params if choice == 0 else replace(params, prompt_logprobs=None),
                    max_new=max_new, namespace=namespace,
                    leader=streams[0].rid if streams else None, choice=choice, origin=origin,
                    selects=selection is not None,
                    attention=0 if selection is None else attention_identity(selection),
                    room=None if room is None else replace(room, index=room.index + choice))
                self._inboxes[inbox.rid] = inbox
                self.num_waiting += 1
                streams.append(ChoiceStream(self, inbox))
                self._send(message)
        except BaseException:                   # all choices or none
            for stream in streams:
                self.abort(stream.rid)
            raise
        return streams

    def abort(self, rid: int) -> None:
        """The reader has gone. Unknown and finished ids are ignored."""
        if (inbox := self._inboxes.get(rid)) is not None:
            self._forget(inbox)
            inbox.wake()                    # its stream ends, if another task waits for it
            self._send(wire.Abort(rid))

    def abort_from_anywhere(self, rid: int) -> None:
        """`abort` for callers that may be on another thread (object collection)."""
        with contextlib.suppress(RuntimeError):         # the loop is closed, and the engine gone
            self._loop.call_soon_threadsafe(self.abort, rid)

    def stop_at(self, rid: int, count: int) -> None:
        """See Stream.stop_at. Unknown and finished ids are ignored."""
        if rid in self._inboxes:
            self._send(wire.StopAt(rid, count))

    def flush(self) -> None:
        """Forget cached pages that no request holds."""
        self._send(wire.Flush())

    def of_session(self, session: int, *, ends: bool) -> None:
        """A session ends, or is about to go on: see OfSession."""
        self._send(wire.OfSession(session, ends))

    async def stats(self) -> dict[str, float]:
        """Gauges and counters by metric name. Raises EngineDied."""
        answer: wire.Stats = await self._ask(wire.AskStats)
        return answer.values

    async def shown(self) -> wire.Shown:
        """Requests and turns, as a page shows them. Raises EngineDied."""
        answer: wire.Shown = await self._ask(wire.AskShown)
        return answer

    async def _ask(self, kind: Callable[[int], wire.ToEngine]) -> Any:
        if self.died is not None:
            raise self.died
        asked = next(self._asks)
        self._asked[asked] = self._loop.create_future()
        try:
            self._send(kind(asked))
            return await self._asked[asked]
        finally:
            del self._asked[asked]

    # ------------------------------------------------------------ messages
    def _send(self, message: wire.ToEngine) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(wire.TO_ENGINE.frames(message))

    def receive(self, message: wire.FromEngine) -> None:
        """Act on one message of the engine."""
        match message:
            case wire.Chunks(chunks):
                for chunk in chunks:
                    self._deliver(chunk)
            case wire.Timelines(timelines):
                if self._traced is not None:
                    self._traced(timelines)
            case wire.Stats() | wire.Shown():
                future = self._asked.get(message.id)
                if future is not None and not future.done():
                    future.set_result(message)
            case wire.PeerNews(missing, connected, info):
                self.peer_missing, self.peer_connected, self.peer_info = missing, connected, info
            case wire.EngineReady():
                if not self._started.done():
                    self._started.set_result(message)
            case wire.Failed(text):
                if not self._started.done():
                    self._started.set_exception(ConfigError(text))

    def _deliver(self, chunk: wire.OutputChunk) -> None:
        inbox = self._inboxes.get(chunk.rid)
        if inbox is None:
            return                          # aborted by us while this was on its way
        if not inbox.started:
            inbox.started = True
            self.num_waiting -= 1
        inbox.add(chunk)
        if chunk.finish is not None:
            self._forget(inbox)
        if inbox.gated:
            return                          # it will find this one too
        if inbox.begun and chunk.finish is None:
            inbox.wake()
        else:
            inbox.begun, inbox.gated = bool(chunk.tokens), True
            self._gate.later(inbox.wake)

    def _forget(self, inbox: Inbox) -> None:
        del self._inboxes[inbox.rid]
        inbox.finished = True
        if not inbox.started:
            self.num_waiting -= 1

    # ------------------------------------------------------------ the end
    def link_lost(self) -> None:
        """The engine closed its end, or sent something that is not a message of ours."""
        self._burial = self._loop.create_task(self._bury())

    async def _bury(self) -> None:
        process = self._process
        assert process is not None
        await _within(1.0, self._exited)
        process.kill()                      # it talks nonsense, or hangs without a socket
        await self._exited.wait()
        await _within(1.0, self._logged)
        self.died = (EngineClosed if self._closing else EngineDied)(process.returncode, self._tail)
        if not self._started.done():
            self._started.set_exception(self.died)
            self._started.exception()       # retrieved: start() may have been cancelled
        self._end_streams(self.died)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(self.died)
        self._gone.set_result(None)
        if self.on_death is not None and not self._closing:
            self.on_death(self.died)

    def _end_streams(self, error: EngineDied) -> None:
        for inbox in list(self._inboxes.values()):
            self._forget(inbox)
            inbox.error = error
            inbox.wake()

    def _on_a_thread(self, work: Callable[[], object], done: asyncio.Event, name: str) -> None:
        """`work` on a thread of its own, and `done` when it has returned."""
        def run() -> None:
            work()
            with contextlib.suppress(RuntimeError):     # the loop is closed: no caller waits
                self._loop.call_soon_threadsafe(done.set)

        threading.Thread(target=run, daemon=True, name=name).start()

    def _read_log(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.rstrip() == wire.LOADED:
                    self._tail.clear()      # why it dies from now on is not in what it said before
                    continue
                self._tail.append(line.rstrip())
                if self._log is not None:
                    self._log(line.rstrip())


async def _within(timeout_s: float, event: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)


def checked_limits(ready: wire.EngineReady, prompt: Sequence[int], params: SamplingParams,
                   eos_ids: Sequence[int] = ()) -> int:
    """The most output tokens that `prompt` may get: `max_tokens` clipped to the context.

    Raises RequestError for anything that the engine would refuse: sampling values, an empty prompt,
    token ids outside the vocabulary, a prompt that leaves no room for one output token, min_tokens
    where every token would stop, sparse_top_k that the server does not give, more tokens without a selection
    than the device pool holds.
    """
    params.checked()
    vocab, room = ready.vocab_size, ready.max_model_len - len(prompt)
    if not prompt:
        raise RequestError("the prompt is empty: send at least one token", "prompt")
    if room < 1:
        raise context_exceeded(len(prompt), ready.max_model_len)
    if min(prompt) < 0 or max(prompt) >= vocab:
        raise RequestError(f"a prompt token id is outside 0 to {vocab - 1}", "prompt")
    if len(params.forced) > room:
        raise RequestError(f"forced has {len(params.forced)} ids: after this prompt the context has "
                           f"room for {room}", "forced", CONTEXT_EXCEEDED)
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias),
                      ("forced", params.forced)):
        if any(not 0 <= i < vocab for i in ids):
            raise RequestError(f"{name} has a token id outside 0 to {vocab - 1}", name)
    if params.logprobs is not None and params.logprobs > vocab:
        raise RequestError(f"logprobs is {params.logprobs}: the vocabulary has {vocab}", "logprobs")
    if (params.prompt_logprobs or 0) > vocab or not scores_fit(params, len(prompt)):
        raise RequestError(f"prompt_logprobs is {params.prompt_logprobs} of {len(prompt)} tokens: at most "
                           f"{vocab} of one, and {ENTRIES_MAX} of all; let it start later",
                           "prompt_logprobs")
    why = str(ready.info.get("grammar_backend", "none"))
    if params.grammar is not None and why.startswith("none"):
        raise RequestError(f"this server has no structured output ({why}): start it with --grammar-backend "
                           "llguidance, or leave it out", "grammar")
    max_new = room if params.max_tokens is None else min(room, params.max_tokens)
    if ready.selection is not None:
        if ready.selection.of(params, len(prompt), max_new) is None:
            max_new = _dense_limit(ready, len(prompt), params.max_tokens, max_new)
    elif params.sparse_top_k:
        raise RequestError(f"sparse_top_k is {params.sparse_top_k}: this server reads all KV; start it with "
                           "--sparse-top-k N, or ask for 0", "sparse_top_k")
    stop_ids = {*(() if params.ignore_eos else eos_ids), *params.stop_token_ids}
    if params.min_tokens and len(stop_ids) >= vocab:
        raise RequestError(f"min_tokens is {params.min_tokens}: every token id is a stop id, so none "
                           "may come first; leave it out", "min_tokens")
    return max_new


def _dense_limit(ready: wire.EngineReady, prompt: int, asked: int | None, max_new: int) -> int:
    """Output tokens of a request that reads all of its KV, which stays on the device; `asked`: its
    max_tokens. Raises RequestError with the numbers."""
    room = ready.dense_len - prompt
    if room < 1 or (asked is not None and room < max_new):
        assert ready.selection is not None
        new = asked if asked is not None and room > 0 else 0
        raise RequestError(
            f"This model's maximum context length is {ready.dense_len} tokens for a request that reads all "
            f"of its KV: the device pool holds no more. However, the prompt has {prompt} tokens"
            f"{f' and max_tokens is {new}' if new else ''}: reduce the length of the messages or of the "
            "prompt. A request that selects, with sparse_top_k of at most "
            f"{ready.selection.budget}, may have {ready.max_model_len} tokens ({CONTEXT_EXCEEDED})",
            "max_tokens" if new else "prompt", CONTEXT_EXCEEDED, (prompt, new, ready.dense_len))
    return min(room, max_new)
