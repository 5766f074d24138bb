"""Bad input at the command line and over HTTP, against the real engine: one clear line, no traceback.

What `serve` says of HTTP with an engine that echoes is in `test_http_server`; damaged files, byte by
byte, are in the property tests. Here the two processes, the files and the exit codes are real.
"""
from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file

from penstock.model import registry
from penstock.model.weights.locate import locate

PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]
WAIT_S = 200
TINY = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "hidden_act": "silu", "torch_dtype": "float32"}


def refused(*words: str | Path, code: int = 2) -> str:
    """The one line that this command line gets."""
    run = subprocess.run([*PENSTOCK, *map(str, words)], capture_output=True, text=True, timeout=WAIT_S,
                         stdin=subprocess.DEVNULL)
    assert run.returncode == code, run.stderr
    assert "Traceback" not in run.stderr and run.stdout == ""
    errors = [line for line in run.stderr.splitlines() if "error:" in line]
    assert len(errors) == 1 and errors[0].startswith("penstock: error: "), run.stderr
    return errors[0].removeprefix("penstock: error: ")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model in one safetensors file, without a tokenizer."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    generator = torch.Generator().manual_seed(0)
    save_file({name: torch.randn(shape, generator=generator) * 0.1
               for name, shape in registry.tensor_shapes(TINY)}, tmp_path / "model.safetensors")
    return tmp_path


def test_the_folder_of_these_tests_is_well(folder: Path) -> None:
    """Or every refusal below would be for another reason."""
    asked = folder / "in.jsonl"
    asked.write_text('{"prompt_token_ids": [1, 2, 3]}\n')
    run = subprocess.run([*PENSTOCK, "generate", str(folder), "--input", str(asked), "--max-tokens",
                          "4", "--kv-cache-memory-bytes", "1M"], capture_output=True, text=True, timeout=WAIT_S)
    assert run.returncode == 0 and len(json.loads(run.stdout)["token_ids"]) == 4, run.stderr


# ---------------------------------------------------------------- models that are not there
@pytest.mark.parametrize("command", ["serve", "generate"])
@pytest.mark.parametrize("model, said", [
    ("nobody/no-such-model", "nobody/no-such-model"), ("./nowhere/x.gguf", "no such"),
    ("nowhere", "not a folder or a .gguf file"), ("", "MODEL is missing"),
])
def test_unknown_models(command: str, model: str, said: str) -> None:
    more = ["--prompt", "hi"] if command == "generate" else ["--port", "0"]
    assert said in refused(command, model, *more)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.gguf").write_text("these are notes")
    assert "notes.gguf" in refused("serve", tmp_path / "notes.gguf", "--port", "0")
    (tmp_path / "notes.gguf").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert "config.json" in refused("serve", tmp_path, "--port", "0")


# ---------------------------------------------------------------- damaged models
@pytest.mark.parametrize("size", [3, 20_000, 5_000_000, 98_000_000])
def test_a_truncated_gguf(tmp_path: Path, size: int) -> None:
    """In the magic, in the tokenizer, in the first tensor and in the last."""
    cut = tmp_path / "cut.gguf"
    source = locate("demo").gguf
    assert source is not None
    with open(source, "rb") as whole, open(cut, "wb") as out:
        out.write(whole.read(size))
    assert "cut.gguf" in (line := refused("serve", cut, "--port", "0"))
    assert re.search("truncated|ends|GGUF|bytes", line), line


