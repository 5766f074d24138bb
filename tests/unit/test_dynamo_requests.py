"""What a request of Dynamo's frontend means here, and what Dynamo reads of an answer."""
from __future__ import annotations

from array import array

import pytest

from penstock.cli.main import main, parsed
from penstock.config.base.errors import ConfigError, RequestError
from penstock.config.request.params import SamplingParams
from penstock.config.request.scores import Scores
from penstock.dynamo.request import chunk, last, prompt_logprobs, read
from penstock.engine.client.generation import ChoicePiece, Usage
from penstock.engine.wire import BootstrapRoom, TokenLogprob

DEFAULTS = SamplingParams(temperature=0.6, top_k=20)
# As `dynamo.frontend` 1.6.1 sends one: what the client does not name is null.
SENT = {
    "model": "tiny", "token_ids": [5, 6, 7], "eos_token_ids": [95], "mdc_sum": "5b", "annotations": [],
    "stop_conditions": {"max_tokens": 4, "stop": ["ab"], "stop_token_ids": None, "stop_token_ids_visible": None,
                        "stop_token_ids_hidden": [95], "min_tokens": None, "ignore_eos": None,
                        "max_thinking_tokens": None},
    "sampling_options": {
        "n": None, "best_of": None, "presence_penalty": None, "frequency_penalty": None, "repetition_penalty": None,
        "temperature": 0.0, "top_p": None, "top_k": None, "min_p": None, "use_beam_search": None,
        "length_penalty": None, "seed": 5, "include_stop_str_in_output": None, "guided_decoding": None},
    "output_options": {"logprobs": 2, "prompt_logprobs": None, "skip_special_tokens": None, "formatted_prompt": None,
                       "return_tokens_as_token_ids": None},
    "routing": {"dp_rank": 1, "cache_salt": "x", "priority_jump": 3.0, "priority": 3},
    "router_config_override": None, "extra_args": {"nvext": {"cache_salt": "x"}}}


def sent(**groups: object) -> dict:
    """The same with other values in its groups, or other groups."""
    return {**SENT, **{name: {**SENT[name], **value} if isinstance(SENT.get(name), dict) else value
                       for name, value in groups.items()}}


def test_a_request_has_the_clients_values_and_the_models_elsewhere() -> None:
    asked = read(SENT, DEFAULTS)
    assert asked.params == SamplingParams(max_tokens=4, temperature=0.0, top_k=20, seed=5, logprobs=2, priority=-3)
    assert (asked.prompt, asked.eos_ids, asked.rank, asked.salt) == ([5, 6, 7], (95,), 1, "x")
    assert (asked.room, asked.handoff) == (None, None)
    bare = read({"token_ids": [1]}, DEFAULTS)
    assert bare.params.max_tokens is None and bare.params.temperature == 0.6 and bare.eos_ids == ()


@pytest.mark.parametrize(("agent", "found"), [
    (None, ("", False)), ({"session_id": None, "session_final": None}, ("", False)),
    ({"session_id": " é "}, ("é", False)),
    ({"session_id": "run-4", "parent_session_id": "a", "session_final": True}, ("run-4", True))])
def test_a_session_is_what_dynamos_headers_have_named(agent, found) -> None:
    asked = read(sent(agent_context=agent), DEFAULTS)
    assert (asked.session, asked.ends_session) == found


def test_ids_that_stop_come_from_all_three_lists() -> None:
    asked = read(sent(stop_conditions={"stop_token_ids": [1], "stop_token_ids_visible": [2],
                                       "stop_token_ids_hidden": [3], "ignore_eos": True}), DEFAULTS)
    assert (asked.params.stop_token_ids, asked.eos_ids, asked.params.ignore_eos) == ((1, 2), (3,), True)


@pytest.mark.parametrize(("guided", "kind", "text"), [
    ({"regex": "a+", "json": None, "backend": "xgrammar"}, "regex", "a+"), ({"json": {"type": "object"}},
     "json_schema", '{"type":"object"}'), ({"choice": ["a", "b"]}, "choice", '["a","b"]'),
    ({"grammar": "root ::= [a]"}, "grammar", "root ::= [a]")])
def test_guided_decoding_is_a_grammar(guided, kind, text) -> None:
    grammar = read(sent(sampling_options={"guided_decoding": guided}), DEFAULTS).params.grammar
    assert grammar is not None and (grammar.kind, grammar.text) == (kind, text)


@pytest.mark.parametrize(("groups", "named"), [
    ({"sampling_options": {"n": 2}}, "n is 2"), ({"sampling_options": {"best_of": 3}}, "best_of is 3"),
    ({"sampling_options": {"use_beam_search": True}}, "use_beam_search"),
    ({"sampling_options": {"length_penalty": 2.0}}, "length_penalty"),
    ({"sampling_options": {"temperature": "hot"}}, "temperature"), ({"sampling_options": {"top_p": 7}}, "top_p is 7"),
    ({"sampling_options": {"a_new_option": 1}}, "a_new_option"),
    ({"sampling_options": {"guided_decoding": {"structural_tag": "{}"}}}, "structural_tag"),
    ({"sampling_options": {"guided_decoding": {"regex": "a", "choice": ["b"]}}}, "give one"),
    ({"stop_conditions": {"max_thinking_tokens": 9}}, "max_thinking_tokens"),
    ({"stop_conditions": {"min_tokens": 9}}, "min_tokens"), ({"output_options": {"logprobs": 99}}, "logprobs"),
    ({"multi_modal_data": {"image_url": ["x"]}}, "multi_modal_data"),
    ({"bootstrap_info": {"bootstrap_room": 1}}, "--disaggregation-mode")])
