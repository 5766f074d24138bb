"""Flights of simulated runs, flown again: exactly with their beginning, alike without."""
from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.core import Core
from penstock.core.lifecycle import Trigger
from penstock.core.plan import Arrived, RequestId
from penstock.core.recorder import Recorder
from penstock.core.request import Request
from penstock.core.settings import CoreConfig
from penstock.core.standins import redact
from penstock.serve.main import main
from penstock.sim import flight, rerun
from penstock.sim.scenario import draw
from penstock.sim.world import World


def fly(seed: int, turns: int, ring: int = 1 << 20, mode: str = "") -> tuple[Recorder, list[str]]:
    """A simulated run, cut after `turns` of its loop, and the lines of its recorder's file."""
    recorders: list[Recorder] = []

    def make(cfg: CoreConfig) -> Core:
        core = Core(cfg)
        recorders.append(Recorder(core, ring, whole_rows=2))
        core.advance = recorders[0].advance      # type: ignore[method-assign]
        return core

    world = World(draw(seed, mode), make)
    while world.turns < turns and world.clock.step():
        pass
    return recorders[0], list(flight.write(redact(recorders[0]), "0"))


@pytest.mark.parametrize("seed", range(12))
def test_a_complete_flight_has_identical_plans(seed: int) -> None:
    _, lines = fly(seed, 1 << 20)
    same, said = rerun.exact(flight.read(lines))
    assert same, said


def test_another_core_makes_other_plans_and_the_turn_is_named() -> None:
    class Young(Core):
        def _admit(self) -> None:
            self.waiting.reverse()
            super()._admit()
            self.waiting.sort(key=lambda r: r.key)

    seeds = [rerun.exact(flight.read(fly(seed, 1 << 20)[1]), Young) for seed in range(6)]
    assert any(not same and "turn" in said for same, said in seeds), seeds


class Broken(Core):
    """Dies when a request ends after a stop id."""

    def _go(self, r: Request, trigger: Trigger, spare: int = 0) -> bool:
        assert trigger is not Trigger.END or r.num_output < 3, "three"
        return super()._go(r, trigger, spare)


def test_a_crash_in_the_core_happens_again_at_the_same_turn() -> None:
    cfg = CoreConfig(page_size=4, rows=2, hbm_pages=20)
    core = Broken(cfg)
    recorder = Recorder(core)
    plan = recorder.advance([Arrived(RequestId(1), (5, 6), 3)]).plan
    with pytest.raises(AssertionError, match="three"):
        while plan is not None:
            plan = recorder.advance([flight.Retired(plan.step, ((7,),))]).plan
    log = flight.read(flight.write(redact(recorder), "0"))
    assert not log.turns[-1].returned
    same, said = rerun.exact(log, Broken)
    assert same and "raised again: AssertionError: three" in said
    same, said = rerun.exact(log)
    assert not same and "does here" in said


@pytest.mark.parametrize("seed", range(10, 34))
def test_a_flight_without_its_beginning_runs_under_the_judge(seed: int) -> None:
    log = flight.read(fly(seed, 100, ring=30)[1])
    if log.complete:
        pytest.skip("a short run")
    said, _ = rerun.alike(log)
    assert "not exact" in said and "found nothing" in said


def test_what_was_live_comes_again_with_its_prompt_outputs_and_the_rest_to_go() -> None:
    seen = 0
    for seed in range(20, 30):
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
    path.write_text("not a flight")
    assert main(["sim", "--replay", str(path)]) == 2
    assert main(["sim", "--print", str(tmp_path / "none")]) == 2
    assert "flight" in capsys.readouterr().err
