"""Commands as forks of a process with all imports done, and as programs of their own."""
from __future__ import annotations

import subprocess
import sys

import preloaded
import pytest


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
