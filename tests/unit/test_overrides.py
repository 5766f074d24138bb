"""Fields in place of those of config.json: what a RoPE scaling makes of the context, what is refused."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config.base.errors import ConfigError
from penstock.config.settings.cli import from_options
from penstock.config.settings.refuse_model import check_model
from penstock.exec.load.weights import facts_of, load
from penstock.model.registry import read_spec_of
from penstock.model.source.overrides import overridden
from penstock.model.weights.locate import files_of

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
YARN = {"rope_type": "yarn", "factor": 4.0}


def folder(path: Path, config: dict[str, Any] = LLAMA) -> str:
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def context(config: dict[str, Any]) -> int:
    return read_spec_of(config).rope.max_position


@pytest.mark.parametrize(("own", "scaling", "expected"), [
    ({}, {**YARN, "original_max_position_embeddings": 64}, 256), ({}, YARN, 256),
    ({}, {**YARN, "original_max_position_embeddings": 32}, 128), ({}, {**YARN, "factor": 2}, 128),
    ({"original_max_position_embeddings": 32}, YARN, 128),
    ({"rope_scaling": {**YARN, "original_max_position_embeddings": 16}}, {**YARN, "factor": 8}, 128),
    ({}, {"rope_type": "linear", "factor": 3.0}, 192), ({}, {"rope_type": "dynamic", "factor": 2.0}, 128),
    ({}, {"type": "yarn", "factor": 1.5}, 96), ({"rope_scaling": YARN}, {}, 64),
    ({}, {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 128)])
def test_context_is_stretched_by_the_factor(own: dict[str, Any], scaling: dict[str, Any],
                                            expected: int) -> None:
    found = overridden({**LLAMA, **own}, {"rope_scaling": scaling})
    assert context(found) == expected
    also = overridden({**LLAMA, **own}, {"rope_parameters": scaling, "max_position_embeddings": 1000})
    assert also["max_position_embeddings"] == 1000


def test_a_scaling_keeps_the_base_and_parts_of_the_file() -> None:
    own = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    del own["rope_theta"]
    found = overridden(own, {"rope_scaling": YARN})
    assert "rope_scaling" not in found and found["rope_parameters"]["rope_theta"] == 1e6
    assert read_spec_of(found).rope.inv_freq_F[1] != read_spec_of(
        overridden(own, {"rope_scaling": {**YARN, "rope_theta": 10.0}})).rope.inv_freq_F[1]
    layers = {"full_attention": {"rope_type": "default", "rope_theta": 1e6},
              "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    found = overridden({**own, "rope_parameters": layers}, {"rope_scaling": YARN})["rope_parameters"]
    assert found["full_attention"]["factor"] == 4.0
    assert found["sliding_attention"] == layers["sliding_attention"]


@pytest.mark.parametrize(("options", "said"), [
    ({"hf_overrides": {"rope_scalling": YARN}}, "'rope_scalling' is not a field of"),
    ({"hf_overrides": {"text_config": {}}}, "'text_config' is not a field of"),
    ({"hf_overrides": {"rope_scaling": [1]}}, "one JSON object is needed"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "how many times longer"),
    ({"rope_scaling": {**YARN, "original_max_position_embeddings": "x"}}, "the length in tokens"),
    ({"rope_scaling": {"rope_type": "su", "factor": 2}}, "'su' is not supported"),
    ({"hf_overrides": {"num_hidden_layers": 0}}, "num_hidden_layers is 0"),
    ({"max_model_len": 65}, "this model's context is 64 tokens; --rope-scaling stretches it"),
    ({"rope_scaling": YARN, "max_model_len": 257}, "context is 256 tokens")])
def test_overrides_that_are_refused_before_weights_are_read(tmp_path: Path, options: dict[str, object],
                                                            said: str) -> None:
    config = from_options(folder(tmp_path), {**options, "load_format": "dummy"})
    with pytest.raises(ConfigError, match=said):
        check_model(config, facts_of(files_of(config.model)))


def test_overrides_reach_the_model(tmp_path: Path) -> None:
    config = from_options(folder(tmp_path), {
        "hf_overrides": {"num_hidden_layers": 1, "rms_norm_eps": 1e-3, "tie_word_embeddings": True},
        "rope_scaling": YARN, "load_format": "dummy", "max_model_len": 256})
    files = files_of(config.model)
    facts = facts_of(files)
    check_model(config, facts)
    assert (facts.layers, facts.context) == (1, 256) and read_spec_of(files.config).norm_eps == 1e-3
    assert files.own_config == LLAMA


def test_fields_of_a_text_inside_of_another_model() -> None:
    given = {"text_config": {"rope_scaling": YARN}, "rms_norm_eps": 1e-3}
    found = overridden(dict(LLAMA), given, inside=True)
    assert (context(found), found["rms_norm_eps"]) == (256, 1e-3) and "text_config" not in found


def test_what_config_json_refuses_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    """A selection over layers of which all have a window: no message speaks of weights."""
    own = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16}
    config = from_options(folder(tmp_path, own), {"load_format": "dummy", "sparse_top_k": 512,
                                                  "dtype": "float32", "device": "cpu"})
    said: list[str] = []
    with pytest.raises(ConfigError, match="sees its last 16 tokens"):
        load(config, None, said.append)
    assert not [line for line in said if "weights" in line]
