"""Which phase an event leads to, against a table that was written from the design alone.

`next_states.tsv` has every (role, phase, event) with the phases that may follow and one reason. A
first reader wrote it and a second one checked it; both saw the design and no code. Where the code
does something else on purpose, `deviations.tsv` says why.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest

from penstock.core.lifecycle import Mode, Phase, Role, edges
from penstock.sim.programs import Report, Seen, sweep
from penstock.sim.states import possible

Key = tuple[str, str, str]


def lines(name: str) -> list[list[str]]:
    text = (Path(__file__).parent / name).read_text()
    return [line.split("\t") for line in text.splitlines()]


TABLE: dict[Key, set[str]] = {
    (role, phase, event): set() if follows == "impossible" else set(follows.split(","))
    for role, phase, event, follows, _ in lines("next_states.tsv")}
# Ten thousand seeds hardly meet these: tests/unit/test_core_pair_rare.py leads there by hand.
BY_HAND = {("prefill", "dropped", "expired", "done"), ("decode", "staging", "paused", "staging")}
DEVIATIONS = {(role, phase, event, follows) for role, phase, event, follows, _ in lines("deviations.tsv")}


def surprises(seen: Counter[Seen]) -> list[tuple[str, ...]]:
    return sorted(s for s in seen if s[3] not in TABLE[s[:3]] and s not in DEVIATIONS)


def test_every_phase_of_a_role_meets_every_event_in_the_table_with_a_reason() -> None:
    events = {event for _, _, event in TABLE}
    for role in Role:
        table = edges(Mode(host=True, disk=True, sparse=True, role=role))
        phases = ({p.value for p, _ in table} | {p.value for p in table.values()}) - {Phase.DONE.value}
        assert {(role.value, p, e) for p in phases for e in events} <= set(TABLE), role
    assert len(TABLE) == len(lines("next_states.tsv")), "two lines for one pair"
    for name in ("next_states.tsv", "deviations.tsv"):
        assert all(len(line) == 5 and line[4].strip() for line in lines(name)), f"{name}: no reason"
    assert not {d for d in DEVIATIONS if d[3] in TABLE[d[:3]]}, "a deviation that is none"


def test_no_event_leads_anywhere_but_where_the_table_says() -> None:
    seen = sweep(range(60)).met + sweep(range(1_000, 1_025), "pair=1").met
    assert not surprises(seen)
    assert len({s[:3] for s in seen}) > 200, "hardly anything was seen"


def test_what_is_held_for_possible_is_so_in_the_table() -> None:
    for role in Role:
        assert all(TABLE[role.value, phase, event] for phase, event in possible(role)), role


@pytest.mark.sweep
def test_every_pair_that_can_meet_goes_where_the_table_says(long_sweep: Report) -> None:
    seen = long_sweep.met
    assert not surprises(seen)
    used: dict[Key, set[str]] = defaultdict(set)
    for s in seen:
        used[s[:3]].add(s[3])
    assert all(d[3] in used[d[:3]] for d in DEVIATIONS - BY_HAND), "a deviation that does not happen"
