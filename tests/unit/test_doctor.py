"""What `penstock doctor` reports, and when it says that serving cannot work."""
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli.doctor import Finding, examine
from penstock.cli.main import main
from penstock.config.base.machine import Machine
from penstock.config.settings.cli import from_options
from penstock.kernels.c import build
from penstock.kernels.registry import OPS

MACHINE = Machine(system="Linux", machine="x86_64", python="3.11", cpu="test", features=("avx2",),
                  cores=2, memory_total=8 << 30, memory_available=4 << 30, no_gpu="none here")


def named(findings: list[Finding], name: str) -> Finding:
    return next(f for f in findings if f.name == name)


def test_report_names_every_op_and_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {op} " in shown for op in OPS)
    assert shown.rstrip().endswith("no problem found")


def test_a_named_backend_is_used_and_a_wrong_one_is_a_problem() -> None:
    good = list(examine(from_options("demo", {"backends": ["linear=reference"]}), MACHINE))
    assert named(good, "linear").text.startswith("reference (")
    bad = list(examine(from_options("demo", {"backends": ["linear=magic"]}), MACHINE))
    assert [f.name for f in bad if not f.ok] == ["--backends"]
    assert "magic" in named(bad, "--backends").text


def test_a_missing_demo_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    demo = named(list(examine(None, MACHINE)), "demo")
    assert demo.ok and "not fetched yet" in demo.text


def test_a_model_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    found = list(examine(from_options(str(tmp_path), {}), MACHINE))
    assert "config.json" in named(found, str(tmp_path)).text
    assert main(["doctor", str(tmp_path)]) == 1


def test_the_device_of_auto_and_why() -> None:
    def of(machine: Machine) -> tuple[str, str]:
        found = list(examine(from_options("demo", {"device": "cpu"}), machine))
        return named(found, "gpu").text, named(found, "device").text

    assert of(MACHINE) == ("none: none here", "--device auto is cpu here")
    gpu, device = of(replace(MACHINE, gpus=("NVIDIA H200",)))
    assert gpu.startswith("NVIDIA H200: the installed torch is a CPU build") and "cpu" in device
    assert of(replace(MACHINE, gpus=("NVIDIA H200",), torch_cuda="13.0")) == (
        "NVIDIA H200: torch is built for CUDA 13.0", "--device auto is cuda here")


def test_ranks_have_layers_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "tie_word_embeddings": False}))
    options = {"pp": 2, "load_format": "dummy", "dtype": "float32"}
    found = [f for f in examine(from_options(str(tmp_path), options), MACHINE) if f.section == "ranks"]
    layer = 4 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32)
    sizes = [4 * 64 * 32 + 2 * layer, 4 * 64 * 32 + layer + 4 * 32]
    assert [f.text for f in found] == [
        f"layers {layers}, {size / (1 << 20):.1f} MiB of weights, {n * 2 * 2 * 8 * 4} bytes of KV a token"
        for layers, size, n in (("0 to 1", sizes[0], 2), ("2 to 2", sizes[1], 1))]
    wrong = list(examine(from_options(str(tmp_path), {**options, "pp_layers": ["2", "2"]}), MACHINE))
    assert "this model has 3 layers" in named(wrong, "--pp").text and not named(wrong, "--pp").ok


def test_ranks_of_a_demo_that_was_not_fetched_are_not_shown(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    assert not [f for f in examine(from_options("demo", {"pp": 2}), MACHINE) if f.section == "ranks"]


def test_a_kernel_that_could_be_built_and_is_not_is_a_problem(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "_loaded", {})
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    problems = [f.text for f in examine(None, MACHINE) if not f.ok and f.name == "c"]
    if build.compiler() is not None:
        assert len(problems) == 1 and "could have been written by someone else: chmod go-w" in problems[0]
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert not [f for f in examine(None, MACHINE) if not f.ok and f.name == "c"]
