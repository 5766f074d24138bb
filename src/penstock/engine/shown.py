"""What the page at `/` sees of requests and turns: numbers, phases and lengths; nothing that was said.

Owns how much of it. Reads the core's requests and the recorder's turns; changes nothing.
"""
from __future__ import annotations

from itertools import islice

from penstock.engine.wire import SeenRequest, SeenTurn, Shown
from penstock.replay.recorder import Recorder

REQUESTS_MAX = 256
TURNS_MAX = 12
EDGES_MAX = 1024


def shown(asked: int, recorder: Recorder) -> Shown:
    """The oldest requests, the last turns, and all that are kept in which a request changed its phase, up
    to EDGES_MAX changes: who looks every .5 to 5 s sees the phases that were over before he looked again."""
    live = recorder.core.live
    requests = [SeenRequest(r.rid, r.state.name, r.num_prompt, min(r.computed, r.num_tokens), r.num_output)
                for r in islice(live.values(), REQUESTS_MAX)]
    turns, room = list[SeenTurn](), EDGES_MAX
    for age, turn in enumerate(reversed(recorder.turns)):
        plan, edges = turn.plan, turn.edges[:room]
        room -= len(edges)
        if age < TURNS_MAX or edges:
            turns.append(SeenTurn(
                number=recorder.lost + len(recorder.turns) - 1 - age, step=0 if plan is None else plan.step,
                rows=0 if plan is None else len(plan.rids), tokens=0 if plan is None else sum(plan.count),
                moves=0 if plan is None else len(plan.moves),
                edges=[(rid, source.name, target.name) for rid, source, _, target in edges]))
    return Shown(asked, len(live), requests, turns[::-1])
