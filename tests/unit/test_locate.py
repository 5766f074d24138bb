"""Which files a model name means, and what is said when it means none. No torch, no network."""
from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.config.base.errors import ConfigError
from penstock.config.base.paths import cache_dir, hub_cache_dir
from penstock.model.weights.locate import INDEX, locate

CONFIG = {"model_type": "llama", "vocab_size": 8}
GGUF = b"GGUF" + struct.pack("<IQQ", 3, 0, 0)


def folder(path: Path, *names: str, **texts: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    for name in names:
        (path / name).write_bytes(GGUF if name.endswith(".gguf") else b"")
    for name, value in texts.items():
        (path / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def refusal(model: object, load_format: str = "auto") -> str:
    with pytest.raises(ConfigError) as caught:
        locate(str(model), load_format=load_format)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_with_one_file_and_one_with_shards(tmp_path: Path) -> None:
    one = locate(str(folder(tmp_path / "one", "model.safetensors", "consolidated.safetensors")))
    assert one.safetensors == (tmp_path / "one/model.safetensors",) and one.index is None
    assert one.name == "one" and one.tokenizer is None and one.load_format == "safetensors"
    assert one.config == CONFIG and one.generation_config == {}
    many = folder(tmp_path / "many", "a-1.safetensors", "a-2.safetensors", "tokenizer.json")
    assert "2 safetensors files but no" in refusal(many)
    (many / INDEX).write_text(json.dumps({"weight_map": {
        "x": "a-2.safetensors", "y": "a-1.safetensors", "z": "a-2.safetensors"}}))
    found = locate(str(many))
    assert found.safetensors == (many / "a-2.safetensors", many / "a-1.safetensors")
    assert found.tokenizer == many / "tokenizer.json"


def test_gguf_by_path_by_folder_and_by_format(tmp_path: Path) -> None:
    place = folder(tmp_path / "m", "m.gguf")
    assert locate(str(place / "m.gguf")).gguf == place / "m.gguf"
    assert locate(str(place)).gguf == place / "m.gguf" == locate(str(place)).tokenizer
    (place / "model.safetensors").touch()
    assert locate(str(place)).load_format == "safetensors"
    assert locate(str(place), load_format="gguf").gguf == place / "m.gguf"
    assert "load format is safetensors" in refusal(place / "m.gguf", "safetensors")
    folder(place, "n.gguf")
    assert "2 .gguf files; give one of them by its path: m.gguf, n.gguf" in refusal(place, "gguf")
    assert "0 .gguf files; expected one" in refusal(folder(tmp_path / "none"), "gguf")


def test_dummy_needs_only_the_config(tmp_path: Path) -> None:
    place = folder(tmp_path / "m", "pytorch_model.bin")
    files = locate(str(place), load_format="dummy")
    assert files.load_format == "dummy" and files.safetensors == () and files.config == CONFIG
    (place / "config.json").unlink()
    assert "there is no config.json" in refusal(place, "dummy")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "w.pkl", "a.ckpt"])
def test_pickled_weights_are_refused_by_name(tmp_path: Path, name: str) -> None:
    place = folder(tmp_path / "m", name)
    for given in (place, place / name):
        message = refusal(given)
        assert name in message and "can run code" in message and "safetensors" in message


def test_what_is_not_a_model(tmp_path: Path) -> None:
    assert "no such file or folder" in refusal(tmp_path / "absent")
    assert "no such file or folder" in refusal("./absent.gguf")
    assert "expected 'demo', a folder" in refusal("") and "expected 'demo'" in refusal("a\0b")
    assert "there are no weights" in refusal(folder(tmp_path / "no weights"))
    (tmp_path / "text.txt").write_text("hello")
    assert "not a GGUF file" in refusal(tmp_path / "text.txt")
    (tmp_path / "w.safetensors").write_text("hello")
    assert "give the folder" in refusal(tmp_path / "w.safetensors")
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "no such file or folder" in refusal(tmp_path / "pipe.gguf")
    assert "expected auto, safetensors" in refusal(tmp_path, "pt")


CONFIGS: dict[str, tuple[Any, str]] = {
    "not JSON": ("{", "not valid JSON"),
    "a list": ([], "expected a JSON object, found list"),
    "duplicate": ('{"a": 1, "a": 2}', "duplicate key 'a'"),
    "not UTF-8": ('{"a": "\udcff"}', "not UTF-8"),
    "nothing": ({}, "not the config of a language model"),
    "type": ({"model_type": 3}, "not the config of a language model"),
    "negative": ({**CONFIG, "hidden_size": -1}, "hidden_size is -1"),
    "a float": ({**CONFIG, "hidden_size": 64.0}, "hidden_size is 64.0"),
    "true": ({**CONFIG, "num_hidden_layers": True}, "num_hidden_layers is True"),
    "huge": ({**CONFIG, "vocab_size": 1 << 40}, "vocab_size is 1099511627776"),
    "not finite": ('{"model_type": "llama", "rope_theta": 1e999}', "rope_theta is inf"),
    "NaN": ('{"model_type": "llama", "rope_theta": NaN}', "rope_theta is nan"),
    "quantised": ({**CONFIG, "quantization_config": {"quant_method": "awq"}}, "quantised with 'awq'"),
    "fp8 without blocks": ({**CONFIG, "quantization_config": {"quant_method": "fp8"}},
                           "weight_block_size None"),
}


