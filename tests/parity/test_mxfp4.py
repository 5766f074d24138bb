"""gpt-oss with experts in MXFP4, from safetensors and from GGUF: logits of transformers' own unpacking."""
from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from dense_attend import Dense
from gguf import GGMLQuantizationType
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.config.base.errors import ConfigError
from penstock.config.settings.cli import from_options
from penstock.exec.load import weights
from penstock.kernels.c import build as native
from penstock.model.base import GlobalLayer, Stage
from penstock.model.weights import checkpoint
from penstock.model.weights.checkpoint import open_checkpoint
from penstock.model.weights.locate import locate

HIDDEN, WIDTH, EXPERTS, VOCAB = 64, 32, 6, 131
# As gpt-oss has it, of a length that a tiny model reaches.
YARN = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 32, "rope_theta": 150000.0}
CONFIG = GptOssConfig(
    vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, rms_norm_eps=1e-5, sliding_window=6,
    num_local_experts=EXPERTS, num_experts_per_tok=3, rope_parameters=YARN, attn_implementation="eager")
IDS_T = torch.randint(0, VOCAB, (21,), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def made() -> tuple[GptOssForCausalLM, dict[str, torch.Tensor], torch.Tensor]:
    """A model, its tensors as files have them, and its logits."""
    random = torch.Generator().manual_seed(7)
    model = GptOssForCausalLM(CONFIG).eval()
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.25 + ("norm" in name))
    tensors = {}
    for name, tensor in model.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = tensor.clone()
            continue
        rows, columns = (2 * WIDTH, HIDDEN) if "gate_up" in name else (HIDDEN, WIDTH)
        shape = (EXPERTS, rows, columns // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=random, dtype=torch.uint8)
        scales = torch.randint(119, 126, shape, generator=random, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensor.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    with torch.inference_mode():
        return model, tensors, model(IDS_T[None]).logits[0]


def folder(path: Path, tensors: dict[str, torch.Tensor], method: str | None = "mxfp4") -> Path:
    """Scales are in another shard than their blocks."""
    path.mkdir()
    config = CONFIG.to_dict()
    if method is not None:
        config["quantization_config"] = {"quant_method": method, "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config))
    shards = {f"{i}.safetensors": {n: t for n, t in tensors.items() if n.endswith("_scales") == bool(i)}
              for i in range(2)}
    for file, part in shards.items():
        save_file(part, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({
        "weight_map": {name: file for file, part in shards.items() for name in part}}))
    return path


def written(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """As llama.cpp's converter does: gate and up apart, a block's halves beside each other."""
    out, arch = gguf.GGUFWriter(path, "gpt-oss"), "gpt-oss"
    for key, value in {
            "block_count": CONFIG.num_hidden_layers, "context_length": CONFIG.max_position_embeddings,
            "embedding_length": HIDDEN, "feed_forward_length": WIDTH, "expert_feed_forward_length": WIDTH,
            "attention.head_count": CONFIG.num_attention_heads, "attention.key_length": CONFIG.head_dim,
            "attention.head_count_kv": CONFIG.num_key_value_heads, "attention.value_length": CONFIG.head_dim,
            "expert_count": EXPERTS, "expert_used_count": CONFIG.num_experts_per_tok,
            "attention.sliding_window": CONFIG.sliding_window,
            "rope.scaling.original_context_length": YARN["original_max_position_embeddings"]}.items():
        out.add_uint32(f"{arch}.{key}", value)
    out.add_string(f"{arch}.rope.scaling.type", "yarn")
    for key, value in {"rope.scaling.factor": YARN["factor"], "rope.freq_base": YARN["rope_theta"],
                       "attention.layer_norm_rms_epsilon": CONFIG.rms_norm_eps}.items():
        out.add_float32(f"{arch}.{key}", value)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
             "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
             "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.router": "ffn_gate_inp"}
    for name, tensor in tensors.items():
        layer = ""
        if name.startswith("model.layers."):
            _, _, index, name_in = name.split(".", 3)
            layer = f"blk.{index}."
        else:
            name_in = name
        part, _, kind = name_in.rpartition(".")
        if part in names:
            out.add_tensor(f"{layer}{names[part]}.{kind}", tensor.numpy())
        elif kind == "sinks":
            out.add_tensor(f"{layer}attn_sinks.weight", tensor.numpy())
        elif kind.endswith("_blocks"):
            low, high = tensor & 15, tensor >> 4
            code = torch.stack((low, high), -1).flatten(-2)                     # in the order of elements
            half = code[..., :16] | code[..., 16:] << 4
            raw = torch.cat((tensors[name.replace("_blocks", "_scales")][..., None], half), -1).flatten(-2)
            for piece, rows in ((("gate", raw[:, ::2]), ("up", raw[:, 1::2])) if "gate_up" in kind else
                                (("down", raw),)):
                out.add_tensor(f"{layer}ffn_{piece}_exps.weight", np.ascontiguousarray(rows.numpy()),
                               raw_dtype=GGMLQuantizationType.MXFP4)
        elif kind.endswith("_bias"):
            for piece, rows in ((("gate", tensor[:, ::2]), ("up", tensor[:, 1::2])) if "gate_up" in kind else
                                (("down", tensor),)):
                out.add_tensor(f"{layer}ffn_{piece}_exps.bias", np.ascontiguousarray(rows.numpy()))
        else:
            assert kind.endswith("_scales"), name
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def logits(path: Path, dtype: str, told: list[str]) -> torch.Tensor:
    asked = from_options(str(path), {"dtype": dtype, "device": "cpu", "threads": 1})
    with torch.inference_mode():
        model = weights.load(asked, None, told.append).model
        return model.logits(model.forward(IDS_T, torch.arange(21), Dense(model.reads, model.groups)))


def test_safetensors_become_floats_and_the_log_says_so(tmp_path, made):
    told: list[str] = []
    got = logits(folder(tmp_path / "m", made[1]), "float32", told)
    assert made[2].std() > 0.1 and (got - made[2]).abs().max() < 1e-4
    assert [line for line in told if "; its quantised weights (MXFP4 experts) become float32" in line]


def test_tensors_of_floats_with_all_experts_of_a_layer_mean_the_same(tmp_path, made):
    plain = {name: tensor.contiguous() for name, tensor in made[0].state_dict().items()}
    got = logits(folder(tmp_path / "m", plain, None), "float32", [])
    assert (got - made[2]).abs().max() < 1e-4


def test_gguf_files_say_the_same_as_floats_and_as_codes(tmp_path, made):
    path = written(tmp_path / "m.gguf", made[1])
    assert (logits(path, "float32", []) - made[2]).abs().max() < 1e-4
    if not any(map(native.shutil.which, native._COMPILERS)):
        pytest.skip("no C compiler on this machine")
    told: list[str] = []
    got = logits(path, "gguf", told)
    assert (got - made[2]).abs().max() < 1e-3
    assert [line for line in told if "of weights as codes in" in line]


def test_a_stage_reads_its_own_layers_only(tmp_path, made, monkeypatch):
    files = locate(str(folder(tmp_path / "m", made[1])))
    model = weights.families.build(files.config, dtype=torch.float32, linear=lambda w, b: lambda x: x,
                                   stage=Stage(GlobalLayer(1), GlobalLayer(2), embeds=False, heads=False))
    sizes: list[int] = []
    real = checkpoint._read_into
    monkeypatch.setattr(checkpoint, "_read_into", lambda file, begin, target, path: (
        sizes.append(len(target)), real(file, begin, target, path)))
    names = [name for name, _ in open_checkpoint(files).tensors(model.wants)]
    assert names and all(name.startswith("model.layers.1.") for name in names)
    assert sum(sizes) == sum(t.nbytes for name, t in made[1].items() if name.startswith("model.layers.1."))
    assert max(sizes) <= max(2 * WIDTH * HIDDEN // 2, VOCAB * HIDDEN * 4), "an expert at a time"


def first(tensors: dict[str, torch.Tensor], end: str) -> str:
    return next(name for name in tensors if name.endswith(end))


@pytest.mark.parametrize("case, words", {
    "no scales": "no file holds its 'scales'",
    "scales of another shape": "expected U8 of",
    "nothing said": "not supported where config.json has no quantization_config",
    "bytes of something else": "config.json says MXFP4 experts, which has no such",
}.items())
def test_what_does_not_fit_is_one_clear_line(tmp_path, made, case, words):
    tensors = dict(made[1])
    scales = first(tensors, "_scales")
    match case:
        case "no scales":
            del tensors[scales]
        case "scales of another shape":
            tensors[scales] = tensors[scales][:, :2].clone()
        case "bytes of something else":
            tensors["model.norm.weight"] = torch.zeros(HIDDEN, dtype=torch.uint8)
    path = folder(tmp_path / "m", tensors, None if case == "nothing said" else "mxfp4")
    with pytest.raises(ConfigError, match=words) as caught:
        open_checkpoint(locate(str(path)))
    assert "\n" not in str(caught.value)


def test_a_scale_that_is_no_number_is_found(tmp_path, made):
    tensors = dict(made[1])
    name = first(tensors, "_scales")
    tensors[name] = tensors[name].clone()
    tensors[name][1, 1, 0] = 255
    with pytest.raises(ConfigError, match="NaN"):
        list(open_checkpoint(locate(str(folder(tmp_path / "m", tensors)))).tensors())
