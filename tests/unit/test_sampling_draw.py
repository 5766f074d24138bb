"""Sampling against slow, obvious definitions written with plain Python sums."""
from __future__ import annotations

import math

import pytest
import torch
from msgspec.structs import replace

from penstock.config.base.errors import RequestError
from penstock.config.request.params import SamplingParams
from penstock.core.plan import RequestId
from penstock.exec.sampling.on_device import Draws
from penstock.exec.sampling.sampler import Sampler
from penstock.exec.sampling.tokens import SampledStep
from penstock.kernels.sample import filters, uniform

V = 40


def slow_weights(logits: list[float], p: SamplingParams) -> list[float]:
    """Probabilities after temperature, min-p, top-k, top-p; the definition, in float64."""
    top = max(logits)
    w = [math.exp((x - top) / p.temperature) for x in logits]
    w = [x if x >= p.min_p * max(w) else 0.0 for x in w]
    order = sorted(range(len(w)), key=lambda i: (-w[i], i))
    if p.top_k >= 1:
        order = order[: p.top_k]
    kept, mass, total = [], 0.0, sum(w[i] for i in order)
    for i in order:
        if mass >= p.top_p * total and p.top_p < 1:
            break
        kept.append(i)
        mass += w[i]
    total = sum(w[i] for i in kept)
    return [w[i] / total if i in kept else 0.0 for i in range(len(w))]


GRID = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
    for t in (0.3, 1.0, 2.5) for k in (-1, 0, 1, 7, 100) for p in (0.05, 0.6, 0.95, 1.0)
    for m in (0.0, 0.1, 1.0)
]


def test_weights_equal_the_slow_definition_in_one_mixed_batch(monkeypatch):
    """All parameter combinations share one batch, so every subset path of the code runs."""
    torch.manual_seed(1)
    logits = torch.randn(len(GRID), V) * 3
    for candidates in (4, 512):
        monkeypatch.setattr(filters, "CANDIDATES", candidates)
        w = filters.weights(logits.clone(), [p.temperature for p in GRID],
                            [p.top_k for p in GRID], [p.top_p for p in GRID],
                            [p.min_p for p in GRID]).double()
        got = w / w.sum(-1, keepdim=True)
        for i, p in enumerate(GRID):
            want = slow_weights(logits[i].double().tolist(), p)
            assert torch.allclose(got[i], torch.tensor(want).double(), atol=1e-6), (candidates, p)
            assert (got[i] > 0).tolist() == [x > 0 for x in want], (candidates, p)


