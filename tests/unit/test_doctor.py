"""What `penstock doctor` reports, and when it says that serving cannot work."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.config.cli import from_options
from penstock.config.platform import Machine
from penstock.kernels.registry import OPS
from penstock.serve.doctor import Finding, examine
from penstock.serve.main import main

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
