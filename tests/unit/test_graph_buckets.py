"""Batch sizes that decode steps are captured for."""
from __future__ import annotations

from penstock.exec.graphs.capture import buckets_of


def test_buckets_end_with_all_rows_and_waste_little():
    for rows in range(1, 300):
        sizes = buckets_of(rows)
        assert sizes[-1] == rows and list(sizes) == sorted(set(sizes)), rows
        for n in range(1, rows + 1):
            assert min(b for b in sizes if b >= n) - n < max(8, min(16, n)), (rows, n)
    assert len(buckets_of(256)) < 25
