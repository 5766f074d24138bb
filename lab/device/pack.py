"""Wheels of what `bench/device` and `make gpu` need beside torch, triton, numpy and pytest.

For a machine without a network: `FOLDER/a` and `FOLDER/b`, each to be installed there with `pip install --no-index
--no-deps --target SITE FOLDER/*/*.whl` (`lab/device/calls.sh` does), and run from PYTHONPATH=src:SITE.

    python lab/device/pack.py FOLDER --python 3.12
"""
from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

PACKAGES = {
    "a": ("msgspec", "gguf", "starlette", "uvicorn", "httptools", "anyio", "pyzmq", "llguidance==1.9.1",
          "compressed-tensors", "opentelemetry-sdk", "opentelemetry-api", "opentelemetry-semantic-conventions",
          "opentelemetry-exporter-otlp-proto-http", "opentelemetry-exporter-otlp-proto-common", "opentelemetry-proto",
          "protobuf", "googleapis-common-protos", "requests"),
    "b": ("openai", "jiter", "distro", "sniffio", "pydantic", "pydantic-core", "annotated-types",
          "typing-inspection", "typing-extensions", "httpx2", "httpx", "httpcore", "httpcore2", "truststore", "h11",
          "idna"),
}
PLATFORMS = [f"--platform={name}" for name in (
    *(f"manylinux{v}_x86_64" for v in ("_2_31", "_2_28", "_2_27", "_2_17", "2014", "1")), "any")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of that machine")
    args = parser.parse_args()
    for name, packages in PACKAGES.items():
        for package in packages:                # one by one: a package that another one pins to an older version
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
                            "--dest", str(args.folder / name), "--implementation", "cp",
                            "--python-version", args.python, *PLATFORMS, package], check=True)


if __name__ == "__main__":
    main()
