"""A process of ours that answers one question at a time: what must hold neither this one nor its memory.

Owns its start, the frames to it, its time, and its end. Knows nothing of what it computes: `chat` and
`grammar.check` do.
"""
from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import threading
from typing import Any

from penstock.config.base import child
from penstock.config.base.errors import ConfigError
from penstock.text.frames import receive, send

START_S_MAX = 60.0
# Signals that come from outside: an operator, the kernel when memory is short, a service manager.
FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT)


class HelperDied(ConfigError):
    """A helper process was killed while it started: no setting is wrong."""


class Aside:
    """`python -m MODULE` and the socket to it; thread-safe.

    The process starts with the first `check` or `ask`, is killed when it is late, and starts again for
    the next one. It gets `hello` first and answers {} or {"error"}; so it does every later question.
    """

    def __init__(self, module: str, hello: dict[str, Any], *, wrong: str, advice: str) -> None:
        """The ConfigError of a process that does not start or refuses `hello` has `wrong` as its beginning
        and `advice` as its end."""
        self._module = module
        self._hello = hello
        self._wrong = wrong
        self._advice = advice
        self._lock = threading.Lock()
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def check(self) -> None:
        """Start it now. Raises ConfigError; HelperDied: it was killed meanwhile."""
        with self._lock:
            self._start()

    def ask(self, question: dict[str, Any], seconds_max: float) -> dict[str, Any]:
        """Its answer. Raises ConfigError; HelperDied: it was killed twice while it started; TimeoutError;
        EOFError: it ended twice without one."""
        with self._lock:
            try:
                return self._ask(question, seconds_max)
            except (EOFError, HelperDied):
                # The kill may not have been due to this question: memory of another one, an operator.
                return self._ask(question, seconds_max)

    def close(self) -> None:
        """End the process. Idempotent."""
        with self._lock:
            self._kill()

    def _ask(self, question: dict[str, Any], seconds_max: float) -> dict[str, Any]:
        link = self._start()
        try:
            link.settimeout(seconds_max)
            send(link, question)
            answer: dict[str, Any] = receive(link)
            return answer
        except TimeoutError:
            self._kill()
            raise
        except (EOFError, OSError):
            self._kill()
            raise EOFError from None
        except BaseException:
            self._kill()             # its answer would be taken for the next one's
            raise

    def _start(self) -> socket.socket:
        if self._link is not None:
            return self._link
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = child.start(child.module(self._module, theirs.fileno()), [theirs.fileno()], helper=True)
        ours.settimeout(START_S_MAX)
        self._link = ours
        try:
            send(ours, self._hello)
            answer = receive(ours)
        except (EOFError, OSError) as e:
            code = self._ended()
            self._kill()
            if code in FROM_OUTSIDE:
                raise HelperDied(f"the helper process {self._module} was killed by signal {-code} while it "
                                 "started: start again; if memory is short, give it more") from e
            why = f"it ended with exit code {code}, and the log says why" if code else str(e) or type(e).__name__
            raise ConfigError(f"{self._wrong}: its process did not start: {why}: {self._advice}") from e
        if "error" in answer:
            self._kill()
            raise ConfigError(f"{self._wrong}: {answer['error']}: {self._advice}")
        return ours

    def _ended(self) -> int:
        """The exit code of a process whose socket has closed; 0 if it still runs."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(1.0)
        return 0

    def _kill(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._process is not None:
            child.end(self._process)
            self._process = None
