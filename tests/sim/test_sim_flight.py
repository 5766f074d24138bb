"""Flights of simulated runs, flown again: exactly with their beginning, alike without. Of a pair, each
engine's by itself."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from recorded import recorded, recording

from penstock.cli.main import main
from penstock.core.core import Core
from penstock.core.kv.listing import Trial
from penstock.core.kv.pages import NONE_LEFT, Headroom
from penstock.core.lifecycle import Place, Trigger
from penstock.core.plan import (
    Advance,
    Arrived,
    Event,
    Flushed,
    Rates,
    Received,
    RequestId,
    Stopped,
)
from penstock.core.request import Request
from penstock.core.settings import CoreConfig
from penstock.replay import flight
from penstock.replay.exact import exact
from penstock.replay.recorder import Recorder
from penstock.replay.redact import redact
from penstock.sim.programs import rerun
from penstock.sim.world.pair import start
from penstock.sim.world.scenario import draw
from penstock.sim.world.world import World


def fly(seed: int, turns: int, ring: int = 1 << 20, mode: str = "") -> tuple[Recorder, list[str]]:
    """A simulated run, cut after `turns` of its loop, and the lines of its recorder's file."""
    recorders: list[Recorder] = []

    def make(cfg: CoreConfig) -> Core:
        core = Core(cfg)
        recorders.append(recording(Recorder(core, ring, whole_rows=2)))
        return core

    world = World(draw(seed, mode), make)
    while world.turns < turns and world.clock.step():
        pass
    return recorders[0], list(flight.write(redact(recorders[0]), "0"))


def fly_pair(seed: int, moments: int, ring: int = 1 << 20) -> list[list[str]]:
    """The recorders' files of all engines of a pair, cut after so many events of the clock."""
    recorders: list[Recorder] = []

    def make(cfg: CoreConfig) -> Core:
        core = Core(cfg)
        recorders.append(recording(Recorder(core, ring, whole_rows=2)))
        return core

    run = start(draw(seed, "pair=1"), make)
    while moments and run.clock.step():
        moments -= 1
    return [list(flight.write(redact(recorder), "0")) for recorder in recorders]


@pytest.mark.parametrize("seed", range(12))
def test_a_complete_flight_has_identical_plans(seed: int) -> None:
    _, lines = fly(seed, 1 << 20)
    same, said = exact(flight.read(lines))
    assert same, said


def test_complete_flights_of_a_pair_have_identical_plans() -> None:
    seen: Counter[str] = Counter()
    for seed in (*range(25), 79):
        for lines in fly_pair(seed, 1 << 20):
            log = flight.read(lines)
            same, said = exact(log)
            assert same, f"seed {seed}, {log.cfg.role}: {said}"
            seen[log.cfg.role] += 1
            seen.update(e.message.__class__.__name__ if isinstance(e, Received) else e.__class__.__name__
                        for turn in log.turns for e in turn.events)
    assert seen["decode"] > 25 and seen["prefill"] > 25, "no engine came back from the dead"
    for name in ("Grant", "Cancel", "End", "Refused", "Drained", "PeerJoined", "PeerLeft"):
        assert seen[name], f"{name} did not come: this tests nothing of it"


def test_another_core_makes_other_plans_and_the_turn_is_named() -> None:
    class Young(Core):
        def _progress(self) -> None:
            self.candidates[:-1], passed = [], self.candidates[:-1]
            super()._progress()
            self.candidates[:0] = [r for r in passed if r.is_runnable]

    seeds = [exact(flight.read(fly(seed, 1 << 20)[1]), Young) for seed in range(6)]
    assert any(not same and "turn" in said for same, said in seeds), seeds


class Broken(Core):
    """Dies when a request ends after a stop id."""

    def transition(self, r: Request, trigger: Trigger, place: Place | None = None,
                   headroom: Headroom = NONE_LEFT) -> Trial:
        assert trigger is not Trigger.END or r.num_output < 3, "three"
        return super().transition(r, trigger, place, headroom)


