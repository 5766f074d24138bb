"""What has to be installed: the distribution's name, what it depends on, and hints that say what to type."""
from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from penstock.config.base.errors import install_hint
from penstock.config.base.version import DISTRIBUTION

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {"prometheus_client": "prometheus-client", "yaml": "pyyaml"}
# Installed with torch, or looked for and done without.
GUARDED = {"triton", "cuda", "flash_attn", "cutlass", "nixl", "mooncake", "obstore", "redis", "transformers",
           "matplotlib", "setproctitle", "huggingface_hub", "zmq", "opentelemetry", "dynamo"}


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[A-Za-z0-9_-]+", one)[0].lower() for one in requirements}


def test_the_distribution_has_a_name_of_its_own():
    assert PROJECT["name"] == DISTRIBUTION == "penstock-llm"
    assert PROJECT["scripts"].keys() == {"penstock", "penstock-dynamo"}


def test_no_hint_names_a_package_of_others():
    """`pip install penstock[s3]` takes what is called penstock on the index."""
    files = subprocess.run(["git", "ls-files", "-z", "*.py", "*.md", "*.toml", "Makefile", "Dockerfile"],
                           cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    old = re.compile(r"\bpenstock\[|pip install (-\S+ )*['\"]?penstock\b(?!-llm)")
    found = [f"{file}: {line.strip()}" for file in filter(None, files)
             if file not in ("CHANGELOG.md", "tests/tidy/test_tidy_install.py")
             and not file.startswith("lab/") and (ROOT / file).exists()
             for line in (ROOT / file).read_text().splitlines() if old.search(line)]
    assert not found
    for extra in PROJECT["optional-dependencies"]:
        assert f"'.[{extra}]'" in install_hint(extra)


def test_each_import_is_a_dependency_and_each_dependency_is_imported():
    """Of the package as it is installed without extras."""
    have = names(PROJECT["dependencies"])
    imported: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add((node.module or "").split(".")[0])
            elif (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)
                  and ast.unparse(node.func) in ("optional", "import_module", "importlib.import_module")):
                imported.add(str(node.args[0].value).split(".")[0])
    theirs = {MODULES.get(name, name) for name in imported - set(sys.stdlib_module_names) - {"penstock"}
              if name not in GUARDED}
    assert theirs - have == set(), "imported, and no dependency"
    # httptools is uvicorn's parser, named there.
    assert have - theirs - {"httptools"} == set(), "a dependency that nothing imports"
