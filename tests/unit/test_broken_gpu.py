"""A test that breaks a GPU's context ends its process, and no other test fails by it."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import broken_gpu
import pytest

TESTS = """
import broken_gpu, os, pytest

BROKEN = []
broken_gpu.broken = lambda: "".join(BROKEN)


@pytest.fixture(scope="module")
def server():
    yield
    note("ended")


def note(what):
    with open("noted", "a") as file:
        file.write(f"{what}\\n")


@pytest.mark.parametrize("n", range(6))
@pytest.mark.xdist_group("one")
def test_it(n, server):
    assert not BROKEN
    note(n)
    if n in (1, 2):
        BROKEN.append("CUDA error: misaligned address")
    assert n != 1
"""


def run(folder: Path, *args: str) -> str:
    (folder / "test_it.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]")
    env = {**os.environ, "PYTHONPATH": str(Path(broken_gpu.__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
           "TMPDIR": str(folder)}
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_TESTRUNUID"):
        env.pop(name, None)
    return subprocess.run([sys.executable, "-m", "pytest", "-p", "broken_gpu", "-p", "no:cacheprovider", "-rA", "-q",
                           *args], cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False).stdout


@pytest.mark.parametrize("dist", ["worksteal", "load"])
def test_a_test_that_breaks_the_context_fails_and_another_process_runs_what_is_left(dist: str, tmp_path: Path) -> None:
    told = run(tmp_path, "-p", "xdist.plugin", "-n", "1", "--dist", dist)
    lines = [line.split("@")[0].split(" - ")[0] for line in told.splitlines()]
    for n in (0, 3, 4, 5):
        assert f"PASSED test_it.py::test_it[{n}]" in lines, told
    assert "FAILED test_it.py::test_it[1]" in lines and "assert 1 != 1" in told, "its own report"
    assert "FAILED test_it.py::test_it[2]" in lines, "which has passed before its process ended"
    assert told.count("crashed while running 'test_it.py::test_it[") >= 2
    noted = (tmp_path / "noted").read_text().split()
    assert sorted(what for what in noted if what != "ended") == [*"012345"], "each ran once"
    assert all(noted[noted.index(n) + 1] == "ended" for n in "12"), "what a process had made was ended before it"


def test_processes_whose_tests_stay_in_groups_go_on(tmp_path: Path) -> None:
    told = run(tmp_path, "-p", "xdist.plugin", "-n", "1", "--dist", "loadgroup")
    assert "5 failed, 1 passed" in told and (tmp_path / "noted").read_text().split() == ["0", "1", "ended"]


def test_a_run_in_one_process_ends(tmp_path: Path) -> None:
    told = run(tmp_path)
    assert "test_it.py::test_it[1] has broken the GPU's context" in told and "CUDA error: misaligned address" in told
    assert (tmp_path / "noted").read_text().split() == ["0", "1", "ended"]


def test_each_device_with_memory_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, wrong = [], []

    def synchronize(device: int) -> None:
        asked.append(device)
        if wrong and wrong.pop():
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
    cuda = SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 3, memory_reserved=lambda n: 8 * (n != 1),
                           synchronize=synchronize)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert broken_gpu.broken() == "" and asked == [0, 2]
    wrong.append(1)
    assert broken_gpu.broken() == "", "what is said once was an error of one call"
    wrong += [1, 1]
    assert broken_gpu.broken() == "CUDA error: an illegal memory access was encountered"
    cuda.is_initialized = lambda: False
    assert broken_gpu.broken() == ""
