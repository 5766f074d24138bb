"""Scripts that make an `LLM` and never close it: they end, with their own exit code, and the engine too."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

FAKE = Path(__file__).with_name("engine_fake.py")
MAKES = f"""
import functools, os, signal, sys
from penstock.llm import llm as library
from penstock.text.model_text import ModelText
library.EngineClient = functools.partial(library.EngineClient, argv=[sys.executable, "-P", {str(FAKE)!r}])
library.files_of = lambda model: None
library.open_text = lambda config, files: ModelText(None, None, (9,))

def work():
    llm = library.LLM("fake")
    print(llm._inner._client._process.pid, flush=True)
    llm.generate({{"prompt_token_ids": [5]}})
    return llm
"""
ENDS = {
    "plain": ("llm = work()", 0),
    "exception": ("llm = work()\nraise ValueError('of the user')", 1),
    "sys.exit": ("llm = work()\nsys.exit(3)", 3),
    "ctrl-c": ("llm = work()\nos.kill(os.getpid(), signal.SIGINT)\nsignal.pause()", -signal.SIGINT),
    "in a function": ("def f():\n    llm = work()\n    raise ValueError('of the user')\nf()", 1),
}


def exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("end", ENDS)
def test_a_script_that_closes_nothing_ends(end):
    script, code = ENDS[end]
    ran = subprocess.run([sys.executable, "-c", MAKES + textwrap.dedent(script)], env=os.environ.copy(),
                         capture_output=True, text=True, timeout=60)    # it hung for ever
    assert ran.returncode == code, ran.stderr
    pid = int(ran.stdout.split()[0])
    until = time.monotonic() + 10
    while exists(pid):
        assert time.monotonic() < until, "the engine is still there"
        time.sleep(0.01)
