"""Child processes have the descriptors and the environment that they are given, and end when they are told to."""
from __future__ import annotations

import os
import subprocess

import pytest

from penstock.config.base import child

SHOWS = ("import os, sys; print(os.environ.get('PENSTOCK_CLUSTER_KEY'), os.getsid(0) == os.getpid(), "
         "sys.path[0], *sys.argv[1:])")


def test_a_program_run_as_a_helper_has_no_secret_and_a_session_of_its_own(monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_CLUSTER_KEY", "s" * 16)
    done = child.run(SHOWS, "a", "b")
    secret, own_session, first, *words = done.stdout.split()
    assert (secret, own_session, words, done.returncode) == ("None", "True", ["a", "b"], 0) and os.path.isabs(first)


def test_a_program_that_takes_too_long_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        child.run("import time; time.sleep(600)", seconds_max=0.2)


def test_a_child_inherits_the_descriptors_that_it_is_given_and_is_ended() -> None:
    ours, theirs = os.pipe()
    process = child.start([*child.module("timeit")[:2], "-c", f"import os; os.write({theirs}, b'x'); os.read(0, 1); "
                           f"import time; time.sleep(600)"], [theirs, -1])
    os.close(theirs)
    assert os.read(ours, 1) == b"x"
    child.end(process)
    child.end(process)
    assert process.returncode == -9 and os.read(ours, 1) == b""
    os.close(ours)


def test_lines_of_a_logged_child_are_text_whatever_it_writes() -> None:
    code = "import sys; sys.stdout.buffer.write(b'out \\xff\\n'); sys.stdout.flush(); print('err', file=sys.stderr)"
    process = child.start_logged([*child.module("timeit")[:2], "-c", code], [], env={**os.environ})
    assert process.stdout is not None
    with process.stdout as lines:
        assert [line.rstrip() for line in lines] == ["out \ufffd", "err"]
    assert process.wait() == 0
