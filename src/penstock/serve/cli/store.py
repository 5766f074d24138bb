"""`penstock store`: what lies in the folder of --kv-storage, for people. Engines may use it meanwhile.

Owns the words; the format is `penstock.memory.stores.files`. Loads no model.
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

from penstock.config.base.errors import ConfigError
from penstock.config.base.sizes import parse_bytes
from penstock.config.base.storage_url import parse_storage
from penstock.config.settings.tree import Config
from penstock.memory.stores.files import examine, objects, open_root, sweep
from penstock.memory.stores.objects import FORMAT, Verdict

WORDS = ("weights", "weights kept as", "KV dtype", "selector", "page size")
WORDS_MAX = 100             # characters of a value that are shown: anybody may have written them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("ls", "verify", "sweep", "purge"), help=(
        "ls: objects of each kind of engine; verify: read them; sweep: down to --bytes; purge: remove all"))
    parser.add_argument("url", metavar="URL", help="file:///DIR, as --kv-storage has it")
    parser.add_argument("--bytes", metavar="SIZE", help="of sweep: what may stay (none: left-overs go)")
    parser.add_argument("--delete", action="store_true", help="of verify: remove what is damaged")
    parser.add_argument("--yes", action="store_true", help="of purge: really")


def run(config: Config | None, args: argparse.Namespace) -> int:
    """The exit code: 0, or 1 if verify has found damage. Raises ConfigError."""
    url = parse_storage(args.url)
    root = None if url is None else url.folder
    if root is None:
        raise ConfigError(f"{args.url}: file:///DIR is needed, an absolute path")
    for flag, of in (("bytes", "sweep"), ("delete", "verify"), ("yes", "purge")):
        if getattr(args, flag) and args.what != of:
            raise ConfigError(f"--{flag}: of penstock store {of}: leave it out")
    open_root(root, readonly=True)
    if not (root / FORMAT).is_dir():
        raise ConfigError(f"{args.url}: no storage is there: --kv-storage makes one")
    try:
        match args.what:
            case "ls":
                return _ls(root)
            case "verify":
                return _verify(root, delete=args.delete)
            case "sweep":
                left, gone = sweep(root, None if args.bytes is None else parse_bytes(args.bytes))
                print(f"{gone} bytes removed, {left} left")
            case "purge":
                return _purge(root, sure=args.yes)
    except OSError as e:
        raise ConfigError(f"{args.url}: {e.strerror}: give a folder that this user can write to") from None
    return 0


def _ls(root: Path) -> int:
    count, size, used = Counter[str](), Counter[str](), dict[str, float]()
    for o in objects(root):
        kind = "left-overs" if o.temporary else o.path.split("/")[1]
        count[kind] += 1
        size[kind] += o.bytes
        used[kind] = max(used.get(kind, 0.0), o.used)
    for kind in sorted(count):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(used[kind]))
        print(f"{kind}  {count[kind]} objects, {size[kind]} bytes, last used {when}{_words(root, kind)}")
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


def _verify(root: Path, *, delete: bool) -> int:
    count = Counter[Verdict]()
    for o in objects(root):
        if o.temporary:
            continue
        verdict = examine(root, o)
        count[verdict] += 1
        if verdict is Verdict.BAD:
            print(f"damaged: {o.path!a}", file=sys.stderr)
            if delete:
                os.unlink(root / o.path)
    print(f"{count[Verdict.GOOD]} objects are what they should be, {count[Verdict.BAD]} are not"
          + (", and were removed" if delete and count[Verdict.BAD] else ""))
    return int(count[Verdict.BAD] > 0)


def _purge(root: Path, *, sure: bool) -> int:
    found = list(objects(root))
    size = sum(o.bytes for o in found)
    if not sure:
        raise ConfigError(f"{len(found)} objects, {size} bytes of all engines would go: add --yes")
    shutil.rmtree(root / FORMAT)
    print(f"{len(found)} objects, {size} bytes removed")
    return 0
