"""Which phase an event leads to, against a table that was written from the design alone.

`next_states.tsv` has every (role, state, event) with the states that may follow and one reason. A
first reader wrote it and a second one checked it; both saw the design and no code. Where the code
does something else on purpose, `deviations.tsv` says why. Where it holds for possible what never meets in
this core, `not_asked.tsv` says why not.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest

from penstock.core.lifecycle import Mode, Phase, Role, changes, edges
from penstock.sim.programs.sweeps import Report, Seen, sweep
from penstock.sim.world.states import possible

Key = tuple[str, str, str]


def lines(name: str) -> list[list[str]]:
    text = (Path(__file__).parent / name).read_text()
    return [line.split("\t") for line in text.splitlines()]


TABLE: dict[Key, set[str]] = {
    (role, phase, event): set() if follows == "impossible" else set(follows.split(","))
    for role, phase, event, follows, _ in lines("next_states.tsv")}
# Ten thousand seeds hardly meet these: tests/unit/test_core_pair_rare.py leads there by hand.
BY_HAND = {("prefill", "dropped", "expired", "done"), ("unified", "dropped", "expired", "done"),
           *(("decode", f"decode.{place}", "paused", f"decode.{place}") for place in ("to_host", "host", "to_device")),
           ("unified", "decode.to_host", "moved_failed", "dropped")}
DEVIATIONS = {(role, phase, event, follows) for role, phase, event, follows, _ in lines("deviations.tsv")}


NOT_ASKED: set[Key] = {(role, phase, event) for role, phase, event, _ in lines("not_asked.tsv")}
POSSIBLE: set[Key] = {(role.value, phase, event) for role in Role for phase, event in possible(role)}


def surprises(seen: Counter[Seen]) -> list[tuple[str, ...]]:
    return sorted(s for s in seen if s[3] not in TABLE[s[:3]] and s not in DEVIATIONS)


def test_every_phase_of_a_role_meets_every_event_in_the_table_with_a_reason() -> None:
    events = {event for _, _, event in TABLE}
    for role in Role:
        states = {source.name for source, _, _ in changes(Mode(host=True, disk=True, sparse=True, role=role))}
        assert {(role.value, state, e) for state in states for e in events} <= set(TABLE), role
    assert len(TABLE) == len(lines("next_states.tsv")), "two lines for one pair"
    for name in ("next_states.tsv", "deviations.tsv"):
        assert all(len(line) == 5 and line[4].strip() for line in lines(name)), f"{name}: no reason"
    assert not {d for d in DEVIATIONS if d[3] in TABLE[d[:3]]}, "a deviation that is none"


def test_no_event_leads_anywhere_but_where_the_table_says() -> None:
    seen = sweep(range(60)).met + sweep(range(1_000, 1_025), "pair=1").met
    assert not surprises(seen)
    assert len({s[:3] for s in seen}) > 200, "hardly anything was seen"
    assert {s[:3] for s in seen} <= POSSIBLE, "it can happen: the sweep should ask for it"


def test_all_that_the_table_holds_for_possible_is_asked_for_or_has_a_reason_not_to_be() -> None:
    in_use = {(role.value, source.name) for role in Role
              for source, _, _ in changes(Mode(host=True, disk=True, sparse=True, role=role))}
    table = {key for key, follows in TABLE.items() if follows and key[:2] in in_use}
    assert not POSSIBLE & NOT_ASKED
    assert table == POSSIBLE | NOT_ASKED
    assert len(NOT_ASKED) == len(lines("not_asked.tsv"))
    assert all(len(line) == 4 and line[3].strip() for line in lines("not_asked.tsv")), "no reason"


def test_the_reasons_not_to_ask_are_those_of_the_tables() -> None:
    """Who fetches or receives comes from where it had no row, and never comes back."""
    for role in Role:
        into: dict[Phase, set[Phase]] = defaultdict(set)
        for (source, _), target in edges(Mode(host=True, disk=True, sparse=True, role=role)).items():
            into[target].add(source)
        assert not into[Phase.QUEUED]
        assert into[Phase.FETCHING] == {Phase.QUEUED}
        assert into[Phase.RECEIVING] == ({Phase.QUEUED, Phase.FETCHING} if role is Role.DECODE else set())


@pytest.mark.xdist_group("long_sweep")
def test_every_pair_that_can_meet_goes_where_the_table_says(long_sweep: Report) -> None:
    seen = long_sweep.met
    assert not surprises(seen)
    assert {s[:3] for s in seen} <= POSSIBLE
    used: dict[Key, set[str]] = defaultdict(set)
    for s in seen:
        used[s[:3]].add(s[3])
    unused = [d for d in DEVIATIONS - BY_HAND if d[3] not in used[d[:3]]]
    assert len(unused) <= 5 * (long_sweep.runs < 10_000), "a deviation that does not happen"
