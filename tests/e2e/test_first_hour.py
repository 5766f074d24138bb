"""The quickstart, block by block: each command is run, and its answer has the lines that stand behind it.

The installation is what tests/e2e/test_wheel.py does; here `penstock` is this tree.
"""
from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from clients import free_port

ROOT = Path(__file__).parents[2]
LIMIT_S = 300
DOC = (ROOT / "docs/getting-started/quickstart.md").read_text()
BLOCKS = re.findall(r"^```(sh|text)( \w+)?\n(.*?)^```$", DOC, re.MULTILINE | re.DOTALL)
SERVED, ROUTED = "http://127.0.0.1:8000", "http://127.0.0.1:3000"


@dataclass
class Part:
    """A server and what is asked of it: (kind, commands, lines that its answer has)."""

    serves: str
    ready: list[str]
    asked: list[tuple[str, str, list[str]]]


def parts() -> list[Part]:
    found: list[Part] = []
    for language, kind, body in BLOCKS:
        kind = kind.strip()
        if language == "text":
            part = found[-1]
            (part.asked[-1][2] if part.asked else part.ready).extend(body.splitlines())
        elif kind == "serve":
            found.append(Part(body.strip(), [], []))
        elif kind != "install":
            found[-1].asked.append((kind, body, []))
    return found


PARTS = parts()


@pytest.fixture
def env(tmp_path) -> dict[str, str]:
    """A path on which `penstock` and `python3` are this tree's."""
    for name, words in (("penstock", "-m penstock"), ("python3", "")):
        (tmp_path / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (tmp_path / name).chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


@pytest.fixture
def started(env, tmp_path) -> Iterator:
    running = []

    def start(words: list[str]) -> subprocess.Popen:
        log = (tmp_path / f"log{len(running)}").open("w")
        running.append(subprocess.Popen(words, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE,
                                        stderr=log))
        return running[-1]
    yield start
    for process in reversed(running):
        process.terminate()
        process.wait(LIMIT_S)


def test_the_page_has_the_blocks_that_are_run():
    assert len(PARTS) == 4 and sum(len(p.asked) for p in PARTS) >= 9
    assert all(lines for p in PARTS for kind, _, lines in p.asked if not kind)
    assert len(re.findall(r"^```", DOC, re.MULTILINE)) == 2 * len(BLOCKS)
    assert "pip install ." in BLOCKS[0][2] and BLOCKS[0][1] == " install"


@pytest.mark.sweep
@pytest.mark.parametrize("part", PARTS, ids=[p.serves for p in PARTS])
def test_what_the_first_hour_says_happens(part, started, env, tmp_path):
    server = started([*part.serves.split(), "--port", "0"])
    line = server.stdout.readline()
    found = re.search(r"ready on (http://127\.0\.0\.1:\d+) ", line)
    assert found, (tmp_path / "log0").read_text()
    assert all(told.replace(SERVED, found[1]) in line for told in part.ready)
    router = f"http://127.0.0.1:{free_port()}"
    for kind, commands, lines in part.asked:
        commands = commands.replace(SERVED, found[1]).replace(ROUTED, router).replace(
            "--port 3000", f"--port {router.rpartition(':')[2]} --prometheus-port {free_port()}")
        if kind:
            if shutil.which(kind) is None:
                pytest.skip(f"pipx install {kind}")
            started(commands.split())
            continue
        began = time.monotonic()
        while True:                     # a router finds its workers a little later
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", commands], cwd=ROOT, env=env,
                                  capture_output=True, text=True, timeout=LIMIT_S)
            missing = [told for told in lines if told not in done.stdout]
            if not (missing or done.returncode) or time.monotonic() - began > 60 or router not in commands:
                break
            time.sleep(0.5)
        assert not missing and done.returncode == 0, (missing, done.stdout, done.stderr)
