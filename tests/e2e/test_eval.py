"""`penstock eval` end to end on the recall model of the tests: in an engine process, and on a server."""
from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

PENSTOCK = [sys.executable, "-m", "penstock.serve.main"]
MODEL = str(Path(__file__).parents[1] / "data" / "recall")
SMALL = ("--threads", "1", "--hbm-bytes", "100M")
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
    server = subprocess.Popen([*PENSTOCK, "serve", MODEL, "--port", "0", *SMALL],
                              stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = re.search(r"ready on (http://\S+)", server.stdout.readline())
        assert found
        out = evaluate("--base-url", found[1], "--task", "recall")
        assert re.search(r"\| 512 +\| [78] of 8", out)
    finally:
        server.terminate()
        server.wait(END_S)
