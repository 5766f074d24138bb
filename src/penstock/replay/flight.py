"""The file of a flight recorder: JSON lines, a header and then one line a turn.

Owns the format in both directions, and the lines for people. What a flight may hold is decided in
`redact`; where the file lies is the caller's.
"""
from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from penstock.core.plan import (
    Advance,
    Arrived,
    Event,
    Finished,
    Moved,
    Output,
    RequestId,
    Retired,
    StepPlan,
    Token,
)
from penstock.core.settings import CoreConfig
from penstock.replay.redact import Flight, Held
from penstock.replay.text import config_of, event_of, plain, plain_config, plain_event, plain_plan

FORMAT = 4
Json = dict[str, Any]


class FlightError(ValueError):
    """The file is not a flight, or one of another version."""


@dataclass(frozen=True, slots=True)
class FlightTurn:
    """One line: the events as the core may see them again, the rest as it was written."""

    events: tuple[Event, ...]
    plan: Json | None
    digest: str
    edges: tuple[tuple[RequestId, str, str, str], ...]
    outputs: tuple[tuple[Any, ...], ...]
    tokens: int
    idle: int
    returned: bool


@dataclass(frozen=True, slots=True)
class Log:
    """A whole file. `lost` turns came before the first; 0: nothing is missing."""

    version: str
    error: str
    cfg: CoreConfig
    lost: int
    held: tuple[Held, ...]
    turns: tuple[FlightTurn, ...]

    @property
    def complete(self) -> bool:
        return self.lost == 0


def digest(plan: StepPlan | None, outputs: Iterable[Output], tokens: int = 0) -> str:
    """Return a digest of all that the core answered: the plan, the outputs, how many tokens (some in `outputs`, or
    not). `Finished.reason` is left out: a dump does not have it."""
    said: list[Any] = []
    for out in outputs:
        if isinstance(out, Token):
            tokens += 1
        else:
            said.append(plain_event(replace(out, reason="") if isinstance(out, Finished) else out))
    answer = [None if plan is None else plain_plan(plan), said, tokens]
    return hashlib.sha256(_line(answer).encode()).hexdigest()[:16]


def digest_as(turn: FlightTurn, answer: Advance) -> str:
    """The digest of an answer, of as much of it as the recorder kept of this turn's."""
    plan = answer.plan
    if plan is not None and turn.plan is not None and "rows" in turn.plan and "start" not in turn.plan:
        plan = replace(plan, start=(), tokens=())
    return digest(plan, answer.outputs)


# ---------------------------------------------------------------- writing
def write(flight: Flight, version: str, error: str = "") -> Iterator[str]:
    """The lines of a file, each with its end. `error` names what ended the engine, if anything did."""
    yield _line({
        "penstock": version, "format": FORMAT, "complete": flight.lost == 0, "lost": flight.lost,
        "turns": len(flight.legs), "error": error, "config": plain_config(flight.cfg),
        "held": [[_runs_in(h.arrived), _runs(h.outputs), h.phase] for h in flight.held]}) + "\n"
    for leg in flight.legs:
        line: Json = {"events": [_runs_in(e) if isinstance(e, Arrived) else plain_event(e)
                                 for e in leg.events]}
        if leg.plan is not None:
            line["plan"] = plain_plan(leg.plan)
        if leg.edges:
            line["edges"] = plain(leg.edges)
        if leg.outputs:
            line["outputs"] = list(map(plain_event, leg.outputs))
        if leg.tokens:
            line["tokens"] = leg.tokens
        if leg.idle:
            line["idle"] = leg.idle
        if not leg.returned:
            line["returned"] = False
        yield _line(line | {"digest": digest(leg.plan, leg.outputs, leg.tokens)}) + "\n"


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _runs(tokens: tuple[int, ...]) -> list[list[int]]:
    """[first, length] of numbers that count up: stand-ins do, so a long prompt is a short line."""
    runs: list[list[int]] = []
    for token in tokens:
        if runs and token == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([token, 1])
    return runs


def _runs_in(a: Arrived) -> list[Any]:
    return plain_event(replace(a, prompt=tuple(map(tuple, _runs(a.prompt)))))  # type: ignore[arg-type]