@pytest.mark.parametrize("candidates", [4, 512])
def test_ties_keep_the_lowest_ids_and_exactly_k(monkeypatch, candidates):
    monkeypatch.setattr(filters, "CANDIDATES", candidates)
    logits = torch.zeros(3, V)
    w = filters.weights(logits, [1.0] * 3, [5, 0, 1], [1.0, 0.25, 1.0], [0.0] * 3)
    assert [row.nonzero().flatten().tolist() for row in w] == [
        list(range(5)), list(range(V // 4)), [0]]


def test_a_row_does_not_depend_on_its_batch():
    torch.manual_seed(2)
    logits = torch.randn(len(GRID), V)
    columns = [[p.temperature for p in GRID], [p.top_k for p in GRID], [p.top_p for p in GRID],
               [p.min_p for p in GRID]]
    batch = filters.weights(logits.clone(), *columns)
    for i in range(len(GRID)):
        alone = filters.weights(logits[i:i + 1].clone(), *[c[i:i + 1] for c in columns])
        assert torch.equal(alone[0], batch[i]), GRID[i]


def test_extreme_temperatures_are_finite():
    logits = torch.tensor([[1.0, 3.0, 2.0]] * 2)
    w = filters.weights(logits, [1e-60, 100.0], [0, 0], [1.0, 1.0], [0.0, 0.0])
    assert w[0].tolist() == [0.0, 1.0, 0.0]
    assert w[1].isfinite().all() and (w[1] > 0.9).all()


def test_draw_is_the_inverse_cdf_and_never_hits_weight_zero():
    w = torch.tensor([[0.0, 1.0, 0.0, 3.0, 0.0]] * 5)
    us = [0.0, 0.2499999, 0.25, 0.7, 1 - 2.0**-52]
    assert filters.draw(w, us).tolist() == [1, 1, 3, 3, 3]


def test_uniforms_are_uniform_and_independent_of_each_other():
    keys = [uniform.stream(seed, choice) for seed in range(-20, 20) for choice in range(5)]
    us = torch.tensor([[uniform.uniform(k, i) for i in range(100)] for k in keys],
                      dtype=torch.float64)
    assert len(set(us.flatten().tolist())) == us.numel()
    assert abs(us.mean() - 0.5) < 0.01
    counts = torch.histc(us, 20, 0, 1)
    chi2 = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert chi2 < 44                                # 19 degrees of freedom, p = 0.001
    for a, b in ((us[:, :-1], us[:, 1:]), (us[:-1], us[1:])):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.03


def one(params: SamplingParams, logits: torch.Tensor, *, rid: int = 1, seed: int = 0,
        prompt: tuple[int, ...] = (0,), outputs: tuple[int, ...] = (),
        stop_ids: tuple[int, ...] = (), choice: int = 0):
    """Sampler, state and the next token of one request alone."""
    sampler = Sampler(logits.shape[-1], 2, seed=seed)
    s = sampler.open(rid, prompt, params, choice, stop_ids)
    s.outputs.extend(outputs)
    sampler.bind(s, 1, len(outputs))
    token, finite = sampler.sample(logits.clone()[None], [s], [1])
    assert finite.all()
    return s, token.item()


def greedy(**fields) -> SamplingParams:
    return SamplingParams(temperature=0.0, **fields)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    logits = torch.tensor([4.0, 3.0, -1.0, -1.5])
    assert one(greedy(repetition_penalty=1.5), logits, prompt=(0,))[1] == 1
    assert one(greedy(repetition_penalty=1.2), logits, prompt=(0,))[1] == 0
    assert one(greedy(repetition_penalty=1.5), logits, prompt=(3,), outputs=(0,))[1] == 1
    low = torch.tensor([-9.0, -9.0, -1.0, -1.4])
    assert one(greedy(repetition_penalty=1.3), low, prompt=(2,))[1] == 2
    assert one(greedy(repetition_penalty=1.5), low, prompt=(2,))[1] == 3


def test_presence_and_frequency_count_output_tokens_only():
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0])
    assert one(greedy(presence_penalty=1.5), logits, prompt=(0, 0))[1] == 0
    assert one(greedy(presence_penalty=1.5), logits, outputs=(0,))[1] == 1
    assert one(greedy(presence_penalty=0.9), logits, outputs=(0, 0, 0, 0))[1] == 0
    assert one(greedy(frequency_penalty=0.4), logits, outputs=(0, 0))[1] == 0
    assert one(greedy(frequency_penalty=0.4), logits, outputs=(0, 0, 0))[1] == 1
    assert one(greedy(frequency_penalty=-1.0), logits, outputs=(1, 1))[1] == 1


def test_counts_follow_sampling_and_are_rebuilt_by_bind():
    sampler = Sampler(4, 3)
    s = sampler.open(1, (3,), greedy(presence_penalty=1.5, frequency_penalty=0.1), 0, ())
    logits, seen = torch.tensor([[3.0, 2.9, 2.0, 1.9]]), []
    sampler.bind(s, 0, 0)
    for step in range(6):
        if step == 3:                               # another row, after two tokens sampled ahead
            s.outputs += [2, 2]
            sampler.bind(s, 2, 3)
        token, _ = sampler.sample(logits.clone(), [s], [0 if step < 3 else 2])
        s.outputs.append(token.item())
    seen = s.outputs
    again = sampler.open(2, (3,), s.params, 0, ())
    sampler.bind(again, 1, 0)
    for _ in range(6):
        token, _ = sampler.sample(logits.clone(), [again], [1])
        again.outputs.append(token.item())
    assert seen == again.outputs
    assert len(set(seen)) > 2


def test_a_row_remembers_nothing_of_the_request_before():
    sampler, logits = Sampler(4, 2), torch.tensor([[3.0, 2.9, 2.0, 1.9]])
    for prompt, want in (((0,), 1), ((1, 2), 0), ((0, 1), 2)):
        s = sampler.open(1, prompt, greedy(repetition_penalty=2.0), 0, ())
        sampler.bind(s, 1, 0)
        assert sampler.sample(logits.clone(), [s], [1])[0].item() == want


def test_bias_and_min_tokens():
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0])
    assert one(greedy(logit_bias={3: 100.0}), logits)[1] == 3
    assert one(greedy(logit_bias={0: -100.0, 1: -0.5}), logits)[1] == 1
    assert one(greedy(min_tokens=2), logits, stop_ids=(0, 99), outputs=(2,))[1] == 1
    assert one(greedy(min_tokens=2), logits, stop_ids=(0,), outputs=(2, 2))[1] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("more", [{}, {"top_k": 2, "top_p": 0.9}, {"min_p": 0.2}])
