"""The secret that separates tenants' stored pages, the same in all engines that share a store."""
from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from pathlib import Path

from penstock.config.base.errors import ConfigError
from penstock.config.base.paths import cache_dir
from penstock.config.base.storage_url import StorageUrl, parse_storage
from penstock.config.settings.pairkey import BYTES_MIN, read_secret
from penstock.config.settings.tree import KVConfig
from penstock.memory.stores.files import open_root


def secret_of(url: StorageUrl, key_file: str | None, *, readonly: bool) -> bytes:
    """32 bytes: of the file, or else of the folder where the pages lie, or, for stores elsewhere, of this
    user's cache folder, made if there are none. Raises ConfigError."""
    if key_file is not None:
        key = read_secret("--kv-storage-key", key_file).strip()
        if len(key) < BYTES_MIN:
            raise ConfigError(f"--kv-storage-key {key_file} has {len(key)} characters: {BYTES_MIN} or more "
                              "are needed, e.g. of openssl rand -hex 32")
        return hashlib.blake2b(key, digest_size=32).digest()
    if url.folder is not None:
        open_root(url.folder, readonly=readonly)
        return _made(url.folder / "secret", make=not readonly)
    return _made(default_key(), make=True)


def secret_for(kv: KVConfig) -> bytes | None:
    """Return the key that separates tenants' pages, where they outlive this process. Raises ConfigError."""
    url = None if kv.kv_storage is None else parse_storage(kv.kv_storage)
    return None if url is None else secret_of(url, kv.kv_storage_key, readonly=kv.is_readonly)


def default_key() -> Path:
    """Where the secret of stores elsewhere is, if no file is given."""
    return cache_dir() / "kv-storage.key"


def _made(path: Path, *, make: bool) -> bytes:
    """Without a file, and if none is to be made, they are of this process."""
    try:
        if make and not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temp = path.with_name(f".{path.name}.{os.getpid()}")
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(temp, flags, 0o600), "wb") as file:
                file.write(secrets.token_bytes(32))
            with contextlib.suppress(FileExistsError):       # another engine was faster: its secret counts
                os.link(temp, path)
            os.unlink(temp)
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            found, mode = file.read(33), os.fstat(file.fileno()).st_mode
    except FileNotFoundError:
        return secrets.token_bytes(32)
    except OSError as e:
        raise ConfigError(f"--kv-storage: {path}: {e.strerror}: it must be a file that this user can "
                          "read, or give --kv-storage-key FILE") from None
    if len(found) != 32 or mode & 0o077:
        raise ConfigError(f"--kv-storage: {path}: 32 bytes that only this user can read are needed: "
                          f"chmod 600 it, or remove it with all that is stored")
    return found
