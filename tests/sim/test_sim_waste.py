"""What calm workloads cost. That each counter sees what it is for, seeded bugs show (`mutants.policy`)."""
from __future__ import annotations

import pytest
from mutants.registry import COUNTER

from penstock.cli.main import main
from penstock.sim.programs.waste import WASTE


def test_calm_workloads_waste_little(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--waste"]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == list(WASTE)
    assert set(COUNTER.values()) <= WASTE.keys()