def test_constants_of_a_config_are_read_as_python_and_transformers_write_them(tmp_path: Path) -> None:
    place = folder(tmp_path, "model.safetensors")
    (place / "config.json").write_text(json.dumps(CONFIG)[:-1] + (
        ', "time_step_limit": [0.0, Infinity], "low": -Infinity, "a": [NaN], '
        '"b": {"__float__": "-Infinity"}, "c": {"__float__": "else"}}'))
    config = locate(str(place)).config
    assert config["time_step_limit"] == [0.0, math.inf] and config["low"] == config["b"] == -math.inf
    assert math.isnan(config["a"][0]) and config["c"] == {"__float__": "else"}


def test_what_modelopt_s_own_file_says_is_read_or_refused_by_name(tmp_path: Path) -> None:
    place = folder(tmp_path, "model.safetensors")
    (place / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": null}}')
    assert locate(str(place)).config
    assert "quantization_config" not in locate(str(place)).config
    (place / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    assert locate(str(place)).config["quantization_config"] == {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    for given in ('{"quant_algo": "W4A8_AWQ"}', '"W4A8_AWQ"'):
        (place / "hf_quant_config.json").write_text(f'{{"quantization": {given}}}')
        with pytest.raises(ConfigError, match=r"hf_quant_config\.json: .* 'modelopt' with 'W4A8_AWQ', which is not"):
            _ = locate(str(place)).config


@pytest.mark.parametrize("case", CONFIGS)
def test_broken_config_is_one_clear_line(tmp_path: Path, case: str) -> None:
    text, words = CONFIGS[case]
    place = folder(tmp_path, "model.safetensors")
    text = text if isinstance(text, str) else json.dumps(text)
    (place / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        _ = locate(str(place)).config
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("generation", "config", "wanted"), [
    (None, 7, (7,)), ([5, 7, 5], 7, (5, 7)), (3, None, (3,)), (None, None, ())])
def test_eos_ids_prefer_generation_config(tmp_path: Path, generation: Any, config: Any,
                                          wanted: tuple[int, ...]) -> None:
    place = folder(tmp_path, "model.safetensors", config={**CONFIG, "eos_token_id": config},
                   generation_config={"eos_token_id": generation})
    assert locate(str(place)).eos_ids == wanted


@pytest.mark.parametrize("value", ["2", [1, "2"], -1, 1.0, True, [2**40], {}])
def test_eos_ids_of_another_type_are_refused(tmp_path: Path, value: Any) -> None:
    place = folder(tmp_path, "model.safetensors", generation_config={"eos_token_id": value})
    with pytest.raises(ConfigError, match=r"eos_token_id of generation_config\.json"):
        _ = locate(str(place)).eos_ids


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def test_hub_id_in_a_cache_of_links(hub: Path) -> None:
    repo = hub / "models--org--tiny-model"
    blobs = folder(repo / "blobs", "model.safetensors")
    snapshot = repo / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(Path("../../blobs") / blob.name)
    files = locate("org/tiny-model")             # one revision and no refs: that one
    assert files.folder == snapshot and files.name == "org/tiny-model" and files.config == CONFIG
    folder(repo / "snapshots" / "def456", "model.safetensors")
    assert "2 revisions and no refs/main" in refusal("org/tiny-model")
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text("def456\n")
    assert locate("org/tiny-model").folder == repo / "snapshots/def456"
    (repo / "refs/main").write_text("0" * 40)
    assert "is incomplete; run `hf download org/tiny-model`" in refusal("org/tiny-model")
    (repo / "refs/main").write_text("../../../secret")
    assert "is not a revision" in refusal("org/tiny-model")


def test_hub_id_that_is_not_cached_says_where_it_looked(hub: Path) -> None:
    message = refusal("org/absent")
    assert str(hub) in message and "hf download org/absent" in message
    for given in ("../org/x", "org/../x", "a/b/c", "org--x/y", "org/x\n", "/abs/x"):
        assert "no such file or folder" in refusal(given)


def test_a_bare_word_is_no_hub_id(hub: Path) -> None:
    assert refusal("llama3") == ("model 'llama3': not a folder or a .gguf file here; hub ids look like "
                                 "ORG/NAME")


def test_a_folder_goes_before_a_hub_id(hub: Path, tmp_path: Path) -> None:
    folder(hub / "models--org--m" / "snapshots" / "a", "model.safetensors")
    folder(tmp_path / "org" / "m", "model.safetensors")
    assert locate("org/m").folder == Path("org/m")


def test_cache_folders_follow_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "PENSTOCK_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert hub_cache_dir() == Path("/home/someone/.cache/huggingface/hub")
    assert cache_dir() == Path("/home/someone/.cache/penstock")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")         # invalid: ignored
    assert cache_dir() == Path("/home/someone/.cache/penstock")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert hub_cache_dir() == Path("/xdg/huggingface/hub") and cache_dir() == Path("/xdg/penstock")
    monkeypatch.setenv("HF_HOME", "~/hf")
    assert hub_cache_dir() == Path("/home/someone/hf/hub")
    monkeypatch.setenv("HUGGINGFACE_HUB_CACHE", "/old")
    assert hub_cache_dir() == Path("/old")
    monkeypatch.setenv("HF_HUB_CACHE", "/new")
    assert hub_cache_dir() == Path("/new")
    monkeypatch.setenv("PENSTOCK_CACHE", "~/own")
    assert cache_dir() == Path("/home/someone/own")


@pytest.mark.parametrize("module", ["penstock.model.weights.locate", "penstock.text.tokenizer"])
def test_locating_imports_neither_torch_nor_numpy(module: str) -> None:
    code = (f"import sys, {module};"
            "sys.exit(', '.join({'torch', 'numpy', 'gguf'} & set(sys.modules)) or 0)")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
