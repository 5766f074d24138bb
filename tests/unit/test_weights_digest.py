"""Which weights two engines have, told apart by every byte of them."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.model.weights import checkpoint
from penstock.model.weights.locate import ModelFiles
from penstock.model.weights.safetensors_file import read_safetensors_header

TENSORS = 24


def files(folder: Path) -> ModelFiles:
    path = folder / "model.safetensors"
    save_file({f"layers.{i}.weight": torch.full((37_500,), float(i)) for i in range(TENSORS)}, str(path))
    return ModelFiles(name="m", folder=folder, load_format="safetensors", safetensors=(path,))


@pytest.mark.parametrize("tensor", [0, 7, TENSORS - 1])
@pytest.mark.parametrize("at", [0, 77_777, 149_998], ids=["begin", "middle", "end"])
def test_two_bytes_that_differ_are_seen(tmp_path: Path, tensor: int, at: int) -> None:
    model = files(tmp_path)
    [path] = model.safetensors
    before = checkpoint.weights_digest(model)
    assert before == checkpoint.weights_digest(files(tmp_path))
    begin = read_safetensors_header(path)[f"layers.{tensor}.weight"].begin
    with open(path, "r+b") as file:
        file.seek(begin + at)
        file.write(b"\x01\x02")
    assert before != checkpoint.weights_digest(model)
    if at == 0 and not tensor:
        assert checkpoint.weights_digest(model, sampled=True) != checkpoint.weights_digest(
            files(tmp_path), sampled=True)
