"""Quantised checkpoints through the engine: greedy tokens equal those of what their codes mean."""
from __future__ import annotations

from pathlib import Path

import pytest
from packers import FORMATS, packed_checkpoint
from pipeline_engine import CONFIG, PROMPTS, Pipeline

from penstock.config.base.errors import ConfigError

DENSE = {**CONFIG, "num_hidden_layers": 2}
MOE = {**CONFIG, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 2,
       "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
       "tie_word_embeddings": False}
FEW = {rid: PROMPTS[rid] for rid in (1, 2)}


def played(model: str, **options: object) -> tuple[dict[int, list[int]], list[str]]:
    with Pipeline(model, kv_cache_memory_bytes="2M", **options) as engine:
        return engine.play(12, prompts=FEW), engine.lines


@pytest.mark.parametrize("form", FORMATS)
def test_tokens_of_a_packed_model_are_those_of_its_floats(form: str, tmp_path: Path) -> None:
    packed, plain = packed_checkpoint(tmp_path, DENSE, form)
    found, lines = played(packed)
    assert found == played(plain)[0]
    assert len([line for line in lines if "its quantised weights (" in line and "become float32" in line]) == 1


@pytest.mark.sweep
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=["tp 2", "pp 2"])
@pytest.mark.parametrize("form", FORMATS)
def test_ranks_compute_what_one_process_does(form: str, layout: dict[str, int], tmp_path: Path) -> None:
    packed, plain = packed_checkpoint(tmp_path, DENSE, form)
    assert played(packed, **layout)[0] == played(plain)[0]


@pytest.mark.parametrize("form", ["int4 asymmetric", "awq", "gptq"])
def test_experts_one_by_one(form: str, tmp_path: Path) -> None:
    packed, plain = packed_checkpoint(tmp_path, MOE, form)
    assert played(packed)[0] == played(plain)[0]


@pytest.mark.sweep
def test_experts_of_two_ranks(tmp_path: Path) -> None:
    packed, plain = packed_checkpoint(tmp_path, MOE, "awq")
    assert played(packed, tp=2)[0] == played(plain)[0]
    assert played(packed, tp=2, ep=2)[0] == played(plain)[0]


def test_a_format_that_is_named_must_be_the_checkpoints(tmp_path: Path) -> None:
    packed, plain = packed_checkpoint(tmp_path, DENSE, "awq")
    assert played(packed, quantization="awq_marlin")[0] == played(plain)[0]
    for folder, named in ((packed, "gptq"), (plain, "awq")):
        with pytest.raises(ConfigError, match="leave the flag out"):
            played(folder, quantization=named)
