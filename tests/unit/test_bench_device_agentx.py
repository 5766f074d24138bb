"""`bench/device/agentx.py`: a run that fails has no numbers of the one before it."""
from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import bench_programs
import pytest


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return bench_programs.program("device/agentx.py")


PLAN = {"hits": 0.5, "first_s": [1.0, 2.0], "tokens_s": 10.0}


def played(program: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, code: int,
           found: dict[str, object] | None) -> dict[str, object]:
    def run(command: list[str], **more: object) -> SimpleNamespace:
        if found is not None:
            Path(command[-1]).write_text(json.dumps(found))
        return SimpleNamespace(returncode=code, stdout="", stderr="the server is gone")

    monkeypatch.setattr(program.subprocess, "run", run)
    monkeypatch.setattr(program.urllib.request, "urlopen", lambda *a, **k: SimpleNamespace(read=bytes))
    return program.played(SimpleNamespace(url="http://x"), 4, 100, Namespace(out=out, turns=2, scale=4.0))


def test_a_run_without_measurements_is_a_row_that_says_so(
        program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "played.json").write_text(json.dumps({"hits": 1.0}))       # of the row before
    found = played(program, monkeypatch, tmp_path, 2, None)
    assert "the server is gone" in str(found["error"])
    line = program.line({"host": "0", "agents": 4, "plan": PLAN, "played": found})
    assert len(line) == len(program.HEADER) and line[2:] == (*("-" * 8), "all")


def test_failed_requests_are_counted(program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = played(program, monkeypatch, tmp_path, 1, {
        "hits": 0.25, "hits_largest": 0.5, "seconds": 2.0, "failed": 3, "prompt_tokens": 9, "output_tokens": 4,
        "series": {"time to first token": [0.5], "inter-token latency": [0.25]}})
    line = program.line({"host": "32G", "agents": 4, "plan": PLAN, "played": found})
    assert len(line) == len(program.HEADER) and line[-1] == "3" and line[2:4] == ("0.250", "0.500")
