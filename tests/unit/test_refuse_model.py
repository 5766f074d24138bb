"""Every entry of OF_MODEL: a config that trips it alone for some model, and a neighbour that passes."""
from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.config.base.errors import ConfigError
from penstock.config.settings.cli import from_options
from penstock.config.settings.refuse_model import OF_MODEL, WORDS, ModelFacts, check_model

DENSE = ModelFacts(name="tiny", load_format="safetensors", layers=4)
LATENT = replace(DENSE, topk=16, kv_heads=False)
STATES = replace(DENSE, state_bytes=1 << 16, state_parts=2)
ALL_BUT = {"sparse_top_k": 512, "sparse_dense_layers": ["0", "1", "2"]}

# One row for every entry of OF_MODEL, in its order: a model, options refused for it, options at the edge.
CASES: tuple[tuple[ModelFacts, dict[str, object], dict[str, object]], ...] = (
    (replace(DENSE, context=512), {"max_model_len": 513}, {"max_model_len": 512}),
    (replace(DENSE, quantised="awq"), {"quantization": "gptq"}, {"quantization": "awq"}),
    (DENSE, {"dtype": "gguf"}, {"dtype": "bfloat16"}),
    (replace(LATENT, topk=0), {"sparse_top_k": 512}, {}),
    (LATENT, {"sparse_top_k": 512}, {"sparse_top_k": 16}),
    (LATENT, {"sparse_block_size": 4}, {"sparse_block_size": 8}),
    (replace(DENSE, topk=2048, block=128), {"page_size": 16}, {}),
    (LATENT, {"sparse_dense_layers": ["0"]}, {}),
    (LATENT, {"hot_buffer_tokens": 15}, {"hot_buffer_tokens": 16}),
    (DENSE, {"sparse_top_k": 512, "sparse_dense_layers": ["0", "4"]},
     {"sparse_top_k": 512, "sparse_dense_layers": ["0", "3"]}),
    (DENSE, {"sparse_top_k": 512, "sparse_dense_layers": ["0", "1", "2", "3"]}, ALL_BUT),
    (DENSE, {"host_decode": "always"}, {"host_decode": "off"}),
    (DENSE, {"hot_buffer_tokens": 512}, {"hot_buffer_tokens": 512, "sparse_top_k": 512}),
    (DENSE, {"sparse_metadata_dtype": "fp8"}, {"sparse_metadata_dtype": "fp8", "sparse_top_k": 512}),
    (DENSE, {"gpu_layers": 3}, {"gpu_layers": 4}),
    (DENSE, {"pp": 5}, {"pp": 4}),
    (replace(DENSE, tail=3), {"pp": 3}, {"pp": 2, "pp_layers": ["1", "3"]}),
    (replace(DENSE, tail=3), {"pp": 2}, {"pp": 2, "pp_layers": ["1", "3"]}),
    (replace(DENSE, heads=3), {"tp": 4}, {"tp": 3}),
    (DENSE, {"tp": 2, "ep": 0}, {"tp": 2}),
    (replace(DENSE, experts=2), {"tp": 3, "ep": 3}, {"tp": 4, "ep": 2}),
    (DENSE, {"state_interval": 512}, {}),
    (DENSE, {"window_interval": 512}, {}),
    (DENSE, {"speculative_method": "mtp"}, {"speculative_method": "ngram"}),
    (STATES, {"tp": 3}, {"tp": 2}),
    (replace(STATES, state_bytes=1 << 20), {"disaggregation_mode": "prefill"}, {}),
)


def test_every_refusal_has_a_case() -> None:
    assert len(CASES) == len(OF_MODEL)


@pytest.mark.parametrize("index", range(len(OF_MODEL)))
def test_refusal_trips_alone_and_not_at_its_edge(index: int) -> None:
    model, bad, good = CASES[index]
    config = from_options("tiny", bad)
    assert [r for r in OF_MODEL if r.when(config, model)] == [OF_MODEL[index]]
    with pytest.raises(ConfigError) as e:
        check_model(config, model)
    assert str(e.value).startswith("--") and "\n" not in str(e.value) and "{" not in str(e.value)
    check_model(from_options("tiny", good), model)
    assert OF_MODEL[index].why.format_map(WORDS)


@pytest.mark.parametrize(("options", "said"), [
    ({"sparse_top_k": 512, "sparse_dense_layers": ["4"]},
     "--sparse-dense-layers 4: this model has layers 0 to 3"),
    ({"pp": 2, "pp_layers": ["1", "4"]},
     "--pp 2, --pp-layers 1,4: this model has 4 layers, of which each stage takes one or more"),
    ({"pp": 5}, "--pp 5, no --pp-layers: this model has 4 layers, of which each stage takes one or more"),
    ({"pp": 2, "pp_layers": ["3", "1"]},
     "--pp 2, --pp-layers 3,1: layers 2 to 3 of this model share KV, and are of one stage: the last number "
     "of --pp-layers is 2 or more"),
    ({"pp": 4}, "--pp 4: layers 2 to 3 of this model share KV, and are of one stage: at most 3 stages"),
    ({"quantization": "awq"}, "--quantization awq: the weights of tiny are floats, and weights are not quantised when "
     "they are loaded: leave the flag out, or take a checkpoint in that format"),
    ({"dtype": "gguf"}, "--dtype gguf: tiny is neither a .gguf file nor quantised as integers: leave the flag out")])
def test_what_was_given_and_what_is_allowed_is_said(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as e:
        check_model(from_options("tiny", options), replace(DENSE, tail=2))
    assert str(e.value) == said


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("tail", range(5))
def test_layers_that_share_kv_leave_as_many_stages_as_is_said(tail: int, pp: int) -> None:
    config = from_options("tiny", {"pp": pp, "pp_layers": [*["1"] * (pp - 1), str(5 - pp)]})
    if 5 - pp >= tail:
        check_model(config, replace(DENSE, tail=tail))
    else:
        with pytest.raises(ConfigError, match=f"one stage: at most {5 - tail} stages$"):
            check_model(config, replace(DENSE, tail=tail))


@pytest.mark.parametrize(("typed", "format"), [
    ("awq", "awq"), ("awq_marlin", "awq"), ("GPTQ", "gptq"), ("gptq_marlin", "gptq"), ("auto_round", "auto-round"),
    ("inc", "auto-round"), ("compressed-tensors", "compressed-tensors"), ("compressed_tensors", "compressed-tensors"),
    ("fp8", "fp8"), ("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"), ("modelopt_fp4", "modelopt"),
    ("gguf", "gguf"), ("none", ""), ("none", "awq"), ("auto", "gptq")])
def test_a_format_of_weights_by_the_names_of_cards_is_taken_for_a_checkpoint_in_it(typed: str, format: str) -> None:
    config = from_options("tiny", {"quantization": typed})
    check_model(config, replace(DENSE, quantised=format))
    if config.model.quantization != "auto":
        with pytest.raises(ConfigError, match="leave the flag out"):
            check_model(config, DENSE)
