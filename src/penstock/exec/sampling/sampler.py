"""Next tokens from logits: penalties, bias, filters, the draw, and logprobs, on the device.

Owns what a request's sampling remembers (its output tokens, its penalty counts). Knows no pages
and no steps. The order is vLLM's: what the grammar admits, min_tokens, logit bias, repetition, frequency
and presence penalty, then argmax, or temperature, min-p, top-k, top-p and the draw. Logprobs are those of
the model: log-softmax of the logits before any of this. A row of which bias and penalties leave no
finite maximum is sampled without them: a token that was to be avoided is better than none. Not so a
grammar: a row of which it admits no token with a finite logit fails, with the reason in `Sampling.fault`.
`choose` waits for no device: what follows from the output tokens may be asked while that computes.
Forced tokens are given after all of this, and counted, recorded and stopped at like any other.

    R rows of the table   B rows that sample   V vocabulary
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from penstock.config.base.errors import RequestError
from penstock.config.request.grammar import Grammar
from penstock.config.request.params import SamplingParams
from penstock.exec.sampling.grammar import Grammars, Matcher
from penstock.exec.sampling.masks import Masks
from penstock.kernels.sample import filters, uniform
from penstock.kernels.types.ragged import on_device

# (logprob of the token, its rank from 1, the best (id, logprob) in descending order)
Logprobs: TypeAlias = tuple[float, int, list[tuple[int, float]]]
# In the second line of an answer: a row's logits have a finite maximum, have none, or none under its grammar.
FINE, NOT_FINITE, NOTHING_ADMITTED = 1, 0, -1


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
    beyond: int = 0                            # drafts behind its end, which a device has counted as right

    def rewind(self, emitted: int) -> None:
        """Forget output tokens from `emitted` on: sampled ahead, never retired."""
        assert emitted <= len(self.outputs), (
            f"{emitted} tokens retired, {len(self.outputs)} sampled")
        for index in range(emitted, len(self.outputs)):
            self.logprobs.pop(index, None)
        del self.outputs[emitted:]
        self.fault, self.beyond = None, 0
        if self.matcher is not None:
            self.matcher.rewind(emitted)


class Redraw(Protocol):
    def __call__(self, logits_BV: Tensor, token_B: Tensor, states: Sequence[Sampling],
                 rows: Sequence[int]) -> None:
        """Overwrite the tokens of rows that have a temperature, with the uniforms of `len(outputs)`."""


class Sampler:
    """Samples all rows of a step at once. Not thread-safe; runs under inference mode."""

    def __init__(self, vocab_size: int, rows: int, *, seed: int = 0,
                 device: torch.device | str = "cpu", grammars: Grammars | None = None,
                 mask: str = "reference") -> None:
        """grammars: None: requests have none; mask: as `backend` of `Masks`."""
        self._grammars = grammars
        self._vocab, self._rows, self._seed, self._device = vocab_size, rows, seed, torch.device(device)
        self._masks = Masks(self._device, mask)
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
            s.bias = (self._ids(list(params.logit_bias)),
                      on_device(list(params.logit_bias.values()), self._device, torch.float32))
        if params.grammar is not None:
            assert self._grammars is not None, "a request with a grammar, and nothing here can"
            s.matcher = self._grammars.matcher(params.grammar)
        s.simple = (params.logprobs is None and s.bias is None and not s.penalised and not params.forced
                    and s.matcher is None
                    and (params.min_tokens == 0 or not s.stop_ids))
        s.plain = s.simple and params.temperature == 0
        return s

    def compiled(self, grammar: Grammar) -> bool:
        """Whether no request with it would wait. Returns at once, and has it compiled."""
        return self._grammars is None or self._grammars.compiled(grammar)

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
        """(token_B int64, finite_B bool), both on the device: `best` and `choose` of all, and `told`.

        logits_BV  float32; it may be overwritten     states, rows  of each, rows by table index
        Where `finite_B` is False the token means nothing. `states[i].outputs` is the caller's to extend.
        """
        answer_2B = self.best(logits_BV)
        late = [i for i, s in enumerate(states) if not s.plain]
        recorded = self.choose(logits_BV, answer_2B, states, rows, late)
        told(states, answer_2B[1].tolist(), recorded)
        return answer_2B[0], answer_2B[1] == FINE

    def best(self, logits_BV: Tensor) -> Tensor:
        """answer_2B, int64: the best token of each row, and FINE or NOT_FINITE."""
        best_B, token_B = logits_BV.max(-1)
        return torch.stack((token_B, best_B.isfinite().long()))

    def choose(self, logits_BV: Tensor, answer_2B: Tensor, states: Sequence[Sampling], rows: Sequence[int],
               which: Sequence[int], draw: Redraw | None = None) -> Recorded | None:
        """Give the rows `which` the tokens that follow from all that their requests ask. Waits for no device.

        logits_BV   float32; it may be overwritten        states, rows   of each, rows by table index
        answer_2B   of all rows, as `best` has left it, or with other provisional tokens; overwritten
        draw        draws for rows with a temperature; None: this does, and may wait
        Returns logprobs on their way to the host, for `told`, which comes before `outputs` is extended.
        """
        if not logits_BV.is_cuda and not bool(answer_2B[1].all()):      # these need no care on a device
            which = [i for i, fine in zip(which, answer_2B[1, list(which)].tolist(), strict=True) if fine]
        if not which:
            return None
        at_b = self._ids(which)
        raw_bV = logits_BV if len(which) == len(states) else logits_BV[at_b]
        chosen, mine = [states[i] for i in which], [rows[i] for i in which]
        masked_bV, ok_b = self._masked(raw_bV, chosen)
        token_b = self._processed(masked_bV, chosen, mine, draw)
        answer_2B[0, at_b] = token_b
        if ok_b is not None:
            fine_b = answer_2B[1, at_b]
            answer_2B[1, at_b] = torch.where(ok_b | (fine_b == NOT_FINITE), fine_b, NOTHING_ADMITTED)
        return _recorded(raw_bV, token_b, chosen)

    def _processed(self, masked_BV: Tensor, states: Sequence[Sampling], rows: Sequence[int],
                   draw: Redraw | None) -> Tensor:
        logits_BV = self._penalised(self._biased(masked_BV, states), states, rows)
        if logits_BV is not masked_BV:
            logits_BV = _usable(logits_BV, masked_BV)
        random = [i for i, s in enumerate(states) if s.params.temperature > 0]
        if len(random) < len(states) or draw is not None:
            token_B = logits_BV.argmax(-1)
        else:
            token_B = torch.empty(len(states), dtype=torch.int64, device=self._device)
        if random and draw is not None:
            draw(logits_BV, token_B, states, rows)
        elif random:
            at_B = self._ids(random)
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
            self._count_RV[self._ids([rows[i] for i in counted]), token_B[self._ids(counted)]] += 1
        return token_B

    def _masked(self, raw_BV: Tensor, states: Sequence[Sampling]) -> tuple[Tensor, Tensor | None]:
        """Minus infinity where a row's grammar does not admit a token, in a copy if logprobs need the raw
        ones, and, by row, whether it admits one: else the row means nothing. None: no row has a grammar."""
        some = [i for i, s in enumerate(states) if s.matcher is not None]
        if not some:
            return raw_BV, None
        matchers = [m for i in some if (m := states[i].matcher) is not None]
        masked_BV = raw_BV if all(s.params.logprobs is None for s in states) else raw_BV.clone()
        ok_b, faults = self._masks.apply(masked_BV, some, matchers, [states[i].outputs for i in some])
        for i, fault in zip(some, faults, strict=True):
            states[i].fault = f"at output token {len(states[i].outputs)}: {fault}" if fault else None
        # Without a token the draw of a CPU fails, that of a device gives some token.
        if not raw_BV.is_cuda and not bool(ok_b.all()):
            masked_BV[[i for i, ok in zip(some, ok_b.tolist(), strict=True) if not ok]] = 0.0
        if len(some) == len(states):
            return masked_BV, ok_b
        ok_B = torch.ones(len(states), dtype=torch.bool, device=self._device)
        return masked_BV, ok_B.index_copy_(0, self._ids(some), ok_b)

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
                logits_BV[i].index_fill_(0, self._ids(s.stop_ids), -torch.inf)
            if s.bias is not None:
                logits_BV[i].index_add_(0, *s.bias)
        return logits_BV

    def _penalised(self, logits_BV: Tensor, states: Sequence[Sampling],
                   rows: Sequence[int]) -> Tensor:
        some = [i for i, s in enumerate(states) if s.penalised]
        if not some:
            return logits_BV
        assert self._count_RV is not None
        assert self._prompt_RV is not None
        at_B, params = self._ids(some), [states[i].params for i in some]
        row_B = self._ids([rows[i] for i in some])
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
        return on_device(values, self._device, torch.float32).unsqueeze(1)

    def _ids(self, values: Sequence[int]) -> Tensor:
        return on_device(values, self._device, torch.int64)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Logprobs of rows: own_B, rank_B, ids_BK and values_BK, on their way to the host."""

    states: Sequence[Sampling]
    columns: Sequence[Tensor]