def test_a_crash_in_the_core_happens_again_at_the_same_turn() -> None:
    cfg = CoreConfig(page_size=4, rows=2, hbm_pages=20)
    core = Broken(cfg)
    recorder = Recorder(core)
    plan = recorded(recorder, [Arrived(RequestId(1), (5, 6), 3)]).plan
    with pytest.raises(AssertionError, match="three"):
        while plan is not None:
            plan = recorded(recorder, [flight.Retired(plan.step, ((7,),))]).plan
    log = flight.read(flight.write(redact(recorder), "0"))
    assert not log.turns[-1].returned
    same, said = exact(log, Broken)
    assert same and "raised again: AssertionError: three" in said
    same, said = exact(log)
    assert not same and "does here" in said


@pytest.mark.parametrize("seed", range(10, 34))
def test_a_flight_without_its_beginning_runs_under_the_judge(seed: int) -> None:
    log = flight.read(fly(seed, 100, ring=10, mode="requests=10,hbm_pages=80")[1])
    assert not log.complete
    said, _ = rerun.alike(log)
    assert "not exact" in said and "found nothing" in said


def test_what_was_live_comes_again_with_its_prompt_outputs_and_the_rest_to_go() -> None:
    seen = 0
    for seed in range(20, 50):
        log = flight.read(fly(seed, 60, ring=10)[1])
        world = rerun.Again(log)
        world.play()
        for held in log.held:
            if held.arrived.rid in world.index:
                arrived = world.load.made[world.index[held.arrived.rid]].arrived
                assert len(arrived.prompt) == len(held.arrived.prompt) + len(held.outputs)
                assert arrived.max_new == held.arrived.max_new - len(held.outputs)
                seen += len(held.outputs) > 0
    assert seen > 5, "this tests nothing"


def test_nothing_goes_wrong_in_a_rerun_that_was_not_recorded() -> None:
    seen = 0
    for seed in range(20, 60):
        world = rerun.Again(flight.read(fly(seed, 60, ring=10)[1]))
        due = Counter(type(what) for _, what in world.due)
        due[Flushed] += 1                        # at its end it forgets all pages
        came, inner = Counter[type](), world.core.advance

        def advance(events: Sequence[Event], came: Counter[type] = came,
                    inner: Callable[[Sequence[Event]], Advance] = inner) -> Advance:
            came.update(map(type, events))
            return inner(events)

        world.core.advance = advance             # type: ignore[method-assign]
        world.play()
        for kind in (Rates, Flushed, Stopped):      # pauses and aborts are its own
            assert came[kind] <= due[kind], (seed, kind)
            seen += came[kind] - (kind is Flushed)
    assert seen > 5, "this tests nothing"


def test_the_command_prints_and_replays_and_says_which_of_the_two_it_is(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "flight.jsonl"
    path.write_text("".join(fly(4, 1 << 20)[1]))
    assert main(["sim", "--print", str(path)]) == 0
    assert "complete" in capsys.readouterr().out
    assert main(["sim", "--replay", str(path)]) == 0
    assert "exact:" in capsys.readouterr().out
    path.write_text("".join(fly(11, 100, ring=30)[1]))
    assert main(["sim", "--replay", str(path)]) == 0
    out = capsys.readouterr().out
    assert "turns are lost: not an exact replay" in out and "like it, not exact" in out
    decode = fly_pair(0, 1 << 20)[0]
    path.write_text("".join(decode))
    assert main(["sim", "--replay", str(path)]) == 0
    assert "exact:" in capsys.readouterr().out and '"role":"decode"' in decode[0]
    path.write_text("".join(fly_pair(0, 600, ring=10)[0]))
    assert main(["sim", "--replay", str(path)]) == 2
    assert "--print shows it" in capsys.readouterr().err
    path.write_text("not a flight")
    assert main(["sim", "--replay", str(path)]) == 2
    assert main(["sim", "--print", str(tmp_path / "none")]) == 2
    assert "flight" in capsys.readouterr().err
