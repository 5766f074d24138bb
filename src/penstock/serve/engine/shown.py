"""What the page at `/` sees of requests and turns: numbers, phases and lengths; nothing that was said.

Owns how much of it. Reads the core's requests and the recorder's turns; changes nothing.
"""
from __future__ import annotations

from itertools import islice

from penstock.replay.recorder import Recorder
from penstock.serve.wire import SeenRequest, SeenTurn, Shown

REQUESTS_MAX = 256
TURNS_MAX = 32
EDGES_MAX = 32


def shown(asked: int, recorder: Recorder) -> Shown:
    """The oldest requests, and the last turns in which something happened."""
    live = recorder.core.live
    requests = [SeenRequest(r.rid, r.phase.value, r.num_prompt, min(r.computed, len(r.tokens)), r.num_output)
                for r in islice(live.values(), REQUESTS_MAX)]
    kept = len(recorder.turns)
    turns = []
    for n in range(max(0, kept - TURNS_MAX), kept):
        turn = recorder.turns[n]
        plan = turn.plan
        turns.append(SeenTurn(
            number=recorder.lost + n, step=0 if plan is None else plan.step,
            rows=0 if plan is None else len(plan.rids), tokens=0 if plan is None else sum(plan.count),
            moves=0 if plan is None else len(plan.moves),
            edges=[(rid, source.value, target.value) for rid, source, _, target in turn.edges[:EDGES_MAX]]))
    return Shown(asked, len(live), requests, turns)
