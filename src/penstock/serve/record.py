"""What the engine remembers of its recent past: the flight recorder and the event log.

Both hold ids, steps and counts only; prompts, token ids and sampling never enter. The recorder is
always on (a ring of 512); the log is a file of JSON lines for tests and for debugging.
"""
from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TextIO

from penstock.config.errors import ConfigError
from penstock.core.plan import Arrived, Event, Finished, Output, Retired, StepPlan, Token

RING = 512


class Recorder:
    """Keeps the last 512 events and plans; writes everything to `path` as well, if there is one.

    Raises ConfigError if `path` cannot be appended to.
    """

    def __init__(self, path: str | None = None) -> None:
        self._ring: deque[dict[str, Any]] = deque(maxlen=RING)
        self._file: TextIO | None = None
        self._news = False                      # since `outputs` was last called
        self._issued = 0                        # step of the last plan
        self._retired = 0
        if path is not None:
            try:
                self._file = open(path, "a", encoding="utf-8")
            except OSError as e:
                raise ConfigError(f"--event-log {path}: {e.strerror}") from e

    def event(self, event: Event) -> None:
        if isinstance(event, Retired):
            self._retired = event.step
        self._keep(summary(event))

    def plan(self, plan: StepPlan) -> None:
        self._issued = plan.step
        self._keep(summary(plan))

    def _keep(self, entry: dict[str, Any]) -> None:
        entry["issued"], entry["retired"] = self._issued, self._retired
        self._ring.append(entry)
        if self._file is not None:
            self._news = True
            self._write(entry)

    def outputs(self, outputs: Sequence[Output], pools: Callable[[], dict[str, float]]) -> None:
        """Log the outputs of one turn, then the pools, and make the lines visible to readers."""
        if self._file is None or not (self._news or outputs):
            return
        at = {"issued": self._issued, "retired": self._retired}
        for output in outputs:
            self._write(summary(output) | at)
        self._write({"kind": "pools", **at, **pools()})
        self._file.flush()
        self._news = False

    def dump(self, out: TextIO) -> None:
        """The ring as JSON lines, oldest first."""
        for entry in self._ring:
            out.write(json.dumps(entry) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(entry) + "\n")


def summary(what: Event | StepPlan | Output) -> dict[str, Any]:
    """`what` as plain data, with counts in place of everything that a user said or was told."""
    kind = type(what).__name__
    match what:
        case Arrived():
            return {"kind": kind, "rid": what.rid, "prompt": len(what.prompt),
                    "max_new": what.max_new, "stop": len(what.stop), "leader": what.leader}
        case Retired():
            return {"kind": kind, "step": what.step, "tokens": [len(t) for t in what.tokens]}
        case Token():
            return {"kind": kind, "rid": what.rid, "index": what.index}
        case Finished():
            return {"kind": kind, "rid": what.rid, "outcome": what.outcome.value}
        case StepPlan():
            return {"kind": kind, "step": what.step, "rows": what.rows, "rids": what.rids,
                    "start": what.start, "count": what.count, "samples": what.samples,
                    "binds": [(b.row, b.rid, b.pages, b.emitted) for b in what.binds],
                    "grows": [(g.row, g.group, g.pages) for g in what.grows],
                    "moves": [(m.id, m.group, m.src.value, m.src_pages, m.dst.value, m.dst_pages,
                               m.tokens, m.after) for m in what.moves]}
    return {"kind": kind} | {f.name: getattr(what, f.name) for f in fields(what)}
