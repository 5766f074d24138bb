"""Integers of four and eight bits that stay packed on a CPU: `--dtype gguf` of a quantised checkpoint."""
from __future__ import annotations

from functools import partial
from pathlib import Path

import packers
import pytest
import torch
from dense_attend import Dense
from packers import FORMATS, packed_checkpoint, weight
from pipeline_engine import CONFIG

from penstock.config.base.errors import ConfigError
from penstock.config.settings.cli import from_options
from penstock.exec.load import weights
from penstock.kernels.c import build as native
from penstock.kernels.gemm import linear
from penstock.kernels.types.packed import Packed
from penstock.model.base import GlobalLayer, Stage
from penstock.model.weights.checkpoint import open_checkpoint
from penstock.model.weights.locate import locate

DENSE = {**CONFIG, "num_hidden_layers": 2}
INTEGERS = ("int4", "int4 asymmetric", "int4 channel", "int8 packed", "int8", "awq", "gptq", "gptq v2", "auto-round")


@pytest.fixture(autouse=True)
def compiler() -> None:
    if not any(map(native.shutil.which, native._COMPILERS)):
        pytest.skip("no C compiler on this machine")


def loaded(path: str, dtype: str) -> tuple[weights.LoadedModel, torch.Tensor, list[str]]:
    lines: list[str] = []
    found = weights.load(from_options(path, {"dtype": dtype, "device": "cpu", "threads": 1}), None, lines.append)
    ids_T = torch.arange(20) * 7 % DENSE["vocab_size"]
    with torch.inference_mode():
        hidden_TD = found.model.forward(ids_T, torch.arange(20), Dense(found.model.reads))
        return found, found.model.logits(hidden_TD), lines


@pytest.mark.parametrize("form", INTEGERS)
def test_a_packed_model_has_the_logits_of_its_floats_and_takes_less(form: str, tmp_path: Path) -> None:
    packed, plain = packed_checkpoint(tmp_path, DENSE, form)
    (kept, got, told), (floats, want, _) = loaded(packed, "gguf"), loaded(plain, "float32")
    assert want.std() > 1e-3 and (got - want).abs().max() < 2e-3 * want.abs().max()
    assert [line for line in told if "of weights as codes in" in line] and not any("become" in line for line in told)
    checkpoint = open_checkpoint(locate(packed), ["u8"])
    names = [name for name, tensor in checkpoint.tensors() if isinstance(tensor, Packed)]
    assert names and all(name.endswith("_proj.weight") for name in names)
    saved = sum(w.shape.numel() * 4 - w.num_bytes for _, w in checkpoint.tensors() if isinstance(w, Packed))
    assert floats.bytes - kept.bytes == saved > 0
    assert weights.weight_bytes(checkpoint, torch.float32) >= kept.bytes


CASES = {
    "group of eight": (FORMATS["gptq"][0], partial(packers.gptq, group=8, symmetric=False), (16, 24)),
    "group of 128": (FORMATS["awq"][0], partial(packers.awq, group=128), (16, 256)),
    "zero points": (FORMATS["gptq"][0], partial(packers.gptq, group=32, symmetric=False), (8, 64)),
    "one scale": (FORMATS["int8"][0], partial(packers.compressed_int8, channel=False), (6, 8)),
}


@pytest.mark.parametrize("case", CASES)
def test_products_of_codes_are_those_of_what_they_mean(case: str, tmp_path: Path) -> None:
    given, packer, shape = CASES[case]
    parts, twin = packer(weight(*shape))
    packers.written(tmp_path, given, {f"a.b.{part}": t for part, t in parts.items()})
    [(_, kept)] = open_checkpoint(locate(str(tmp_path)), ["u8"]).tensors()
    assert isinstance(kept, Packed) and kept.floats().equal(twin) and kept.finite()
    got = linear.pack(kept, None, backend="c")(torch.eye(shape[1])).T
    assert (got - twin).abs().max() <= 1e-3 * twin.abs().max()


@pytest.mark.parametrize("given, packer, shape", [
    ({**FORMATS["gptq"][0], "desc_act": True}, partial(packers.gptq, group=8), (8, 24)),
    (FORMATS["gptq"][0], partial(packers.gptq, group=16), (8, 40)),
    (FORMATS["int4"][0], partial(packers.compressed_int, group=3), (4, 24)),
    (FORMATS["fp8"][0], packers.compressed_fp8, (4, 8)), (FORMATS["nvfp4"][0], packers.nvfp4, (4, 32))])
def test_what_kernels_do_not_read_becomes_floats(given, packer, shape, tmp_path: Path) -> None:
    """Columns in another order, groups of several sizes or of an odd one, and codes that are no integers."""
    parts, twin = packer(weight(*shape))
    packers.written(tmp_path, given, {f"a.b.{part}": t for part, t in parts.items()})
    checkpoint = open_checkpoint(locate(str(tmp_path)), ["u8"])
    [(name, found)] = checkpoint.tensors()
    assert isinstance(found, torch.Tensor) and found.equal(twin) and checkpoint.format(name) is None


def test_columns_whose_order_the_config_does_not_tell_become_floats(tmp_path: Path) -> None:
    order = torch.randperm(24, generator=torch.Generator().manual_seed(2))
    parts, twin = packers.gptq(weight(8, 24), 8, order=order)
    packers.written(tmp_path, FORMATS["gptq"][0], {f"a.b.{part}": t for part, t in parts.items()})
    [(_, found)] = open_checkpoint(locate(str(tmp_path)), ["u8"]).tensors()
    assert isinstance(found, torch.Tensor) and found.equal(twin)


@pytest.mark.parametrize("form", [form for form in FORMATS if form not in INTEGERS])
def test_a_checkpoint_without_integers_is_refused(form: str, tmp_path: Path) -> None:
    packed, plain = packed_checkpoint(tmp_path, DENSE, form)
    assert not any("--dtype gguf" in line for line in loaded(packed, "float32")[2])
    for path in (packed, plain):
        with pytest.raises(ConfigError, match=r"neither a \.gguf file nor quantised as integers: leave the flag out"):
            loaded(path, "gguf")


def test_the_log_says_that_integers_may_stay_packed(tmp_path: Path) -> None:
    packed, _ = packed_checkpoint(tmp_path, DENSE, "int4")
    assert [line for line in loaded(packed, "float32")[2] if "(--dtype gguf keeps blocks packed" in line]


def test_one_rank_of_several_says_what_becomes_floats(tmp_path: Path) -> None:
    packed, _ = packed_checkpoint(tmp_path, DENSE, "nvfp4")
    asked = from_options(packed, {"dtype": "float32", "device": "cpu", "threads": 1, "pp": 2})
    said = []
    for i in range(2):
        lines: list[str] = []
        stage = Stage(GlobalLayer(i), GlobalLayer(i + 1), embeds=i == 0, heads=i == 1)
        weights.load(asked, stage, lines.append)
        said.append(len([line for line in lines if "become float32" in line]))
    assert said == [1, 0]
