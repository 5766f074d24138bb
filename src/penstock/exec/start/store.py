"""From a config to open storage: which pages may be shared, under which names, and where they lie."""
from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from penstock.config.base.errors import ConfigError
from penstock.config.base.storage_url import StorageUrl, check_installed, parse_storage
from penstock.config.settings.tree import KVConfig
from penstock.exec.load.layout import Caches
from penstock.exec.load.sizing import show_size
from penstock.memory.storage import HostPages, Storage
from penstock.memory.stores.files import LOW_WATER, Files, open_root
from penstock.memory.stores.objects import FORMAT, HEADER, Store
from penstock.memory.stores.secret import default_key, secret_of


def check_storage(kv: KVConfig) -> None:
    """What is wrong with it for good is told before a model is loaded. Raises ConfigError."""
    if kv.kv_storage is None:
        return
    url = _url(kv)
    if url.folder is not None:
        open_root(url.folder, readonly=kv.is_readonly)
    check_installed(url)
    secret_of(url, kv.kv_storage_key, readonly=kv.is_readonly)


def storage_info(kv: KVConfig) -> dict[str, str]:
    """For people: where it is, without a password."""
    return {} if kv.kv_storage is None else {"kv_storage": _url(kv).shown}


def _url(kv: KVConfig) -> StorageUrl:
    url = parse_storage(kv.kv_storage or "")
    assert url is not None, "refused"
    return url


def open_storage(kv: KVConfig, identity: Mapping[str, str], caches: Caches, pools: Sequence[HostPages],
                 wake: Callable[[], None], log: Callable[[str], object]) -> tuple[Storage, bytes]:
    """The storage, and `CoreConfig.store_root`. identity: what engines must have in common to read each
    other's KV, in words. pools: whole host pages by cache group. Raises ConfigError."""
    url, readonly = _url(kv), kv.is_readonly
    words = {**identity, "page size": str(caches.page_size), "cache groups": json.dumps(
        [{"name": group.name, **{name: str(value) for name, value in asdict(layout).items()}}
         for group, layout in zip(caches.groups, caches.layouts, strict=True)])}
    least = HEADER.size + max(layout.page_bytes for layout in caches.layouts)
    if kv.kv_storage_bytes is not None and LOW_WATER * kv.kv_storage_bytes < least:
        raise ConfigError(f"--kv-storage-bytes {show_size(kv.kv_storage_bytes)}: a page of {caches.page_size} "
                          f"tokens takes {show_size(least)} here, and a sweep leaves nine tenths: give at "
                          f"least {show_size(2 * least)}, better as much as many prompts take")
    text = json.dumps([FORMAT, sorted(words.items())])
    fingerprint = hashlib.blake2b(text.encode(), digest_size=16).digest()
    secret = secret_of(url, kv.kv_storage_key, readonly=readonly)
    store = _open(kv, url, fingerprint.hex(), [layout.page_bytes for layout in caches.layouts], words, log)
    if kv.kv_offloading_size == "auto":
        log("storage: its pages go through a host tier, which takes half of what is free: see --kv-offloading-size")
    if url.folder is None and kv.kv_storage_key is None:
        log(f"storage: engines of other users and machines find nothing of this one without the same "
            f"--kv-storage-key; it is {default_key()} here")
    try:
        if advice := store.check():
            log(f"storage: {advice}")
    except OSError as e:
        log(f"storage: {url.shown}: {e.strerror or e}: serving begins without it, and it is tried again")
    storage = Storage(store, pools, wake, quota=kv.kv_storage_bytes)
    return storage, hashlib.blake2b(fingerprint, key=secret, digest_size=16).digest()


def _open(kv: KVConfig, url: StorageUrl, fingerprint: str, sizes: Sequence[int], words: Mapping[str, str],
          log: Callable[[str], object]) -> Store:
    store: Store
    readonly = kv.is_readonly
    match url.kind:
        case "file":
            assert url.folder is not None
            store = files = Files(url.folder, fingerprint, sizes, readonly=readonly, words=words)
            bound = (f"at most {show_size(kv.kv_storage_bytes)}" if kv.kv_storage_bytes is not None else
                     f"at most 80 % of the {show_size(files.free_bytes)} that are free, plus what it holds")
        case "s3":
            from penstock.memory.stores.s3 import Bucket
            store, bound = Bucket(url, fingerprint, sizes, readonly=readonly), "kept by the bucket's rules"
        case "valkey":
            from penstock.memory.stores.valkey import Valkey
            store, bound = Valkey(url, fingerprint, sizes, readonly=readonly), "kept by the server's policy"
        case "mooncake":
            from penstock.memory.stores.mooncake import MooncakeStore
            try:
                store, bound = MooncakeStore(url, fingerprint, sizes, readonly=readonly), "kept by the master"
            except ImportError as e:
                raise ConfigError(f"--kv-storage {url.shown}: {e}: Mooncake needs libibverbs1, libnl-3-200 "
                                  "and libnl-route-3-200 of Debian") from None
    log(f"storage: {url.shown}, {'nothing is stored' if readonly else bound}; shared with engines that have "
        "the same weights, KV settings and page size")
    return store
