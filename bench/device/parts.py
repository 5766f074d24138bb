"""A file that is larger than one trip to the machine with the GPU: in parts that travel one by one.

    python bench/device/parts.py split FILE FOLDER [--megabytes 50]     # here: FOLDER/000, 001, ..., FOLDER/sums.json
    python bench/device/parts.py take FOLDER FILE                       # there, once a trip: sums.json and any parts

`take` keeps the parts that came beside FILE and says which are missing; with the last one it writes FILE, whose SHA-256
must be that of the original. A part that comes again, or damaged, changes nothing. Needs no package.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path


def split(file: Path, folder: Path, size: int) -> int:
    """The number of parts of `size` bytes; the last one is shorter."""
    folder.mkdir(parents=True, exist_ok=True)
    sums, whole = [], hashlib.sha256()
    with file.open("rb") as data:
        while part := data.read(size):
            (folder / f"{len(sums):03}").write_bytes(part)
            sums.append(hashlib.sha256(part).hexdigest())
            whole.update(part)
    (folder / "sums.json").write_text(json.dumps({"whole": whole.hexdigest(), "parts": sums}))
    return len(sums)


def take(folder: Path, file: Path) -> list[int]:
    """The numbers of the parts that are still missing; none: the file is written. Raises ValueError for a file that
    is not the original."""
    sums = json.loads((folder / "sums.json").read_text())
    kept = file.with_name(file.name + ".parts")
    kept.mkdir(parents=True, exist_ok=True)
    for n, want in enumerate(sums["parts"]):
        if (part := folder / f"{n:03}").exists() and hashlib.sha256(part.read_bytes()).hexdigest() == want:
            shutil.copyfile(part, kept / part.name)
    missing = [n for n in range(len(sums["parts"])) if not (kept / f"{n:03}").exists()]
    if missing:
        return missing
    whole = hashlib.sha256()
    with file.open("wb") as out:
        for n in range(len(sums["parts"])):
            part_bytes = (kept / f"{n:03}").read_bytes()
            out.write(part_bytes)
            whole.update(part_bytes)
    if whole.hexdigest() != sums["whole"]:
        raise ValueError(f"{file}: its SHA-256 is {whole.hexdigest()} instead of {sums['whole']}")
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("split")
    one.add_argument("file", type=Path)
    one.add_argument("folder", type=Path)
    one.add_argument("--megabytes", type=float, default=50)
    two = commands.add_parser("take")
    two.add_argument("folder", type=Path)
    two.add_argument("file", type=Path)
    args = parser.parse_args()
    if args.command == "split":
        print(f"{split(args.file, args.folder, int(args.megabytes * 1e6))} parts in {args.folder}")
        return 0
    missing = take(args.folder, args.file)
    print(f"{args.file}: " + (f"missing {missing}" if missing else "complete"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
