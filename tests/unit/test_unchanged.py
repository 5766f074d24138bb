"""Tests of code that has not changed belong to the sweep."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import unchanged


def test_a_file_that_differs_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged, "ROOT", tmp_path)
    monkeypatch.setattr(unchanged, "NOTED", tmp_path / "noted.json")
    (tmp_path / "tests").mkdir()
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("1")
    test = tmp_path / "tests" / "test_it.py"
    test.write_text('pytestmark = pytest.mark.when_changed("code")')
    unchanged.main()
    assert unchanged.same(test, ["code"])
    assert [*json.loads((tmp_path / "noted.json").read_text())] == ["tests/test_it.py"]
    for change in (lambda: (tmp_path / "code" / "a.py").write_text("2"), lambda: (tmp_path / "code" / "b.py").touch()):
        unchanged.main()
        unchanged.digest.cache_clear()
        change()
        assert not unchanged.same(test, ["code"])
        unchanged.digest.cache_clear()
