"""Next tokens from logits: penalties, bias, filters, the draw, and logprobs, on the device.

Owns what a request's sampling remembers (its output tokens, its penalty counts). Knows no pages
and no steps. The order is vLLM's: what the grammar admits, min_tokens, logit bias, repetition, frequency
and presence penalty, then argmax, or temperature, min-p, top-k, top-p and the draw. Logprobs are those of
the model: log-softmax of the logits before any of this. A row of which bias and penalties leave no
finite maximum is sampled without them: a token that was to be avoided is better than none. Not so a
grammar: a row of which it admits no token with a finite logit fails, with the reason in `Sampling.fault`.
Forced tokens are given after all of this, and counted, recorded and stopped at like any other.

    R rows of the table   B rows that sample   V vocabulary
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.config.base.errors import RequestError
from penstock.config.request.params import SamplingParams
from penstock.exec.sampling.grammar import Grammars, Matcher
from penstock.kernels.sample import filters, uniform

# (logprob of the token, its rank from 1, the best (id, logprob) in descending order)
Logprobs: TypeAlias = tuple[float, int, list[tuple[int, float]]]


@dataclass(slots=True)
class Sampling:
    """Sampling state of one request; it outlives rows, pauses and drops."""

    params: SamplingParams
    prompt: tuple[int, ...]
    stop_ids: tuple[int, ...]
    key: int                                   # names its stream of uniforms
    outputs: list[int] = field(default_factory=list)
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    simple: bool = False                       # temperature, top-k, top-p, min-p and seed, and nothing else
    plain: bool = False                        # argmax of the raw logits, and nothing else
    penalised: bool = False
    bias: tuple[Tensor, Tensor] | None = None  # ids int64, values float32
    matcher: Matcher | None = None             # of a request with a grammar
    fault: str | None = None                   # why the grammar gave no next token

    def rewind(self, emitted: int) -> None:
        """Forget output tokens from `emitted` on: sampled ahead, never retired."""
        assert emitted <= len(self.outputs), (
            f"{emitted} tokens retired, {len(self.outputs)} sampled")
        for index in range(emitted, len(self.outputs)):
            self.logprobs.pop(index, None)
        del self.outputs[emitted:]
        self.fault = None
        if self.matcher is not None:
            self.matcher.rewind(emitted)


class Sampler:
    """Samples all rows of a step at once. Not thread-safe; runs under inference mode."""

    def __init__(self, vocab_size: int, rows: int, *, seed: int = 0,
                 device: torch.device | str = "cpu", grammars: Grammars | None = None) -> None:
        """grammars: None: requests have none."""
        self._grammars = grammars
        self._vocab, self._rows, self._seed, self._device = vocab_size, rows, seed, device
        # Made for the first request with a penalty: most servers never need them.
        self._count_RV: Tensor | None = None       # int32: times in the output
        self._prompt_RV: Tensor | None = None      # bool: occurs in the prompt

    def open(self, rid: int, prompt: tuple[int, ...], params: SamplingParams, choice: int,
             stop_ids: tuple[int, ...]) -> Sampling:
        """State of a new request. Raises RequestError for token ids outside the vocabulary."""
        check_ids(prompt, params, self._vocab)
        key = (uniform.stream(self._seed, 1, rid) if params.seed is None
               else uniform.stream(params.seed, 0))
        s = Sampling(params, prompt, tuple(i for i in stop_ids if 0 <= i < self._vocab),
                     uniform.stream(key, choice))
        s.penalised = (params.presence_penalty != 0 or params.frequency_penalty != 0
                       or params.repetition_penalty != 1)
        if params.logit_bias:
            s.bias = (torch.tensor(list(params.logit_bias), device=self._device),
                      torch.tensor(list(params.logit_bias.values()), device=self._device))
        if params.grammar is not None:
            assert self._grammars is not None, "a request with a grammar, and nothing here can"
            s.matcher = self._grammars.matcher(params.grammar)
        s.simple = (params.logprobs is None and s.bias is None and not s.penalised and not params.forced
                    and s.matcher is None
                    and (params.min_tokens == 0 or not s.stop_ids))
        s.plain = s.simple and params.temperature == 0
        return s

    def bind(self, s: Sampling, row: int, emitted: int) -> None:
        """`s` now samples from table row `row` with `emitted` tokens retired."""
        s.rewind(emitted)
        if not s.penalised:
            return
        if self._count_RV is None or self._prompt_RV is None:
            shape = (self._rows, self._vocab)
            self._count_RV = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._prompt_RV = torch.zeros(shape, dtype=torch.bool, device=self._device)
        self._prompt_RV[row] = False
        self._prompt_RV[row, torch.tensor(s.prompt, device=self._device)] = True
        self._count_RV[row] = torch.bincount(
            torch.tensor(s.outputs, dtype=torch.int64, device=self._device),
            minlength=self._vocab)

    def sample(self, logits_BV: Tensor, states: Sequence[Sampling],
               rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(token_B int64, finite_B bool), both on the device.

        logits_BV  float32; it may be overwritten     states, rows  of each, rows by table index
        Where `finite_B` is False the logits had a NaN or an infinite maximum, or the row's grammar admits
        no token (`states[i].fault`): the token means nothing. `states[i].outputs` is the caller's to
        extend; logprobs are added here, under the index that the new token will have.
        """
        token_B = logits_BV.argmax(-1)
        finite_B = logits_BV.gather(1, token_B.unsqueeze(1)).squeeze(1).isfinite()
        some = [i for i, s in enumerate(states) if not s.plain]
        if some and not finite_B.all():
            ok = finite_B.tolist()
            some = [i for i in some if ok[i]]
        if not some:
            return token_B, finite_B
        at_B = torch.tensor(some, device=self._device)
        raw_BV = logits_BV if len(some) == len(states) else logits_BV[at_B]
        chosen = [states[i] for i in some]
        token_b = self._processed(raw_BV, chosen, [rows[i] for i in some])
        token_B[at_B] = token_b
        if failed := [i for i in some if states[i].fault is not None]:
            finite_B[torch.tensor(failed, device=self._device)] = False
        return token_B, finite_B

    def _processed(self, raw_BV: Tensor, states: Sequence[Sampling],
                   rows: Sequence[int]) -> Tensor:
        masked_BV = self._masked(raw_BV, states)
        logits_BV = self._penalised(self._biased(masked_BV, states), states, rows)
        if logits_BV is not masked_BV:
            logits_BV = _usable(logits_BV, masked_BV)
        random = [i for i, s in enumerate(states) if s.params.temperature > 0]
        if len(random) < len(states):
            token_B = logits_BV.argmax(-1)
        else:
            token_B = torch.empty(len(states), dtype=torch.int64, device=self._device)
        if random:
            at_B = torch.tensor(random, device=self._device)
            chosen = [states[i] for i in random]
            params = [s.params for s in chosen]
            w_BV = filters.weights(
                logits_BV if len(random) == len(states) else logits_BV[at_B],
                [p.temperature for p in params], [p.top_k for p in params],
                [p.top_p for p in params], [p.min_p for p in params])
            token_B[at_B] = filters.draw(
                w_BV, [uniform.uniform(s.key, len(s.outputs)) for s in chosen])
        for i, s in enumerate(states):
            if len(s.outputs) < len(s.params.forced):
                token_B[i] = s.params.forced[len(s.outputs)]
        counted = [i for i, s in enumerate(states) if s.penalised]
        if counted:
            assert self._count_RV is not None
            self._count_RV[torch.tensor([rows[i] for i in counted], device=self._device),
                           token_B[torch.tensor(counted, device=self._device)]] += 1
        self._record(raw_BV, token_B, states)
        return token_B

    def _masked(self, raw_BV: Tensor, states: Sequence[Sampling]) -> Tensor:
        """Minus infinity where a row's grammar admits no token, in a copy; raw where it admits none."""
        some = [i for i, s in enumerate(states) if s.matcher is not None]
        if not some:
            return raw_BV
        matchers = [m for i in some if (m := states[i].matcher) is not None]
        words_BW = torch.zeros(len(some), max(m.words() for m in matchers), dtype=torch.int32,
                               pin_memory=raw_BV.is_cuda)
        for i, matcher, words_W in zip(some, matchers, words_BW, strict=True):
            fault = matcher.fill(states[i].outputs, words_W.data_ptr())
            states[i].fault = f"at output token {len(states[i].outputs)}: {fault}" if fault else None
        at_B = torch.tensor(some, device=self._device)
        mine_BV = raw_BV[at_B]
        masked_BV = mine_BV.masked_fill(~_bits(words_BW.to(self._device, non_blocking=True), self._vocab),
                                        -torch.inf)
        ok_B1 = masked_BV.amax(-1, keepdim=True).isfinite()
        for i, ok in zip(some, ok_B1.squeeze(1).tolist(), strict=True):
            if not ok and states[i].fault is None:
                states[i].fault = (f"at output token {len(states[i].outputs)}: its grammar admits no token "
                                   "that the model gives a finite logit")
        return raw_BV.index_copy(0, at_B, torch.where(ok_B1, masked_BV, mine_BV))

    def _biased(self, logits_BV: Tensor, states: Sequence[Sampling]) -> Tensor:
        """min_tokens and logit_bias; copies before it writes, for the logprobs' sake."""
        own = False
        for i, s in enumerate(states):
            short = bool(s.stop_ids) and len(s.outputs) < s.params.min_tokens
            if not short and s.bias is None:
                continue
            if not own:
                logits_BV, own = logits_BV.clone(), True
            if short:
                logits_BV[i, list(s.stop_ids)] = -torch.inf
            if s.bias is not None:
                logits_BV[i, s.bias[0]] += s.bias[1]
        return logits_BV

    def _penalised(self, logits_BV: Tensor, states: Sequence[Sampling],
                   rows: Sequence[int]) -> Tensor:
        some = [i for i, s in enumerate(states) if s.penalised]
        if not some:
            return logits_BV
        assert self._count_RV is not None
        assert self._prompt_RV is not None
        at_B, params = torch.tensor(some, device=self._device), [states[i].params for i in some]
        row_B = torch.tensor([rows[i] for i in some], device=self._device)
        count_BV, x_BV = self._count_RV[row_B], logits_BV[at_B]
        if any(p.repetition_penalty != 1 for p in params):
            seen_BV = self._prompt_RV[row_B] | (count_BV > 0)
            by_B1 = self._column([p.repetition_penalty for p in params])
            x_BV = x_BV.where(~seen_BV, torch.where(x_BV > 0, x_BV / by_B1, x_BV * by_B1))
        if any(p.frequency_penalty for p in params):
            x_BV -= self._column([p.frequency_penalty for p in params]) * count_BV
        if any(p.presence_penalty for p in params):
            x_BV -= self._column([p.presence_penalty for p in params]) * (count_BV > 0)
        if len(some) == len(states):
            return x_BV
        return logits_BV.index_copy(0, at_B, x_BV)

    def _column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=self._device).unsqueeze(1)

    def _record(self, raw_BV: Tensor, token_B: Tensor, states: Sequence[Sampling]) -> None:
        some = [i for i, s in enumerate(states) if s.params.logprobs is not None]
        if not some:
            return
        at_B = torch.tensor(some, device=self._device)
        logprob_BV = raw_BV[at_B].log_softmax(-1)
        own_B1 = logprob_BV.gather(1, token_B[at_B].unsqueeze(1))
        rank_B = (logprob_BV > own_B1).sum(-1) + 1
        most = min(max(states[i].params.logprobs or 0 for i in some), self._vocab)
        top = logprob_BV.topk(most, dim=-1)
        for i, own, rank, ids, values in zip(some, own_B1.squeeze(1).tolist(), rank_B.tolist(),
                                             top.indices.tolist(), top.values.tolist(),
                                             strict=True):
            s = states[i]
            n = s.params.logprobs or 0
            s.logprobs[len(s.outputs)] = (
                own, rank, list(zip(ids[:n], values[:n], strict=True)))


