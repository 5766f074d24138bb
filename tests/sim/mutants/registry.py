"""The list of seeded bugs, how long each may survive, and the ways to make one.

A bug is a Core with a wrong method, or a wrong function that stands in for a right one of another
module or class while that Core advances. Bugs of what the ranks do bend the simulator's own ranks.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import CO_VARARGS
from typing import Any, TypeVar

from penstock.core.core import Core
from penstock.core.plan import Advance, Event
from penstock.core.settings import CoreConfig

C = TypeVar("C", bound=type[Core])
Wrong = TypeVar("Wrong", bound=Callable[..., Any])
Real = Callable[..., Any]            # the right function: a wrong one gets it as its first argument

MUTANTS: dict[str, Callable[[CoreConfig], Core]] = {}
BUDGET: dict[str, range] = {}        # seeds within which the default test must catch it
MODE: dict[str, str] = {}            # dimensions that are fixed while it is hunted, if any
COUNTER: dict[str, str] = {}         # the counter of `sim.waste` that must see it, if only that can


class Stale(BaseException):
    """The right function has changed: a bug that would only crash proves nothing. Not an Exception,
    because every Exception is taken for a finding."""


def mutant(budget: int = 120, first: int = 0, mode: str = "", counter: str = "") -> Callable[[C], C]:
    """Enter a Core with a bug under its name in kebab case."""
    def enter(cls: C) -> C:
        _enter("".join("-" + c.lower() if c.isupper() else c for c in cls.__name__)[1:], cls,
               range(first, first + budget), mode, counter)
        return cls
    return enter


def instead_of(owner: object, name: str, budget: int = 120, first: int = 0, mode: str = "",
               counter: str = "") -> Callable[[Wrong], Wrong]:
    """Enter a bug under the name of the wrong function: it is called instead of a function of a
    module or a method of a class, with the right one before the other arguments."""
    def enter(wrong: Wrong) -> Wrong:
        class Mutant(Core):
            def advance(self, events: Sequence[Event]) -> Advance:
                with swapped(owner, name, wrong):
                    return super().advance(events)

        Mutant.__doc__ = wrong.__doc__
        _enter(wrong.__name__.replace("_", "-"), Mutant, range(first, first + budget), mode, counter)
        return wrong
    return enter


def of_ranks(owner: type, part: str, name: str, budget: int = 120,
             mode: str = "") -> Callable[[Wrong], Wrong]:
    """Enter a bug of the ranks: for a whole run, `wrong(real, self, ...)` is called instead of a method of
    the executor, or of its attribute `part`."""
    def enter(wrong: Wrong) -> Wrong:
        class Mutant(Core):                    # a right one: a `World` hands it its ranks
            def bend(self, executor: object) -> None:
                bent, real = getattr(executor, part) if part else executor, getattr(owner, name)
                assert isinstance(bent, owner)
                if not _takes_any(wrong) and _arity(wrong) != _arity(real) + 1:
                    raise Stale(name)
                setattr(bent, name, partial(wrong, real, bent))

        Mutant.__doc__ = wrong.__doc__
        _enter(wrong.__name__.replace("_", "-"), Mutant, range(budget), mode)
        return wrong
    return enter


def _enter(name: str, make: Callable[[CoreConfig], Core], seeds: range, mode: str = "",
           counter: str = "") -> None:
    assert name not in MUTANTS, name
    if counter:
        COUNTER[name] = counter
    MUTANTS[name], BUDGET[name], MODE[name] = make, seeds, mode


@contextmanager
def swapped(owner: object, name: str, wrong: Callable[..., Any]) -> Iterator[None]:
    """For a while, `wrong(real, ...)` is called instead of the attribute `name` of a module or class."""
    real = getattr(owner, name)
    if not _takes_any(wrong) and _arity(wrong) != _arity(real) + 1:
        raise Stale(name)

    def instead(*args: Any, **kw: Any) -> Any:
        return wrong(real, *args, **kw)

    with holding(owner, name, instead):
        yield


def _takes_any(function: Callable[..., Any]) -> bool:
    return bool(getattr(function, "__code__").co_flags & CO_VARARGS)       # noqa: B009


def _arity(function: Callable[..., Any]) -> int:
    code = getattr(function, "__code__")       # noqa: B009
    bound = getattr(function, "__self__", None) is not None
    return int(code.co_argcount + code.co_kwonlyargcount) - bound


@contextmanager
def holding(owner: object, name: str, value: object) -> Iterator[None]:
    """For a while, the attribute `name` of a module or class is `value`."""
    real = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, real)
