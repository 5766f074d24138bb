"""`penstock chat --base-url`: a conversation in a terminal with a running server, which echoes."""
from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from http_server import Server

from penstock.cli import commands
from penstock.cli.main import main
from penstock.cli.remote import Remote
from penstock.config.base.errors import ConfigError, RequestError
from penstock.config.request.params import SamplingParams

LIMIT_S = 120
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    (folder / "keys").write_text("secret")
    (folder / "keys").chmod(0o600)
    made = Server(folder, "--api-key-file", str(folder / "keys"))
    yield str(made.http.base_url).rstrip("/")
    assert made.end(signal.SIGTERM) == 0


def test_lines_of_a_pipe_are_asked_until_bye(server, capsys, monkeypatch):
    for word in commands.LEAVE:
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"hello\n/help\n{word}\nnever asked\n"))
        assert main(["chat", "--base-url", server + "/v1", "--bearer", "secret", "--max-tokens", "30"]) == 0
        told = capsys.readouterr()
        assert "hello" in told.out and "never" not in told.out and "/bye" in told.err


def test_what_a_server_refuses_is_said_and_the_next_line_is_asked(server, capsys):
    remote = Remote(server, "secret")
    said = "".join(d.text for d in remote.stream_chat(HELLO, SamplingParams(max_tokens=30)))
    assert said.count("hello") == 1
    with pytest.raises(RequestError, match="context"):
        list(remote.stream_chat([{"role": "user", "content": "x" * 30_000}], SamplingParams(max_tokens=3)))
    talk = commands.Conversation(remote, SamplingParams(max_tokens=30), None)
    talk.run(["x" * 30_000, "hello"])
    told = capsys.readouterr()
    assert [m["role"] for m in talk.messages] == ["user", "assistant"] and "/reset starts again" in told.err


@pytest.mark.parametrize("words, told", [
    ([], "MODEL or --base-url"), (["demo", "--base-url", "http://127.0.0.1:1"], "one of them"),
    (["demo", "--bearer", "x"], "--bearer is for a server"), (["--base-url", "nonsense"], "give one such as"),
    (["--base-url", "http://127.0.0.1:1"], "does not answer"),
    (["--base-url", "http://127.0.0.1:1", "--page-size", "16"], "--page-size needs a MODEL")])
def test_what_does_not_go_together_is_named(words, told, capsys):
    assert main(["chat", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_wrong_key_is_told(server):
    with pytest.raises(ConfigError, match="API key"):
        Remote(server, "wrong")


def test_a_terminal_has_a_history_that_the_next_one_knows(server, tmp_path):
    """The second conversation asks the first one's line again, by the key for the line before."""
    for typed in (b"hello\n/bye\n", b"\x1b[A\x1b[A\n/bye\n"):
        own, other = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "chat", "--base-url", server, "--bearer", "secret",
             "--max-tokens", "30"], stdin=other, stdout=other, stderr=other, close_fds=True,
            env={**os.environ, "PENSTOCK_CACHE": str(tmp_path), "TERM": "xterm"})
        os.close(other)
        seen = until(own, b"> ")
        os.write(own, typed)
        try:
            while part := os.read(own, 65536):
                seen += part
        except OSError:                     # it has ended, and its terminal with it
            pass
        os.close(own)
        assert process.wait(LIMIT_S) == 0, seen
        assert seen.count(b"hello") >= 2, seen
    kept = tmp_path / commands.HISTORY
    assert kept.read_text().split() == ["hello", "/bye", "hello", "/bye"]
    assert kept.stat().st_mode & 0o077 == 0


def until(terminal: int, mark: bytes) -> bytes:
    seen, began = b"", time.monotonic()
    while mark not in seen:
        assert time.monotonic() - began < LIMIT_S, seen
        seen += os.read(terminal, 65536)
    return seen