def _bits(words_BW: Tensor, count: int) -> Tensor:
    """bool_BV: bit i of the words, lowest first, False past their end."""
    bit_32 = torch.arange(32, dtype=torch.int32, device=words_BW.device)
    bits_BV = ((words_BW.unsqueeze(-1) >> bit_32) & 1).flatten(1).bool()
    return torch.nn.functional.pad(bits_BV, (0, count - bits_BV.shape[1]))       # cuts where that is negative


def check_ids(prompt: tuple[int, ...], params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError for a token id outside the vocabulary."""
    for name, ids in (("prompt", prompt), ("logit_bias", params.logit_bias), ("forced", params.forced)):
        if ids and not (0 <= min(ids) and max(ids) < vocab_size):
            bad = next(i for i in ids if not 0 <= i < vocab_size)
            raise RequestError(f"{name} has token id {bad}: the model's ids are 0 to {vocab_size - 1}", name)


def _usable(logits_BV: Tensor, raw_BV: Tensor) -> Tensor:
    """logits_BV, with the raw logits for rows in which every token is masked, as when min_tokens
    meets stop ids that are the whole vocabulary, or whose maximum a tiny penalty overflowed."""
    usable_B1 = logits_BV.amax(-1, keepdim=True).isfinite()
    return logits_BV if usable_B1.all() else torch.where(usable_B1, logits_BV, raw_BV)
