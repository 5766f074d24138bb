"""What tests cost, by folder: `make test` notes the processor seconds of each test in .cache/times.json."""
from __future__ import annotations

from collections import Counter


def by_folder(seconds: dict[str, float]) -> list[tuple[str, float]]:
    """Seconds of all tests in each folder of `tests`, the slowest first."""
    found: Counter[str] = Counter()
    for test, took in seconds.items():
        found[test.split("/")[1]] += took
    return found.most_common()