def _recorded(raw_BV: Tensor, token_B: Tensor, states: Sequence[Sampling]) -> Recorded | None:
    some = [i for i, s in enumerate(states) if s.params.logprobs is not None]
    if not some:
        return None
    at_B = on_device(some, raw_BV.device, torch.int64)
    logprob_BV = raw_BV[at_B].log_softmax(-1)
    own_B1 = logprob_BV.gather(1, token_B[at_B].unsqueeze(1))
    rank_B = (logprob_BV > own_B1).sum(-1) + 1
    top = logprob_BV.topk(min(max(states[i].params.logprobs or 0 for i in some), raw_BV.shape[1]), dim=-1)
    return Recorded([states[i] for i in some], [x.to("cpu", non_blocking=True) for x in (
        own_B1.squeeze(1), rank_B, top.indices, top.values)])


def told(states: Sequence[Sampling], fine: Sequence[int], recorded: Recorded | None) -> None:
    """What `choose` has sent has arrived: logprobs, under the index of the token that comes next, and why a
    grammar gave none."""
    for s, code in zip(states, fine, strict=False):
        if code == NOTHING_ADMITTED and s.fault is None:
            s.fault = (f"at output token {len(s.outputs)}: its grammar admits no token that the model gives "
                       "a finite logit")
    if recorded is None:
        return
    columns = [column.tolist() for column in recorded.columns]
    for s, own, rank, ids, values in zip(recorded.states, *columns, strict=True):
        n = s.params.logprobs or 0
        s.logprobs[len(s.outputs)] = own, rank, list(zip(ids[:n], values[:n], strict=True))


def check_ids(prompt: tuple[int, ...], params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError for a token id outside the vocabulary."""
    for name, ids in (("prompt", prompt), ("logit_bias", params.logit_bias), ("forced", params.forced)):
        if ids and not (0 <= min(ids) and max(ids) < vocab_size):
            bad = next(i for i in ids if not 0 <= i < vocab_size)
            raise RequestError(f"{name} has token id {bad}: the model's ids are 0 to {vocab_size - 1}", name)


def _usable(logits_BV: Tensor, raw_BV: Tensor) -> Tensor:
    """logits_BV, with the raw logits for rows in which every token is masked, as when min_tokens
    meets stop ids that are the whole vocabulary, or whose maximum a tiny penalty overflowed."""
    return torch.where(logits_BV.amax(-1, keepdim=True).isfinite(), logits_BV, raw_BV)
