"""Which weights two engines have, told apart without reading all of them."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.model import checkpoint
from penstock.model.locate import ModelFiles
from penstock.model.safetensors_file import read_safetensors_header

TENSORS = 24


def files(folder: Path) -> ModelFiles:
    path = folder / "model.safetensors"
    # 150,000 bytes each: the pieces at every 64th of the file miss where most of them begin.
    save_file({f"layers.{i}.weight": torch.full((37_500,), float(i)) for i in range(TENSORS)}, str(path))
    return ModelFiles(name="m", folder=folder, load_format="safetensors", safetensors=(path,))


@pytest.mark.parametrize("tensor", range(TENSORS))
def test_a_tensor_that_differs_is_seen(tmp_path: Path, tensor: int) -> None:
    model = files(tmp_path)
    [path] = model.safetensors
    before = checkpoint.weights_digest(model)
    assert before == checkpoint.weights_digest(files(tmp_path))
    begin = read_safetensors_header(path)[f"layers.{tensor}.weight"].begin
    with open(path, "r+b") as file:
        file.seek(begin + 8)
        file.write(b"\x01\x02")
    assert before != checkpoint.weights_digest(model)
