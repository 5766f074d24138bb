"""The make targets: what is installed when, asked of make itself without running anything."""
from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INPUTS = ("Makefile", "pyproject.toml", "constraints.txt")
STAMPS = (".venv/bin/python", ".venv/.installed", ".venv/.installed-dev")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder that looks installed, with all inputs older than the stamps."""
    for name in INPUTS:
        shutil.copy(ROOT / name, tmp_path / name)
        os.utime(tmp_path / name, (1000, 1000))
    for at, name in enumerate(STAMPS, 2000):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (at, at))
    return tmp_path


def planned(folder: Path, *words: str) -> list[str]:
    """The commands that make would run."""
    # This test may itself run under make, which exports its variables.
    env = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG")}
    run = subprocess.run(["make", "-n", *words], cwd=folder, env=env, capture_output=True,
                         text=True, check=True)
    return run.stdout.splitlines()


def test_second_serve_starts_without_installing(clone: Path) -> None:
    [command] = planned(clone, "serve")
    assert command.split() == "exec .venv/bin/penstock serve demo --port 8000".split()


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_install_again(clone: Path, name: str) -> None:
    os.utime(clone / name, (9000, 9000))
    assert "pip install" in planned(clone, "serve")[0]


def test_fresh_clone_installs_the_pinned_torch_first(clone: Path) -> None:
    shutil.rmtree(clone / ".venv")
    plan = planned(clone, "serve", "PYTHON=python9", "PIP_ARGS=--index-url there")
    assert any(c.startswith("python9 -m venv .venv") for c in plan)
    installs = [c for c in plan if "pip install" in c]
    assert installs[0].endswith(" torch") and installs[1].endswith(" -e .")
    assert all("-c constraints.txt --index-url there" in c for c in installs)
    assert plan[-1].startswith("exec .venv/bin/penstock serve demo")


def test_tests_run_in_the_environment_that_serves(clone: Path) -> None:
    (clone / ".venv/.installed-dev").unlink()
    plan = planned(clone, "test")
    assert plan[0].endswith("-e '.[dev]'") and "pytest" in plan[-1]
    assert 'not sweep and not soak and not gpu' in plan[-1]


def test_what_runs_before_a_commit_is_what_check_runs() -> None:
    told = (ROOT / ".pre-commit-config.yaml").read_text()
    for command in planned(ROOT, "-B", "check")[-4:-2]:
        tool = command.split()[0]
        assert f"entry: {tool}" in told and tool in (".venv/bin/ruff", ".venv/bin/mypy")
    assert "repo: local" in told and "http" not in told, "nothing is fetched"


def test_the_image_is_short_and_said_to_be_untested() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert len(lines) <= 20
    copied = [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]
    assert copied and all((ROOT / name).exists() for name in copied)
    told = (ROOT / "docs/getting-started/install.md").read_text().split("\n\n")
    assert "untested" in next(part for part in told if "`Dockerfile`" in part)


def test_the_changes_begin_with_the_version_that_is_built() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    first = next(s for s in (ROOT / "CHANGELOG.md").read_text().splitlines() if s.startswith("## "))
    assert version in first


def test_ci_runs_the_two_targets_and_stops_at_the_first_failure() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = [s for s in script.read_text().splitlines() if s and not s.startswith("#")]
    assert lines[0] == "set -euo pipefail" and lines[-2:] == ["make test", "make sweep"]