def flip(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def test_a_gguf_with_a_damaged_block(tmp_path: Path) -> None:
    """Scales that are not numbers: headers are fine, text would be noise."""
    files = locate("demo")
    assert files.gguf is not None
    bad = tmp_path / "bad.gguf"
    shutil.copy(files.gguf, bad)
    at = next(t.begin for t in files.gguf_header.tensors.values() if t.block == "Q4_1")
    flip(bad, at, b"\xff\x7f\xff\x7f")
    assert "NaN or infinity" in refused("serve", bad, "--port", "0")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda f: os.truncate(f / "model.safetensors", 9_000), "model.safetensors"),
    "in its header": (lambda f: os.truncate(f / "model.safetensors", 100), "model.safetensors"),
    "empty": (lambda f: os.truncate(f / "model.safetensors", 0), "model.safetensors"),
    "header of noise": (lambda f: flip(f / "model.safetensors", 8, b"\x00\xff" * 40),
                        "model.safetensors"),
    "of a huge header": (lambda f: flip(f / "model.safetensors", 0, b"\xff" * 8),
                         "model.safetensors"),
    "another config": (lambda f: (f / "config.json").write_text(
        json.dumps({**TINY, "hidden_size": 64})), "shape"),
    "more layers": (lambda f: (f / "config.json").write_text(
        json.dumps({**TINY, "num_hidden_layers": 3})), "lacks"),
    "config of noise": (lambda f: (f / "config.json").write_bytes(b"\xff{"), "config.json"),
    "unknown family": (lambda f: (f / "config.json").write_text(
        json.dumps({**TINY, "model_type": "nonesuch"})), "nonesuch"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_folder(folder: Path, how: str) -> None:
    damage, said = DAMAGE[how]
    damage(folder)
    assert said in refused("serve", folder, "--port", "0", "--kv-cache-memory-bytes", "1M")


# ---------------------------------------------------------------- configurations that cannot be
@pytest.mark.parametrize("flags, said", [
    (["--kv-cache-memory-bytes", "900T"], "free"), (["--kv-offloading-size", "900T", "--kv-cache-memory-bytes", "1M"],
                                                    "free"),
    (["--kv-cache-memory-bytes", "1"], "page"), (["--max-model-len", "4096"], "2048"),
    (["--max-model-len", "2048", "--kv-cache-memory-bytes", "20K"], "--kv-cache-memory-bytes"),
    (["--page-size", "0"], "page"), (["--kv-cache-memory-bytes", "many"], "many"),
    (["--nonsense", "1"], "--nonsense"), (["--port", "99999"], "port"),
    (["--backends", "linear=nonesuch"], "nonesuch"), (["--dtype", "int3"], "int3"),
    (["--tokenizer", "nowhere.json"], "nowhere.json"),
], ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_a_configuration_that_cannot_be(folder: Path, flags: list[str], said: str) -> None:
    port = [] if "--port" in flags else ["--port", "0"]
    assert said in refused("serve", folder, *port, *flags)


def test_a_model_larger_than_memory(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**TINY, "hidden_size": 65_536, "head_dim": 16_384,
                                                    "intermediate_size": 1 << 20,
                                                    "num_hidden_layers": 400}))
    line = refused("serve", folder, "--port", "0", "--load-format", "dummy")
    assert "weights take" in line and "free" in line


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"port {port} on 127.0.0.1 is in use" in refused("serve", "demo", "--port", port)


# ---------------------------------------------------------------- requests, and the engine's end
@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    log = tmp_path_factory.mktemp("bad") / "log"
    process = subprocess.Popen([*PENSTOCK, "serve", "demo", "--port", "0", "--threads", "1",
                                "--kv-cache-memory-bytes", "100M"],
                               stdout=subprocess.PIPE, stderr=log.open("w"), text=True)
    assert process.stdout is not None
    try:
        found = re.search(r"ready on (http://\S+) ", process.stdout.readline())
        assert found, log.read_text()
        yield process, found.group(1), log
    finally:
        process.kill()
        process.wait()


USER = {"role": "user", "content": "hi"}
BAD = [
    ("completions", b"", None), ("completions", b"{", None), ("completions", b"[]", None),
    ("completions", b'"prompt"', None), ("completions", b"\xff\xfe", None),
    ("completions", b"[" * 100_000, None),
    ("completions", {"prompt": ""}, "prompt"), ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": 7}, "prompt"), ("completions", {"prompt": [[]]}, "prompt"),
    ("completions", {"prompt": [49_152]}, "prompt"), ("completions", {"prompt": [1.5]}, "prompt[0]"),
    ("completions", {"prompt": "word " * 9_000}, "prompt"),
    ("completions", {"prompt": "a", "max_tokens": "ten"}, "max_tokens"),
    ("completions", {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ("completions", {"prompt": "a", "max_tokens": 10**30}, None),
    ("completions", {"prompt": "a", "temperature": "hot"}, "temperature"),
    ("completions", {"prompt": "a", "stop": 5}, "stop"),
    ("completions", {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    ("completions", {"prompt": "a", "stream": "yes"}, "stream"),
    ("chat/completions", {"messages": "hi"}, "messages"),
    ("chat/completions", {"messages": [7]}, None),
    ("chat/completions", {"messages": [{"role": "user"}]}, None),
    ("chat/completions", {"messages": [{"role": 3, "content": "x"}]}, None),
    ("chat/completions", {"messages": [USER], "top_p": 0}, "top_p"),
    ("chat/completions", {"messages": [USER], "seed": 1.5}, "seed"),
    ("chat/completions", {"messages": [USER], "n": 0}, "n"),
]


@pytest.mark.parametrize("path, body, param", BAD, ids=lambda v: str(v)[:40])
def test_a_bad_request_is_400_in_openais_shape(server, path, body, param) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx.post(f"{server[1]}/v1/{path}", content=content, timeout=WAIT_S)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param
    assert "Traceback" not in answer.text and "\n" not in error["message"]


def engine_of(pid: int) -> int:
    """The engine process of this server."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if "penstock.engine.process" in Path(f"/proc/{child}/cmdline").read_text():
            return int(child)
    raise AssertionError("no engine process")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the engine through /proc")
def test_after_all_that_it_serves_until_its_engine_is_killed(server) -> None:
    process, url, log = server
    body = {"prompt": "Count: 1 2 3", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT_S) as stream:
        assert stream.status_code == 200
        lines = stream.iter_lines()
        while "text" not in next(lines):
            pass
        os.kill(engine_of(process.pid), signal.SIGKILL)
        rest = "\n".join(lines)
    assert "engine_died" in rest and "[DONE]" not in rest
    assert process.wait(WAIT_S) == 1
    assert "the engine process" in log.read_text() and "Traceback" not in log.read_text()
