"""Wheels of what `bench/device` and `make gpu` need beside torch, triton, numpy and pytest.

For a machine without a network: install them there with `pip install --no-index --no-deps --target SITE
FOLDER/*.whl`, and run from PYTHONPATH=src:SITE.

    python lab/device/pack.py FOLDER --python 3.12
"""
from __future__ import annotations

import argparse
import subprocess
import sys

PACKAGES = ("msgspec", "gguf", "starlette", "uvicorn", "httptools")
PLATFORMS = [f"manylinux{v}_x86_64" for v in ("_2_28", "_2_27", "_2_17", "2014", "1")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--python", default="3.12", help="of that machine")
    args = parser.parse_args()
    for packages in (["--no-deps", *PACKAGES], ["openai"]):
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:",
             "--dest", args.folder, "--implementation", "cp", "--python-version", args.python,
             *(f"--platform={name}" for name in PLATFORMS), *packages], check=True)


if __name__ == "__main__":
    main()
