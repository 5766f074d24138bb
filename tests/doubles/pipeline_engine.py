"""An engine of a tiny model from a checkpoint, driven by the real core; its stages are processes where
`pp` or `tp` is more than 1. Pauses come from the caller."""
from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import agents
import gguf
import torch
import where
from driven import Driven, asked
from safetensors.torch import save_file

from penstock.config.base.machine import probe
from penstock.config.request.params import SamplingParams
from penstock.config.settings.cli import from_options
from penstock.config.settings.resolve import resolve
from penstock.core.plan import Dropped, Paused, RequestId
from penstock.exec.start.build import Built, build_engine
from penstock.kernels.fused import layer
from penstock.kernels.types.packed import quantised
from penstock.model import registry
from penstock.model.eagle3 import Eagle3, read_eagle

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 97,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 10000.0, "hidden_act": "silu",
}
GLM = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "vocab_size": 97,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "first_k_dense_replace": 4,
    "num_attention_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 24,
    "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "indexer_types": ["full", "shared", "full", "shared"],
}
# With sinks, and a window that most of each prompt is behind.
SINKS = {**CONFIG, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 5,
         "num_hidden_layers": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "rms_norm_eps": 1e-5,
         "sliding_window": 21, "tie_word_embeddings": False, "swiglu_limit": 2.0,
         "rope_parameters": {"rope_type": "default"}}
STATES = {
    **CONFIG, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 6,
    "linear_value_head_dim": 4, "num_experts": 0, "partial_rotary_factor": 0.5,
}
GGUF_NAMES = {"model.layers.": "blk.", "model.embed_tokens": "token_embd", "model.norm": "output_norm",
              "self_attn.o_proj": "attn_output", "self_attn.": "attn_", "mlp.": "ffn_", "_proj": "",
              "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
Change = Callable[[str, torch.Tensor], torch.Tensor]        # of a tensor by its name
PROMPTS = {rid: tuple((rid * 31 + i * i * 7 + i) % 97 for i in range(40 + 35 * rid)) for rid in range(1, 6)}


def checkpoint(folder: Path, config: dict[str, object] = CONFIG, *, drafts: bool = False,
               change: Change = lambda name, tensor: tensor) -> str:
    """Weights whose greedy choices are clear-cut, but for what `change` makes of them."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: change(name, t if "norm" in name or name.endswith(registry.FACTORS) else t * 8).contiguous()
               for name, t in registry.dummy_tensors(config, 3, drafts=drafts)}, folder / "model.safetensors")
    return str(folder)


def eagle_checkpoint(folder: Path, config: dict[str, object]) -> str:
    """An EAGLE-3 layer for it, of random weights."""
    folder.mkdir()
    own = {**config, "num_hidden_layers": 1, "draft_vocab_size": 40}
    (folder / "config.json").write_text(json.dumps(own))
    made = Eagle3(read_eagle(own, registry.read_spec_of(config), "here"), torch.float32,
                  lambda w_OI, b_O: lambda x_TI: x_TI, layer.OP.use("reference"))
    random = torch.Generator().manual_seed(4)
    tensors = {name: torch.ones(shape) if name.endswith("norm.weight") else
               torch.randn(shape, generator=random) * .3 for name, shape in made.shapes()}
    save_file({**tensors, "d2t": torch.arange(40)}, folder / "model.safetensors")
    return str(folder)


def large_checkpoint(folder: Path, config: dict[str, object]) -> str:
    """As `checkpoint`, drawn where tests run, in bfloat16. No word is the one that follows upon itself."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: (t if "norm" in name else t * (1 if "embed" in name else 8)).bfloat16().cpu()
               for name, t in registry.dummy_tensors(config, 3, device=where.DEVICE)},
              folder / "model.safetensors")
    return str(folder)


