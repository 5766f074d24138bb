"""What is built from this tree is whole: a wheel made of the sdist answers a prompt where nothing else of
penstock is."""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What a build reads; not `src` as it lies there, where an editable install keeps notes of its own.
INPUTS = ("pyproject.toml", "README.md", "LICENSE")
MAKE = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def made(kind: str, tree: Path, into: Path) -> Path:
    """A file that the build back-end makes of `tree`, without a network."""
    run = subprocess.run([sys.executable, "-c", MAKE, kind, str(into)], cwd=tree, capture_output=True,
                         text=True)
    assert run.returncode == 0, run.stderr
    return into / run.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("out")
    for name in INPUTS:
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "src/penstock", tree / "src/penstock",
                    ignore=shutil.ignore_patterns("__pycache__"))
    with tarfile.open(made("build_sdist", tree, out)) as sdist:
        sdist.extractall(out, filter="data")
    [unpacked] = (path for path in out.iterdir() if path.is_dir())
    return made("build_wheel", unpacked, out)


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, which sees the libraries of this one and no other penstock: an editable
    install is a .pth file, and those of folders that a .pth file names are not read."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    paths = {"base": str(folder), "platbase": str(folder), "installed_base": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", paths))
    (site / "libraries.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
    subprocess.run([sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "-q",
                    "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel)], check=True)
    return folder


def run(bare: Path, *words: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([str(bare / "bin" / words[0]), *words[1:]], cwd=bare, env=env, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_has_every_file_of_the_package(wheel: Path) -> None:
    have = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("penstock/")}
    source = ROOT / "src"
    assert have == {path.relative_to(source).as_posix() for path in (source / "penstock").rglob("*")
                    if path.is_file() and "__pycache__" not in path.parts}


def test_it_answers_a_prompt_where_nothing_else_of_penstock_is(bare: Path) -> None:
    where = run(bare, "python", "-c", "import penstock; print(penstock.__file__)").strip()
    assert Path(where).is_relative_to(bare)
    assert run(bare, "penstock", "--version") == run(bare, "python", "-m", "penstock", "--version")
    told = run(bare, "penstock", "generate", "demo", "--prompt", "The capital of France is",
               "--max-tokens", "8", "--temperature", "0", "--kv-cache-memory-bytes", "50M")
    assert "Paris" in told
