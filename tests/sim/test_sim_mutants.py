"""Seeded bugs: each must be caught, or the simulator has a hole."""
from __future__ import annotations

import pytest
from mutants import BUDGET, MUTANTS, hunt


@pytest.mark.when_changed("src/penstock/core", "src/penstock/sim", "tests/sim/mutants")
@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_seeded_bug_is_caught(name: str) -> None:
    seeds, line = hunt(name, BUDGET[name])
    assert line is not None, f"{name} survived {seeds} seeds"
    assert f"hunt.py {name} " in line


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_seeded_bug_is_caught_from_elsewhere(name: str) -> None:
    """Other seeds than those that the budget was measured on."""
    seeds, line = hunt(name, range(50_000, 53_000))
    assert line is not None, f"{name} survived {seeds} seeds"