def test_min_tokens_without_any_other_token_samples_from_the_raw_logits(temperature, more):
    logits, plain = torch.tensor([3.0, 2.0, 1.0, 0.0]), SamplingParams(
        temperature=temperature, seed=8, **more)
    for outputs in ((), (1, 2)):
        want = one(plain, logits, outputs=outputs)[1]
        short = replace(plain, min_tokens=9)
        assert one(short, logits, stop_ids=(0, 1, 2, 3), outputs=outputs)[1] == want
    assert one(replace(plain, min_tokens=9), logits, stop_ids=(0, 1, 2))[1] == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_that_overflows_is_as_if_it_were_off(temperature):
    params = SamplingParams(temperature=temperature, seed=8, repetition_penalty=1e-39)
    logits = torch.tensor([3.0, 2.0, 1.0, 0.5])
    want = one(replace(params, repetition_penalty=1.0), logits, prompt=(0, 2))[1]
    assert one(params, logits, prompt=(0, 2))[1] == want


def test_a_row_that_is_masked_whole_leaves_its_batch_alone():
    logits = torch.randn(3, V)
    sampler, params = Sampler(V, 3), SamplingParams(seed=2, logit_bias={1: 2.0}, min_tokens=1)
    states = [sampler.open(i, (0,), params, i, tuple(range(V)) if i == 1 else (0,))
              for i in range(3)]
    tokens, finite = sampler.sample(logits.clone(), states, [0, 1, 2])
    assert finite.all() and (tokens < V).all()
    for i in (0, 2):
        assert sampler.sample(logits[i:i + 1].clone(), [states[i]], [i])[0] == tokens[i]


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_draw_never_leaves_the_vocabulary(bad):
    for u in (0.0, 0.5, 1 - 2.0**-52):
        assert 0 <= filters.draw(torch.full((1, 5), bad), [u]).item() < 5


def test_ids_outside_the_vocabulary_are_refused_by_name():
    sampler = Sampler(4, 1)
    with pytest.raises(RequestError, match=r"logit_bias has token id 4.*0 to 3"):
        sampler.open(1, (0,), greedy(logit_bias={4: 1.0}), 0, ())
    with pytest.raises(RequestError, match="prompt has token id -1"):
        sampler.open(1, (0, -1), greedy(), 0, ())


def test_logprobs_are_of_the_unprocessed_logits():
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0])
    raw = logits.log_softmax(-1).tolist()
    s, token = one(SamplingParams(temperature=0.0, logit_bias={2: 50.0}, repetition_penalty=2.0,
                                  logprobs=2), logits, outputs=(3,))
    assert token == 2
    logprob, rank, top = s.logprobs[1]
    assert logprob == pytest.approx(raw[2]) and rank == 3
    assert [i for i, _ in top] == [0, 1] and [x for _, x in top] == pytest.approx(raw[:2])
    s, token = one(greedy(logprobs=0), logits)
    assert token == 0 and s.logprobs[0] == (pytest.approx(raw[0]), 1, [])


def test_forced_tokens_are_given_counted_and_recorded_and_then_it_samples():
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0])
    raw = logits.log_softmax(-1).tolist()
    for params in (greedy(logprobs=1), SamplingParams(seed=4, top_k=1, logprobs=1)):
        params = replace(params, forced=(2, 3))
        for index, outputs, want in ((0, (), 2), (1, (2,), 3), (2, (2, 3), 0)):
            s, token = one(params, logits, outputs=outputs)
            assert token == want
            assert s.logprobs[index][0] == pytest.approx(raw[want]) and s.logprobs[index][1] == want + 1
    penalised = greedy(presence_penalty=2.5, forced=(0, 0))
    assert one(penalised, logits, outputs=(0, 0))[1] == 1
    sampler = Sampler(4, 2)
    s = sampler.open(1, (3,), penalised, 0, ())
    sampler.bind(s, 0, 0)
    for want in (0, 0, 1):                             # the forced ones count, without a bind
        token, _ = sampler.sample(logits.clone()[None], [s], [0])
        s.outputs.append(token.item())
        assert s.outputs[-1] == want
    with pytest.raises(RequestError, match="forced has token id 4"):
        one(greedy(forced=(1, 4)), logits)


