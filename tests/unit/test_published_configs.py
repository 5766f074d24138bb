"""Published config.json files: each is read, or refused for the reason written here. docs/reference/models.md names
those that are read. tests/data/configs/README.md says where they come from.
"""
from __future__ import annotations

import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import models_reference
import pytest

from penstock.config.base.errors import ConfigError
from penstock.model import registry
from penstock.model.base import GlobalLayer, Stage
from penstock.model.weights.locate import locate

ROOT = Path(__file__).parents[2]
CONFIGS = {path.name.removesuffix("_config.json").replace("--", "/"): path
           for path in sorted((ROOT / "tests/data/configs").glob("*_config.json"))}
REFUSED = {
    "XiaomiMiMo/MiMo-7B-Base": "model_type 'mimo' is not supported",
    "XiaomiMiMo/MiMo-V2-Flash": "model_type 'mimo_v2_flash' is not supported",
    "deepseek-ai/DeepSeek-V4-Flash": "model_type 'deepseek_v4' is not supported",
    "deepseek-ai/DeepSeek-V4-Pro": "model_type 'deepseek_v4' is not supported",
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": "'llama4', whose text is 'llama4_text', is not",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "'llama4', whose text is 'llama4_text', is not",
    "mistralai/Mixtral-8x22B-v0.1": "model_type 'mixtral' is not supported",
    "mistralai/Mixtral-8x7B-v0.1": "model_type 'mixtral' is not supported",
    "moonshotai/Kimi-K3": "'kimi_k3', whose text is 'kimi_linear', is not supported",
    "nvidia/DeepSeek-V4-Flash-NVFP4": "model_type 'deepseek_v4' is not supported",
    "nvidia/DeepSeek-V4-Pro-NVFP4": "model_type 'deepseek_v4' is not supported",
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1": "model_type 'nemotron-nas' is not supported",
    "sgl-project/DeepSeek-V4-Flash-FP8": "model_type 'deepseek_ref' is not supported",
    "sgl-project/DeepSeek-V4-Pro-FP8": "model_type 'deepseek_ref' is not supported",
}
# Read, and not named in docs: no weights of such a repository have been opened.
OTHER_FILE = {name for name in CONFIGS if name.startswith("nvidia/") and name.endswith(("NVFP4", "-FP8"))}
PARAMETERS = {"Qwen/Qwen3-8B": 8.19e9, "Qwen/Qwen3-VL-8B-Instruct": 8.19e9, "Qwen/Qwen3.5-27B": 26.9e9,
              "nvidia/Gemma-4-26B-A4B-NVFP4": 25.2e9, "nvidia/Gemma-4-31B-IT-NVFP4": 30.7e9,
              "meta-llama/Meta-Llama-3.1-8B": 8.03e9}


def read(name: str, folder: Path) -> dict[str, Any]:
    """The model's config as it is served, of a folder without weights."""
    shutil.copy(CONFIGS[name], folder / "config.json")
    return locate(str(folder), load_format="dummy").config


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_is_read_or_refused_for_its_reason(name: str, tmp_path: Path) -> None:
    """What is read has shapes for every weight of its first layer and of its last one, and all totals fit."""
    if name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[name]):
            registry.read_spec_of(read(name, tmp_path))
        return
    config = read(name, tmp_path)
    spec = registry.read_spec_of(config)
    last = spec.num_layers - 1
    ends = (Stage(GlobalLayer(0), GlobalLayer(1), embeds=True, heads=False),
            Stage(GlobalLayer(last), GlobalLayer(last + 1), embeds=False, heads=True))
    shapes = dict(chain.from_iterable(registry.tensor_shapes(config, stage) for stage in ends))
    assert shapes["model.embed_tokens.weight"] == (spec.vocab_size, spec.hidden)
    assert any(f"layers.{last}." in tensor for tensor in shapes) and all(min(s) > 0 for s in shapes.values())


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_published_config_has_as_many_parameters_as_its_maker_says(name: str, tmp_path: Path) -> None:
    count = 0
    for _, shape in registry.tensor_shapes(read(name, tmp_path)):
        size = 1
        for n in shape:
            size *= n
        count += size
    assert count == pytest.approx(PARAMETERS[name], rel=0.005)


def test_every_refusal_is_of_a_config_that_is_here() -> None:
    assert len(CONFIGS) > 70 and REFUSED.keys() < CONFIGS.keys()


def test_docs_name_the_published_models_that_are_read(tmp_path: Path) -> None:
    """Each where its family is, and no other."""
    found: dict[str, set[str]] = {}
    for name in CONFIGS.keys() - REFUSED.keys() - OTHER_FILE:
        found.setdefault(str(read(name, tmp_path)["model_type"]), set()).add(name)
    named = {family: set(names) & CONFIGS.keys() for family, names in models_reference.EXAMPLES.items()}
    assert {family: names for family, names in named.items() if names} == found


def test_the_document_of_models_is_written_from_the_code() -> None:
    assert (ROOT / "docs/reference/models.md").read_text() == models_reference.reference(), "make docs"
