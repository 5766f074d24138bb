"""Requests of OpenAI's API: what is understood, what is neutral, and what is refused by name."""
from __future__ import annotations

import json
import math
import re
import typing

import msgspec
import openai.types
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatBase
from openai.types.completion_create_params import CompletionCreateParamsBase as TextBase

from penstock.api.apis.anthropic import MessagesRequest
from penstock.api.apis.responses import ResponsesRequest
from penstock.api.completions import as_api_error
from penstock.api.openai_format import ChatFormat, Prompts, TextFormat, Whole, encode, event, usage_json
from penstock.api.pd_router import BOOTSTRAP, Routed
from penstock.api.protocol.openai import (
    ChatRequest,
    CompletionRequest,
    bad_request,
    parse,
)
from penstock.config.base.errors import RequestError
from penstock.config.request.params import SamplingParams
from penstock.config.request.selection import Selection
from penstock.engine.client.client import checked_limits
from penstock.engine.client.generation import ChoicePiece, Ended, Usage
from penstock.engine.wire import EngineReady, TokenLogprob
from penstock.text.chat import plain_message
from penstock.text.tools.asked import AnswerForm

USER = [{"role": "user", "content": "hi"}]


def chat(**fields):
    return parse(json.dumps({"messages": USER, **fields}).encode(), ChatRequest)


def text(**fields):
    return parse(json.dumps({"prompt": "hi", **fields}).encode(), CompletionRequest)


def refused(call, *args, **fields):
    with pytest.raises(RequestError) as e:
        call(*args, **fields).params()
    return e.value


# ---------------------------------------------------------------- fields
@pytest.mark.parametrize("kind, official", [(ChatRequest, ChatBase), (CompletionRequest, TextBase)])
def test_every_field_of_the_official_client_is_known(kind, official):
    missing = set(official.__annotations__) - set(kind.__struct_fields__)
    assert not missing
    assert "stream" in kind.__struct_fields__


@pytest.mark.parametrize("call", [chat, text])
def test_a_budget_of_kv_is_a_field_of_ours(call):
    assert call(sparse_top_k=0).params().sparse_top_k == 0
    assert call(sparse_top_k=512).params().sparse_top_k == 512
    assert call().params().sparse_top_k is None
    assert [call(speculative_tokens=n).params().speculative_tokens for n in (0, 2, None)] == [0, 2, None]
    assert refused(call, speculative_tokens=-1).param == "speculative_tokens"
    assert refused(call, sparse_top_k=-1).param == "sparse_top_k"


def test_usage_says_what_selected_units_were_read_from_if_any_were():
    assert "completion_tokens_details" not in usage_json(Usage(1, 2))
    assert usage_json(Usage(1, 2, kv_reads={"hot_hits": 7}))["completion_tokens_details"] == {
        "kv_reads": {"hot_hits": 7}}
    assert usage_json(Usage(1, 2, draft_tokens=5, accepted_draft_tokens=3))["completion_tokens_details"] == {
        "draft_tokens": 5, "accepted_draft_tokens": 3}


@pytest.mark.parametrize("call", [chat, text])
def test_forcing_tokens_is_not_for_http(call):
    with pytest.raises(RequestError, match="forced is not a field of this API") as e:
        call(forced=[1, 2])
    assert e.value.param == "forced"


