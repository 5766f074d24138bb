"""One request between Submit and its last chunk, and the chunks that are made of it.

Owns what the readers have not received yet. Knows neither the core nor the other engine of a pair.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from penstock.config.request.grammar import Grammar
from penstock.config.request.params import SamplingParams
from penstock.config.request.scores import PromptScores, Scores
from penstock.core.plan import Executor, Finished, Outcome, RequestId, Started, Token
from penstock.engine.wire import BootstrapRoom, OutputChunk, TokenLogprob

if TYPE_CHECKING:
    from penstock.engine.pd.remote import Peer
    from penstock.exec.sampling.sampler import Logprobs


class Runner(Executor, Protocol):
    """An Executor that also keeps what the core need not know: sampling state and logprobs."""

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


class Live:
    """One request."""

    __slots__ = ("_asked_prompt", "_cached", "_first", "_logprobs", "_tokens", "client", "excuse", "given_up",
                 "num_prompt", "peer", "peer_cached", "rid", "room", "started", "tenant", "transfer",
                 "verdict")

    def __init__(self, rid: RequestId, params: SamplingParams, *, num_prompt: int,
                 peer: Peer | None = None, transfer: int = 0, room: BootstrapRoom | None = None,
                 tenant: int = 0) -> None:
        """peer, transfer: who computes its prompt, or has asked for it, and its name there. room: of a
        prefill instance, in which a router sends it here too. tenant: see Submit."""
        self.room = room
        self.client = int(rid)                  # number of the client that gets its chunks; 0: none, or no longer
        self.verdict = "unavailable"            # how it ends if it is given up
        self.rid, self.peer, self.transfer, self.tenant = rid, peer, transfer, tenant
        self.num_prompt = num_prompt
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
