"""Loading streams: peak RSS above the RSS after imports is at most 1.3x the loaded weights.

Measured in a process of its own, from the kernel's high-water mark, over the whole of `build_engine`
with its proof of one token; the pools are small and, but for that token, untouched. And what libraries keep
of each size of a step stays bounded.
"""
from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.model import registry

RATIO_MAX = 1.3
SHARDED = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 1024,
    "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 16_384, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "torch_dtype": "bfloat16",
}

MEASURE = """
import sys
from pathlib import Path

from penstock.config.settings.cli import from_options
from penstock.config.base.machine import probe
from penstock.config.settings.resolve import resolve
from penstock.exec.start.build import build_engine
from penstock.exec.load.backends import choose_backends

def kib(key):
    return int(Path("/proc/self/status").read_text().split(key)[1].split()[0])

config = resolve(from_options(sys.argv[1], {"dtype": sys.argv[2], "kv_cache_memory_bytes": "16M",
                                            "threads": 1}), probe())
# Imports, but in earnest: torch's library reads 18 MB of its own code when it first multiplies.
choose_backends(config, ("linear", "layer", *sys.argv[3].split(",")), lambda line: None)
before = kib("VmRSS:")
Path("/proc/self/clear_refs").write_text("5")          # the high-water mark starts again from here
built = build_engine(config, lambda line: None)
rest = kib("VmRSS:")                                   # first: reading takes memory too, and the mark follows
print(built.info["weight_bytes"], (kib("VmHWM:") - before) << 10, (rest - before) << 10)
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux only")


def measured(model: str, dtype: str, ops: str = "paged_attention") -> tuple[int, int, int]:
    """Bytes of the weights (parameters x size of the loaded dtype, a tied tensor once); peak and
    last RSS above the RSS after imports."""
    run = subprocess.run([sys.executable, "-c", MEASURE, model, dtype, ops], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    weights, peak, rest = map(int, run.stdout.split())
    print(f"{model.rpartition('/')[2]} {dtype}: {weights / 1e6:.0f} MB of weights, peak "
          f"{peak / weights:.2f}x, at rest {rest / weights:.2f}x")
    return weights, peak, rest


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an index and four shards of bfloat16: 250 MB."""
    folder = tmp_path_factory.mktemp("sharded")
    (folder / "config.json").write_text(json.dumps(SHARDED))
    shapes = list(registry.tensor_shapes(SHARDED))
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    for shard in range(4):
        file = f"model-{shard + 1:05}-of-00004.safetensors"
        tensors = {name: torch.randn(shape, generator=generator).mul_(0.02).to(torch.bfloat16)
                   for name, shape in shapes[shard::4]}
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo(dtype: str) -> None:
    weights, peak, rest = measured("demo", dtype)
    assert weights == 134_515_008 * (4 if dtype == "float32" else 2)
    # A tied head is kept twice, as rows to look up and packed to multiply: 1.21x at rest.
    assert weights <= rest <= peak <= RATIO_MAX * weights


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.sweep), "bfloat16"])
def test_shards(sharded: Path, dtype: str) -> None:
    weights, peak, rest = measured(str(sharded), dtype)
    count = sum(math.prod(shape) for _, shape in registry.tensor_shapes(SHARDED))
    assert weights == count * (4 if dtype == "float32" else 2)
    assert weights <= rest <= peak <= RATIO_MAX * weights


SIZES = """
from pathlib import Path

import torch

from penstock.config.base.machine import bound_onednn_caches
from penstock.kernels.gemm import linear

def resident():
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) << 10

bound_onednn_caches()
run = linear.pack(torch.ones(64, 32), backend="onednn")
for rows in range(1, 401):
    run(torch.ones(rows, 32))
    if rows == 100:
        before = resident()
print(resident() - before)
"""


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_steps_of_ever_new_sizes_take_no_more_memory() -> None:
    """oneDNN keeps 0.6 MB of code for each number of rows: 180 MB for these 300, were it not bounded."""
    run = subprocess.run([sys.executable, "-c", SIZES], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 60e6


FP8 = {
    "model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"], "hidden_size": 1024,
    "intermediate_size": 2816, "num_hidden_layers": 4, "first_k_dense_replace": 1, "num_attention_heads": 16,
    "q_lora_rank": 384, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "index_n_heads": 16, "index_head_dim": 64, "index_topk": 256, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "moe_intermediate_size": 768, "n_shared_experts": 1, "n_group": 4,
    "topk_group": 2, "vocab_size": 8192, "max_position_embeddings": 2048, "rope_theta": 10000.0,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}


@pytest.mark.sweep
def test_fp8_blocks(tmp_path: Path) -> None:
    """A made-up checkpoint of 150 M parameters in two shards, each with the scales of the other's tensors."""
    generator = torch.Generator().manual_seed(0)
    shards: list[dict[str, torch.Tensor]] = [{}, {}]
    size = 0
    for i, (name, shape) in enumerate(registry.tensor_shapes(FP8)):
        tensor = torch.randn(shape, generator=generator).mul_(0.02)
        chooses = "weights_proj" in name or "mlp.gate." in name         # in float32, whatever the dtype
        size += tensor.numel() * (4 if chooses else 2)
        linear = "proj" in name or name.endswith(("wq_b.weight", "wk.weight"))
        if len(shape) == 2 and linear and "weights_proj" not in name:
            shards[i % 2][name] = (tensor * 500).to(torch.float8_e4m3fn)
            shards[1 - i % 2][f"{name}_scale_inv"] = torch.full([-(-n // 128) for n in shape], 0.002)
        else:
            shards[i % 2][name] = tensor.to(torch.float32 if "bias" in name else torch.bfloat16)
    assert sum(t.dtype is torch.float8_e4m3fn for part in shards for t in part.values()) > 100
    (tmp_path / "config.json").write_text(json.dumps(FP8))
    for n, part in enumerate(shards):
        save_file(part, tmp_path / f"{n}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {
        name: f"{n}.safetensors" for n, part in enumerate(shards) for name in part}}))
    del shards
    weights, peak, rest = measured(str(tmp_path), "bfloat16", "index_select,latent_attention")
    assert weights == size
    assert weights <= rest <= peak <= RATIO_MAX * weights
