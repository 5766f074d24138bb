"""The format of a KV cache: what the flag and the checkpoint ask for, what it takes, and what engines tell of it."""
from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.base.errors import ConfigError
from penstock.config.request.selection import selection_of
from penstock.config.settings.tree import Config, Kept, KVConfig, ModelConfig
from penstock.exec.load import weights
from penstock.exec.load.layout import caches_of
from penstock.exec.load.sizing import groups_of
from penstock.exec.start.build import kinds_of
from penstock.kernels.types import fp8
from penstock.model import registry
from penstock.model.base import CacheShape, GlobalLayer, LocalLayer, Reads, Source, Stage
from penstock.model.weights.formats.table import kv_format_of
from penstock.model.weights.locate import locate
from penstock.transfer import facts

LLAMA = {"model_type": "llama", "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
         "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 1e4}
CODES = KVConfig(kv_cache_dtype="fp8_e4m3")
FULL = CacheShape(name="full", layers=(0, 1), num_kv_heads=2, head_dim=64)
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@dataclass
class Shape:
    """What is read of a model."""

    groups: tuple[CacheShape, ...] = (FULL,)
    stage: Stage = Stage(GlobalLayer(0), GlobalLayer(2), embeds=True, heads=True)
    dtype: torch.dtype = torch.float32
    kv_format: str = ""

    @property
    def reads(self) -> dict[LocalLayer, Reads]:
        return {layer: Reads(source=Source(layer), num_heads=4, scale=.125, dtype=self.dtype)
                for group in self.groups for layer in group.layers}


@dataclass
class Latent(Shape):
    """With MLA KV entries, of which the first `value_dim` values are coded."""

    value_dim: int = 48

    @property
    def reads(self) -> dict[LocalLayer, Reads]:
        return {layer: replace(reads, value_dim=self.value_dim) for layer, reads in super().reads.items()}


@pytest.mark.parametrize(("dim", "wide"), [(16, 32), (64, 80), (80, 96), (128, 144), (256, 272), (512, 528),
                                           (576, 608)])
def test_a_vector_takes_its_codes_and_scales_in_whole_sixteens(dim: int, wide: int) -> None:
    assert fp8.head_width(dim) == wide and fp8.head_dim_of(wide) == dim
    x = torch.randn(3, 2, 4, dim) * torch.logspace(-8, 8, 3)[:, None, None, None]
    kept = fp8.encode_heads(x)
    assert kept.shape == (3, 2, 4, wide) and not kept[..., fp8.width(dim, dim):].any()
    assert ((fp8.decode_heads(kept) - x).abs() <= x.abs().amax(-1, keepdim=True) / 16).all()
    assert torch.equal(fp8.encode_heads(x[1:2, :, 2:3]), kept[1:2, :, 2:3]), "bytes depend on neighbours"


@pytest.mark.parametrize(("given", "asked"), [
    ({}, ""), ({"quantization_config": {"quant_method": "fp8"}}, ""),
    ({"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": None}}, ""),
    ({"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}}, "fp8_e4m3"),
    ({"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}, "fp8_e4m3"),
    ({"kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
    ({"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}}, "NVFP4"),
    ({"quantization_config": {"kv_cache_scheme": {**SCHEME, "type": "int"}}}, "int8")])
def test_what_a_checkpoint_asks_for(given: dict[str, Any], asked: str) -> None:
    assert kv_format_of(given) == asked


def test_a_file_of_modelopt_may_ask_for_fp8_kv_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}))
    assert registry.read_spec_of(locate(str(tmp_path)).config).kv_format == "fp8_e4m3"


@pytest.mark.parametrize(("asked", "kv", "kept", "line"), [
    ("", KVConfig(), None, None),
    ("fp8_e4m3", KVConfig(), torch.uint8, "KV cache is fp8, as the checkpoint asks; each vector has a scale"),
    ("", CODES, torch.uint8, None),
    ("fp8_e4m3", KVConfig(kv_cache_dtype="bfloat16"), None, "a KV cache in fp8_e4m3, and gets one in bfloat16"),
    ("NVFP4", KVConfig(), None, "asks for a KV cache in NVFP4, and gets one in the compute type")])
def test_auto_is_what_the_checkpoint_asks_for_and_the_log_says_so(
        asked: str, kv: KVConfig, kept: torch.dtype | None, line: str | None) -> None:
    model = Shape(dtype=torch.bfloat16, kv_format=asked)
    [group] = groups_of(model, None, kv)
    assert group.dtype == kept and (group.head_dim, group.values) == ((80, 64) if kept else (64, 0))
    said = weights._kv_asked(Config(model=ModelConfig(model="m"), kv=kv), model)
    assert (line is None and not said) or line in said[0]


@pytest.mark.parametrize(("dtype", "dim", "kv", "kept", "line"), [
    (torch.float32, 64, KVConfig(), None, "in fp8_e4m3, and gets one in the compute type, as float32 is computed in: "
     "--kv-cache-dtype fp8 makes it fp8"),
    (torch.float32, 64, CODES, torch.uint8, "its KV cache is fp8"),
    (torch.float32, 72, KVConfig(), None, "as its full vectors have 72 values"),
    (torch.bfloat16, 72, KVConfig(), None, "and gets one in the compute type, as its full vectors have 72 values, and "
     "fp8 is for multiples of 16")])
def test_auto_is_the_compute_type_with_float32_and_for_heads_that_fp8_cannot_hold(
        dtype: torch.dtype, dim: int, kv: KVConfig, kept: torch.dtype | None, line: str) -> None:
    model = Shape((replace(FULL, head_dim=dim),), dtype=dtype, kv_format="fp8_e4m3")
    assert [group.dtype for group in groups_of(model, None, kv)] == [kept]
    [said] = weights._kv_asked(Config(model=ModelConfig(model="m"), kv=kv), model)
    assert line in said


@pytest.mark.parametrize(("value", "key", "metadata", "kept"), [
    (48, 32, "auto", [torch.uint8, torch.uint8]), (40, 32, "auto", [None, None]), (48, 48, "auto", [None, None]),
    (48, 48, "bfloat16", [torch.uint8, torch.bfloat16])])
def test_auto_looks_at_what_is_coded_of_mla_entries_and_at_the_keys_of_an_indexer(
        value: int, key: int, metadata: Kept, kept: list[torch.dtype | None]) -> None:
    model = Latent((replace(FULL, num_kv_heads=1, head_dim=64, planes=1),
                    CacheShape(name="index", layers=(0,), num_kv_heads=1, head_dim=key, planes=1, selector=True)),
                   dtype=torch.bfloat16, kv_format="fp8_e4m3", value_dim=value)
    assert [group.dtype for group in groups_of(model, None, KVConfig(sparse_metadata_dtype=metadata))] == kept


def test_states_and_drafts_stay_floats_and_windows_do_not() -> None:
    states = replace(FULL, name="states", snapshot=True, planes=1)
    model = Shape(groups=(FULL, replace(FULL, name="window", window=9), states,
                          replace(FULL, name="draft", drafts=True)))
    assert [group.dtype for group in groups_of(model, None, CODES)] == [torch.uint8, torch.uint8, None, None]
    kv = replace(CODES, sparse_top_k=512, sparse_dense_layers=("0",))
    found = {group.name: (group.dtype, group.head_dim) for group in groups_of(model, selection_of(kv), kv)}
    assert found["full"] == found["dense"] == found["window"] == (torch.uint8, 80) and found["bounds"] == (None, 64)


@pytest.mark.parametrize(("kv", "dim", "said"), [
    (CODES, 72, "--kv-cache-dtype fp8: heads of this model have 72 values, and fp8 is for multiples of 16"),
    (KVConfig(kv_cache_dtype="bfloat16"), 64, "--kv-cache-dtype bfloat16: KV heads have the type that is computed in")])
def test_a_format_that_a_model_cannot_have_is_refused(kv: KVConfig, dim: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        groups_of(Shape(groups=(replace(FULL, head_dim=dim),)), None, kv)


def test_instances_of_another_format_refuse_each_other_by_its_name() -> None:
    caches = [caches_of(groups_of(Shape(), None, kv), 16, torch.float32) for kv in (CODES, KVConfig())]
    assert [kinds_of(each, torch.float32) for each in caches] == [{"full_dtype": "fp8_e4m3"}, {}]
    ours, theirs = (facts.Facts(role, {"pages": str(kinds_of(each, torch.float32))},
                                [facts.group_facts("full", each.layouts[0])], [[2]])
                    for role, each in zip(("prefill", "decode"), caches, strict=True))
    assert "dtype of full: uint8 here and float32 there" in facts.differences(ours, theirs)
