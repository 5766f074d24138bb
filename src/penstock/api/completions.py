"""Chat and completion requests from body to answer.

Owns the way of one request: parse, prompt to tokens, submit, and what becomes an error. Writes to a
`Reply`, so it knows no HTTP.
"""
from __future__ import annotations

import asyncio
import logging
import secrets
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from penstock.api.openai_format import (
    DONE,
    AnswerFormat,
    ChatFormat,
    Prompts,
    TextFormat,
    Whole,
    encode,
    event,
    padded,
    usage_json,
)
from penstock.api.pd_router import ALONE, Routed
from penstock.api.protocol.openai import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    bad_request,
    overloaded,
    parse,
)
from penstock.api.protocol.structured import grammar_of
from penstock.config.base.errors import RequestError, answer_exceeds, context_exceeded, show
from penstock.config.request.grammar import TOO_COMPLEX
from penstock.config.request.params import SamplingParams
from penstock.engine.client.client import EngineClosed, EngineDied, checked_limits
from penstock.engine.client.generation import Ended, Generation
from penstock.engine.client.metrics import Metrics
from penstock.engine.client.namespaces import check_session, namespace, session_number
from penstock.engine.client.replicas import Engines
from penstock.engine.wire import BootstrapRoom, Origin
from penstock.text.chat import ONLY_TEXT, ChatTemplate, too_many_messages
from penstock.text.detokenize import Detokenizer
from penstock.text.encoder import Encoder
from penstock.text.helper import HelperDied
from penstock.text.model_text import ModelText
from penstock.text.tools.asked import AnswerForm, ToolOffer
from penstock.text.turns import TooManyTexts

if TYPE_CHECKING:
    from penstock.engine.traces.spans import RequestSpan, Traces

log = logging.getLogger("penstock.http")
T = TypeVar("T")


_SWITCHES = ("enable_thinking", "thinking")     # of templates, for reasoning


class Reply(Protocol):
    """One HTTP answer: `whole`, or `start` and any number of `events`."""

    started: bool
    span: RequestSpan | None        # None: the request is not traced
    session: str | None             # that the path or a header names

    async def whole(self, status: int, body: bytes, headers: dict[str, str]) -> None: ...
    async def start(self) -> None: ...
    async def events(self, data: bytes, *, last: bool = False) -> None: ...


class Running:
    """Requests that run, by tenant and their names, so that others can end them."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[Any], tuple[bytes, tuple[str | None, ...]]] = {}
        self._aborted: set[asyncio.Task[Any]] = set()

    @contextmanager
    def of(self, tenant: bytes, *names: str | None) -> Iterator[None]:
        """The calling task runs one. Raises ApiError in it when it is aborted."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = tenant, names
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._aborted:
                raise                       # its client has gone
            task.uncancel()
            raise ApiError(400, "this request was ended by /abort_request", code="aborted") from None
        finally:
            del self._tasks[task]
            self._aborted.discard(task)

    def abort(self, tenant: bytes, name: str | None) -> int:
        """End those of `tenant` that are called `name`, None: all; how many these are."""
        found = [t for t, (whose, names) in self._tasks.items()
                 if whose == tenant and (name is None or name in names) and t not in self._aborted]
        for task in found:
            self._aborted.add(task)
            task.cancel()
        return len(found)


