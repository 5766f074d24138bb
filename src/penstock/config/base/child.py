"""Child processes of ours: how the engine, its ranks and helpers are started, and ended.

Each is this interpreter without the current folder in its path (`-P`), reads nothing from stdin, and gets no
descriptors but those that it is given.
"""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

SECRET_VARIABLES = ("PENSTOCK_CLUSTER_KEY", "PENSTOCK_PAIR_KEY", "PENSTOCK_NODE_KEY", "AWS_SECRET_ACCESS_KEY",
                    "AWS_SESSION_TOKEN")


def helper_environment() -> dict[str, str]:
    """Return our environment for a process that needs no secret: without them, and with the folder that this
    package was imported from first in PYTHONPATH, as `-P` keeps the current folder out."""
    paths = [str(Path(__file__).parents[3]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    ours = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    return {name: value for name, value in ours.items() if name not in SECRET_VARIABLES}


def module(name: str, *words: object) -> list[str]:
    """Return the command that runs a module of ours."""
    return [sys.executable, "-P", "-m", name, *map(str, words)]


def start(command: Sequence[str], fds: Iterable[int], *, env: Mapping[str, str] | None = None,
          helper: bool = False) -> subprocess.Popen[bytes]:
    """Start a process that writes to our stdout and stderr.

    fds     descriptors that it inherits; those under 0 stand for none
    env     None: ours
    helper  it needs no secret and does not end by Ctrl-C, which is for the server that drains first
    """
    return subprocess.Popen(command, pass_fds=[fd for fd in fds if fd >= 0], stdin=subprocess.DEVNULL,
                            env=helper_environment() if helper else env, start_new_session=helper)


def start_logged(command: Sequence[str], fds: Iterable[int], *,
                 env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a process whose stdout and stderr are lines of text in `stdout` of what is returned."""
    return subprocess.Popen(command, pass_fds=list(fds), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, env=env, encoding="utf-8", errors="replace")


def run(code: str, *words: str, seconds_max: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program text as a helper until it ends.

    Raises subprocess.TimeoutExpired: it took longer, and was killed.
    """
    return subprocess.run([sys.executable, "-P", "-c", code, *words], stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, timeout=seconds_max, start_new_session=True, env=helper_environment())


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill it, if it runs, and wait for it."""
    process.kill()
    process.wait()
