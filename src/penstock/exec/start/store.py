"""From a config to open storage: which pages may be shared, under which names, and where they lie."""
from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from penstock.config.base.paths import storage_folder
from penstock.config.settings.tree import KVConfig
from penstock.exec.load.layout import Caches
from penstock.exec.load.sizing import show_size
from penstock.memory.files import FORMAT, Files, open_root, secret_of
from penstock.memory.pool import BlockPool
from penstock.memory.storage import Storage, free_bytes


def check_folder(kv: KVConfig) -> None:
    """What is wrong with the folder is told before a model is loaded. Raises ConfigError."""
    if kv.kv_storage is not None:
        open_root(folder_of(kv), readonly=kv.kv_storage_readonly)


def folder_of(kv: KVConfig) -> Path:
    root = storage_folder(kv.kv_storage or "")
    assert root is not None, "refused"
    return root


def open_storage(kv: KVConfig, identity: Mapping[str, str], caches: Caches, pools: Sequence[BlockPool],
                 wake: Callable[[], None], log: Callable[[str], object]) -> tuple[Storage, bytes]:
    """The storage, and `CoreConfig.store_root`. identity: what engines must have in common to read each
    other's KV, in words. pools: whole host pages by cache group. Raises ConfigError."""
    root, readonly = folder_of(kv), kv.kv_storage_readonly
    words = {**identity, "page size": str(kv.page_size), "cache groups": json.dumps(
        [{"name": group.name, **{name: str(value) for name, value in asdict(layout).items()}}
         for group, layout in zip(caches.groups, caches.layouts, strict=True)])}
    text = json.dumps([FORMAT, sorted(words.items())])
    fingerprint = hashlib.blake2b(text.encode(), digest_size=16).digest()
    secret = secret_of(root, readonly=readonly)
    files = Files(root, fingerprint.hex(), [layout.page_bytes for layout in caches.layouts],
                  readonly=readonly, words=words)
    quota = ("nothing is stored" if readonly else f"at most {show_size(kv.kv_storage_bytes)}"
             if kv.kv_storage_bytes is not None else
             f"at most 80 % of the {show_size(free_bytes(root))} that are free, beside what it holds")
    log(f"storage: {root}, {quota}; shared with engines of the same weights, settings of KV and page size")
    if kv.dram_bytes is None and kv.dram_ratio is None:
        log("storage: its pages go through a host tier, which takes half of what is free: see --dram-bytes")
    storage = Storage(files, pools, wake, quota=kv.kv_storage_bytes)
    return storage, hashlib.blake2b(fingerprint, key=secret, digest_size=16).digest()