def test_seeded_tokens_do_not_depend_on_the_batch():
    torch.manual_seed(3)
    logits = torch.randn(8, V)
    kinds = [SamplingParams(seed=5, top_p=0.9), greedy(), SamplingParams(seed=5, temperature=2.0),
             SamplingParams(seed=6, top_k=9, presence_penalty=0.5),
             greedy(logit_bias={1: 3.0}), SamplingParams(seed=-7, min_p=0.05, logprobs=3),
             SamplingParams(), greedy(logprobs=1)]
    alone = [one(p, logits[i], rid=i)[1] for i, p in enumerate(kinds)]
    for order in (range(8), [6, 2, 0, 7, 1, 5], [3, 4]):
        sampler = Sampler(V, 8)
        states = [sampler.open(i, (0,), kinds[i], 0, ()) for i in order]
        for row, s in enumerate(states):
            sampler.bind(s, row, 0)
        tokens, _ = sampler.sample(logits[list(order)], states, list(range(len(states))))
        assert tokens.tolist() == [alone[i] for i in order]


def test_what_names_a_stream_of_uniforms():
    """The user's seed and the choice do; the request id only when there is no seed."""
    flat = torch.zeros(1000)
    seeded = SamplingParams(seed=11)
    assert one(seeded, flat, rid=1)[1] == one(seeded, flat, rid=2, seed=9)[1]
    assert one(seeded, flat)[1] != one(seeded, flat, choice=1)[1]
    assert one(seeded, flat)[1] != one(seeded, flat, outputs=(1,))[1]
    free = SamplingParams()
    assert one(free, flat, rid=1)[1] != one(free, flat, rid=2)[1]
    assert one(free, flat, rid=1)[1] != one(free, flat, rid=1, seed=1)[1]
    assert one(free, flat, rid=1)[1] == one(free, flat, rid=1)[1]


def test_frequencies_follow_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    n = 4000
    sampler = Sampler(4, 1)
    s = sampler.open(1, (0,), SamplingParams(seed=1), 0, ())
    counts = [0] * 4
    for _ in range(n):
        token = sampler.sample(logits.clone()[None], [s], [0])[0].item()
        s.outputs.append(token)
        counts[token] += 1
    for count, p in zip(counts, logits.softmax(-1).tolist(), strict=True):
        assert abs(count - n * p) < 4 * math.sqrt(n * p * (1 - p))


def test_non_finite_logits_are_told_apart_row_by_row():
    logits = torch.zeros(5, V)
    logits[1, 3], logits[3, 4], logits[4, 5] = torch.nan, torch.inf, -torch.inf
    for p in (greedy(), SamplingParams(seed=1, top_p=0.5, logprobs=2)):
        sampler = Sampler(V, 5)
        states = [sampler.open(i, (0,), p, 0, ()) for i in range(5)]
        tokens, finite = sampler.sample(logits.clone(), states, list(range(5)))
        assert finite.tolist() == [True, False, True, False, True]
        assert all(0 <= t < V for t in tokens.tolist())


END = 7


@pytest.mark.parametrize("says, drafts", [((5, END, 8, 9), (5, END, 8)), ((5, END, 8, 9), (5, END, 1)),
                                          ((END, 8, 9, 3), (8, 9, 3)), ((5, 6, 8, 9), (5, 6, 8)),
                                          ((5, 6, 8, 9), (5, 1, 8))])
def test_a_host_that_has_learnt_where_a_row_ends_says_where_it_is_on_the_device(says, drafts) -> None:
    """Which goes on behind its end; so TP ranks that have heard of it and others launch the same."""
    device = torch.device("cpu")
    state = Sampler(V, 1).open(0, (1, 2, 3), SamplingParams(temperature=0.0), 0, (END,))
    logits, at = torch.zeros(4, V), torch.arange(4, dtype=torch.int32)
    logits[range(4), list(says)] = 1
    answer, counts = Draws(V, 1, device, "reference").checked(
        logits, torch.zeros(2, dtype=torch.int64), torch.zeros_like(at), torch.zeros(4, dtype=torch.int64),
        at + 3, torch.tensor((-1, *drafts), dtype=torch.int32), at, 4)
    answers = SampledStep(((RequestId(0), state),) * 4, [0], answer)
    answers.learn()
    assert answers.tokens == [says[:len(state.outputs)]] and (END in state.outputs) == (END in says)
    assert 3 + len(state.outputs) + state.beyond == 3 + int(counts.sum())
    state.rewind(1)
    assert state.beyond == 0
