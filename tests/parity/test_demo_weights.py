"""The demo's weights, tensor for tensor, against the `gguf` package and against transformers' loader."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from penstock.model.weights.checkpoint import open_checkpoint
from penstock.model.weights.gguf_config import hf_name
from penstock.model.weights.locate import ModelFiles, locate


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return locate("demo")


def test_equal_to_the_gguf_package(files: ModelFiles) -> None:
    assert files.gguf is not None
    wanted = {}
    for tensor in gguf.GGUFReader(files.gguf).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            heads = 9 if ".attn_q." in tensor.name else 3
            # Rows 2i and 2i + 1 of a head are rows i and i + 32 in Hugging Face's layout.
            values = values[[64 * h + 2 * i + half for h in range(heads) for half in (0, 1)
                             for i in range(32)]]
        wanted[hf_name(tensor.name, files.config, "demo").name] = values
    count = 0
    for name, found in open_checkpoint(files).tensors():
        assert found.dtype == torch.float32 and np.array_equal(found.numpy(), wanted.pop(name)), name
        count += 1
    assert not wanted and count == 272


@pytest.mark.sweep
def test_equal_to_the_loader_of_transformers(files: ModelFiles) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    with torch.device("meta"):
        shell = LlamaForCausalLM(LlamaConfig(**files.config))
    wanted = load_gguf_checkpoint(str(files.gguf), return_tensors=True, model_to_load=shell)["tensors"]
    for name, found in open_checkpoint(files).tensors():
        assert found.equal(torch.as_tensor(wanted.pop(name))), name
    assert not wanted


MEASURE = """
import resource, sys
from pathlib import Path
from penstock.model.weights.checkpoint import open_checkpoint
from penstock.model.weights.locate import locate
files = locate(sys.argv[1])
Path("/proc/self/clear_refs").write_text("5")          # the peak starts again from here
def kib(key): return int(Path("/proc/self/status").read_text().split(key)[1].split()[0])
before, largest = kib("VmRSS:"), 0
for name, tensor in open_checkpoint(files).tensors():
    largest = max(largest, tensor.numel() * tensor.element_size())
    del tensor
print((kib("VmHWM:") - before) * 1024, largest)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux")
def test_reading_holds_one_tensor(files: ModelFiles) -> None:
    run = subprocess.run([sys.executable, "-c", MEASURE, str(files.gguf)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    grown, largest = map(int, run.stdout.split())
    assert largest == 49152 * 576 * 4
    # Besides the tensor: the header, the chunk's temporaries, and what numpy and the allocator keep.
    assert grown < largest + (48 << 20)