def test_what_has_no_effect_here_is_refused_by_name(groups, named) -> None:
    with pytest.raises(RequestError, match=named):
        read(sent(**groups), DEFAULTS)


INFO = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 9001, "bootstrap_room": 77, "handoff_id": "a"}


def test_prefill_and_decode_worker_meet_in_the_routers_room() -> None:
    short = sent(bootstrap_info=INFO, stop_conditions={"max_tokens": 1, "min_tokens": 3})
    prefill = read(short, DEFAULTS, "prefill", "10.0.0.1:9001")
    assert (prefill.room, prefill.handoff) == (BootstrapRoom(77), INFO)
    assert prefill.params.max_tokens == 3, "both choose the first token alike"
    decode = read(sent(bootstrap_info=INFO), DEFAULTS, "decode")
    assert decode.room == BootstrapRoom(77, address="10.0.0.1:9001") and decode.handoff is None


def test_without_a_room_the_prefill_worker_makes_one_and_holds_the_pages() -> None:
    prefill = read(SENT, DEFAULTS, "prefill", "10.0.0.1:9001")
    assert prefill.room is not None and prefill.room.holds
    decode = read(sent(prefill_result={"disaggregated_params": prefill.handoff}), DEFAULTS, "decode")
    assert decode.room == BootstrapRoom(prefill.room.number, address="10.0.0.1:9001")
    assert read(SENT, DEFAULTS, "decode").room is None, "the router has left the prompt to it"


@pytest.mark.parametrize("wrong", [{"bootstrap_host": "unix"}, {"bootstrap_port": 0}, {"bootstrap_room": -1}])
def test_a_room_elsewhere_is_refused(wrong) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        read(sent(bootstrap_info=INFO | wrong), DEFAULTS, "decode")


def test_a_probe_meets_no_other_worker() -> None:
    assert read({"token_ids": [1], "_HEALTH_CHECK": True}, DEFAULTS, "decode").room is None


def test_an_answers_chunks_have_ids_scores_and_at_the_end_the_usage() -> None:
    piece = ChoicePiece(0, "", [7, 8], [TokenLogprob(-1.0, 1, [(7, -1.0), (9, -2.0)]), TokenLogprob(-3.0, 5, [])], [])
    found = chunk(piece, str)
    assert (found["token_ids"], found["log_probs"]) == ([7, 8], [-1.0, -3.0])
    assert [[(e["token_id"], e["rank"], e["token"]) for e in top] for top in found["top_logprobs"]] == [
        [(7, 1, "7"), (9, 2, "9")], [(8, 5, "8")]]
    assert chunk(ChoicePiece(0, "", [7], [], []), str) == {"token_ids": [7], "index": 0}
    usage = Usage(prompt_tokens=20, completion_tokens=2, cached_tokens=16, cached_by_tier={"dram": 16})
    end = last("stop", usage, [None])
    assert end["finish_reason"] == "stop" and end["engine_data"] == {"prompt_logprobs": [None]}
    assert end["completion_usage"]["prompt_tokens_details"]["cached_tokens_details"] == {"host": 16}


def test_logprobs_of_a_prompt_are_by_token_id() -> None:
    scores = Scores(1, array("f", [-1.0]).tobytes(), array("i", [2]).tobytes(), array("i", [4]).tobytes(),
                    array("f", [-.5]).tobytes())
    assert prompt_logprobs([5, 6], scores, str) == [None, {
        "4": {"logprob": -.5, "rank": 1, "decoded_token": "4"},
        "6": {"logprob": -1.0, "rank": 2, "decoded_token": "6"}}]


def test_flags_are_those_of_a_worker() -> None:
    found = parsed("dynamo", ["demo", "--dp", "2", "--drain-s", "5", "--discovery-backend", "file"])
    assert found is not None and found[0] is not None
    assert (found[0].device.dp, found[0].server.drain_s, found[1].discovery_backend) == (2, 5.0, "file")
    assert (found[1].namespace, found[1].endpoint, found[1].component) == ("dynamo", "generate", None)
    decode = parsed("dynamo", ["demo", "--disaggregation-mode", "decode"])
    assert decode is not None and decode[0] is not None and decode[0].is_routed
    for flag in ("--port", "--api-key", "--kv-events-config", "--prefill-replicas", "--tool-call-parser"):
        with pytest.raises(ConfigError, match=rf"{flag}.* penstock serve"):
            parsed("dynamo", ["demo", flag, "1"])


def test_without_the_package_the_error_says_what_to_install(monkeypatch, capsys) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["dynamo", "demo", "--discovery-backend", "file"]) == 2
    assert "ai-dynamo" in capsys.readouterr().err
