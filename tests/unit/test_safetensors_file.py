"""safetensors: equal to the library on whole files, one clear line on each kind of damage."""
from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penstock.config.base.errors import ConfigError
from penstock.model.weights.checkpoint import open_checkpoint
from penstock.model.weights.locate import INDEX, locate
from penstock.model.weights.safetensors_file import read_safetensors_header

CONFIG = {"model_type": "llama", "vocab_size": 8, "eos_token_id": 7}
W = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def write(path: Path, header: Any, num_bytes: int = 24, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(num_bytes))
    return path


def model(folder: Path, **shards: dict[str, torch.Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, tensors in shards.items():
        save_file(tensors, folder / f"{name}.safetensors")
    return folder


def index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def test_tensors_equal_the_library(tmp_path: Path) -> None:
    wanted = {"scalar": torch.tensor(1.5), "row": torch.randn(7),
              "half": torch.randn(3, 5).half(), "brain": torch.randn(2, 2, 3).bfloat16(),
              "double": torch.randn(4, 1, dtype=torch.float64)}
    checkpoint = open_checkpoint(locate(str(model(tmp_path, model=wanted))))
    found = dict(checkpoint.tensors())
    assert checkpoint.config == CONFIG and checkpoint.eos_ids == (7,)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype and tensor.equal(wanted[name]), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tensors_reach_a_device_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through few and small pieces of memory, which are filled again while copies may still run."""
    monkeypatch.setattr("penstock.model.weights.checkpoint._STAGED", 3)
    monkeypatch.setattr("penstock.model.weights.checkpoint._PART_BYTES", 4096)
    wanted = {"scalar": torch.tensor(1.5), "many": torch.randn(300, 1001), "half": torch.randn(4096).half()}
    for name, tensor in open_checkpoint(locate(str(model(tmp_path, model=wanted)))).tensors(device="cuda"):
        assert tensor.device.type == "cuda" and tensor.cpu().equal(wanted[name]), name


def test_shards_of_an_index_and_old_buffers(tmp_path: Path) -> None:
    a, b, c = torch.randn(2, 2), torch.randn(3), torch.ones(4)
    model(tmp_path, one={"a": a, "model.layers.0.self_attn.rotary_emb.inv_freq": c}, two={"b": b})
    index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors",
                     "model.layers.0.self_attn.rotary_emb.inv_freq": "one.safetensors"})
    found = dict(open_checkpoint(locate(str(tmp_path))).tensors())
    assert found.keys() == {"a", "b"} and found["a"].equal(a) and found["b"].equal(b)


def test_the_index_decides_which_copy_of_a_tensor_is_read(tmp_path: Path) -> None:
    """Nothing is read of a stale shard, of tensors that nothing lists, of buffers and scales; the log says
    so in one line; their types do not matter."""
    right, stale = torch.randn(3), torch.randn(3)
    model(tmp_path, one={"a": right, "b": stale, "x": torch.ones(2, dtype=torch.int32)},
          two={"b": right + 1, "a": stale, "model.layers.0.self_attn.k_scale": torch.ones(1),
               "model.layers.0.self_attn.k_proj.k_scale": torch.ones(1), "model.extra.weight": stale + 1},
          stale={"a": stale, "c": stale + 2})
    index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "model.extra.weight": "two.safetensors",
                     "model.layers.0.self_attn.k_scale": "two.safetensors",
                     "model.layers.0.self_attn.k_proj.k_scale": "two.safetensors",
                     "model.layers.1.self_attn.rotary_emb.inv_freq": "one.safetensors"})
    checkpoint = open_checkpoint(locate(str(tmp_path)))
    found = dict(checkpoint.tensors(lambda name: "extra" not in name))
    assert found.keys() == {"a", "b"} and found["a"].equal(right) and found["b"].equal(right + 1)
    assert checkpoint.unread(lambda name: "extra" in name) == [
        "6 tensors are not read: 3 not in the index (b, x, a); 2 buffers and static scales "
        "(model.layers.0.self_attn.k_proj.k_scale, model.layers.0.self_attn.k_scale); 1 not of this model "
        "(model.extra.weight)"]
    index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"})
    assert open_checkpoint(locate(str(tmp_path))).unread(lambda _: False) == [
        "1 tensor is not read: 1 not in the index (x)"]


def test_a_single_file_is_read_in_place_of_a_stale_index(tmp_path: Path) -> None:
    """As transformers does."""
    model(tmp_path, model={"a": torch.ones(2)}, one={"a": torch.zeros(2)})
    index(tmp_path, {"a": "one.safetensors", "b": "gone.safetensors"})
    checkpoint = open_checkpoint(locate(str(tmp_path)))
    assert dict(checkpoint.tensors())["a"].tolist() == [1, 1] and checkpoint.unread(lambda name: False) == []


@pytest.mark.parametrize("other, names", [("mtp", {"a", "b"}), ("gone", {"a"})])
def test_index_beside_a_single_file_is_read_if_all_its_files_are_there(
        tmp_path: Path, other: str, names: set[str]) -> None:
    """MTP layers are published in a second file."""
    model(tmp_path, model={"a": torch.ones(2)}, mtp={"b": torch.zeros(2)})
    index(tmp_path, {"a": "model.safetensors", "b": f"{other}.safetensors"})
    assert dict(open_checkpoint(locate(str(tmp_path))).tensors()).keys() == names


def test_an_absent_tensor_that_the_model_does_not_want_is_no_fault(tmp_path: Path) -> None:
    model(tmp_path, one={"a": torch.ones(2)})
    index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors", "lm_head.weight": "one.safetensors"})
    checkpoint = open_checkpoint(locate(str(tmp_path)))
    assert dict(checkpoint.tensors(lambda name: name != "b")).keys() == {"a"}
    with pytest.raises(ConfigError, match=r"'b' is not in one\.safetensors: the shards are not of one"):
        next(checkpoint.tensors())


@pytest.mark.parametrize("dtype, words", [
    (torch.int32, "'I32': this type is not supported"), (torch.float8_e5m2, "'F8_E5M2': this type is not")])
def test_a_type_that_is_not_read_is_refused_by_name(tmp_path: Path, dtype: torch.dtype, words: str) -> None:
    model(tmp_path, model={"a": torch.ones(2).to(dtype)})
    with pytest.raises(ConfigError, match=words):
        open_checkpoint(locate(str(tmp_path)))


DAMAGED = {
    "empty": (b"", None, 0, "too few"),
    "header longer than the file": ({"w": W}, 1 << 20, 24, "truncated"),
    "header of 2**63 bytes": ({"w": W}, 1 << 63, 24, "header of 9223372036854775808 bytes"),
    "one byte missing": ({"w": W}, None, 23, "truncated"),
    "one byte more": ({"w": W}, None, 25, "damaged"),
    "not JSON": (b"{{", None, 0, "not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', None, 0, "not UTF-8"),
    "not an object": ([1], None, 0, "expected a JSON object"),
    "nested": (b'{"a":' + b"[" * 100_000, None, 0, "nested too deeply"),
    "duplicate": (b'{"w": %b, "w": %b}' % ((json.dumps(W).encode(),) * 2), None, 24, "duplicate key 'w'"),
    "NaN": (b'{"w": NaN}', None, 0, "NaN is not JSON"),
    "not a tensor": ({"w": 3}, None, 0, "expected dtype, shape"),
    "unknown type": ({"w": {**W, "dtype": "F31"}}, None, 24, "'F31': no such type"),
    "negative dimension": ({"w": {**W, "shape": [-2, -3]}}, None, 24, "bad shape"),
    "huge dimension": ({"w": {**W, "shape": [0, 2**70]}}, None, 24, "bad shape"),
    "true for one": ({"w": {**W, "shape": [True, 6]}}, None, 24, "bad shape"),
    "no elements": ({"w": {**W, "shape": [0], "data_offsets": [0, 0]}}, None, 0, "bad shape"),
    "wrong product": ({"w": {**W, "shape": [2, 4]}}, None, 24, "needs 32 bytes"),
    "offsets reversed": ({"w": {**W, "data_offsets": [24, 0]}}, None, 24, "bad data_offsets"),
    "three offsets": ({"w": {**W, "data_offsets": [0, 24, 24]}}, None, 24, "bad data_offsets"),
    "hole": ({"w": W, "v": {**W, "data_offsets": [28, 52]}}, None, 52, "overlap or leave a hole"),
    "overlap": ({"w": W, "v": {**W, "data_offsets": [12, 36]}}, None, 36, "overlap or leave a hole"),
    "same place": ({"w": W, "v": W}, None, 24, "overlap or leave a hole"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_file_is_one_clear_line(tmp_path: Path, damage: str) -> None:
    header, length, num_bytes, words = DAMAGED[damage]
    path = write(tmp_path / "model.safetensors", header, num_bytes, length)
    if damage == "empty":
        path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"model\.safetensors") as caught:
        read_safetensors_header(path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_name_cannot_break_the_line(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"a\n\ud800\x1b" * 99: {**W, "dtype": "F31"}})
    with pytest.raises(ConfigError) as caught:
        read_safetensors_header(path)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400 + len(str(path))


INDEXES = {
    "no map": (None, "no weight_map"),
    "empty map": ({}, "no weight_map"),
    "another folder": ({"a": "../one.safetensors"}, "in the same folder"),
    "an absolute path": ({"a": "/etc/passwd"}, "in the same folder"),
    "not a name": ({"a": 3}, "in the same folder"),
    "dots": ({"a": ".."}, "not a safetensors file"),
    "pickled": ({"a": "one.bin"}, "not a safetensors file"),
    "a shard that is not there": ({"a": "three.safetensors"}, "is missing"),
    "an absent tensor": ({"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"},
                         "tensor 'c' is not in two.safetensors"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_index_that_does_not_fit_its_shards(tmp_path: Path, case: str) -> None:
    weight_map, words = INDEXES[case]
    model(tmp_path, one={"a": torch.ones(1)}, two={"b": torch.ones(2)})
    index(tmp_path, weight_map)
    with pytest.raises(ConfigError) as caught:
        next(open_checkpoint(locate(str(tmp_path))).tensors())
    assert words in str(caught.value)


def test_file_that_shrinks_after_it_was_opened(tmp_path: Path) -> None:
    model(tmp_path, model={"a": torch.ones(100)})
    checkpoint = open_checkpoint(locate(str(tmp_path)))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ConfigError, match="the file has changed"):
        list(checkpoint.tensors())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_that_are_not_finite(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    tensor = torch.randn(64, 8).to(dtype)
    tensor[3, 4] = value
    model(tmp_path, model={"a": tensor})
    with pytest.raises(ConfigError, match="'a' holds NaN or infinity"):
        list(open_checkpoint(locate(str(tmp_path))).tensors())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_weights_whose_sum_overflows_are_not_called_nan(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.full((32, 8), 3e38).to(dtype)
    model(tmp_path, model={"a": tensor})
    [(name, read)] = open_checkpoint(locate(str(tmp_path))).tensors()
    assert name == "a" and torch.equal(read, tensor)


def test_tensors_are_read_one_at_a_time(tmp_path: Path) -> None:
    import gc
    import weakref
    model(tmp_path, model={f"t{i}": torch.ones(10) for i in range(4)})
    alive: list[weakref.ref[torch.Tensor]] = []
    for _, tensor in open_checkpoint(locate(str(tmp_path))).tensors():
        gc.collect()
        assert not any(ref() is not None for ref in alive)
        alive.append(weakref.ref(tensor))
        del tensor
    assert len(alive) == 4
