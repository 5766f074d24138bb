"""SGLang's words in ours: sparse decode (--enable-hisparse and the JSON of --hisparse-config), and storage
(--hicache-storage-backend and the JSON of its extra config)."""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from penstock.config.base.errors import ConfigError
from penstock.config.base.paths import hicache_dir, mooncake_master

ENABLE, CONFIG = "--enable-hisparse", "--hisparse-config"
BACKEND, EXTRA = "--hicache-storage-backend", "--hicache-storage-backend-extra-config"
MASTER = "master_server_address"
# Keys of Mooncake's that may be there as long as they say what is so anyhow, and why it is.
MOONCAKE: dict[str, tuple[object, ...]] = {
    "protocol": ("tcp",), "metadata_server": ("P2PHANDSHAKE",), "device_name": ("",),
    "global_segment_size": (0, "0", "0gb", "0GB")}
WHY = {"protocol": "tcp is what there is", "metadata_server": "only P2PHANDSHAKE is there",
       "device_name": "TCP has none: leave it out",
       "global_segment_size": "an engine's own memory would not outlive it: 0, and a mooncake_client beside "
                              "the master, which has the memory"}
FOLDER = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"


def whole(value: object) -> bool:
    return type(value) is int and value > 0


def _ratio(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")  # type: ignore[operator]


# key: (our flag, what its value is, whether a value is that)
KEYS: dict[str, tuple[str, str, Callable[[object], bool]]] = {
    "top_k": ("--sparse-top-k", "a whole number of tokens", whole),
    "device_buffer_size": ("--hot-buffer-tokens", "a whole number of tokens", whole),
    "host_to_device_ratio": ("--kv-offloading-size", "a number", _ratio),
}


def json_object(flag: str, text: str, known: Collection[str] | None = None) -> dict[str, object]:
    """Return the object, whose keys are `known` ones, or any. Raises ConfigError."""
    keys = "" if known is None else f", its keys: {', '.join(known) or 'none'}"
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ConfigError(f"{flag} {text}: a JSON object is needed{keys}")
    for key in values:
        if known is not None and key not in known:
            raise ConfigError(f"{flag}: {key!r} is not a key that penstock has; it has {', '.join(known) or 'none'}")
    return values


def sparse(text: str) -> list[str]:
    """Our flags for the JSON object `text`. Raises ConfigError that names the key."""
    values = json_object(CONFIG, text, KEYS)
    for key, value in values.items():
        if not KEYS[key][2](value):
            raise ConfigError(f"{CONFIG}: {key} is {json.dumps(value)}: {KEYS[key][1]} is needed")
    return [f"{KEYS[key][0]}={value}{'x' * (key == 'host_to_device_ratio')}" for key, value in values.items()]


def storage(backend: str | None, extra: str | None) -> list[str]:
    """Our flags for a back-end and its extra config, as far as they were given. Raises ConfigError."""
    backend, extra = (None if (text or "").lower() in ("none", "null", "") else text
                      for text in (backend, extra))
    if backend is None:
        if extra is not None:
            raise ConfigError(f"{EXTRA}: give {BACKEND} as well, or our own --kv-storage URL")
        return []
    if backend == "mooncake":
        values = json_object(EXTRA, extra or "{}", (MASTER, *MOONCAKE))
        for key in MOONCAKE.keys() & values.keys():
            if values[key] not in MOONCAKE[key]:
                raise ConfigError(f"{EXTRA}: {key} is {json.dumps(values[key])}: {WHY[key]}")
        master = values.get(MASTER, mooncake_master())
        if not isinstance(master, str) or not re.fullmatch(r"[A-Za-z0-9._-]+:[0-9]{1,5}", master):
            raise ConfigError(f'{BACKEND} mooncake: say where its master is, with {EXTRA} '
                              '\'{"master_server_address": "HOST:PORT"}\', MOONCAKE_MASTER in the '
                              'environment or --kv-storage mooncake://HOST:PORT')
        return [f"--kv-storage=mooncake://{master}"]
    if backend != "file":
        raise ConfigError(f"{BACKEND} {backend}: penstock has file and mooncake, and more by --kv-storage "
                          "URL: s3://BUCKET/PREFIX, valkey://HOST:PORT")
    json_object(EXTRA, extra or "{}", ())
    folder = hicache_dir()
    if folder is None:
        raise ConfigError(f"{BACKEND} file: say where with --kv-storage file:///DIR, or with {FOLDER} in the "
                          "environment, an absolute path; a folder with SGLang's own files is refused")
    return [f"--kv-storage={folder.as_uri()}"]
