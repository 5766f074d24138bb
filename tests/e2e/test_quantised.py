"""Quantised checkpoints through the engine: greedy tokens equal those of what their codes mean."""
from __future__ import annotations

from pathlib import Path

import pytest
from packers import FORMATS, packed_checkpoint
from pipeline_engine import CONFIG, PROMPTS, Pipeline

from penstock.config.base.errors import ConfigError

DENSE = {**CONFIG, "num_hidden_layers": 2}
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


def test_a_format_that_is_named_must_be_the_checkpoints(tmp_path: Path) -> None:
    packed, plain = packed_checkpoint(tmp_path, DENSE, "awq")
    assert played(packed, quantization="awq_marlin")[0] == played(plain)[0]
    for folder, named in ((packed, "gptq"), (plain, "awq")):
        with pytest.raises(ConfigError, match="leave the flag out"):
            played(folder, quantization=named)