# ---------------------------------------------------------------- reading
def read(lines: Iterable[str]) -> Log:
    """Raises FlightError, whatever the lines."""
    rest = iter(lines)
    try:
        head = json.loads(next(rest, ""))
        if head["format"] != FORMAT:
            raise FlightError(f"format {head['format']}: this penstock reads {FORMAT}")
        held = tuple(Held(_arrived(a), _tokens(outputs), phase) for a, outputs, phase in head["held"])
        turns = tuple(_turn(json.loads(line)) for line in rest)
        if len(turns) != head["turns"]:
            raise FlightError(f"{len(turns)} of {head['turns']} turns: the file was cut")
        return Log(str(head["penstock"]), str(head["error"]), config_of(head["config"]), head["lost"], held,
                   turns)
    except (KeyError, TypeError, IndexError, AttributeError, json.JSONDecodeError) as e:
        raise FlightError(f"not a flight recorder's file: {type(e).__name__}: {e}") from e


def _tokens(runs: list[list[int]]) -> tuple[int, ...]:
    return tuple(token for first, n in runs for token in range(first, first + n))


def _arrived(item: list[Any]) -> Arrived:
    event = _event(item)
    if not isinstance(event, Arrived):
        raise TypeError(f"{item[0]} where a request was expected")
    return event


def _event(item: list[Any]) -> Event:
    return event_of([*item[:2], _tokens(item[2]), *item[3:]] if item[0] == "Arrived" else item)


def _turn(line: Json) -> FlightTurn:
    return FlightTurn(tuple(map(_event, line["events"])), line.get("plan"), line["digest"],
                tuple((RequestId(rid), a, b, c) for rid, a, b, c in line.get("edges", ())),
                tuple(tuple(o) for o in line.get("outputs", ())), line.get("tokens", 0),
                line.get("idle", 0), line.get("returned", True))


# ---------------------------------------------------------------- for people
def pages(log: Log) -> Iterator[str]:
    """A header, then one line a turn: step, events, rows, copies, edges, what was told."""
    whole = "complete" if log.complete else f"{log.lost} earlier turns are lost"
    yield f"penstock {log.version}: {len(log.turns)} turns, {whole}" + (f"; {log.error}" if log.error else "")
    yield f"  {log.cfg}"
    for h in log.held:
        yield (f"  at the start: {h.arrived.rid} {h.phase}, {len(h.arrived.prompt)} prompt and "
               f"{len(h.outputs)} output tokens of {h.arrived.max_new}")
    for turn in log.turns:
        yield " | ".join(filter(None, [_step(turn), _events(turn), _rows(turn.plan), _edges(turn),
                                       _outputs(turn)]))


def _step(turn: FlightTurn) -> str:
    if not turn.returned:
        return "raised"
    return "  -   " if turn.plan is None else f"{turn.plan['step']:6d}"


def _events(turn: FlightTurn) -> str:
    return " ".join(map(_told, turn.events))


def _told(e: Event) -> str:
    match e:
        case Arrived():
            return f"Arrived({e.rid}: {len(e.prompt)}+{e.max_new})"
        case Retired():
            return f"Retired({e.step}: {sum(map(len, e.tokens))})"
        case Moved():
            return f"Moved({e.id})" if e.ok else f"Moved({e.id} FAILED)"
    return f"{type(e).__name__}({', '.join(map(str, plain(e)))})"


def _rows(plan: Json | None) -> str:
    if plan is None:
        return ""
    rids = plan.get("rids", ())
    rows = list(zip(rids, plan.get("start", [0] * len(rids)), plan.get("count", ()), strict=True))
    decode = [str(rid) for rid, _, n in rows if n == 1]
    words = [f"{rid}[{start}:{start + n}]" for rid, start, n in rows if n > 1]
    if decode:
        words.append("decode " + ",".join(decode))
    for m in plan.get("moves", ()):
        id, group, src, src_pages, dst, dst_pages, _, after = m[:8]
        num = max(len(src_pages), len(dst_pages))            # to a peer, one side is empty
        words.append(f"move {id} {src}>{dst} {num}p" + (f" g{group}" if group else "")
                     + (f" after {after}" if after else ""))
    for name in ("binds", "grows", "remaps", "resizes", "waits"):
        if name in plan:
            words.append(f"{len(plan[name])} {name}")
    return " ".join(words)


def _edges(turn: FlightTurn) -> str:
    return " ".join(f"{rid}:{a}-{trigger}>{b}" for rid, a, trigger, b in turn.edges)


def _outputs(turn: FlightTurn) -> str:
    words = [f"{o[0]}({', '.join(str(v) for v in o[1:] if v != '')})" for o in turn.outputs]
    return " ".join([*words, *([f"{turn.tokens} tokens"] if turn.tokens else [])])
