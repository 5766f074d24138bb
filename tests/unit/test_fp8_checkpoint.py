"""Checkpoints in block-scaled fp8: equal to their dequantised twins, and what does not fit is one line."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.config.base.errors import ConfigError
from penstock.model.weights import checkpoint
from penstock.model.weights.checkpoint import open_checkpoint
from penstock.model.weights.locate import locate

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "quantization_config": {
    "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [4, 8]}}


def quantised(rows: int, cols: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(elements, scales, what they stand for, element by element)."""
    random = torch.Generator().manual_seed(seed)
    elements = torch.randn(rows, cols, generator=random).mul_(50).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // 4), -(-cols // 8), generator=random)
    twin = torch.tensor([[float(elements[i, j].float() * scales[i // 4, j // 8]) for j in range(cols)]
                         for i in range(rows)])
    return elements, scales, twin


def shards(folder: Path, files: dict[str, dict[str, torch.Tensor]], config: dict = CONFIG) -> Path:
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {
        tensor: f"{name}.safetensors" for name, tensors in files.items() for tensor in tensors}}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.covers(weights="fp8")
def test_blocks_equal_their_dequantised_twin_with_scales_in_another_shard(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, a_scale, a_twin = quantised(8, 16, 1)
    b, b_scale, b_twin = quantised(10, 19, 2)            # neither side is a multiple of its block
    norm = torch.rand(3)
    shards(tmp_path, {"one": {"a.weight": a, "norm.weight": norm, "b.weight_scale_inv": b_scale},
                      "two": {"b.weight": b, "a.weight_scale_inv": a_scale}})
    found = dict(open_checkpoint(locate(str(tmp_path))).tensors())
    assert sorted(found) == ["a.weight", "b.weight", "norm.weight"]
    assert found["a.weight"].equal(a_twin) and found["b.weight"].equal(b_twin)
    assert found["norm.weight"].equal(norm)
    sizes: list[int] = []
    real = checkpoint._read_into
    monkeypatch.setattr(checkpoint, "_read_into", lambda file, begin, target, path: (
        sizes.append(len(target)), real(file, begin, target, path)))
    list(open_checkpoint(locate(str(tmp_path))).tensors(lambda name: name == "b.weight"))
    assert sizes == [10 * 19, b_scale.nbytes], "a stage reads its own weights and scales only"


ONE = quantised(8, 16, 3)
WRONG = {
    "no scales": ({"w.weight": ONE[0]}, CONFIG, "no file holds"),
    "scales of another shape": ({"w.weight": ONE[0], "w.weight_scale_inv": ONE[1][:1].clone()}, CONFIG,
                                r"expected F32 of \(2, 2\)"),
    "scales of another type": ({"w.weight": ONE[0], "w.weight_scale_inv": ONE[1].double()}, CONFIG, "F64"),
    "three dimensions": ({"w.weight": ONE[0][None].clone(), "w.weight_scale_inv": ONE[1]}, CONFIG,
                         "two dimensions"),
    "nothing said": ({"w.weight": ONE[0], "w.weight_scale_inv": ONE[1]}, {"model_type": "llama"},
                     "no quantization_config"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_one_clear_line(tmp_path: Path, case: str) -> None:
    tensors, config, words = WRONG[case]
    with pytest.raises(ConfigError, match=words) as caught:
        open_checkpoint(locate(str(shards(tmp_path, {"one": tensors}, config))))
    assert "\n" not in str(caught.value)


def test_a_nan_in_the_scales_is_found(tmp_path: Path) -> None:
    scale = ONE[1].clone()
    scale[1, 1] = float("nan")
    shards(tmp_path, {"one": {"w.weight": ONE[0], "w.weight_scale_inv": scale}})
    with pytest.raises(ConfigError, match="NaN"):
        list(open_checkpoint(locate(str(tmp_path))).tensors())
