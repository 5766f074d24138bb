"""Which code is as it was when its long tests last passed: `tests/data/unchanged.json`.

    python tools/unchanged.py          writes it, once `make test` has passed

A test marked `when_changed(FOLDER, ...)` belongs to `make test` while one of these folders, or its own file, differs
from what that file says, and to `make sweep` else. So one of both always runs it.
"""
from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTED = ROOT / "tests/data/unchanged.json"
MARK = re.compile(r"^(?:pytestmark = |@)pytest\.mark\.when_changed\(([^)]*)\)", re.MULTILINE)


@cache
def digest(file: Path, folders: Sequence[str]) -> str:
    """Of a test's file, and of all files below the folders."""
    found = hashlib.sha256()
    for path in (file, *sorted(path for folder in folders for path in (ROOT / folder).rglob("*")
                               if path.is_file() and "__pycache__" not in path.parts)):
        data = path.read_bytes()
        found.update(f"{path.relative_to(ROOT)} {len(data)}\n".encode() + data)
    return found.hexdigest()


def same(file: Path, folders: Sequence[str]) -> bool:
    return json.loads(NOTED.read_text()).get(str(file.relative_to(ROOT))) == digest(file, tuple(folders))


def main() -> None:
    marked = {file: MARK.search(file.read_text()) for file in sorted((ROOT / "tests").rglob("test_*.py"))}
    noted = {str(file.relative_to(ROOT)): digest(file, tuple(re.findall(r'"([^"]+)"', found[1])))
             for file, found in marked.items() if found}
    NOTED.write_text(json.dumps(noted, indent=1) + "\n")


if __name__ == "__main__":
    main()
