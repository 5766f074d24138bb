"""The list of seeded bugs, and how long each may survive."""
from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from penstock.core.core import Core
from penstock.core.settings import CoreConfig

C = TypeVar("C", bound=type[Core])

MUTANTS: dict[str, Callable[[CoreConfig], Core]] = {}
BUDGET: dict[str, range] = {}        # seeds within which the default test must catch it


def mutant(budget: int = 120, first: int = 0) -> Callable[[C], C]:
    """Enter a Core with a bug under its name in kebab case."""
    def enter(cls: C) -> C:
        name = "".join("-" + c.lower() if c.isupper() else c for c in cls.__name__)[1:]
        MUTANTS[name], BUDGET[name] = cls, range(first, first + budget)
        return cls
    return enter


def become(thing: object, wrong: type) -> None:
    """Make an existing pool, tree or holdings behave as a subclass that adds no fields."""
    assert wrong.__base__ is type(thing)
    thing.__class__ = wrong
