"""Models of GGUF files whose weights mix block types, kept as codes: the same logits, and what is told."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from dense_attend import Dense
from gguf import GGMLQuantizationType as Type

from penstock.config.base.errors import ConfigError
from penstock.config.settings.cli import from_options
from penstock.config.settings.tree import Config
from penstock.exec.load import backends, weights
from penstock.kernels.c import build as native
from penstock.kernels.op import Unusable
from penstock.kernels.platform import Platform
from penstock.model.base import Model
from penstock.model.weights.locate import files_of

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCAB, EXPERTS = 256, 4, 2, 64, 256, 40, 3
# Files mix types: other ones for v, down and embeddings. Q3_K does not stay packed.
KV_ROWS = KV_HEADS * HEAD_DIM
DENSE = {"token_embd": ("Q6_K", VOCAB), "blk.0.attn_q": ("Q4_K", HIDDEN), "blk.0.attn_k": ("Q4_K", KV_ROWS),
         "blk.0.attn_v": ("Q6_K", KV_ROWS), "blk.0.attn_output": ("Q5_0", HIDDEN),
         "blk.0.ffn_gate": ("Q8_0", WIDTH), "blk.0.ffn_up": ("Q3_K", WIDTH),
         "blk.0.ffn_down": ("Q4_1", HIDDEN)}
MOE = {**dict(list(DENSE.items())[:5]), "output": ("Q8_0", VOCAB), "blk.0.ffn_gate_exps": ("Q4_K", WIDTH),
       "blk.0.ffn_up_exps": ("Q5_K", WIDTH), "blk.0.ffn_down_exps": ("Q6_K", HIDDEN)}
D_AT = {"Q6_K": (208,), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2), "Q5_0": (0,),
        "Q8_0": (0,)}               # where a block has its f16


def blocks(block: str, rows: int, seed: int) -> np.ndarray:
    """`rows` rows of HIDDEN inputs."""
    rng, (elements, size) = np.random.default_rng(seed), gguf.GGML_QUANT_SIZES[Type[block]]
    raw = rng.integers(0, 256, (rows * HIDDEN // elements, size), dtype=np.uint8)
    for at in D_AT[block]:
        raw[:, at : at + 2] = rng.normal(0, 1e-4, (len(raw), 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def written(path: Path, architecture: str, types: dict[str, tuple[str, int]]) -> Path:
    made = gguf.GGUFWriter(path, architecture)
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": HIDDEN,
             "feed_forward_length": WIDTH, "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS,
             "attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM}
    if architecture == "qwen3moe":
        sizes |= {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": WIDTH}
    for key, value in sizes.items():
        made.add_uint32(f"{architecture}.{key}", value)
    made.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    for seed, (name, (block, rows)) in enumerate(types.items()):
        experts = EXPERTS if name.endswith("_exps") else 1
        raw = np.stack([blocks(block, rows, seed + 100 * e) for e in range(experts)])
        made.add_tensor(f"{name}.weight", raw if experts > 1 else raw[0], raw_dtype=Type[block])
    norms = {"output_norm": HIDDEN, "blk.0.attn_norm": HIDDEN, "blk.0.ffn_norm": HIDDEN}
    if architecture == "qwen3moe":
        norms |= {"blk.0.attn_q_norm": HEAD_DIM, "blk.0.attn_k_norm": HEAD_DIM}
        made.add_tensor("blk.0.ffn_gate_inp.weight",
                        np.random.default_rng(9).normal(0, 1, (EXPERTS, HIDDEN)).astype(np.float32))
    for name, size in norms.items():
        made.add_tensor(f"{name}.weight", np.ones(size, np.float32))
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
    return path


def config(path: Path, dtype: str) -> Config:
    return from_options(str(path), {"dtype": dtype, "device": "cpu", "threads": 1})


def logits_of(model: Model) -> torch.Tensor:
    ids_T = torch.arange(20) * 7 % VOCAB
    return model.logits(model.forward(ids_T, torch.arange(20), Dense(model.reads)))


@pytest.fixture
def compiler() -> None:
    if not any(map(native.shutil.which, native._COMPILERS)):
        pytest.skip("no C compiler on this machine")


@pytest.mark.parametrize("architecture, types, floats", [("llama", DENSE, True), ("qwen3moe", MOE, False)])
def test_a_mixed_file_gives_the_same_logits(tmp_path, compiler, architecture, types, floats):
    path, lines = written(tmp_path / "m.gguf", architecture, types), []
    packed, exact = (weights.load(config(path, dtype), None, lines.append) for dtype in ("gguf", "float32"))
    got, want = logits_of(packed.model), logits_of(exact.model)
    assert want.std() > 1e-3 and (got - want).abs().max() < 2e-3 * want.abs().max()
    assert exact.bytes > 2 * packed.bytes
    told = [line for line in lines if " of weights as " in line]
    assert "as codes" in told[0] and ("those of Q3_K, and what is fused" in told[0]) == floats
    assert "as float32 (--dtype gguf keeps blocks packed, scales rounded to f16) in" in told[1]


def test_a_file_of_other_blocks_is_refused(tmp_path):
    types = {name: ("Q3_K", rows) for name, (_, rows) in DENSE.items()}
    path = written(tmp_path / "m.gguf", "llama", types)
    with pytest.raises(ConfigError, match=r"m has no weights of MXFP4, .* only of F32, Q3_K: leave"):
        weights.load(config(path, "gguf"), None, lambda _: None)


def test_without_a_compiler_it_is_refused_and_doctor_says_so(tmp_path, monkeypatch):
    from penstock.cli import doctor

    path = written(tmp_path / "m.gguf", "llama", DENSE)
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    monkeypatch.setattr(native, "_loaded", {})
    asked = config(path, "gguf")
    with pytest.raises(ConfigError, match=r"--dtype gguf: no C compiler .*: use --dtype float32"):
        weights.load(asked, None, lambda _: None)
    found = list(doctor.examine(asked, weights.machine.probe()))
    assert [finding.text for finding in found if not finding.ok] == [
        "--dtype gguf: no C compiler (cc, gcc, clang): use --dtype float32"]
    [told] = [finding.text for finding in found if finding.name == "weights"]
    assert "Q3_K" in told.split(":")[0] and "Q3_K" not in told.split(";")[1]
    assert all(block in told.split(";")[1] for block in ("Q4_1", "Q4_K", "Q5_0", "Q6_K", "Q8_0"))


def test_on_a_gpu_without_triton_it_is_refused_and_doctor_says_so(tmp_path, monkeypatch):
    from penstock.cli import doctor

    path, said = written(tmp_path / "m.gguf", "llama", DENSE), []

    def usable_on(platform):
        raise Unusable("Triton is missing")
    monkeypatch.setattr(backends, "_platform", lambda config: Platform(device="cuda", features=("sm_90",), torch="2"))
    monkeypatch.setattr(backends.linear, "OP", SimpleNamespace(get=lambda name: SimpleNamespace(usable_on=usable_on)))
    asked = config(path, "gguf")
    asked = replace(asked, device=replace(asked.device, device="cuda"))
    with pytest.raises(ConfigError, match=r"--dtype gguf: Triton is missing: use --dtype bfloat16"):
        backends.kept_packed(asked, files_of(asked.model), said.append)
    floats = replace(asked, model=replace(asked.model, dtype="bfloat16"))
    assert backends.kept_packed(floats, files_of(asked.model), said.append) == () and not said
    assert "--dtype gguf: Triton is missing: use --dtype bfloat16" in [each.text for each in doctor._model(asked)]
