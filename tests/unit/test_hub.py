"""Models by their hub id, from a hub of this machine (`tests/doubles/hub.py`)."""
from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import hub as double
import pytest

from penstock.config.base.errors import ConfigError
from penstock.config.settings.cli import from_options
from penstock.model.source.hub import pull
from penstock.model.weights.locate import files_of

CONFIG = json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}).encode()
BIG = bytes(range(256)) * 4096             # 1 MiB
SMALL = {"config.json": CONFIG, "tokenizer.json": b"{}", "tokenizer_config.json": b"{ }",
         "generation_config.json": b"{  }", "chat_template.jinja": b"x", "README.md": b"# card"}
INDEX = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors",
                                   "b": "model-00002-of-00002.safetensors"}}).encode()
REPOS = {
    "org/one": {**SMALL, "model.safetensors": BIG, "pytorch_model.bin": b"pickle", "original.pt": b"pickle"},
    "org/shards": {**SMALL, "model.safetensors.index.json": INDEX, "model-00001-of-00002.safetensors": BIG,
                   "model-00002-of-00002.safetensors": BIG[::-1], "consolidated.safetensors": BIG},
    "org/gguf": {"README.md": b"", "m.gguf": b"GGUF" + BIG},
    "org/ggufs": {"a.gguf": b"GGUF", "b.gguf": b"GGUF"},
    "org/pickled": {**SMALL, "pytorch_model.bin": b"pickle"},
    "org/gated": {**SMALL, "model.safetensors": BIG},
}


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)        # which it has read when it was imported
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[double.Hub]:
    with double.running(double.Hub(REPOS, gated=("org/gated",))) as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found


def pulled(name: str, **options: object) -> list[str]:
    """What was said."""
    said: list[str] = []
    pull(from_options(name, options), said.append)
    return said


def test_files_that_are_needed_and_no_others(hub: double.Hub, tmp_path: Path) -> None:
    said = pulled("org/one")
    files = files_of(from_options("org/one", {}).model)
    assert files.folder == tmp_path / "hub/models--org--one/snapshots" / double.SHA
    assert files.safetensors[0].read_bytes() == BIG and files.config["model_type"] == "llama"
    assert {p.name for p in files.folder.iterdir()} == {*SMALL, "model.safetensors"} - {"README.md"}
    assert any("downloading" in line for line in said) and said[-1] == "org/one: downloaded"
    asked = len(hub.asked)
    assert pulled("org/one") == [] and len(hub.asked) == asked, "what is there is not asked for"


def test_shards_that_the_index_lists(hub: double.Hub) -> None:
    pulled("org/shards")
    files = files_of(from_options("org/shards", {}).model)
    assert [p.read_bytes() for p in files.safetensors] == [BIG, BIG[::-1]]
    assert not (files.folder / "consolidated.safetensors").exists()


def test_a_gguf_is_taken_where_there_are_no_other_weights(hub: double.Hub) -> None:
    pulled("org/gguf")
    assert files_of(from_options("org/gguf", {}).model).gguf.read_bytes() == b"GGUF" + BIG  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"2 \.gguf files \(a.gguf, b.gguf\): run `hf download org/ggufs"):
        pulled("org/ggufs")


def test_random_weights_need_no_weights(hub: double.Hub) -> None:
    pulled("org/one", load_format="dummy")
    assert "model.safetensors" not in hub.files()
    pulled("org/one")                       # and then only they are missing
    assert hub.files().count("config.json") == 1 and hub.files()[-1] == "model.safetensors"


def test_a_download_that_was_cut_goes_on_where_it_was(hub: double.Hub,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    hub.cut = {"model.safetensors"}
    pulled("org/one")
    assert files_of(from_options("org/one", {}).model).safetensors[0].read_bytes() == BIG
    assert [r for m, path, r in hub.asked if path.startswith("/cdn/") and r], "asked for the rest alone"


def test_a_revision_and_a_folder_of_the_user_s(hub: double.Hub, tmp_path: Path) -> None:
    options = {"revision": "other", "download_dir": str(tmp_path / "mine")}
    pulled("org/one", **options)
    files = files_of(from_options("org/one", options).model)
    assert files.folder == tmp_path / "mine/models--org--one/snapshots" / double.OTHER
    with pytest.raises(ConfigError, match="the hub has no revision absent of it"):
        pulled("org/one", revision="absent")
    (tmp_path / "local").mkdir()
    with pytest.raises(ConfigError, match="a revision is of a hub id"):
        files_of(from_options(str(tmp_path / "local"), {"revision": "v1"}).model)


def test_a_tokenizer_by_hub_id_brings_no_weights(hub: double.Hub) -> None:
    pulled("demo", tokenizer="org/one")
    assert "tokenizer.json" in hub.files() and "model.safetensors" not in hub.files()


def test_a_gated_model_wants_a_token(hub: double.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"gated: accept its terms at http://\S+/org/gated, and set"):
        pulled("org/gated")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    pulled("org/gated")
    assert files_of(from_options("org/gated", {}).model).safetensors


def test_what_cannot_be_downloaded_says_what_to_do(hub: double.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, said in (("org/absent", "not on the hub http://.*, or private"),
                       ("org/pickled", r"no safetensors and no \.gguf file")):
        with pytest.raises(ConfigError, match=said):
            pulled(name)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"downloading from http://127\S+ failed.*hf download org/one"):
        pulled("org/one")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set: unset it, or `hf download org/one`"):
        pulled("org/one")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="huggingface_hub is not installed: pip install huggingface_hub"):
        pulled("org/one")


def test_nothing_is_asked_for_what_is_no_hub_id(hub: double.Hub, tmp_path: Path) -> None:
    (tmp_path / "org/here").mkdir(parents=True)
    for name in ("demo", "llama3", "org/here", "a/b/c", "x.gguf"):
        assert pulled(name) == []
    assert hub.asked == []