@pytest.mark.parametrize("kind, fields, param, allowed", [
    (ChatRequest, {"messages": [], "tools": [{"type": "custom"}]}, "tools[0].type", "'function'"),
    (ChatRequest, {"messages": [], "reasoning_effort": "huge"}, "reasoning_effort", "'max', 'medium', "),
    (ResponsesRequest, {"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
    (MessagesRequest, {"max_tokens": 1, "messages": [], "tools": [
        {"type": "custom", "name": "a", "input_schema": {}}, {"type": "bash_20250124", "name": "bash"}]},
     "tools[1].type", "'custom'"),
    (MessagesRequest, {"max_tokens": 1, "messages": [], "tool_choice": {"type": "required"}},
     "tool_choice.type", "'any', 'auto', 'none', 'tool'")])
def test_a_value_outside_a_fixed_set_is_refused_with_those_allowed(kind, fields, param, allowed):
    said = f"{re.escape(param)}: invalid enum value .*: allowed: .*{allowed}"
    with pytest.raises(RequestError, match=said) as e:
        parse(json.dumps(fields).encode(), kind)
    assert e.value.param == param


@pytest.mark.parametrize("name, value", [
    ("functions", [{}]), ("function_call", "auto"),
    ("audio", {}), ("modalities", ["audio"]),
    ("reasoning_effort", "enormous"), ("verbosity", "loud"),
    ("chat_template", "{{ x }}"), ("web_search_options", {}),
    ("logprobs", 1), ("nonsense", None), ("regex", 1), ("return_hidden_states", 0),
    ("stream_options", {"include_usage": True}), ("log_metrics", False), ("log_metrics", 1),
    ("separate_reasoning", "yes"), ("stream_reasoning", False),
])
def test_a_field_that_is_not_supported_is_named(name, value):
    error = refused(chat, **{name: value})
    assert error.param == name and name in str(error)


@pytest.mark.parametrize("fields, advice", [
    ({"functions": [{"name": "f"}]}, "functions is not supported: use tools, each {"),
    ({"function_call": {"name": "f"}}, "function_call is not supported: use tool_choice")])
def test_older_names_of_tools_say_what_to_use(fields, advice):
    assert advice in str(refused(chat, **fields))


@pytest.mark.parametrize("message, advice", [
    ({"role": "function", "name": "f", "content": "rain"}, "use tool, with tool_call_id"),
    ({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
     "use tool_calls")])
def test_older_messages_of_tools_say_what_to_use(message, advice):
    with pytest.raises(RequestError, match=advice):
        plain_message(message, 0)


@pytest.mark.parametrize("fields", [
    {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "function_call": None},
    {"response_format": {"type": "text"}, "store": False, "modalities": ["text"], "n": 1},
    {"logprobs": False, "top_logprobs": 0, "user": "u", "safety_identifier": "s", "metadata": {}},
    {"model": None, "log_metrics": True, "separate_reasoning": True, "no_stop_trim": False,
     "return_hidden_states": False, "stream_reasoning": True, "lora_path": None, "regex": None},
    {"separate_reasoning": False, "log_metrics": None, "stream_reasoning": None},
    {"metadata": {"a": "b"}, "store": True, "verbosity": "low"},
])
def test_neutral_values_and_what_routers_fill_in_are_accepted(fields):
    assert chat(**fields).params() == SamplingParams(max_tokens=None)


def test_what_is_asked_of_a_prompt_reaches_the_sampling_parameters():
    def asked(**fields):
        got = text(**fields).params()
        return got.max_tokens, got.logprobs, got.prompt_logprobs, got.prompt_logprobs_start
    assert asked(echo=True, logprobs=2, max_tokens=0) == (1, None, 2, 0)
    assert asked(echo=True, logprobs=0, max_tokens=3, prompt_logprobs=5) == (3, 0, 5, 0)
    assert asked(prompt_logprobs=0, prompt_logprobs_start=4, max_tokens=0) == (1, None, 0, 4)
    assert asked(echo=True, max_tokens=0) == (1, None, None, 0)
    assert chat(prompt_logprobs=1).params().prompt_logprobs == 1


def test_fields_reach_the_sampling_parameters():
    params = chat(
        temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, n=2, seed=7, stop="a", max_tokens=9,
        min_tokens=2, presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.5,
        logit_bias={"5": -100}, stop_token_ids=[3], ignore_eos=True, priority=-1,
        skip_special_tokens=False, include_stop_str_in_output=True, logprobs=True, top_logprobs=3,
    ).params()
    assert params == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, n=2, seed=7, stop=("a",), max_tokens=9,
        min_tokens=2, presence_penalty=1.0, frequency_penalty=-1.0, repetition_penalty=1.5,
        logit_bias={5: -100.0}, stop_token_ids=(3,), ignore_eos=True, priority=-1,
        skip_special_tokens=False, include_stop_str_in_output=True, logprobs=3)
    assert set(SamplingParams.__struct_fields__) == set(params.__struct_fields__)


def test_defaults_are_openais():
    assert chat().params().max_tokens is None and text().params().max_tokens == 16
    assert chat(max_completion_tokens=5).params().max_tokens == 5
    assert refused(chat, max_completion_tokens=5, max_tokens=6).param == "max_tokens"
    assert chat(logprobs=True).params().logprobs == 0
    assert text(logprobs=2, stop=["a", "b"]).params().stop == ("a", "b")


@pytest.mark.parametrize("fields, param", [
    ({"temperature": -1}, "temperature"), ({"temperature": "hot"}, "temperature"),
    ({"n": 0}, "n"), ({"n": 129}, "n"), ({"n": 1.5}, "n"), ({"max_tokens": 0}, "max_tokens"),
    ({"stop": ["a"] * 17}, "stop"), ({"stop": "a" * 1025}, "stop"),
    ({"metadata": {"a": 1}}, "metadata[...]"),
    ({"metadata": []}, "metadata"), ({"store": 0}, "store"), ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1" * 5000: 1}}, "logit_bias"), ({"seed": 2**64}, "seed"),
    ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": None}, "messages"), ({"messages": "hi"}, "messages"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"cache_salt": ""}, "cache_salt"), ({"priority": 2**40}, "priority"),
])
def test_wrong_values_name_their_field(fields, param):
    assert refused(chat, **fields).param == param


@pytest.mark.parametrize("call", [chat, text])
@pytest.mark.parametrize("huge", [2**70, -2**70])
def test_every_number_has_bounds_and_names_itself(call, huge):
    kind = ChatRequest if call is chat else CompletionRequest
    hints = {name: str(hint) for name, hint in typing.get_type_hints(kind).items()}
    names = [n for n, hint in hints.items() if hint in ("int | None", "float | None")]
    assert {"top_k", "max_tokens", "min_tokens", "temperature", "seed"} <= set(names)
    for name in set(names) - set(BOOTSTRAP):
        others = {"logprobs": True} if name == "top_logprobs" else {}
        shown = "sparse_top_k" if name == "top_k_tokens" else name          # its old name
        assert refused(call, **{name: huge}, **others).param == shown
    for name in set(names) & set(BOOTSTRAP):            # by who knows what a room is
        for routed in (Routed("sglang", "decode"), Routed("sglang", "prefill", "h:9"), Routed()):
            request = call(**{"bootstrap_host": "h", "bootstrap_port": 9, "bootstrap_room": 1, name: huge})
            with pytest.raises(RequestError) as e:
                routed.room(request)
            assert e.value.param == name or (routed == Routed() and e.value.param in BOOTSTRAP)


@pytest.mark.parametrize("wrong", [0, -1])
def test_the_maximum_that_was_given_is_blamed(wrong):
    error = refused(chat, max_completion_tokens=wrong)
    assert error.param == "max_completion_tokens" and "max_completion_tokens is" in str(error)
    assert refused(chat, max_tokens=wrong).param == "max_tokens"


@pytest.mark.parametrize("body", [
    b"", b"{", b"[]", b"null", b'{"messages": [', b"\xff", b'{"messages": "\xff"}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b"[" * 100_000,
    b'{"messages": [], "seed": ' + b"9" * 10_000 + b"}", b'{"messages": [], "temperature": NaN}',
    b'{"messages": [], "temperature": 1e999}', b'{"a":' * 5000 + b"1" + b"}" * 5000,
])
def test_bodies_that_are_no_request_are_request_errors(body):
    with pytest.raises(RequestError):
        parse(body, ChatRequest).params()


@given(st.binary(max_size=60))
def test_any_bytes_are_a_request_or_a_request_error(body):
    for kind in (ChatRequest, CompletionRequest):
        with pytest.raises(RequestError):
            parse(body, kind)                        # 60 random bytes are never a request


@given(st.dictionaries(
    st.sampled_from(sorted(CompletionRequest.__struct_fields__)),
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
                 lambda inner: st.lists(inner, max_size=3)
                 | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=5)))
def test_any_value_of_a_known_field_is_taken_or_refused(fields):
    try:
        request = parse(msgspec.json.encode(fields), CompletionRequest)
        request.params()
        request.prompts(8)
    except RequestError:
        pass


# ---------------------------------------------------------------- prompts
def test_the_four_forms_of_a_prompt():
    for prompt, found in (("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]),
                          ([[1], [2, 3]], [[1], [2, 3]])):
        assert text(prompt=prompt).prompts(8) == found


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], [1, "a"], ["a", [1]], [[1], 2], ["a"] * 9])
def test_other_prompts_are_refused(prompt):
    with pytest.raises(RequestError) as e:
        text(prompt=prompt).prompts(8)
    assert e.value.param == "prompt"


