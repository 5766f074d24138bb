"""From a config.json to a model: which family it is, or a ConfigError that says which there are."""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.config.base.errors import ConfigError
from penstock.kernels.fused import layer
from penstock.kernels.fused.layer import LayerOps
from penstock.kernels.gemm.experts import ExpertOps
from penstock.kernels.state import scan as scans
from penstock.kernels.state.scan import Scan
from penstock.kernels.types.packed import Packed, quantised
from penstock.model.base import GlobalLayer, Model, Stage, TpGroup, Wants, everything
from penstock.model.families.bamba import bamba
from penstock.model.families.deepseek import deepseek_v3, deepseek_v32, glm_moe_dsa, mistral4
from penstock.model.families.gemma import gemma2, gemma3_text, gemma4_text
from penstock.model.families.glm4 import glm4_moe
from penstock.model.families.gpt_oss import gpt_oss
from penstock.model.families.granite import granitemoehybrid
from penstock.model.families.llama import llama, ministral3, mistral, seed_oss
from penstock.model.families.minimax import minimax_m2, minimax_m3
from penstock.model.families.nemotron import nemotron_h
from penstock.model.families.qwen import (
    qwen2,
    qwen2_5_vl_text,
    qwen3,
    qwen3_moe,
    qwen3_vl_moe_text,
    qwen3_vl_text,
)
from penstock.model.families.qwen3_next import qwen3_5_moe_text, qwen3_5_text, qwen3_next
from penstock.model.parts import Cut
from penstock.model.spec import Spec
from penstock.model.transformer import Transformer
from penstock.model.weights.fields import Fields
from penstock.model.weights.formats.reader import Format
from penstock.model.weights.formats.table import format_of, kv_format_of
from penstock.model.weights.slots import LinearFactory

# Of which random weights have 1.
FACTORS = ("norm.weight", "norm_1.weight", "norm_2.weight", "layer_scalar", "router.scale", "per_expert_scale")
REFERENCE_OPS, REFERENCE_SCAN = layer.OP.use("reference"), scans.OP.use("reference")
FAMILIES: dict[str, tuple[str, Callable[[Fields], Spec]]] = {
    "llama": ("LlamaForCausalLM", llama),
    "mistral": ("MistralForCausalLM", mistral),
    "ministral3": ("Ministral3ForCausalLM", ministral3),
    "seed_oss": ("SeedOssForCausalLM", seed_oss),
    "qwen2": ("Qwen2ForCausalLM", qwen2),
    "qwen3": ("Qwen3ForCausalLM", qwen3),
    "qwen3_moe": ("Qwen3MoeForCausalLM", qwen3_moe),
    "qwen2_5_vl_text": ("Qwen2_5_VLForConditionalGeneration", qwen2_5_vl_text),
    "qwen3_vl_text": ("Qwen3VLForConditionalGeneration", qwen3_vl_text),
    "qwen3_vl_moe_text": ("Qwen3VLMoeForConditionalGeneration", qwen3_vl_moe_text),
    "qwen3_next": ("Qwen3NextForCausalLM", qwen3_next),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", qwen3_5_text),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", qwen3_5_moe_text),
    "bamba": ("BambaForCausalLM", bamba),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", granitemoehybrid),
    "nemotron_h": ("NemotronHForCausalLM", nemotron_h),
    "gemma2": ("Gemma2ForCausalLM", gemma2),
    "gemma3_text": ("Gemma3ForCausalLM", gemma3_text),
    "gemma4_text": ("Gemma4ForCausalLM", gemma4_text),
    "gpt_oss": ("GptOssForCausalLM", gpt_oss),
    "deepseek_v3": ("DeepseekV3ForCausalLM", deepseek_v3),
    "kimi_k2": ("DeepseekV3ForCausalLM", deepseek_v3),
    "mistral4": ("Mistral4ForCausalLM", mistral4),
    "deepseek_v32": ("DeepseekV32ForCausalLM", deepseek_v32),
    "glm4_moe": ("Glm4MoeForCausalLM", glm4_moe),
    "minimax_m2": ("MiniMaxM2ForCausalLM", minimax_m2),
    "minimax_m3": ("MiniMaxM3ForCausalLM", minimax_m3),
    "minimax_m3_vl_text": ("MiniMaxM3VLForCausalLM", minimax_m3),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", glm_moe_dsa),
}


def build(
    config: dict[str, Any], *, dtype: torch.dtype, linear: LinearFactory,
    ops: LayerOps = REFERENCE_OPS, stage: Stage | None = None, experts: ExpertOps | None = None,
    tp_group: TpGroup | None = None, scan: Scan = REFERENCE_SCAN,
) -> Model:
    """An empty model of this config.json. Allocates no weights; `load` and `finish` fill it.

    linear(weight_OI, bias_O or None) packs one weight, in `dtype`, and is called once per weight.
    ops      what a layer does between its linears      stage    a part of it; None: all of it
    experts  computes all experts of a layer at once; None: they are MLPs packed one by one, and a forward
             pass reads back which of them are visited, so it cannot be captured
    tp_group    those of its stage, where it has several: its weights are one of them's
    scan     of layers that keep a state
    Raises ConfigError on an unknown family and on any field that this code would get wrong.
    """
    return Transformer(read_spec_of(config), dtype, linear, ops, _between_blocks(config, stage), experts,
                       tp_group, scan)


