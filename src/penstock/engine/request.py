"""One request between Submit and its last chunk, and the chunks that are made of it.

Owns what the readers have not received yet. Knows neither the core nor the other engine of a pair.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from penstock.config.base.errors import RequestError
from penstock.config.request.grammar import Grammar
from penstock.config.request.params import SamplingParams
from penstock.config.request.scores import PromptScores, Scores, scores_fit
from penstock.config.request.selection import Selection, attention_identity
from penstock.core.plan import Finished, Outcome, PlanExecutor, RequestId, Started, Token
from penstock.engine.wire import BootstrapRoom, OutputChunk, Submit, TokenLogprob

if TYPE_CHECKING:
    from penstock.engine.pd.remote import Peer
    from penstock.exec.sampling.sampler import Logprobs

ID_MAX = 1 << 62


class Runner(PlanExecutor, Protocol):
    """A PlanExecutor that also keeps what the core need not know: sampling state and logprobs."""

    def open(self, rid: RequestId, prompt: tuple[int, ...], params: SamplingParams, *,
             choice: int, stop_ids: tuple[int, ...]) -> None: ...
    def compiled(self, grammar: Grammar) -> bool: ...
    def close(self, rid: RequestId) -> None: ...
    def given(self, rid: RequestId, tokens: Sequence[int], logprobs: Sequence[Logprobs] = (),
              prompt: PromptScores | None = None) -> None: ...
    def take_prompt(self, rid: RequestId) -> PromptScores | None: ...
    def fault(self, rid: RequestId) -> str | None: ...
    def take_logprobs(self, rid: RequestId, index: int) -> Logprobs | None: ...
    def kv_reads(self, rid: RequestId) -> dict[str, int] | None: ...
    def drafts(self, rid: RequestId) -> tuple[int, int]: ...
    def stats(self) -> dict[str, float]: ...

    @property
    def works_here(self) -> bool: ...


class Limits:
    """What a request of one engine may ask for."""

    def __init__(self, vocab_size: int, max_model_len: int, selection: Selection | None) -> None:
        """selection: the largest that the engine can decode from; None: it reads all KV."""
        self._vocab_size, self.max_model_len, self._selection = vocab_size, max_model_len, selection

    def refusal(self, m: Submit) -> str | None:
        """Why `m` cannot run. The API process has said so before with more words: this is the
        check that lets nothing received become an index or a size."""
        try:
            m.params.checked()
        except RequestError as e:
            return str(e)
        vocab = self._vocab_size
        if not 0 < m.rid < ID_MAX or not 0 <= m.choice < m.params.n:
            return "the request id or the choice is out of range"
        if not m.prompt or min(m.prompt) < 0 or max(m.prompt) >= vocab:
            return f"the prompt is empty or has a token id outside 0 to {vocab - 1}"
        if (reason := self._selection_refusal(m)) is not None:
            return reason
        if m.max_new < 1 or len(m.prompt) + m.max_new > self.max_model_len:
            return (f"{len(m.prompt)} prompt tokens and {m.max_new} new ones: "
                    f"the context is {self.max_model_len}")
        if any(not 0 <= i < vocab for i in (*m.stop_ids, *m.params.logit_bias, *m.params.forced)):
            return f"a stop id, a logit bias or a forced id is outside 0 to {vocab - 1}"
        if m.params.min_tokens and len(set(m.stop_ids)) >= vocab:
            return "min_tokens: every token id is a stop id"
        if m.params.logprobs is not None and m.params.logprobs > vocab:
            return f"logprobs is over the vocabulary of {vocab}"
        if (m.params.prompt_logprobs or 0) > vocab or not scores_fit(m.params, len(m.prompt)):
            return f"prompt_logprobs is over the vocabulary of {vocab}, or over what a message holds"
        return None

    def _selection_refusal(self, m: Submit) -> str | None:
        top, budget = self._selection, m.params.sparse_top_k or 0
        if not m.selects:
            if top is not None and top.native:
                return "selects: every request of this model does"
            odd = budget or m.attention
            return "sparse_top_k or attention of a request that reads all KV" if odd else None
        if top is None:
            return "selects: this engine has no selector"
        if not top.least <= budget <= top.budget or budget % top.unit:
            return f"sparse_top_k: {top.least} to {top.budget}, a multiple of {top.unit}"
        if m.attention != attention_identity(top.within(budget)):
            return "attention: not the identity of what this request selects"
        return None


class Live:
    """One request."""

    __slots__ = ("_asked_prompt", "_cached", "_first", "_logprobs", "_tokens", "client", "excuse", "given_up",
                 "num_prompt", "peer", "peer_cached", "rid", "room", "session", "started", "tenant", "transfer",
                 "verdict")

    def __init__(self, rid: RequestId, params: SamplingParams, *, num_prompt: int,
                 peer: Peer | None = None, transfer: int = 0, room: BootstrapRoom | None = None,
                 tenant: int = 0, session: int = 0) -> None:
        """peer, transfer: who computes its prompt, or has asked for it, and its name there. room: of a
        prefill instance, in which a router sends it here too. tenant, session: see Origin."""
        self.room = room
        self.client = int(rid)                  # number of the client that gets its chunks; 0: none, or no longer
        self.verdict = "unavailable"            # how it ends if it is given up
        self.rid, self.peer, self.transfer, self.tenant = rid, peer, transfer, tenant
        self.num_prompt, self.session = num_prompt, session
        self._logprobs, self._asked_prompt = params.logprobs is not None, params.prompt_logprobs is not None
        self._first = 0                         # output index of _tokens[0]
        self._tokens: list[int] = []            # of this turn
        self._cached: Started | None = None     # of this turn
        self.peer_cached = 0, 0, 0              # tokens of its prompt that the other engine had, by tier
        self.started: Started | None = None
        self.excuse = ""                        # what the other engine of a pair last did for it
        self.given_up = False                   # no instance has computed the prompt, and none will

    def token(self, output: Token) -> None:
        if not self._tokens:
            self._first = output.index
        self._tokens.append(output.token)

    def start(self, found: Started) -> None:
        self._cached = self.started = found

    def chunk(self, executor: Runner, end: Finished | None) -> OutputChunk:
        """What is new since the last one, with `end` the last of all."""
        tokens, self._tokens = self._tokens, []
        cached, self._cached = self._cached, None
        by_tier, peer_tokens = (None, 0) if cached is None else _by_tier(cached, self.peer_cached)
        finish, reason = None, ""
        if end is not None:
            fault = executor.fault(self.rid) if end.outcome is Outcome.ABORT else None
            finish, reason = end.outcome.value, end.reason or fault or ""
            if self.given_up:
                finish, reason = self.verdict, self.excuse
        return OutputChunk(
            rid=self.rid, tokens=tokens, index=self._first, finish=finish, reason=reason,
            logprobs=self._taken(executor, len(tokens)) if self._logprobs and tokens else None,
            cached_tokens=None if by_tier is None else sum(by_tier.values()),
            cached_by_tier=by_tier,
            peer_tokens=peer_tokens,
            prompt=self._prompt(executor) if self._asked_prompt and tokens else None,
            kv_reads=None if end is None else executor.kv_reads(self.rid),
            drafts=None if end is None or not (drafts := executor.drafts(self.rid))[0] else drafts)

    def _prompt(self, executor: Runner) -> Scores:
        self._asked_prompt, scores = False, executor.take_prompt(self.rid)
        assert scores is not None and scores.is_whole, f"request {self.rid}: no logprobs of its prompt"
        return scores.whole()

    def _taken(self, executor: Runner, count: int) -> list[TokenLogprob]:
        taken = []
        for index in range(self._first, self._first + count):
            found = executor.take_logprobs(self.rid, index)
            assert found is not None, f"request {self.rid}: no logprobs of output token {index}"
            taken.append(TokenLogprob(*found))
        return taken


def _by_tier(found: Started, there: tuple[int, int, int]) -> tuple[dict[str, int], int]:
    """Tokens of a prompt by the tier that they were cached in, of either engine of a pair, and those that the
    other one has computed. What both had is ours."""
    ours = {"hbm": found.hbm_tokens, "dram": found.dram_tokens, "disk": found.disk_tokens}
    skip, computed = sum(ours.values()), found.peer_tokens
    for tier, tokens in zip(("hbm", "dram", "disk"), there, strict=True):
        more = min(max(0, tokens - skip), computed)
        skip, computed = max(0, skip - tokens), computed - more
        ours[tier] += more
    if not ours["disk"]:
        del ours["disk"]
    return ours, computed
