"""guidellm or aiperf, by their commands, against a server.

    python command_calls.py URL FOLDER NAME      FOLDER has the tokenizer
"""
from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from calls import MODEL, URL, call, main

FOLDER, NAME = sys.argv[2:4]
BIN = Path(sys.executable).parent


def run(*words: str) -> str:
    with tempfile.TemporaryDirectory() as into:
        got = subprocess.run([str(BIN / words[0]), *words[1:]], cwd=into, capture_output=True, text=True,
                             timeout=900)
    told = got.stdout + got.stderr
    assert got.returncode == 0, told[-2000:]
    return told


if NAME == "guidellm":
    @call
    def benchmark():
        run("guidellm", "run", "--backend", f"kind=openai_http,target={URL},model={MODEL}",
            "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3",
            "--tokenizer", f"kind=huggingface_auto,model={FOLDER}", "--disable-console",
            "--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=8")
else:
    @call
    def profile_chat_streamed():
        run("aiperf", "profile", "-m", MODEL, "--url", URL, "--endpoint-type", "chat", "--streaming",
            "--request-count", "3", "--tokenizer", FOLDER, "--ui", "none",
            "--synthetic-input-tokens-mean", "40", "--output-tokens-mean", "8")

main()
