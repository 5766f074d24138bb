"""Where things are kept on this machine: the only reader of the environment for folders.

Owns no files and makes no folders; the code that writes into one makes it.
"""
from __future__ import annotations

import os
from pathlib import Path


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is invalid and is ignored.
    return Path(base) if os.path.isabs(base) else Path.home() / ".cache"


def cache_dir() -> Path:
    """Penstock's own cache: $PENSTOCK_CACHE, else `penstock` in the user's cache folder."""
    own = os.environ.get("PENSTOCK_CACHE")
    return Path(own).expanduser().absolute() if own else _user_cache() / "penstock"


def hub_cache_dir() -> Path:
    """Where Hugging Face's tools keep downloads: $HF_HUB_CACHE, $HF_HOME/hub, or the default."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := os.environ.get(name):
            return Path(value).expanduser().absolute()
    home = os.environ.get("HF_HOME")
    base = Path(home).expanduser().absolute() if home else _user_cache() / "huggingface"
    return base / "hub"


def hub_endpoint() -> str:
    """Where the hub is: $HF_ENDPOINT, or the public one."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def hub_is_offline() -> bool:
    """Whether the user forbids downloads: $HF_HUB_OFFLINE or $TRANSFORMERS_OFFLINE, as Hugging Face's tools
    read them."""
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
               for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def hicache_dir() -> Path | None:
    """The folder that SGLang's users name for stored pages: $SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR."""
    folder = os.environ.get("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", "")
    return Path(folder) if os.path.isabs(folder) else None


def mooncake_master() -> str | None:
    """What Mooncake's users name as the address of its master: $MOONCAKE_MASTER."""
    return os.environ.get("MOONCAKE_MASTER") or None
