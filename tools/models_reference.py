"""Writes docs/reference/models.md: each family that config.json may name, and what works with it.

`python tools/models_reference.py` prints it; `--into README.md` writes the small table there. Tests
compare both, and the examples with published configs.
Every cell is asked of the code that refuses or reads: families, wrappers, refusals, readers of weights.
"""
from __future__ import annotations

import re
import sys
from pathlib import Path

from cells import families_ran

from penstock.config.base.errors import ConfigError
from penstock.config.settings.cli import from_options
from penstock.config.settings.refuse_model import ModelFacts, check_model
from penstock.model import registry
from penstock.model.latent import LatentSpec
from penstock.model.layers import GqaSpec
from penstock.model.spec import Spec
from penstock.model.weights import gguf_config
from penstock.model.weights.fields import Fields
from penstock.model.weights.formats.table import READERS
from penstock.model.weights.wrappers import WRAPPERS

_INTRO = """\
# Models

Written by `make docs` from `src/penstock/model/`; a test compares it and reads the published `config.json`
files of `tests/data/configs`. A model is a folder, a `.gguf` file, a hub id that is in the local hub cache,
or `demo`; its `model_type` decides. Every family is held to transformers by logits of random weights on a
CPU.

- **CPU**, **GPU** *tested*: tests run tiny models with layers of these kinds there. *not tested*: it is not
  refused, and no test has run there what this family alone does.
- **`--tp` on**: where tensor parallelism is accepted. `--pp` works with every family.
- **Sparse**: `--sparse-top-k N` selects blocks of KV in layers that see all tokens; an indexer of the model
  selects by itself, without a flag. Both decode from host memory.
- `minimax_m3` has an index head for each KV head, which selects 16 blocks of 128 tokens. A page holds whole blocks:
  `--page-size` is 128 by default there.
- **Weights**: *fp8* is e4m3 in blocks (`weight_block_size`). The formats under "Quantised weights" open in
  every family.

| `model_type` | class | published, for example | layers | CPU | GPU | `--tp` on | sparse | weights |
|---|---|---|---|---|---|---|---|---|"""

_WRAPPED = """
## The text of multimodal repositories

The text model is read from `text_config` or `llm_config`, and its weights from among the others. Vision,
audio and projector weights are neither read nor counted; the log says so once. A request with an image is
refused with status 400. Where the levels of a config disagree about a tied head, the files decide.

| `model_type` of the repository | `model_type` of its text |
|---|---|"""

