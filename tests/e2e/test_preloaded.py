"""Commands as forks of a process with all imports done, and as programs of their own."""
from __future__ import annotations

import os
import subprocess
import sys

import preloaded
import pytest

from penstock.config.base import machine


@pytest.mark.skipif("config.getoption('--by-exec') or config.getoption('--device') != 'cpu'", reason="no forks")
@pytest.mark.parametrize("words, code", [(("--version",), 0), (("serve", "demo", "--nonsense"), 2),
                                         (("generate", "demo", "--input", "/nowhere"), 2)], ids=str)
def test_a_fork_prints_and_ends_as_exec_does(tmp_path, monkeypatch, words, code):
    said = []
    for on in (True, False):
        monkeypatch.setattr(preloaded, "on", on)
        before = preloaded.forks
        done = subprocess.run([sys.executable, "-m", "penstock.cli.main", *words], cwd=tmp_path, capture_output=True,
                              text=True, env={**preloaded.environ, "XDG_CACHE_HOME": str(tmp_path)})
        said.append((done.returncode, done.stdout, done.stderr))
        assert preloaded.forks - before == on
    assert said[0] == said[1] and said[0][0] == code and "".join(said[0][1:])


def test_what_a_server_sets_for_its_engine_needs_no_exec(monkeypatch):
    for name in (*preloaded.WAITS, preloaded.AT_FIRST_PRODUCT, "LRU_CACHE_CAPACITY"):
        monkeypatch.delenv(name, raising=False)
    before = preloaded.read_at_imports({**os.environ})
    machine.bound_waits()
    machine.bound_onednn_caches()
    assert preloaded.read_at_imports({**os.environ}) == before
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert preloaded.read_at_imports({**os.environ}) != before
