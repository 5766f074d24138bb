"""What a request may ask for, and its one validation. Shared by HTTP, the library and the engine."""
from __future__ import annotations

import msgspec

from penstock.config.base.errors import RequestError, show
from penstock.config.request.grammar import Grammar

COUNT_MAX = 2**31 - 1                  # of tokens: what the engine counts with


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How output tokens are chosen. Names and ranges follow OpenAI, vLLM and SGLang.

    Raises RequestError from `checked`, never from the constructor.
    """

    max_tokens: int | None = 16            # None: up to the context length
    min_tokens: int = 0
    temperature: float = 1.0               # 0 is greedy
    top_k: int = 0                         # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0          # -2 to 2, over output tokens
    frequency_penalty: float = 0.0         # -2 to 2, over output tokens
    repetition_penalty: float = 1.0        # > 0, over prompt and output tokens
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None            # how many alternatives beside the chosen token
    prompt_logprobs: int | None = None     # the same of prompt tokens, which are computed even where cached
    prompt_logprobs_start: int = 0         # of this one and those behind it; the very first has none
    skip_special_tokens: bool = True
    priority: int = 0
    sparse_top_k: int | None = None        # tokens of KV that a decode step selects and reads; 0: all, None:
                                           # the server's --sparse-top-k
    top_k_tokens: int | None = None        # its old name, for one release more
    speculative_tokens: int | None = None  # drafts a step, at most; 0: none, None: the server's
    grammar: Grammar | None = None         # what the answer must match; not with three others, see `checked`
    forced: tuple[int, ...] = ()           # library only: output i is forced[i], whatever the model
                                           # says (teacher forcing); later ones are chosen

    @property
    def prompt_from(self) -> int:
        """The first token of a prompt that gets a logprob, where any does."""
        return max(1, self.prompt_logprobs_start)

    @property
    def cached_max(self) -> int | None:
        """Tokens of a prompt that may be taken from a cache; None: all."""
        return None if self.prompt_logprobs is None else self.prompt_from - 1

    def checked(self) -> SamplingParams:
        """Return these parameters; a RequestError names the field, the value and the allowed range."""
        if self.top_k_tokens is not None:
            if self.sparse_top_k is not None:
                raise RequestError("top_k_tokens is the old name of sparse_top_k: give one", "top_k_tokens")
            return msgspec.structs.replace(self, sparse_top_k=self.top_k_tokens, top_k_tokens=None).checked()

        def need(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                value = getattr(self, name)
                value = list(value) if isinstance(value, tuple) else value      # as it was sent
                raise RequestError(f"{name} is {show(value)}: {allowed}", name)

        need(self.max_tokens is None or 1 <= self.max_tokens <= COUNT_MAX, "max_tokens", f"1 to {COUNT_MAX}")
        need(0 <= self.min_tokens <= COUNT_MAX, "min_tokens", f"0 to {COUNT_MAX}")
        if self.max_tokens is not None:
            need(self.min_tokens <= self.max_tokens, "min_tokens", "at most max_tokens")
        need(0 <= self.temperature <= 100, "temperature", "0 (greedy) to 100")
        need(-1 <= self.top_k <= COUNT_MAX, "top_k", f"1 to {COUNT_MAX}, or 0 or -1 for off")
        need(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        need(0 <= self.min_p <= 1, "min_p", "0 to 1")
        need(-2 <= self.presence_penalty <= 2, "presence_penalty", "-2 to 2")
        need(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "-2 to 2")
        need(0 < self.repetition_penalty <= 100, "repetition_penalty", "above 0 and at most 100")
        need(len(self.logit_bias) <= 300, "logit_bias", "at most 300 entries")
        need(all(-100 <= b <= 100 for b in self.logit_bias.values()), "logit_bias",
             "values from -100 to 100")
        need(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer")
        need(1 <= self.n <= 128, "n", "1 to 128")
        need(len(self.stop) <= 16, "stop", "at most 16 strings")
        need(all(0 < len(s) <= 1024 for s in self.stop), "stop", "1 to 1024 characters each")
        need(len(self.stop_token_ids) <= 64, "stop_token_ids", "at most 64 ids")
        need(self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", "0 to 20")
        need(self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20, "prompt_logprobs", "0 to 20")
        need(0 <= self.prompt_logprobs_start <= COUNT_MAX, "prompt_logprobs_start", f"0 to {COUNT_MAX}")
        need(-(2**31) <= self.priority < 2**31, "priority", "a 32-bit integer")
        need(self.sparse_top_k is None or 0 <= self.sparse_top_k <= 1 << 24, "sparse_top_k",
             "0 (all) to 16777216")
        need(self.speculative_tokens is None or 0 <= self.speculative_tokens <= COUNT_MAX,
             "speculative_tokens", f"0 (none) to {COUNT_MAX}")
        need(self.max_tokens is None or len(self.forced) <= self.max_tokens, "forced",
             "at most max_tokens ids")
        if self.grammar is not None:
            self.grammar.checked()
            for name in ("forced", "ignore_eos", "min_tokens"):
                need(not getattr(self, name), name, "not with a grammar, which says when an answer ends")
        return self
