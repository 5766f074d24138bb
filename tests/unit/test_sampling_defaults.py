"""generation_config.json: the sampling values of requests that name none."""
from __future__ import annotations

import json

import pytest
from scripted import Scripted

from penstock.config.base.errors import ConfigError
from penstock.config.request.defaults import params, sampling_of
from penstock.config.request.params import SamplingParams
from penstock.config.settings.tree import ModelConfig
from penstock.model.weights.locate import ModelFiles
from penstock.text.model_text import sampling_defaults

FILE = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1,
        "do_sample": True, "eos_token_id": [1, 2], "max_new_tokens": 5}
KEPT = {k: FILE[k] for k in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
USER = [{"role": "user", "content": "Weather?"}]
ASKS = {"/v1/chat/completions": {"messages": USER}, "/v1/completions": {"prompt": "x"},
        "/v1/responses": {"input": USER}, "/v1/messages": {"messages": USER, "max_tokens": 5},
        "/generate": {"text": "x"}}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(FILE))
    return ModelFiles(name="m", folder=tmp_path, load_format="dummy")


@pytest.fixture(scope="module")
def server():
    made = Scripted("{% for m in messages %}{{ m.content }}{% endfor %}", sampling=KEPT)
    made.says = "Rain."
    yield made
    made.close()


def test_the_models_file_is_read_unless_another_is_named(folder, tmp_path):
    def of(**fields):
        return sampling_defaults(ModelConfig(model="m", **fields), folder)

    assert of() == of(generation_config="auto") == KEPT
    assert of(generation_config="none") == of(generation_config="vllm") == {}
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"temperature": null, "top_p": 0.5}')
    assert of(generation_config=str(other)) == {"top_p": 0.5}
    assert of(override_generation_config='{"top_k": 3}') == {**KEPT, "top_k": 3}
    assert of(override_generation_config='{"top_k": 3}', generation_config="none") == {"top_k": 3}
    with pytest.raises(ConfigError, match="missing has no generation_config"):
        of(generation_config=str(tmp_path / "missing"))
    (other / "generation_config.json").write_text('{"top_p": 0.0}')
    with pytest.raises(ConfigError, match=r"top_p is 0\.0: .*, or start with --generation-config none"):
        of(generation_config=str(other))
    with pytest.raises(ConfigError, match="nonsense"):
        of(override_generation_config='{"nonsense": 3}')


@pytest.mark.parametrize("wrong", [{"temperature": "hot"}, {"top_p": 0}, {"top_k": 1.5}, {"min_p": True},
                                   {"temperature": -1}, {"repetition_penalty": 0}])
def test_a_wrong_value_is_refused_with_its_file(wrong):
    with pytest.raises(ConfigError, match=f"a.json: {next(iter(wrong))}"):
        sampling_of(wrong, "a.json")


@pytest.mark.parametrize("path", ASKS)
def test_a_request_that_names_none_has_the_models_values(server, path):
    assert server.post(path, **ASKS[path]).status_code == 200
    assert {k: getattr(server.params, k) for k in KEPT} == KEPT


@pytest.mark.parametrize("path", ASKS)
def test_a_requests_own_value_wins(server, path):
    own = {"temperature": 0, "top_p": 1.0}
    body = {**ASKS[path], **({"sampling_params": own} if path == "/generate" else own)}
    assert server.post(path, **body).status_code == 200
    assert (server.params.temperature, server.params.top_p, server.params.top_k) == (0, 1.0, 20)


def test_the_library_has_them_for_requests_without_parameters():
    assert params(KEPT) == SamplingParams(**KEPT) and params({}) == SamplingParams()


def test_a_response_shows_what_it_was_sampled_with(server):
    told = server.post("/v1/responses", **ASKS["/v1/responses"]).json()
    assert (told["temperature"], told["top_p"]) == (0.6, 0.95)
