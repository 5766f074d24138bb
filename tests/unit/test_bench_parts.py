"""`bench/device/parts.py`: a file in parts is whole again, and only if every part is what it was."""
from __future__ import annotations

import json
import random
from pathlib import Path

import bench_programs
import pytest

parts = bench_programs.program("device/parts.py")


def test_parts_come_in_any_order_and_damaged_ones_come_again(tmp_path: Path) -> None:
    file, folder, there = tmp_path / "file", tmp_path / "folder", tmp_path / "there" / "file"
    file.write_bytes(random.Random(0).randbytes(2500))
    assert parts.split(file, folder, 1000) == 3
    held = {n: (folder / f"{n:03}").read_bytes() for n in range(3)}
    assert list(map(len, held.values())) == [1000, 1000, 500]
    for part in folder.glob("0*"):
        part.unlink()
    (folder / "002").write_bytes(held[2])
    (folder / "000").write_bytes(held[0][:-1] + b"x")
    assert parts.take(folder, there) == [0, 1] and not there.exists()
    (folder / "002").unlink()
    (folder / "000").write_bytes(held[0])
    assert parts.take(folder, there) == [1]
    (folder / "001").write_bytes(held[1])
    assert parts.take(folder, there) == [] and there.read_bytes() == file.read_bytes()
    sums = json.loads((folder / "sums.json").read_text())
    (folder / "sums.json").write_text(json.dumps({**sums, "whole": "0" * 64}))
    with pytest.raises(ValueError, match="SHA-256"):
        parts.take(folder, there)
