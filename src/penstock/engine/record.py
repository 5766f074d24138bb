"""What the engine writes of its past: the flight recorder's file and the event log.

Neither has prompts, token ids or sampling in it: the flight has stand-ins (`replay.redact`), the log
ids, steps and counts. The log is a file of JSON lines for tests and for debugging; the flight is written
when the engine dies, or on SIGUSR1.
"""
from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

from penstock.config.base.errors import ConfigError
from penstock.config.base.paths import cache_dir
from penstock.config.base.version import version
from penstock.core.plan import (
    Arrived,
    Event,
    Finished,
    Listed,
    Lookup,
    Output,
    Retired,
    StepPlan,
    Token,
    Unstore,
    Used,
)
from penstock.replay import flight
from penstock.replay.recorder import Recorder
from penstock.replay.redact import redact

FLIGHTS_MAX = 20                # files that are kept: an engine that dies at every start fills no disk


def write_flight(recorder: Recorder, error: BaseException | None = None) -> Path:
    """Write what the recorder has to a new file that only this user can read. Raises OSError."""
    folder = cache_dir() / "flights"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for old in sorted(folder.glob("*.jsonl"))[:-FLIGHTS_MAX + 1]:          # their names are times
        old.unlink(missing_ok=True)
    now = time.time()
    stamp = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}.{int(now * 1e6) % 1_000_000:06d}"
    path = folder / f"{stamp}-{os.getpid()}.jsonl"
    lines = flight.write(redact(recorder), version(), "" if error is None else where(error))
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="ascii") as file:
        file.writelines(lines)
    return path


def where(error: BaseException) -> str:
    """The kind of an exception and the line of ours that raised it; not its message, which may quote
    what a user sent."""
    at = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        _, package, rest = frame.f_code.co_filename.rpartition("/penstock/")
        at = f" at penstock/{rest}:{line}" if package else at
    return type(error).__name__ + at


def write_on_signal(recorder: Recorder) -> Callable[[], None]:
    """SIGUSR1 writes a flight, at once between two turns, else after the turn: call what is returned
    after each. The main thread's; the handler runs wherever that thread is, also while it sleeps."""
    asked = False

    def turn_over() -> None:
        nonlocal asked
        if asked:
            asked = False
            try:
                print(f"engine: flight recorder: {write_flight(recorder)}", file=sys.stderr, flush=True)
            except OSError as e:
                print(f"engine: flight recorder: {e}", file=sys.stderr, flush=True)

    def handler(signum: int, frame: object) -> None:
        nonlocal asked
        asked = True
        if recorder.now is None:
            turn_over()

    signal.signal(signal.SIGUSR1, handler)
    return turn_over


class EventLog:
    """Events, plans and outputs as JSON lines in `path`; None: nowhere.

    Raises ConfigError if `path` cannot be appended to.
    """

    def __init__(self, path: str | None = None) -> None:
        self._file: TextIO | None = None
        self._news = False                      # since `outputs` was last called
        self._issued = 0                        # step of the last plan
        self._retired = 0
        if path is not None:
            try:
                self._file = open(path, "a", encoding="utf-8")
            except OSError as e:
                raise ConfigError(f"--debug-event-log {path}: {e.strerror}") from e

    def add(self, what: Event | StepPlan) -> None:
        if self._file is None:
            return
        if isinstance(what, Retired):
            self._retired = what.step
        elif isinstance(what, StepPlan):
            self._issued = what.step
        self._write(summary(what))
        self._news = True

    def outputs(self, outputs: Sequence[Output], pools: Callable[[], dict[str, float]]) -> None:
        """Log the outputs of one turn, then the pools, and make the lines visible to readers."""
        if self._file is None or not (self._news or outputs):
            return
        for output in outputs:
            self._write(summary(output))
        self._write({"kind": "pools", **pools()})
        self._file.flush()
        self._news = False

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        assert self._file is not None
        at = {"issued": self._issued, "retired": self._retired}
        self._file.write(json.dumps(entry | at) + "\n")


def summary(what: Event | StepPlan | Output) -> dict[str, Any]:
    """`what` as plain data, with counts in place of everything of prompts and answers."""
    kind = type(what).__name__
    match what:
        case Arrived():
            return {"kind": kind, "rid": what.rid, "prompt": len(what.prompt),
                    "max_new": what.max_new, "stop": len(what.stop), "leader": what.leader}
        case Retired():
            return {"kind": kind, "step": what.step, "tokens": [len(t) for t in what.tokens]}
        case Token():
            return {"kind": kind, "rid": what.rid, "index": what.index}
        case Lookup():
            return {"kind": kind, "rid": what.rid, "pages": len(what.keys)}
        case Listed():
            return {"kind": kind, "rid": what.rid, "pages": len(what.present)}
        case Unstore() | Used():
            return {"kind": kind, "pages": len(what.keys)}
        case Finished():
            return {"kind": kind, "rid": what.rid, "outcome": what.outcome.value}
        case StepPlan():
            return {"kind": kind, "step": what.step, "rows": what.rows, "rids": what.rids,
                    "start": what.start, "count": what.count, "samples": what.samples,
                    "binds": [(b.row, b.rid, b.pages, b.emitted) for b in what.binds],
                    "grows": [(g.row, g.group, g.index, g.pages) for g in what.grows],
                    "moves": [(m.id, m.group, m.src.value, m.src_pages, m.dst.value, m.dst_pages,
                               m.tokens, m.after) for m in what.moves]}
    return {"kind": kind} | {f.name: getattr(what, f.name) for f in fields(what)}
