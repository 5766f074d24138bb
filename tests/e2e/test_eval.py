"""`penstock eval` end to end on the recall model of the tests: in an engine process, and on a server."""
from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]
MODEL = str(Path(__file__).parents[1] / "data" / "recall")
SMALL = ("--threads", "1", "--kv-cache-memory-bytes", "100M")
ASKED = ("--contexts", "512", "--samples", "1", "--questions", "8", "--quiet")
END_S = 300


def evaluate(*words: str) -> str:
    done = subprocess.run([*PENSTOCK, "eval", *words, *ASKED], capture_output=True, text=True,
                          timeout=END_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_questions_while_decoding(tmp_path: Path) -> None:
    out = evaluate(MODEL, *SMALL, "--task", "tracking", "--forced",
                   "--output-json", str(tmp_path / "out.json"))
    assert "tracking, forced" in out
    [group] = json.loads((tmp_path / "out.json").read_text())["groups"]
    assert group["asked"] == 8 and group["right"] >= 7


def test_a_running_server_is_asked_the_same() -> None:
    """One that has no row of a context on the device but what it reads."""
    hosted = "--host-decode always --kv-cache-memory-bytes 8M --kv-offloading-size 32M --max-model-len 1024".split()
    server = subprocess.Popen([*PENSTOCK, "serve", MODEL, "--port", "0", "--threads", "1", *hosted],
                              stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = re.search(r"ready on (http://\S+)", server.stdout.readline())
        assert found
        out = evaluate("--base-url", found[1], "--task", "recall")
        assert re.search(r"\| 512 +\| [78] of 8", out)
        with urllib.request.urlopen(f"{found[1]}/metrics", timeout=END_S) as reply:
            assert re.search(r'hot_window_pages_total\{layer="0"\} [1-9]', reply.read().decode())
    finally:
        server.terminate()
        server.wait(END_S)
