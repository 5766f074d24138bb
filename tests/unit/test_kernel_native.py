"""Compiling kernels on the user's machine: what is kept, what is refused, what is only reported."""
from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.kernels import registry
from penstock.kernels.c import build as native
from penstock.kernels.op import Unusable
from penstock.kernels.platform import KernelError, Platform

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, native._COMPILERS)), reason="no C compiler on this machine")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "seven.c"
    path.write_text("int seven(void) { return 7; }\n")
    return path


def load(source: Path, cache: Path | None) -> int:
    """As a new process would: nothing is remembered."""
    native._loaded.pop((source, "native"), None)
    return native.library(source, cache)[0].seven()


@needs_compiler
def test_a_library_is_built_once_per_source(source, tmp_path, monkeypatch):
    cache = tmp_path / "a" / "cache"
    assert load(source, cache) == 7
    [built] = cache.iterdir()
    monkeypatch.setattr(native, "_build", None)                 # a second build would fail
    assert load(source, cache) == 7
    monkeypatch.undo()
    source.write_text("int seven(void) { return 70 / 10; }  /* new */\n")
    assert load(source, cache) == 7
    assert len(list(cache.iterdir())) == 2 and built.exists()


@needs_compiler
def test_without_a_cache_nothing_is_left_behind(source, tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(native.tempfile, "tempdir", str(scratch))
    assert load(source, None) == 7
    assert not list(scratch.iterdir())


@needs_compiler
def test_a_cache_that_cannot_be_made_is_done_without(source, tmp_path):
    (tmp_path / "file").write_text("")
    assert load(source, tmp_path / "file" / "cache") == 7


@needs_compiler
def test_a_library_that_others_may_write_is_refused(source, tmp_path):
    assert load(source, tmp_path / "cache") == 7
    [built] = (tmp_path / "cache").iterdir()
    built.chmod(0o777)
    with pytest.raises(Unusable, match="could have been written by someone else"):
        load(source, tmp_path / "cache")


@needs_compiler
def test_builds_are_announced_once_and_kept_libraries_are_not(source, tmp_path, monkeypatch):
    lines = []
    with native.announced(lines.append, after_s=0):
        assert load(source, tmp_path / "cache") == 7
        assert lines == ["compiling kernels for this CPU (once) ..."]
        assert load(source, None) == 7
    assert lines[1:] == [lines[-1]] and lines[-1].startswith("kernels compiled in ")
    del lines[:]
    with native.announced(lines.append, after_s=0):             # it is kept
        load(source, tmp_path / "cache")
    with native.announced(lines.append, after_s=1000):          # fast
        load(source, None)
    assert lines == []
    reported, real = threading.Event(), native._build
    monkeypatch.setattr(native, "_build", lambda *given: reported.wait(60) and real(*given))
    with native.announced(lambda line: (lines.append(line), reported.set()), after_s=0.01):     # slow
        load(source, None)
    assert "at every start since the cache cannot be written" in lines[0] and len(lines) == 2


@needs_compiler
@pytest.mark.parametrize("left", [0, 0.01, 0.5, 1], ids=["empty", "its head", "half", "a bit flipped"])
def test_a_damaged_library_is_built_once_more(source, tmp_path, left):
    # By another process each: the loader gives one that has it what it has, and half of it is a SIGBUS.
    code = ("import sys; from pathlib import Path; from penstock.kernels.c.build import library; "
            "assert library(*map(Path, sys.argv[1:]))[0].seven() == 7")
    command = [sys.executable, "-c", code, source, tmp_path / "cache"]
    subprocess.run(command, check=True)
    [built] = (tmp_path / "cache").iterdir()
    whole = built.read_bytes()
    damaged = bytearray(whole[:int(left * len(whole))])
    if left == 1:
        damaged[0x18] ^= 1                      # the entry point, which a library has none of
    built.write_bytes(damaged)
    subprocess.run(command, check=True)
    assert built.read_bytes() == whole


@needs_compiler
def test_a_folder_that_others_may_write_is_refused(source, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(Unusable, match=r"cache could have been written by someone else: chmod go-w .*CACHE"):
        load(source, tmp_path / "cache")


@needs_compiler
def test_who_waits_for_anothers_build_takes_it(source, tmp_path, monkeypatch):
    cache, real, built = tmp_path / "cache", native._build, threading.Event()

    def slow(*given):
        path = real(*given)
        assert built.wait(60)
        return path

    monkeypatch.setattr(native, "_build", slow)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(native._load, source, cache, "native")
        while not (cache.is_dir() and list(cache.glob("*.so"))):
            time.sleep(0.001)
        monkeypatch.setattr(native, "_build", None)             # a second build would fail
        monkeypatch.setattr(native, "_opened", lambda path, real=native._opened, first=[1]:
                            None if first and first.pop() else real(path))
        waiting = threading.Thread(target=load, args=(source, cache))
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        built.set()
        waiting.join(60)
        assert not waiting.is_alive() and (source, "native") in native._loaded
        other.result()


def test_kernels_link_the_runtime_that_torch_uses_whatever_else_is_loaded():
    pytest.importorskip("sentencepiece")        # brings a libgomp of its own
    found = set()
    for first in ("", "import sentencepiece; ", "import torch, sentencepiece; "):
        done = subprocess.run([sys.executable, "-c", f"{first}from penstock.kernels.c.build import _openmp; "
                               "print(_openmp())"], capture_output=True, text=True, check=True)
        found.add(done.stdout)
    assert len(found) == 1 and "sentencepiece" not in found.pop()


@needs_compiler
def test_a_runtime_under_a_path_with_a_space_is_linked(source, tmp_path):
    folder = tmp_path / "my models"
    folder.mkdir()
    runtime = Path(shutil.copy(native._openmp(), folder))
    assert native._build(native.compiler(), ("-fPIC",), source, runtime, folder / "k.so").exists()


@needs_compiler
def test_a_failed_build_says_what_the_compiler_said(source, tmp_path):
    source.write_text("int seven(void) { return eight; }\n")
    with pytest.raises(Unusable, match=r"error: .*eight"):
        load(source, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_without_a_compiler_torch_runs_the_ops_and_the_line_says_so(monkeypatch):
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    monkeypatch.setattr(native, "_loaded", {})
    here = Platform(device="cpu", features=("avx2",), torch="0")
    choice = registry.choose(here)["paged_attention"]
    assert choice.name == "sdpa"
    assert dict(choice.skipped)["c"] == "no C compiler (cc, gcc, clang)"
    with pytest.raises(KernelError, match="paged_attention=c cannot run here: no C compiler"):
        registry.choose(here, {"paged_attention": "c"})


def test_a_gpu_that_triton_cannot_reach_is_told_with_what_it_needs(monkeypatch):
    runtime = pytest.importorskip("triton.runtime")

    class Driver:
        @property
        def active(self):
            raise RuntimeError("Failed to find C compiler.")
    monkeypatch.setattr(runtime, "driver", Driver())
    with pytest.raises(Unusable, match=r"C compiler and Python's headers .*: Failed to find C compiler\.$"):
        native.triton_runs()