def fp8_checkpoint(folder: Path, config: Mapping[str, Any], change: Change = lambda name, tensor: tensor) -> str:
    """The same with the matrices of its layers in fp8, each block of 16 by 16 with a scale."""
    folder.mkdir(exist_ok=True)
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": blocks}))
    tensors: dict[str, torch.Tensor] = {}
    for name, t in registry.dummy_tensors(dict(config), 3):
        t = change(name, t if "norm" in name else t * 8)
        if name.endswith("_proj.weight"):
            scaled = quantised(t, 16, 16)
            tensors |= {name: scaled.code_OI.contiguous(), f"{name}_scale_inv": scaled.scale_RJ}
        else:
            tensors[name] = t.contiguous()
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def gguf_checkpoint(path: Path, config: Mapping[str, Any] = CONFIG,
                    change: Change = lambda name, tensor: tensor) -> str:
    """The same in one file: matrices in blocks of four bits, one of each layer in eight, and those of rows
    that no block divides as they are. Of llama, of qwen3moe, or of gpt-oss."""
    sinks = config["model_type"] == "gpt_oss"
    experts = config.get("num_local_experts" if sinks else "num_experts", 0)
    name = "gpt-oss" if sinks else "qwen3moe" if experts else "llama"
    made = gguf.GGUFWriter(path, name)
    sizes = {"block_count": config["num_hidden_layers"], "context_length": 1024,
             "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
             "attention.head_count": config["num_attention_heads"],
             "attention.head_count_kv": config["num_key_value_heads"], "attention.key_length": config["head_dim"]}
    if experts:
        sizes |= {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"],
                  "expert_feed_forward_length": config["intermediate_size" if sinks else "moe_intermediate_size"],
                  "attention.value_length": config["head_dim"]}
    if sinks:
        sizes["attention.sliding_window"] = config["sliding_window"]
    for key, value in sizes.items():
        made.add_uint32(f"{name}.{key}", value)
    made.add_float32(f"{name}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    stacked: dict[str, list[torch.Tensor]] = {}
    for stored, tensor in registry.dummy_tensors(dict(config), 3):
        tensor = change(stored, tensor)
        if ".experts." in stored:               # model.layers.0.mlp.experts.1.up_proj.weight
            layer, (part, kind) = stored.split(".")[2], stored.split(".")[-2:]
            stacked.setdefault(f"blk.{layer}.ffn_{part.removesuffix('_proj')}_exps.{kind}", []).append(tensor)
            continue
        for theirs, ours in GGUF_NAMES.items():
            stored = stored.replace(theirs, ours)
        if experts:
            stored = stored.replace("ffn_gate.weight", "ffn_gate_inp.weight").replace("lm_head", "output")
        if sinks:
            stored = stored.replace("ffn_router", "ffn_gate_inp").replace("attn_sinks", "attn_sinks.weight").replace(
                "ffn_norm", "post_attention_norm")
        _add(made, stored, tensor)
    for stored, each in stacked.items():
        _add(made, stored, torch.stack(each))
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
    return str(path)


def _add(made: gguf.GGUFWriter, name: str, tensor: torch.Tensor) -> None:
    if tensor.ndim == 1:
        made.add_tensor(name, tensor.numpy())
    elif tensor.shape[-1] % 32 or "gate_inp" in name or name.endswith("bias"):
        made.add_tensor(name, tensor.numpy() * 8)
    else:
        block = gguf.GGMLQuantizationType["Q8_0" if "attn_v" in name else "Q4_0"]
        made.add_tensor(name, gguf.quants.quantize(tensor.numpy() * 8, block), raw_dtype=block)


class Pipeline(Driven):
    """A `with` of it ends its processes. With `nnodes` this process is node 0, and starts the agents."""

    def __init__(self, model: str, **options: object) -> None:
        self.options: dict[str, object] = {"dtype": "float32", "threads": 1, "page_size": 8, "seed": 1,
                                           "max_num_seqs": 4, "step_tokens": 48, "device": where.DEVICE,
                                           **options}
        self.model = model
        self.options, self.agents = agents.started(model, self.options)
        self.built = self._build(self.options)
        self.begin(self.built.core_config, self.built.executor)

    def _build(self, options: dict[str, object]) -> Built:
        self.lines: list[str] = []
        return build_engine(resolve(from_options(self.model, options), probe()), self.lines.append)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        if self.built.workers is not None:
            self.built.workers.close(asked=True)
        agents.ended(self.agents)

    def add(self, rid: int, prompt: tuple[int, ...], max_new: int, **sampling) -> None:
        params, more = asked(self.built.selection, SamplingParams(temperature=0.0, **sampling), len(prompt),
                             max_new)
        self.tell(rid, prompt, max_new, params, **more)

    def play(self, new: int = 24, pauses: Callable[[int], Iterable[int]] = lambda turn: (),
             prompts: Mapping[int, tuple[int, ...]] = PROMPTS,
             kind: type[Paused] | type[Dropped] = Paused) -> dict[int, list[int]]:
        """All prompts at once; what they say. `pauses`: whom an event of `kind` is for at a turn."""
        for rid, prompt in prompts.items():
            self.add(rid, prompt, new)
        for turn in range(4000):
            self.inbox += [kind(RequestId(rid)) for rid in pauses(turn) if rid not in self.ended]
            if not self.turn():
                break
        assert set(self.ended) == set(self.got), "a request never ended"
        return {rid: self.got[rid] for rid in prompts}