@pytest.mark.parametrize("prompt", [1, None, {}, [[True]], [["a"]], [1.5], [None]])
def test_prompts_of_another_type_are_refused(prompt):
    with pytest.raises(RequestError) as e:
        text(prompt=prompt)
    assert e.value.param.startswith("prompt")


def test_completion_fields_that_are_not_supported():
    assert refused(text, best_of=2).param == "best_of"
    assert text(best_of=2, n=2, suffix=None).params().n == 2
    assert refused(text, suffix="x").param == "suffix"
    assert refused(text, prompt_logprobs_start=3).param == "prompt_logprobs_start"
    assert refused(text, max_tokens=0).param == refused(text, max_tokens=0, logprobs=1).param == "max_tokens"
    assert refused(text, echo=True, max_tokens=0, logprobs=21).param in ("logprobs", "prompt_logprobs")
    assert refused(text, logprobs=21).param == "logprobs"


# ---------------------------------------------------------------- answers
PIECES = {65: b"A", 66: b" b", 67: b"\xe2\x98", 68: b"\x83", 69: b""}


def piece(tokens, shown, finish=None, index=0):
    entry = [TokenLogprob(-0.5, 1, [(65, -0.25), (t, -0.5)]) for t in tokens]
    return ChoicePiece(index, shown, tokens, entry, list(range(len(tokens))), finish)


