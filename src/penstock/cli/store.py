"""`penstock store`: what lies where --kv-storage says, for people. Engines may use it meanwhile.

Owns the words; what is there each store says itself, see `penstock.memory.stores`. Loads no model.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

from penstock.config.base.errors import ConfigError
from penstock.config.base.sizes import parse_bytes
from penstock.config.base.storage_url import FORMS, StorageUrl, check_installed, masked, parse_storage
from penstock.config.settings.tree import Config
from penstock.memory.stores.files import Folder, open_root
from penstock.memory.stores.objects import FORMAT, Inventory, Verdict

WORDS = ("weights", "weights kept as", "KV dtype", "selector", "page size")
WORDS_MAX = 100             # characters of a value that are shown: anybody may have written them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("ls", "verify", "sweep", "purge"), help=(
        "ls: objects of each kind of engine; verify: read them; sweep: down to --bytes; purge: remove all"))
    parser.add_argument("url", metavar="URL", help="the URL that --kv-storage has")
    parser.add_argument("--bytes", metavar="SIZE", help="sweep: size to keep (default: removes left-over files only)")
    parser.add_argument("--delete", action="store_true", help="verify: remove damaged objects")
    parser.add_argument("--yes", action="store_true", help="purge: needed; without it the size is printed")


def run(config: Config | None, args: argparse.Namespace) -> int:
    """The exit code: 0, or 1 if verify has found damage. Raises ConfigError."""
    shown = masked(args.url)
    url = parse_storage(args.url)
    if url is None:
        raise ConfigError(f"{shown}: one of these is needed, paths absolute: {FORMS}")
    for flag, of in (("bytes", "sweep"), ("delete", "verify"), ("yes", "purge")):
        if getattr(args, flag) and args.what != of:
            raise ConfigError(f"--{flag}: of penstock store {of}: leave it out")
    quota = None if args.bytes is None else parse_bytes(args.bytes)
    there = _open(url)
    try:
        match args.what:
            case "ls":
                return _ls(there, url.folder)
            case "verify":
                return _verify(there, delete=args.delete)
            case "sweep":
                left, gone = there.sweep(quota)
                print(f"{gone} bytes removed, {left} left")
            case "purge":
                return _purge(there, sure=args.yes)
    except OSError as e:
        raise ConfigError(f"{shown}: {e.strerror or e}: give a store that this user can reach and write "
                          "to") from None
    return 0


def _open(url: StorageUrl) -> Inventory:
    check_installed(url)
    match url.kind:
        case "file":
            assert url.folder is not None
            open_root(url.folder, readonly=True)
            if not (url.folder / FORMAT).is_dir():
                raise ConfigError(f"{url.shown}: no storage is there: --kv-storage makes one")
            return Folder(url.folder)
        case "s3":
            from penstock.memory.stores.s3 import Bucket
            return Bucket(url, "", ())
        case "valkey":
            from penstock.memory.stores.valkey import Valkey
            return Valkey(url, "", ())
        case "mooncake":
            raise ConfigError(f"{url.shown}: Mooncake lists no objects: what goes is its master's "
                              "choice, and a master that starts anew begins empty")


def _ls(there: Inventory, folder: Path | None) -> int:
    count, size, used = Counter[str](), Counter[str](), dict[str, float]()
    for o in there.objects():
        kind = "left-overs" if o.temporary else o.kind
        count[kind] += 1
        size[kind] += o.bytes
        used[kind] = max(used.get(kind, 0.0), o.used)
    for kind in sorted(count):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(used[kind]))
        words = "" if folder is None else _words(folder, kind)
        print(f"{ascii(kind)[1:-1]}  {count[kind]} objects, {size[kind]} bytes, last used {when}{words}")
    print(f"{count.total()} objects, {size.total()} bytes")
    return 0


def _words(root: Path, kind: str) -> str:
    try:
        with open(os.open(root / FORMAT / kind / "manifest.json", os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            said = json.loads(file.read(1 << 16))
        found = {name: said[name][:WORDS_MAX] for name in WORDS if isinstance(said.get(name), str)}
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""
    return "".join(f"\n    {name}: {value!a}" for name, value in found.items())


def _verify(there: Inventory, *, delete: bool) -> int:
    count = Counter[Verdict]()
    for o in there.objects():
        if o.temporary:
            continue
        verdict = there.examine(o)
        count[verdict] += 1
        if verdict is Verdict.BAD:
            print(f"damaged: {o.name!a}", file=sys.stderr)
            if delete:
                there.remove([o])
    print(f"{count[Verdict.GOOD]} objects are intact, {count[Verdict.BAD]} are damaged"
          + (", and were removed" if delete and count[Verdict.BAD] else ""))
    return int(count[Verdict.BAD] > 0)


def _purge(there: Inventory, *, sure: bool) -> int:
    found = list(there.objects())
    size = sum(o.bytes for o in found)
    if not sure:
        raise ConfigError(f"{len(found)} objects, {size} bytes of all engines would go: add --yes")
    there.purge()
    print(f"{len(found)} objects, {size} bytes removed")
    return 0