def read_spec_of(config: dict[str, Any]) -> Spec:
    """The shape of the model that a config.json describes. Raises ConfigError as `build` does."""
    family = _family(config)
    return replace(FAMILIES[family][1](Fields(config, family)), kv_format=kv_format_of(config))


def drafting_stage(config: dict[str, Any]) -> Stage:
    """A whole model with the layer that drafts."""
    layers = GlobalLayer(read_spec_of(config).num_layers)
    return Stage(GlobalLayer(0), layers, embeds=True, heads=True, drafts=True)


def numbers_of(spec: Spec) -> dict[str, int]:
    """Return what refusals compare of a model: words as in `ModelFacts`."""
    attention, moe = spec.attention, spec.moe
    widths = [spec.width, *([moe.width, *([moe.shared_width] if moe.shared_width else [])] if moe else [])]
    scan = None if spec.states is None else spec.states.scan
    return {"topk": spec.selector.tokens if spec.selector else 0, "block": spec.selector.block if spec.selector else 1,
            "state_bytes": 0 if scan is None else 4 * scan.part_elements,
            "state_parts": 0 if scan is None else scan.parts, "heads": attention.num_heads,
            "windows": sum(map(bool, spec.windows)), "mtp": int(spec.mtp is not None), "tail": spec.tail,
            "experts": moe.num_experts if moe else 0, "vocab": spec.vocab_size, "width": min(widths)}


def tensor_shapes(
    config: dict[str, Any], stage: Stage | None = None
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(Hugging Face name, shape of what is kept) of every weight of a stage or of all, in model order.
    Allocates nothing."""
    for name, cuts in cuts_of(config, stage):
        yield name, tuple(cut.size for cut in cuts)


def cuts_of(config: dict[str, Any], stage: Stage | None = None) -> Iterator[tuple[str, tuple[Cut, ...]]]:
    """Return which rows and columns of each tensor are kept, see `tensor_shapes`."""
    return Transformer(read_spec_of(config), torch.float32, _no_pack, REFERENCE_OPS,
                       _between_blocks(config, stage), scan=REFERENCE_SCAN).cuts()


def _between_blocks(config: dict[str, Any], stage: Stage | None) -> Stage | None:
    """Cut weights that may stay packed between blocks."""
    form = format_of(config, "config.json")
    if stage is None or form is None or form.kind == "u8":          # groups may be cut
        return stage
    return replace(stage, tp_rank=replace(stage.tp_rank, block=form.cols))


def dummy_tensors(
    config: dict[str, Any], seed: int, wants: Wants = everything, *, device: str = "cpu",
    formats: Callable[[str], Format | None] = lambda name: None, drafts: bool = False,
) -> Iterator[tuple[str, Tensor | Packed]]:
    """Random weights for every wanted name, f32, one at a time: normal(0, 0.02), norms and factors 1; packed where
    `formats` says so. Each is seeded by its name, so that a stage draws its own only and the same as the whole
    model. They are drawn on the device: a GPU's are others than a CPU's. drafts: its weights as well."""
    for name, shape in tensor_shapes(config, drafting_stage(config) if drafts else None):
        if not wants(name):
            continue
        if name.endswith(FACTORS):
            yield name, torch.ones(shape, device=device)
        else:
            digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
            random = torch.Generator(device).manual_seed(int.from_bytes(digest))
            # No name for it here: it would live as long as this waits.
            yield name, _packed(torch.empty(shape, device=device).normal_(0.0, 0.02, generator=random),
                                formats(name))


def _packed(weight: Tensor, form: Format | None) -> Tensor | Packed:
    if form is None:
        return weight
    return quantised(weight, form.rows, form.cols,
                     "u4" if (form.kind, form.bits) == ("u8", 4) else form.kind).regular()


def _no_pack(weight_OI: Tensor | Packed, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    raise AssertionError("a model that is only asked for its shapes packs nothing")


def _family(config: dict[str, Any]) -> str:
    known = ", ".join(f"{family} ({name})" for family, (name, _) in FAMILIES.items())
    architectures = config.get("architectures")
    one = isinstance(architectures, list) and len(architectures) == 1 and isinstance(architectures[0], str)
    if architectures is not None and not one:
        raise ConfigError(f"config.json: architectures = {architectures!r} is not supported; one of {known}, "
                          "in a list, or none at all")
    by_name = {name: family for family, (name, _) in reversed(FAMILIES.items())}
    if config.get("model_type") is not None:
        family = str(config["model_type"])
    else:
        family = by_name.get(architectures[0], architectures[0]) if architectures else "(absent)"
    if family not in FAMILIES:
        raise ConfigError(f"config.json: model_type {family!r} is not supported; one of {known}")
    if architectures and architectures[0] != FAMILIES[family][0]:
        raise ConfigError(
            f"config.json: architectures {architectures!r} does not go with model_type {family!r}; "
            f"supported: {FAMILIES[family][0]}"
        )
    return family