def chat_format(**fields):
    return ChatFormat(**{**dict(model="m", token_bytes=PIECES.__getitem__, logprobs=True,
                                include_usage=True, return_token_ids=False, prompts=Prompts([[1]], 1)),
                         **fields})


def text_format(**fields):
    return TextFormat(**{**dict(model="m", token_bytes=PIECES.__getitem__, logprobs=True,
                                include_usage=False, return_token_ids=True, prompts=Prompts([[1]], 1)),
                         **fields})


def strict(model: type, value: typing.Any):
    """Through JSON into the official client's own type."""
    return model.model_validate(json.loads(encode(value)), strict=True)


def test_a_whole_chat_answer_is_the_official_clients_type():
    whole = Whole()
    whole.add(piece([65, 67], "A"))
    whole.add(piece([68], "☃", "stop"))
    answer = chat_format().whole([whole], Usage(3, 3, 2, {"hbm": 2}))
    got = strict(openai.types.chat.ChatCompletion, answer)
    assert got.choices[0].message.content == "A☃" and got.choices[0].finish_reason == "stop"
    entries = got.choices[0].logprobs.content
    assert [e.bytes for e in entries] == [[65], [0xE2, 0x98], [0x83]]
    assert entries[1].top_logprobs[0].token == "A" and entries[1].logprob == -0.5
    assert (got.usage.total_tokens, got.usage.prompt_tokens_details.cached_tokens) == (6, 2)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens_details"] == {"device": 2}


def test_chat_chunks_are_the_official_clients_type_and_keep_every_logprob():
    out = chat_format()
    pieces = [piece([65], "A"), piece([67], ""), piece([68], "☃"), piece([69], "", "length")]
    chunks = [*out.openings(Usage()), *(c for p in pieces for c in out.chunks(p)),
              *out.endings(Usage(3, 4))]
    got = [strict(openai.types.chat.ChatCompletionChunk, c) for c in chunks]
    deltas = [c.choices[0].delta for c in got[:-1]]
    assert deltas[0].role == "assistant"
    assert "".join(d.content or "" for d in deltas) == "A☃"
    assert [e.token for c in got[:-1] if c.choices[0].logprobs
            for e in c.choices[0].logprobs.content] == ["A", "�", "�", ""]
    assert [c.choices[0].finish_reason for c in got[:-1]][-2:] == [None, "length"]
    assert not got[-1].choices and got[-1].usage.completion_tokens == 4
    assert all(c["usage"] is None for c in chunks[:-1])


def test_completions_have_the_older_logprobs_with_bytes_escaped():
    whole = Whole()
    whole.add(piece([65, 67, 68], "A☃", "length"))
    out = text_format(prompts=Prompts([[65]], 1, ["Q"]))
    got = strict(openai.types.Completion, out.whole([whole], Usage(1, 3)))
    assert got.choices[0].text == "QA☃"
    assert got.choices[0].logprobs.tokens == ["A", "bytes:\\xe2\\x98", "bytes:\\x83"]
    assert got.choices[0].logprobs.top_logprobs[1] == {"A": -0.25, "bytes:\\xe2\\x98": -0.5}
    assert got.choices[0].logprobs.text_offset == [1, 2, 3]
    assert got.choices[0].model_extra["token_ids"] == [65, 67, 68]


def test_infinite_logprobs_are_finite_json():
    whole = Whole(tokens=[65], logprobs=[TokenLogprob(-math.inf, 1, [(65, -math.inf)])], offsets=[0])
    for out in (chat_format(), text_format()):
        assert b"-9999.0" in encode(out.whole([whole], Usage()))


def test_a_grammar_that_became_too_complex_is_the_clients_fault():
    error = as_api_error(Ended("abort", "at output token 8: its grammar became too complex"))
    assert (error.status, error.body["error"]["code"]) == (400, "grammar_too_complex")
    assert error.body["error"]["type"] == "invalid_request_error" and "retry-after" not in error.headers