# `quant_method` -> what opens, and what its weights are once loaded: on a CPU, on a GPU.
_FLOATS = "floats of `--dtype`"
_CODES = "floats of `--dtype`; codes with `--dtype gguf`"
_FOUR, _EIGHT, _BITS = "4 bits", "8 bits", "4 or 8 bits"
_FORMATS = {
    "fp8": ("e4m3 with `weight_block_size`, or with a scale per tensor or row and `activation_scheme`", _FLOATS,
            _EIGHT),
    "mxfp8": ("e4m3 with a power of two for 32 columns, as MiniMax-M3-MXFP8 has it", _FLOATS, _EIGHT),
    "fbgemm_fp8": ("e4m3 with a scale per row", _FLOATS, _EIGHT),
    "compressed-tensors": ("`pack-quantized` int4 and int8 (group, channel, asymmetric, `actorder`); "
                           "`int-quantized` int8; `float-quantized` fp8 (tensor, channel, block); "
                           "`nvfp4-pack-quantized`, `mxfp4-pack-quantized`, `mxfp8-quantized`",
                           "floats of `--dtype`; int4 and int8 codes with `--dtype gguf`",
                           f"{_BITS}; floats with a `weight_g_idx`"),
    "awq": ("`version` gemm, 4 bits, zero points", _CODES, _FOUR),
    "gptq": ("4 and 8 bits, `checkpoint_format` gptq and gptq_v2, `desc_act`, `dynamic`",
             f"{_CODES} and without `desc_act`", f"{_BITS}; floats with `desc_act`"),
    "auto-round": ("4 and 8 bits, `packing_format` auto_round, auto_round:gptqmodel, auto_round:auto_gptq",
                   _CODES, _BITS),
    "modelopt": ("`quant_algo` FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, MXFP8, NVFP4, W4A16_NVFP4, MIXED_PRECISION "
                 "of these; also in `hf_quant_config.json`", _FLOATS, _BITS),
    "mxfp4": ("experts of gpt-oss", _FLOATS, _FOUR),
}
_QUANTISED = """
## Quantised weights

`quant_method` in config.json decides. Which modules are quantised is read from the headers of the files, so modules
in `ignore` or `modules_to_not_convert` need no pattern. Activations are of the type of `--dtype`; with `--backends
linear=fp8` on Hopper prompts are multiplied in fp8, where weights are: linears in blocks of 128 x 128, or with a
scale per row or tensor. Experts are not. On a GPU weights keep the bits that they have in the files, but for groups
of no multiple of 16 columns; `desc_act` and a GGUF become floats. Weights that become floats do so once, at load,
which the log says. Each then takes 2 bytes in bfloat16 and 4 in float32 (`--dtype auto` on a CPU): 4 and 8 times an
int4 checkpoint. Tests compare each format with weights packed as its definition says; no published checkpoint of one
has run here, except of fp8 in blocks. Other formats (bitsandbytes, three bits, ModelOpt's int4) are refused by name,
and so are experts packed in one tensor, ModelOpt's `pre_quant_scale`, and zero points of 4-bit floats.

`--dtype gguf` keeps integers as the codes of the file, with scales of a GGUF, and on a CPU all, rounded to f16; it
computes in float32 on a CPU, in bfloat16 on a GPU. int4 and GGUF's Q4 take half a byte each, others a byte. Groups of
an odd number of columns or of several sizes become floats.

| `quant_method` | opens | in memory of a CPU | in memory of a GPU |
|---|---|---|---|"""

_END = """
## Names in files

- The index decides: a tensor that `model.safetensors.index.json` does not list, or places in another shard,
  is not read. A folder with `model.safetensors` is read without its index, as transformers does.
- Layers after the last, modules outside of the model, `rotary_emb` buffers and static scales (`k_scale`,
  `v_scale`, `input_scale`) are skipped. The log says in one line what was not read.
- A weight or bias in a layer of the model that its family does not have is refused by name: without it the
  model would be another one. Biases of zeros, which AutoGPTQ writes for every matrix, are skipped.
- `hf_quant_config.json` counts as `quantization_config` where config.json has none. 
- A checkpoint that asks for fp8 KV (`kv_cache_scheme`, `kv_cache_quant_algo`) gets it with `--kv-cache-dtype auto`
  where the compute type is bfloat16 and head dimensions are multiples of 16. Else KV keeps the compute type, and one
  log line says why; with float32 (a CPU's default, and its `--dtype gguf`) `--kv-cache-dtype fp8` makes it fp8.
  Static scales are not used: each vector has a scale of its own. Another format is named in the log."""