class OpenAI:
    """The two generating endpoints of one server.

    `choices_max` bounds choices that run or wait: beyond it the answer is 503 with Retry-After.
    """

    def __init__(self, engine: Engines, text: ModelText, metrics: Metrics, *, model: str,
                 choices_max: int, encoder: Encoder | None = None, also: Sequence[str] = (),
                 secret: bytes | None = None, routed: Routed = ALONE, clips: bool = False,
                 unlisted: Sequence[str] = (),
                 is_admin: Callable[[bytes], bool] = lambda tenant: True,
                 turn_of: Callable[[bytes], int] = lambda tenant: 0, traces: Traces | None = None,
                 cache_of: Callable[[bytes], bytes] = lambda tenant: tenant) -> None:
        """secret: what tenants' namespaces are made with, None: drawn. routed: which part of a pair.

        also: more names of the model. unlisted: names that are taken and not shown in the list of models.
        clips: a maximum that does not fit the context is clipped, where it would be refused.
        is_admin: whether a tenant may go before others. turn_of: the number by which its turn among others is
        counted, 0: there are no others. traces: makes a span of each request, None: there are
        none. cache_of: the name of the tenant's cache, b"": it needs none of its own."""
        self.clips, self._is_admin, self._turn_of, self._cache_of = clips, is_admin, turn_of, cache_of
        self.routed, self.traces = routed, traces
        self.engine = engine
        self.text = text
        self.tokenizer = text.tokenizer
        self.encoder = encoder           # None for a model without a tokenizer
        self.template, self._no_template = text.template, text.no_template
        self.eos_ids = text.eos_ids
        self.metrics = metrics
        self.model = model
        self.listed = tuple(dict.fromkeys((model, *also)))
        self.own_names = (*self.listed, *unlisted)
        # Routers fill in "unknown" where their client named none.
        self.names = frozenset({*self.own_names, "unknown"})
        self.choices_max = choices_max
        self._secret = secret or secrets.token_bytes(32)
        self.draining = False
        self.running = Running()
        self.num_open = 0            # requests that have not been answered to the end
        self.idle = asyncio.Event()
        self.idle.set()

    # ------------------------------------------------------------ endpoints
    async def chat(self, body: bytes, tenant: bytes, reply: Reply) -> None:
        began = time.monotonic()
        context = self.engine.ready.max_model_len
        # Before it is decoded, which holds everybody for tens of milliseconds: a message's key is nowhere
        # inside a string, where quotes are escaped.
        if body.count(b'"role"') > context:
            raise too_many_messages(context)
        request = self.routed.whole(parse(body, ChatRequest))
        await self.converse(request, tenant, reply, began, lambda asked, prompts: ChatFormat(
            model=self.named(request.model), token_bytes=self.token_bytes, logprobs=bool(request.logprobs),
            include_usage=request.include_usage, return_token_ids=self._shows_ids(request),
            prompts=prompts, asked=asked, num_prompt=request.prompt_logprobs))

    async def converse(self, request: ChatRequest, tenant: bytes, reply: Reply, began: float,
                       written: Callable[[AnswerForm, Prompts], AnswerFormat]) -> None:
        """Answer a conversation. written: makes the form of the answer."""
        self.check_model(request.model)
        params, offer, field = request.params(self.text.sampling), request.offer, grammar_of(request)
        try:
            text, prompt = await self.chat_prompt(request, tenant, offer)
            asked = self.text.asked(offer, text, separate=request.separate_reasoning is not False)
            grammar = self.text.grammar(asked, params.grammar)
            if grammar is not params.grammar:
                params = msgspec.structs.replace(params, grammar=grammar).checked()
            prompts = Prompts([prompt], params.n)
            await self._run(prompts, request, params, tenant, written(asked, prompts), reply, began,
                            blamed=field[0] if field else "tools", shown=self.text.shown(asked))
        except RequestError as e:
            named = {"prompt": "messages", "grammar": field[0] if field else "tools"}
            raise e.named(named.get(e.param or "", e.param)) from None

    async def completion(self, body: bytes, tenant: bytes, reply: Reply) -> None:
        began = time.monotonic()
        request = self.routed.whole(parse(body, CompletionRequest))

        def written(prompts: Prompts) -> AnswerFormat:
            return TextFormat(
                model=self.named(request.model), token_bytes=self.token_bytes,
                logprobs=request.logprobs is not None,
                include_usage=request.include_usage, return_token_ids=self._shows_ids(request),
                prompts=prompts, num_echoed=request.echoed,
                num_prompt=request.prompt_logprobs, offsets=self._offsets)
        await self.complete(request, tenant, reply, began, written)

    async def complete(self, request: CompletionRequest, tenant: bytes, reply: Reply, began: float,
                       written: Callable[[Prompts], AnswerFormat]) -> None:
        """Go on with prompts. written: makes the form of their answers."""
        self.check_model(request.model)
        params = request.params(self.text.sampling)
        given = request.prompts(max(1, self.choices_max // params.n))
        ids = iter(await self.encode([p for p in given if isinstance(p, str)], tenant,
                                      special=request.add_special_tokens is not False))
        prompts = Prompts([p if isinstance(p, list) else next(ids) for p in given], params.n)
        context = self.engine.ready.max_model_len
        if prompts.longest >= context:
            raise context_exceeded(prompts.longest, context)        # before an echo of it is made
        if request.echo:
            prompts.echoes = [self._shown(p) for p in given]
        field = grammar_of(request)
        await self._run(prompts, request, params, tenant, written(prompts), reply, began,
                        blamed=field[0] if field else "")

    def session(self, tenant: bytes, name: str) -> int:
        """Return the number of a tenant's session. Raises RequestError."""
        check_session(name, None, 0)
        return session_number(self._secret, tenant, name)

    # ------------------------------------------------------------ prompts
    @property
    def only_text(self) -> str:
        """What to say to a part of a message that is not text."""
        return ONLY_TEXT if self.template is None else self.template.only

    def check_turns(self, items: str | Sequence[Any]) -> None:
        """Raise RequestError if `items`, mappings with roles, have more messages of others than the assistant than
        the context has tokens: before anything is made of them."""
        context = self.engine.ready.max_model_len
        if len(items) > context and not isinstance(items, str) and context < sum(
                isinstance(i, dict) and i.get("role", "assistant") != "assistant" for i in items):
            raise too_many_messages(context)

    async def chat_prompt(self, request: ChatRequest, tenant: bytes, offer: ToolOffer) -> tuple[str, list[int]]:
        """Text and tokens of a conversation. Raises RequestError, ApiError."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer: send token ids to /v1/completions",
                               "messages")
        if self.template is None:
            raise RequestError(f"{self._no_template}: use /v1/completions, or start the server with "
                               "--chat-template", "messages")
        if offer.tools and not self.template.reads("tools"):
            raise RequestError("tools: this model's chat template does not show them: leave them out, or "
                               "start the server with --chat-template", "tools")
        try:
            text = await self.template.take(
                request.messages, tenant=tenant, context=self.engine.ready.max_model_len,
                continue_final=bool(request.continue_final_message),
                add_generation_prompt=request.add_generation_prompt,
                variables=self._variables(request, self.template), tools=offer.tools)
        except TooManyTexts:
            raise overloaded("too many conversations at once: try again") from None
        [ids] = await self.encode([text], tenant, special=bool(request.add_special_tokens))
        return text, ids

    def _variables(self, request: ChatRequest, template: ChatTemplate) -> dict[str, Any]:
        """Return variables for the template, next to what is always there. Clients ask every model for an effort;
        where the template takes none, the model reasons as it does."""
        effort = request.reasoning_effort
        found: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        if effort is not None and not template.reads("reasoning_effort"):
            switch = next((s for s in _SWITCHES if template.reads(s)), None)
            found = {} if switch is None else {switch: effort not in ("none", "minimal")}
        form = request.response_format
        if form is not None and form.type != "text" and template.reads("response_format"):
            found["response_format"] = {k: v for k, v in msgspec.to_builtins(form).items() if v is not None}
        return found | request.variables

    async def encode(self, texts: Sequence[str], tenant: bytes, *, special: bool) -> list[list[int]]:
        if not texts:
            return []
        if self.encoder is None:
            raise RequestError("this model has no tokenizer: send the prompt as token ids",
                               "prompt")
        try:
            return await self.encoder.encode(texts, special=special, context=self.engine.ready.max_model_len,
                                             tenant=tenant)
        except TooManyTexts:
            raise overloaded("too many long texts at once: try again") from None

    def _shown(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer: echo needs one", "echo")
        try:
            return self.tokenizer.decode(prompt, skip_special=False)
        except (OverflowError, TypeError):
            raise RequestError("a prompt token id is outside the vocabulary", "prompt") from None

    def _offsets(self, ids: Sequence[int]) -> list[int]:
        """Characters before each of these tokens."""
        text, found = Detokenizer(self.tokenizer, skip_special=False), []
        for token in ids:
            found.append(text.chars)
            text.push((token,))
        return found

    def token_bytes(self, token: int) -> bytes:
        if self.tokenizer is None:
            return f"token_id:{token}".encode()
        return self.tokenizer.token_bytes(token)

    def _shows_ids(self, request: ChatRequest | CompletionRequest) -> bool:
        """Without a tokenizer there is nothing else to show."""
        return bool(request.return_token_ids) or self.tokenizer is None

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise self.no_such_model(name)

    def no_such_model(self, name: str) -> ApiError:
        """The 404 of a name that this server's model has not."""
        return ApiError(404, f"the model {show(name)} does not exist: this server has "
                        f"{' and '.join(map(repr, self.listed))}", param="model", code="model_not_found")

    def named(self, name: str | None) -> str:
        """The name of the model in an answer: the one that was asked for."""
        return name if name is not None and name in self.own_names else self.model

    # ------------------------------------------------------------ running
    async def _run(self, prompts: Prompts, request: ChatRequest | CompletionRequest,
                   params: SamplingParams, tenant: bytes, out: AnswerFormat, reply: Reply,
                   began: float, *, blamed: str, shown: frozenset[int] = frozenset()) -> None:
        """blamed: the field that asks for the grammar. shown: special tokens that the form must see."""
        clipped = self._check_room(prompts, request)
        if params.priority < 0 and not self._is_admin(tenant):
            raise RequestError(f"priority is {params.priority}: of a key that is no admin's 0 or more, which "
                               "orders this key's own requests; below 0 it would go before other keys'",
                               "priority")
        if params.stop and self.tokenizer is None:
            raise RequestError("this model has no tokenizer: use stop_token_ids", "stop")
        _check_scores(prompts, params)
        await self._check_grammar(params, prompts.ids[0], tenant, blamed)
        root = namespace(self._secret, self._cache_of(tenant), request.cache_salt)
        room = self.routed.room(request)
        turn = 0 if params.priority < 0 or room is not None else self._turn_of(tenant)
        name = reply.session if request.session_id is None else request.session_id
        check_session(name, request.session_retain_s, int(self.engine.ready.info.get("retained_pages_max") or 0))
        origin = Origin(turn, "" if reply.span is None else reply.span.trace,
                        0 if name is None else self.session(tenant, name), request.session_retain_s)
        engine = self.engine.of(request.data_parallel_rank)
        generation = Generation(engine, self.tokenizer, self.metrics, began=began, shown=shown,
                                silent=isinstance(request, CompletionRequest) and request.silent)
        generation.usage.clipped_max_tokens = clipped
        try:
            with self.running.of(tenant, out.id, request.rid):
                for prompt in prompts.ids:
                    generation.submit(
                        await self.engine.hashed(prompt, root), params, eos_ids=self.eos_ids, namespace=root,
                        room=room, origin=origin, context=prompt if isinstance(request, CompletionRequest) else ())
                if request.stream and not self.routed.prefills:
                    await self._stream(generation, request, out, reply)
                else:
                    await self._whole(generation, request, out, reply, prompts.num_choices, room)
        finally:
            # Also when the client has gone, which cancels this task wherever it waits.
            await generation.close()
            if reply.span is not None:
                reply.span.answered(out.id, self.named(request.model), params, bool(request.stream), generation,
                                    name or "")

    async def _check_grammar(self, params: SamplingParams, prompt: list[int], tenant: bytes,
                             blamed: str) -> None:
        """Raises RequestError that names the field, or ApiError."""
        if params.grammar is None:
            return
        try:
            checked_limits(self.engine.ready, prompt, params, self.eos_ids)
            await self.text.check(params, tenant)
        except RequestError as e:
            raise e.named(blamed if e.param == "grammar" else e.param) from None
        except TooManyTexts:
            raise overloaded("too many grammars at once: try again") from None

    def _check_room(self, prompts: Prompts, request: ChatRequest | CompletionRequest) -> int | None:
        """Raises RequestError, ApiError. Returns to what the maximum is clipped, None: it is not."""
        context = self.engine.ready.max_model_len
        explicit, name = request.max_tokens, "max_tokens"
        if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
            explicit, name = request.max_completion_tokens, "max_completion_tokens"
        longest, clipped = prompts.longest, None
        if explicit is not None and longest < context < longest + explicit:
            if not self.clips:
                names = "max_tokens or max_completion_tokens" if isinstance(request, ChatRequest) else name
                raise answer_exceeds(names, explicit, longest, context, name)
            clipped = context - longest
        if self.draining:
            raise overloaded("the server is shutting down", "shutting_down")
        open_now = self.engine.num_waiting + self.engine.num_running
        if open_now and open_now + prompts.num_choices > self.choices_max:
            raise overloaded(f"{open_now} requests run or wait, and {self.choices_max} are the "
                             "most: try again")
        return clipped

    async def _whole(self, generation: Generation, request: ChatRequest | CompletionRequest, out: AnswerFormat,
                     reply: Reply, count: int, room: BootstrapRoom | None) -> None:
        choices = [Whole() for _ in range(count)]
        async with aclosing(generation.batches()) as batches:
            async for batch in batches:
                for piece in batch:
                    choices[piece.index].add(piece)
        if room is not None and self.routed.prefills:
            answer = self.routed.answer(room, self.named(request.model), count)
            answer |= {"usage": usage_json(generation.usage)}
        else:
            answer = await _aside(any(c.prompt is not None for c in choices), out.whole, choices,
                                generation.usage)
        if request.store:
            answer |= {"store": False}
        await reply.whole(200, encode(answer), {})

    async def _stream(self, generation: Generation, request: ChatRequest | CompletionRequest, out: AnswerFormat,
                      reply: Reply) -> None:
        def events(chunks: list[dict[str, Any]]) -> bytes:
            if request.usage_so_far:
                chunks = [c | {"usage": usage_json(generation.usage)} for c in chunks]
            return b"".join(event(c, out.named) for c in (map(padded, chunks) if request.padded else chunks))

        changed = request.usage_so_far or request.padded
        async with aclosing(generation.batches()) as batches:
            async for batch in batches:
                if not reply.started:
                    # Not before: until the first token a refusal can still be an HTTP status.
                    await reply.start()
                    await reply.events(events(out.openings(generation.usage)))
                parts = []
                for piece in batch:
                    one = None if changed else out.event(piece)
                    parts.append(events(await _aside(piece.prompt is not None, out.chunks, piece))
                                if one is None else one)
                await reply.events(b"".join(parts))
        tail = b"".join(event(c, out.named) for c in out.endings(generation.usage))
        await reply.events(tail + (b"" if out.named else DONE), last=True)


SCORES_MAX = 1 << 19                    # of prompt tokens and their alternatives, in one answer


def _check_scores(prompts: Prompts, params: SamplingParams) -> None:
    """Raises RequestError: an answer of so many numbers would be gigabytes on its way to JSON."""
    if params.prompt_logprobs is not None:
        each = 1 + params.prompt_logprobs
        count = sum(max(0, len(p) - params.prompt_from) * each for p in prompts.ids)
        if count > SCORES_MAX:
            raise RequestError(
                f"prompt_logprobs: {count} logprobs of prompts are asked for, {SCORES_MAX} are the most in "
                "one answer: ask for fewer alternatives, send fewer prompts, or let them start later",
                "prompt_logprobs")


async def _aside(long: bool, work: Callable[..., T], *args: Any) -> T:
    """`work(*args)`, in a thread if it is long, so that others' tokens go on."""
    return await asyncio.to_thread(work, *args) if long else work(*args)


def as_api_error(error: Exception) -> ApiError:
    """Return the HTTP error for an exception."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return bad_request(error)
        case EngineClosed():
            return overloaded("the server shut down before the answer was complete", "shutting_down")
        case EngineDied():
            return ApiError(503, "the engine process is gone: ask again",
                            kind="server_error", code="engine_died")
        case HelperDied():              # twice; nothing is wrong with the request
            log.error("%s", error)
            return ApiError(503, "a helper process of the server was killed while it started: ask again",
                            kind="server_error", code="helper_died")
        case Ended(outcome="refused"):
            return ApiError(400, str(error), param="prompt", code="refused")
        case Ended(outcome="room_taken"):
            return ApiError(400, str(error), code=error.outcome)
        case Ended(outcome="room_late"):
            return ApiError(504, str(error), kind="server_error", code=error.outcome)
        case Ended(outcome="unavailable"):
            return overloaded(str(error), "prefill_unavailable")
        case Ended() if TOO_COMPLEX in error.reason:
            return ApiError(400, f"{error.reason}: make it simpler", param="grammar",
                            code="grammar_too_complex")
        case Ended(reason=""):
            return overloaded("the server ended this request", "aborted")
        case Ended():
            # The model's fault, not the load's: it would happen again, so no Retry-After.
            return ApiError(500, error.reason, kind="server_error", code="model_fault")
    # The message of an unknown error may quote the prompt: the log gets the place and the type.
    places = "".join(traceback.format_tb(error.__traceback__))
    log.error("internal error: %s\n%s", type(error).__name__, places)
    return ApiError(500, "internal error", kind="server_error", code="internal_error")