def test_a_model_fault_is_a_500_with_its_reason_and_no_advice_to_retry():
    reason = "the model's logits for output token 3 are not finite: its weights are damaged"
    told = as_api_error(Ended("abort", reason))
    assert told.status == 500 and not told.headers and told.body["error"]["message"] == reason
    assert told.body["error"]["type"] == "server_error"
    asked_for = as_api_error(Ended("abort", ""))
    assert asked_for.status == 503 and "retry-after" in asked_for.headers


def test_the_code_of_an_error_is_not_guessed_from_its_text():
    assert bad_request(RequestError("the context is odd")).body["error"]["code"] is None
    ready = EngineReady(pid=1, vocab_size=10, max_model_len=4, info={})
    with pytest.raises(RequestError) as e:
        checked_limits(ready, [1] * 4, SamplingParams())
    assert bad_request(e.value).body["error"]["code"] == "context_length_exceeded"


def test_a_request_that_reads_all_of_its_kv_is_held_to_the_device():
    """16 tokens of a context of 40: nothing is cut off in silence, and short or selecting ones may pass."""
    selection = Selection(selector="bounds", version=1, unit=2, budget=12, sinks=2, window=2)
    ready = EngineReady(pid=1, vocab_size=10, max_model_len=40, info={}, selection=selection, dense_len=16)

    def limit(prompt: int, **given) -> int:
        return checked_limits(ready, [1] * prompt, SamplingParams(**given))
    for prompt, max_tokens in ((10, 7), (16, 1), (30, None)):
        with pytest.raises(RequestError, match=r"length is 16 tokens .* of at most 12, may have 40") as e:
            limit(prompt, max_tokens=max_tokens, sparse_top_k=0)
        assert e.value.code == "context_length_exceeded" and e.value.overflow == (
            prompt, max_tokens if prompt == 10 else 0, 16)
        assert e.value.param == ("max_tokens" if prompt == 10 else "prompt")
    assert limit(10, max_tokens=6, sparse_top_k=0) == limit(10, max_tokens=None, sparse_top_k=0) == 6
    assert limit(10, max_tokens=None) == 30 and limit(30, max_tokens=9, sparse_top_k=10) == 9
    assert limit(4, max_tokens=3) == 3             # short: it reads all, and fits


def test_an_event_is_one_line():
    data = event({"a": "x\n\u2028y\r"})
    assert data.startswith(b"data: {") and data.endswith(b"}\n\n")
    assert data.count(b"\n") == 2 and b"\r" not in data


@pytest.mark.parametrize("body", [
    {"logit_bias": {str(i): 1 for i in range(300_000)}}, {"stop_token_ids": list(range(500_000))},
    {"stop": ["x" * 4_000_000]}, {"stop": ["x"] * 1_000_000}, {"x" * 1_000_000: 1}, {"n": "x" * 1_000_000},
    {"messages": [{"role": "x" * 1_000_000}]}, {"messages": [{"role": "user", "x" * 1_000_000: 1}]},
    {"messages": [{"role": "user", "content": [{"type": "x" * 1_000_000}]}]}, {"verbosity": "x" * 1_000_000},
], ids=lambda b: next(iter(b))[:9])
def test_no_error_echoes_a_large_value(body):
    with pytest.raises(RequestError) as e:
        request = parse(json.dumps({"messages": USER, **body}).encode(), ChatRequest)
        request.params().checked()
        [plain_message(m, i) for i, m in enumerate(request.messages)]
    assert len(str(e.value)) < 300 and len(e.value.param or "") < 200 and "x" * 81 not in str(e.value)


@pytest.mark.parametrize("make", [
    lambda: chat_format(logprobs=False),
    lambda: chat_format(logprobs=False, include_usage=False, prompts=Prompts([[1]], 2)),
    lambda: text_format(logprobs=False, return_token_ids=False),
    lambda: chat_format(logprobs=False, asked=AnswerForm(reasoning=True)), chat_format, text_format])
def test_an_event_made_around_text_is_the_one_made_whole(make):
    texts = ['A"\\\n', "\0", "☃", "", "B", " </thi", "nk>", "\n\nyes"]
    pieces = [piece([65], shown, index=n % 2) for n, shown in enumerate(texts)]
    pieces += [piece([69], "end", "stop"), piece([69], "", "length", index=1)]
    quick, slow = make(), make()
    slow.id, slow.created = quick.id, quick.created
    num_quick = 0
    for p in pieces:
        whole = b"".join(map(event, slow.chunks(p)))
        made = quick.event(p)
        num_quick += made is not None
        assert (b"".join(map(event, quick.chunks(p))) if made is None else made) == whole
    assert not num_quick if quick.logprobs else num_quick >= 4