# Published repositories, by family; those of tests/data/configs are read by a test.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "llama": ("meta-llama/Meta-Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-70B",
              "meta-llama/Meta-Llama-3.1-405B"),
    "qwen2": ("Qwen/Qwen2.5-7B-Instruct",),
    "qwen3": ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-32B", "Qwen/Qwen3-32B-FP8"),
    "seed_oss": ("ByteDance-Seed/Seed-OSS-36B-Instruct",),
    "gemma2": ("google/gemma-2-9b-it",), "gemma3_text": ("google/gemma-3-270m-it",),
    "gemma4_text": ("google/gemma-4-E2B-it", "google/gemma-4-26B-A4B-it", "google/gemma-4-31B-it"),
    "mistral": ("mistralai/Mistral-7B-Instruct-v0.3",), "qwen3_next": ("Qwen/Qwen3-Next-80B-A3B-Instruct",),
    "glm4_moe": ("zai-org/GLM-4.6",),
    "qwen3_moe": ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B-FP8", "Qwen/Qwen3-Coder-480B-A35B-Instruct"),
    "qwen3_vl_text": ("Qwen/Qwen3-VL-2B-Instruct", "Qwen/Qwen3-VL-4B-Instruct", "Qwen/Qwen3-VL-8B-Instruct",
                      "Qwen/Qwen3-VL-32B-Instruct", "Qwen/Qwen3-VL-32B-Thinking"),
    "qwen3_vl_moe_text": ("Qwen/Qwen3-VL-30B-A3B-Instruct",),
    "qwen3_5_text": ("Qwen/Qwen3.5-27B",), "qwen3_5_moe_text": ("Qwen/Qwen3.5-35B-A3B",),
    "mistral4": ("mistralai/Mistral-Small-4-119B-2603",),
    "nemotron_h": ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nvidia/Nemotron-H-56B-Base-8K",
                   "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16"),
    "gpt_oss": ("openai/gpt-oss-20b", "openai/gpt-oss-120b"),
    "minimax_m2": ("MiniMaxAI/MiniMax-M2.5", "MiniMaxAI/MiniMax-M2.7"),
    "minimax_m3": ("MiniMaxAI/MiniMax-M3", "MiniMaxAI/MiniMax-M3-MXFP8"),
    "deepseek_v3": ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-R1"),
    "kimi_k2": ("moonshotai/Kimi-K2-Instruct", "moonshotai/Kimi-K2.5"),
    "deepseek_v32": ("deepseek-ai/DeepSeek-V3.2",),
    "glm_moe_dsa": ("zai-org/GLM-5", "zai-org/GLM-5-FP8", "zai-org/GLM-5.1", "zai-org/GLM-5.1-FP8",
                    "zai-org/GLM-5.2"),
}
# One config that every family reads, of which each takes its own fields, and what some need beside.
_ANY = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1 << 17,
    "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "num_local_experts": 8,
    "num_experts": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "index_head_dim": 16, "index_n_heads": 4, "index_topk": 2048,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16,
          "layer_types": ["linear_attention", "full_attention"] * 2}
_OWN: dict[str, dict[str, object]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]}, "granitemoehybrid": _MAMBA,
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp", "moe"]},
    **{family: {"rope_parameters": {
        "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192,
        "llama_4_scaling_beta": 0.1}} for family in ("ministral3", "mistral4")},
    **{family: {"index_n_heads": 2, "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3]}
       for family in ("minimax_m3", "minimax_m3_vl_text")},
    "gemma4_text": {"num_hidden_layers": 6, "enable_moe_block": True, "top_k_experts": 2,
                    "hidden_size_per_layer_input": 0},
    **{family: {"sliding_window": 128} for family in ("mistral", "gemma2", "gemma3_text", "gpt_oss")},
}


def reference() -> str:
    """Return the whole document, ending in a newline."""
    lines = [_INTRO, *map(_row, sorted(registry.FAMILIES)), _WRAPPED]
    lines += [f"| `{kind}` | {', '.join(f'`{text}`' for text in wrapper.texts)} |"
              for kind, wrapper in WRAPPERS.items()]
    lines += [_QUANTISED, *(f"| `{method}` | {' | '.join(_FORMATS[method])} |" for method in READERS)]
    return "\n".join([*lines, _END]) + "\n"


def example(family: str) -> Spec:
    """Return the shape of a small model of a family, with all kinds of layers that it may have."""
    return registry.FAMILIES[family][1](Fields({**_ANY, **_OWN.get(family, {})}, family))


def _row(family: str) -> str:
    spec = example(family)
    cells = (f"`{family}`", f"`{registry.FAMILIES[family][0]}`", ", ".join(EXAMPLES.get(family, ())) or "-",
             _layers(spec), "tested", _gpu(family), _tp(spec), _sparse(spec),
             _weights(family))
    return f"| {' | '.join(cells)} |"


