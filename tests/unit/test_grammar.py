"""Masks of a grammar: what is admitted after any outputs, whatever happened to them; sampling under them."""
from __future__ import annotations

import json
import random
import threading
import time

import printable
import pytest
import torch
from printable import CHARACTERS, END

from penstock.config.base.errors import RequestError
from penstock.config.request.grammar import ANY_OBJECT, TEXT_BYTES_MAX, Grammar
from penstock.config.request.params import SamplingParams
from penstock.exec.sampling import grammar as grammar_module
from penstock.exec.sampling.grammar import BadGrammar, Compiler, Grammars, Vocabulary, switched_off
from penstock.exec.sampling.sampler import Sampler

V = 101                     # more than the tokenizer's 96: padding rows of a head
SCHEMA = Grammar("json_schema", json.dumps({
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"], "additionalProperties": False}))
DIGITS = Grammar("regex", "[0-9]{2,4}")


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(printable.vocabulary)


def ids(text: str) -> list[int]:
    return [CHARACTERS.index(c) for c in text]


def admitted(matcher, outputs) -> tuple[set[int], str]:
    words = torch.zeros(matcher.words(), dtype=torch.int32)
    fault = matcher.fill(outputs, words.data_ptr())
    return {i for i in range(32 * len(words)) if words[i // 32] >> (i % 32) & 1}, fault


def test_what_may_come_next(grammars):
    matcher = grammars.matcher(DIGITS)
    digits = set(ids("0123456789"))
    for outputs, want in (("", digits), ("1", digits), ("12", digits | {END}), ("123", digits | {END}),
                          ("1234", {END})):
        assert admitted(matcher, ids(outputs)) == (want, "")
    assert admitted(matcher, [*ids("1234"), END])[1] == ""        # sampled ahead of the end, and dropped
    choice = grammars.matcher(Grammar("choice", '["no", "n\\"\\u0041"]'))
    assert admitted(choice, ids("n")) == (set(ids('o"')), "")
    gbnf = grammars.matcher(Grammar("grammar", 'root ::= "a" | "b" root'))
    assert admitted(gbnf, ids("bb")) == (set(ids("ab")), "")


@pytest.mark.parametrize(("text", "outputs", "forced"), [("ab(cdef)?", "abc", "def"), ("no", "", "no")])
def test_nothing_is_forced_after_the_end_of_an_answer(grammars, text, outputs, forced):
    matcher = grammars.matcher(Grammar("regex", text))
    assert not admitted(matcher, [])[1]                    # waits until the grammar is compiled
    assert matcher.forced(ids(outputs), 9) == ids(forced)
    assert matcher.forced([*ids(outputs), END], 9) == []


def test_a_matcher_follows_its_outputs_wherever_they_go(grammars):
    """Forgotten and given again, in leaps: always as one that has seen nothing else."""
    rng, matcher, outputs = random.Random(3), grammars.matcher(SCHEMA), []
    line = [*ids('{"a": -120 , "b":"yy"}'), END]
    for _ in range(300):
        count = rng.randrange(len(line) + 1)
        if count < len(outputs):
            matcher.rewind(count)
        outputs = line[:count]
        assert admitted(matcher, outputs) == admitted(grammars.matcher(SCHEMA), outputs), count


def test_what_no_answer_can_come_of_is_a_fault_that_quotes_nothing(grammars):
    matcher = grammars.matcher(DIGITS)
    _, fault = admitted(matcher, ids("1x"))
    assert "output token 1" in fault and "x" not in fault.replace("next", "")
    secret = Grammar("json_schema", '{"type": "marker-7"}')
    _, fault = admitted(grammars.matcher(secret), [])
    assert fault and "marker-7" not in fault
    _, fault = admitted(Grammars(switched_off).matcher(DIGITS), [])
    assert fault


def test_whose_grammars_are_is_told_without_the_model_and_proved_with_it():
    assert grammar_module.whose("none") == "none: --grammar-backend none"
    assert grammar_module.whose("auto").startswith("llguidance 1.")
    assert grammar_module.proved(switched_off) == "--grammar-backend none"
    assert grammar_module.proved(lambda: None) == "this model has no tokenizer"
    assert "llguidance knows" in grammar_module.proved(lambda: Vocabulary("{}", (0,)))
    assert grammar_module.proved(printable.vocabulary) == ""


def test_the_vocabulary_is_taken_up_at_begin_and_not_before():
    asked = []

    def vocabulary():
        asked.append(True)
        return printable.vocabulary()

    grammars = Grammars(vocabulary)
    assert not asked
    assert grammars.begin().result() is grammars.begin().result()
    assert not admitted(grammars.matcher(DIGITS), [])[1] and asked == [True]


@pytest.mark.parametrize("kind, text, word", [
    ("json_schema", '{"not": {}}', "not"),
    ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
    ("json_schema", '{"not": {}, "x-guidance": {"lenient": true}}', "not"),
    ("json_schema", '{"type": "x"}', "x"), ("json_schema", "{", ""), ("json_schema", '{"$ref": "#/a"}', "/a"),
    ("regex", "a(", "unclosed"), ("regex", "a(?=b)", "look"), ("grammar", 'start: "a" b', "b"),
    ("grammar", "root ::= (", ""), ("choice", "[", ""), ("choice", "[1]", ""), ("choice", "[]", ""),
])
def test_grammars_that_are_none_say_why(kind, text, word):
    with pytest.raises(BadGrammar) as e:
        Compiler(printable.vocabulary()).compile(Grammar(kind, text))
    assert str(e.value) and word in str(e.value)


def test_parameters_that_say_otherwise_when_an_answer_ends():
    assert SamplingParams(grammar=DIGITS, temperature=0, logit_bias={1: 2.0}, n=3).checked()
    for name, value in (("forced", (1,)), ("ignore_eos", True), ("min_tokens", 1)):
        with pytest.raises(RequestError, match="not with a grammar") as e:
            SamplingParams(grammar=DIGITS, **{name: value}).checked()
        assert e.value.param == name
    for text in ("", "x" * (TEXT_BYTES_MAX + 1), "é" * TEXT_BYTES_MAX):
        with pytest.raises(RequestError):
            SamplingParams(grammar=Grammar("regex", text)).checked()


# ---------------------------------------------------------------- sampling
def answer(sampler: Sampler, params: SamplingParams, seed: int, most: int = 60) -> list[int]:
    """Logits are noise: only the grammar makes sense of them."""
    s = sampler.open(1, (1, 2), params, 0, (END,))
    sampler.bind(s, 0, 0)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(most):
        token_B, finite_B = sampler.sample(torch.randn(1, V, generator=generator) * 5, [s], [0])
        assert finite_B.all(), s.fault
        s.outputs.append(int(token_B))
        if s.outputs[-1] == END:
            return s.outputs
    return s.outputs


PARAMS = {
    "greedy": {"temperature": 0.0}, "drawn": {"seed": 1}, "filtered": {"seed": 2, "top_k": 1, "min_p": 0.5},
    "nucleus": {"seed": 3, "top_p": 0.1}, "penalised": {"seed": 4, "frequency_penalty": 2.0,
                                                       "repetition_penalty": 3.0, "presence_penalty": 2.0},
    "biased": {"seed": 5, "logit_bias": {END: 100.0, 3: 100.0}, "logprobs": 2},
}


@pytest.mark.parametrize("kind", PARAMS)
def test_every_answer_matches_however_it_is_sampled(grammars, kind):
    sampler = Sampler(V, 2, grammars=grammars)
    for seed in range(20):
        got = answer(sampler, SamplingParams(grammar=SCHEMA, **PARAMS[kind]), seed)
        if got[-1] == END:
            found = json.loads(printable.text(got))
            assert type(found["a"]) is int and found["b"] in ("x", "yy") and set(found) == {"a", "b"}
        short = answer(sampler, SamplingParams(grammar=DIGITS, **PARAMS[kind]), seed)
        assert short[-1] == END and printable.text(short).isdigit() and 2 <= len(short) - 1 <= 4


def test_rows_without_a_grammar_are_sampled_as_if_there_were_none(grammars):
    """In one batch with one that has a mask, by logits and uniforms of their own."""
    sampler = Sampler(V, 4, grammars=grammars)
    kinds = [SamplingParams(temperature=0), SamplingParams(seed=3),
             SamplingParams(seed=4, frequency_penalty=1.0)]
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(1))

    def states(*params: SamplingParams) -> list:
        made = [sampler.open(i, (1,), p, 0, (END,)) for i, p in enumerate(params)]
        for row, s in enumerate(made):
            sampler.bind(s, row, 0)
        return made

    alone, _ = sampler.sample(logits[:3].clone(), states(*kinds), [0, 1, 2])
    mixed, finite = sampler.sample(logits.clone(), states(*kinds, SamplingParams(grammar=DIGITS, seed=1)),
                                   [0, 1, 2, 3])
    assert mixed[:3].tolist() == alone.tolist() and finite.all()
    assert CHARACTERS[int(mixed[3])].isdigit()


def test_logprobs_are_the_models_also_under_a_mask(grammars):
    sampler = Sampler(V, 1, grammars=grammars)
    s = sampler.open(1, (1,), SamplingParams(grammar=DIGITS, temperature=0, logprobs=3), 0, (END,))
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(2))
    token, _ = sampler.sample(logits.clone(), [s], [0])
    own, rank, best = s.logprobs[0]
    want = logits.log_softmax(-1)[0]
    assert own == pytest.approx(float(want[token])) and [i for i, _ in best] == want.topk(3).indices.tolist()
    assert rank == int((want > want[token]).sum()) + 1


def test_a_row_that_its_grammar_leaves_nothing_fails_alone(grammars):
    sampler = Sampler(V, 3, grammars=grammars)
    kinds = [SamplingParams(grammar=DIGITS, seed=1), SamplingParams(seed=3),
             SamplingParams(grammar=DIGITS, seed=2)]
    made = [sampler.open(i, (1,), p, 0, (END,)) for i, p in enumerate(kinds)]
    logits = torch.randn(3, V)
    logits[0, ids("0123456789")] = -torch.inf              # the model will not
    made[2].outputs += ids("1x")                            # and this is no answer
    token, finite = sampler.sample(logits, made, [0, 1, 2])
    assert finite.tolist() == [False, True, False] and made[1].fault is None
    assert "output token 0" in made[0].fault and "output token 1" in made[2].fault
    made[2].rewind(1)
    assert made[2].fault is None
    token, finite = sampler.sample(torch.randn(1, V), [made[2]], [2])
    assert finite.all() and CHARACTERS[int(token)].isdigit()


def test_any_object_is_an_object(grammars):
    matcher = grammars.matcher(ANY_OBJECT)
    assert admitted(matcher, [])[0] == set(ids("{"))


def test_who_waits_for_a_grammar_is_woken():
    woken = threading.Event()
    mine = Grammars(printable.vocabulary, woken.set)
    while not mine.compiled(SCHEMA):
        assert woken.wait(60), "nobody says that it is done"
    assert admitted(mine.matcher(SCHEMA), [])[0] == set(ids("{"))


def test_more_grammars_than_are_kept_are_each_compiled_once_while_somebody_waits(monkeypatch):
    compiled, held = [], {Grammar("regex", f"{i}{{3}}") for i in range(9)}
    monkeypatch.setattr(grammar_module, "COMPILED_MAX", 4)
    monkeypatch.setattr(Compiler, "compile", lambda self, one: time.sleep(0.01) or compiled.append(one))
    woken = threading.Event()
    mine = Grammars(printable.vocabulary, woken.set)
    while held:                                         # as the loop looks, again and again in one order
        held -= {one for one in sorted(held, key=lambda one: one.text) if mine.compiled(one)}
        assert not held or woken.wait(60)
    assert len(compiled) == 9


@pytest.mark.parametrize("kind, text", [
    ("json_schema", json.dumps({"type": "object", "properties": {f"a{i}": {} for i in range(400)}})),
    ("regex", "(a?){5000}a{5000}"),
])
def test_what_becomes_too_complex_behind_the_first_token_is_no_grammar(kind, text):
    with pytest.raises(BadGrammar, match=r"items|expressions"):
        Compiler(printable.vocabulary()).compile(Grammar(kind, text))


def test_an_answer_that_becomes_too_complex_is_told_so(grammars, monkeypatch):
    monkeypatch.setattr(Compiler, "_walk", lambda self, at, some: None)
    matcher = Grammars(printable.vocabulary).matcher(Grammar("regex", "(a?){5000}a{5000}"))
    fault = next(f for n in range(9) if (f := admitted(matcher, ids("a" * n))[1]))
    assert fault == "its grammar became too complex"
