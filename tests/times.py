"""What tests cost: `make test` notes it in .cache/times.json, `make times` writes it into CONTRIBUTING.md."""
from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

NOTED = Path(".cache/times.json")
START, END = "<!-- times: written by `make times` -->", "<!-- times: end -->"
SLOWEST = 10


def by_folder(seconds: dict[str, float]) -> list[tuple[str, float]]:
    """Seconds of all tests in each folder of `tests`, the slowest first."""
    found: Counter[str] = Counter()
    for test, took in seconds.items():
        found[test.split("/")[1]] += took
    return found.most_common()


def tables(seconds: dict[str, float]) -> str:
    """Both tables: folders, and the slowest tests with all their cases."""
    lines = [f"{len(seconds):,} tests, {sum(seconds.values()):,.0f} s of a process, by folder:", "",
             "| s | folder |", "|---|---|"]
    lines += [f"| {took:.0f} | `tests/{folder}` |" for folder, took in by_folder(seconds)]
    lines += ["", "| s | test |", "|---|---|"]
    lines += [f"| {took:.0f} | `{test}` |" for test, took in Counter(seconds).most_common(SLOWEST)]
    return "\n".join(lines)


def put_into(text: str, seconds: dict[str, float]) -> str:
    """A document with the tables between its two marks."""
    return re.sub(f"(?s){re.escape(START)}.*{re.escape(END)}", f"{START}\n{tables(seconds)}\n{END}", text)


if __name__ == "__main__":
    if not NOTED.exists():
        sys.exit(f"no {NOTED}: run make test first")
    path = Path("CONTRIBUTING.md")
    path.write_text(put_into(path.read_text(), json.loads(NOTED.read_text())))