def _refused(spec: Spec, **options: object) -> bool:
    """Whether flags do not go with a model of this shape."""
    facts = ModelFacts(name="NAME", load_format="safetensors", layers=spec.num_layers,
                       kv_heads="paged_attention" in spec.attention.ops, **registry.numbers_of(spec))
    try:
        check_model(from_options("NAME", {"host_decode": "off", **options}), facts)
    except ConfigError:
        return True
    return False


def _tp(spec: Spec) -> str:
    if _refused(spec, tp=2):
        return "no"
    return "CPU" if _refused(spec, tp=2, device="cuda") else "CPU, GPU"


def _layers(spec: Spec) -> str:
    attention = spec.attention
    kinds = ["GQA" if attention.index is None else "GQA with an indexer"]
    if isinstance(attention, LatentSpec):
        kinds = ["MLA" if attention.index is None else "DSA"]
    kinds += ["sliding windows"] if any(spec.windows) else []
    kinds += ["sinks"] if isinstance(attention, GqaSpec) and attention.sinks else []
    kinds += ["recurrent states"] if spec.states else []
    return ", ".join([*kinds, *(["MoE"] if spec.moe else [])])


def _gpu(family: str) -> str:
    """Whether the report of runs has the family, or another of the same layers; of one that no test names, whether
    these fields ask for nothing that has not run on a GPU."""
    spec = example(family)
    attention, (_, layers) = spec.attention, registry.FAMILIES[family]
    own = attention.growth or spec.scaled or spec.gate or (
        isinstance(attention, GqaSpec) and (attention.sinks or attention.norm_width))
    ran = {registry.FAMILIES[one][1] for one in families_ran("gpu")}
    return "not tested" if own and layers not in ran else "tested"


def _sparse(spec: Spec) -> str:
    attention = spec.attention
    if attention.index is not None:
        return "its indexer"
    capped = isinstance(attention, GqaSpec) and attention.softcap       # `exec.load.sizing` refuses it
    return "no" if capped or _refused(spec, sparse_top_k=512) else "`--sparse-top-k`"


def _weights(family: str) -> str:
    kinds = ["safetensors", "fp8"]
    kinds += ["MXFP4 experts"] if family == "gpt_oss" else []
    return ", ".join([*kinds, *(["GGUF"] if family in {kind for kind, _ in gguf_config.ARCHITECTURES.values()}
                                else [])])


# ---------------------------------------------------------------- the small table
_START, _STOP = "<!-- models: written by `make docs` -->", "<!-- models: end -->"


def view() -> str:
    """Return the table of README: families that work alike in one row, those that no test has run on a GPU named, with
    two published examples."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for family in sorted(registry.FAMILIES, key=lambda name: (name not in EXAMPLES, name)):
        spec = example(family)
        alike.setdefault((_layers(spec), _tp(spec), _sparse(spec)), []).append(family)
    lines = ["| attention | families (`model_type`) | for example | CPU | GPU | `--tp` on | sparse decode | GGUF |",
             "|---|---|---|---|---|---|---|---|"]
    for (layers, *cells), families in sorted(alike.items()):
        ggufs = [family for family in families if _weights(family).endswith("GGUF")]
        gguf = "yes" if ggufs == families else ", ".join(ggufs) or "no"
        shown = [EXAMPLES[family][0] for family in families if family in EXAMPLES][:2]
        not_run = [family for family in families if _gpu(family) != "tested"]
        gpu = "not tested" if not_run == families else f"tested, but {', '.join(not_run)}" if not_run else "tested"
        row = (layers, ", ".join(families), ", ".join(shown) or "-", "tested", gpu, *cells, gguf)
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def put_into(text: str) -> str:
    """Return a document with the small table between its two marks."""
    return re.sub(f"(?s){re.escape(_START)}.*{re.escape(_STOP)}", f"{_START}\n{view()}\n{_STOP}", text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--into"]:
        readme = Path(sys.argv[2])
        readme.write_text(put_into(readme.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(reference(), end="")
