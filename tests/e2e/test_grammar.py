"""Answers under grammars, in every combination of what runs them: the same tokens, and each a match."""
from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path

import printable
import pytest
from pair_engines import LIMIT_S, End, PairOfEnds
from pipeline_engine import checkpoint

from penstock.config.request.grammar import Grammar
from penstock.core.plan import Dropped, Paused, RequestId

SCHEMA = Grammar("json_schema", json.dumps({
    "type": "object", "properties": {
        "name": {"type": "string", "maxLength": 30}, "tags": {"type": "array", "items": {"enum": ["a", "bb"]},
                                                             "minItems": 3, "maxItems": 9}},
    "required": ["name", "tags"], "additionalProperties": False}))
PHONE = Grammar("regex", "([0-9]{3}-){4,12}[a-f]{5}")
PROMPT = tuple((i * i * 7 + 3 * i) % 97 for i in range(150))
# (prompt, how it is sampled): two kinds of grammar, penalties, a row without, one that is aborted.
WORK: list[tuple[tuple[int, ...], dict[str, object]]] = [
    (PROMPT, {"grammar": SCHEMA, "temperature": 1.0, "seed": 1}),
    (PROMPT[:70], {"grammar": PHONE, "logprobs": 2}),
    (PROMPT + (5, 6, 7) * 9, {"grammar": PHONE, "temperature": 1.0, "seed": 2, "frequency_penalty": 1.0}),
    (PROMPT, {"temperature": 1.0, "seed": 3}),
    (PROMPT[:128], {"grammar": SCHEMA, "temperature": 2.0, "seed": 4}),
    (PROMPT[:90], {"grammar": PHONE, "temperature": 0.7, "top_k": 5, "seed": 5}),
]
ABORTED = 5
NEW = 90
PLACES = {
    "resident": {"kv_cache_memory_bytes": "4M", "kv_offloading_size": "8M"},
    "hosted": {"kv_cache_memory_bytes": "2M", "kv_offloading_size": "8M", "sparse_top_k": 96, "host_decode": "always"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return checkpoint(tmp_path_factory.mktemp("grammar"))


def ask(end: End, turn, *, disturbed: bool) -> dict[int, list[int]]:
    """All of WORK at once; one request is aborted, and each few tokens a row is paused or loses its KV."""
    rids = [end.submit(prompt, NEW, stop_ids=[printable.END], **how) for prompt, how in WORK]
    began, said, disturbances = time.monotonic(), 0, 0
    while end.open:
        assert time.monotonic() - began < LIMIT_S, "nothing happens any more"
        turn()
        if len(end.got[rids[ABORTED]]) > 10 and rids[ABORTED] in end.open:
            end.abort(rids[ABORTED])
        now = sum(map(len, end.got.values()))
        if now == said:
            time.sleep(0.0005)              # the other engine of a pair is asked as well
        elif disturbed and now - said >= 4 and (rid := rids[disturbances % len(rids)]) in end.open:
            event = Paused if disturbances % 2 else Dropped
            end.loop._events.append(event(RequestId(rid)))
        if now - said >= 4 or not disturbed:
            said, disturbances = now, disturbances + 1
    return {i: end.got[rid] for i, rid in enumerate(rids) if i != ABORTED}


def matches(answers: dict[int, list[int]]) -> int:
    """How many ended; each of those, and every beginning, is one of its grammar."""
    ended = 0
    for i, ids in answers.items():
        grammar = WORK[i][1].get("grammar")
        if grammar is None:
            continue
        done, said = ids[-1] == printable.END, printable.text(ids)
        ended += done
        assert done or len(ids) == NEW
        if done and grammar is PHONE:
            assert re.fullmatch(PHONE.text, said), said
        elif done:
            found = json.loads(said)
            assert set(found) == {"name", "tags"} and 3 <= len(found["tags"]) <= 9
    return ended


@pytest.fixture(scope="module")
def plain(model: str) -> dict[str, dict[int, list[int]]]:
    """By place: what one engine says that is left alone."""
    found = {}
    for place, options in PLACES.items():
        end = End(model, overlap=False, **options)
        found[place] = ask(end, end.turn, disturbed=False)
        assert matches(found[place]) >= 2
    return found


CELLS = [pytest.param(place, overlap, pp, pair, marks=() if cell in (
    ("resident", True, 1, False), ("hosted", True, 2, True)) else pytest.mark.sweep)
    for cell in itertools.product(PLACES, (True, False), (1, 2), (False, True))
    for place, overlap, pp, pair in [cell]]


@pytest.mark.sweep
def test_lanes_say_the_same(model: str, plain) -> None:
    """Two that share the heads: each samples, and has matchers."""
    end = End(model, tp=2, **PLACES["resident"])
    try:
        assert ask(end, end.turn, disturbed=True) == plain["resident"]
    finally:
        end.close()


@pytest.mark.parametrize("place, overlap, pp, pair", CELLS)
def test_the_same_tokens_whatever_runs_them(model: str, plain, tmp_path: Path, place: str, overlap: bool,
                                            pp: int, pair: bool) -> None:
    """With pauses, drops and an abort forced."""
    options = {**PLACES[place], "overlap": overlap, "pp": pp}
    if not pair:
        end = End(model, **options)
        try:
            assert ask(end, end.turn, disturbed=True) == plain[place]
            assert end.loop.stats()["drops"] > 0
        finally:
            end.close()
        return
    with PairOfEnds(model, tmp_path, **options) as both:
        assert ask(both.decode, both.turn, disturbed=True) == plain[place]
        assert both.decode.loop.stats()["pair_delivered_total"] >= 2
        both.settle()
