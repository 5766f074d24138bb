"""The words in which an op lists itself and what may run it; `registry.py` owns the choice."""
from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from penstock.kernels.platform import KernelError, Platform


class Unusable(Exception):
    """Raised by a probe: why an implementation cannot run here."""


class WrongResult(Unusable):
    """It runs and differs from the reference: on a user's machine a reason to skip it, in our
    tests a failure."""


F = TypeVar("F")
DEVICES = ("cpu", "cuda")                   # devices of what is written in torch's own operations


@dataclass(frozen=True, slots=True)
class Implementation(Generic[F]):
    """One way to run an op. `probe` says in a few words what it relies on, or raises Unusable; it is
    asked on a platform of `devices` only, by `usable_on`. Words alone: it runs on all of these. `code` is
    what runs it, or where that is, "module" or "module:name". `kinds`: of packed weights that it takes."""

    name: str
    code: F | str
    probe: Callable[[Platform], str] | str
    devices: tuple[str, ...] = ("cpu",)
    kinds: tuple[str, ...] = ()

    @property
    def run(self) -> F:
        """What runs it, imported if need be."""
        if not isinstance(self.code, str):
            return self.code
        module, _, name = self.code.partition(":")
        found: Any = importlib.import_module(module)
        return getattr(found, name) if name else found  # type: ignore[no-any-return]

    def usable_on(self, platform: Platform) -> str:
        """What it relies on there. Raises Unusable."""
        if platform.device not in self.devices:
            raise Unusable(f"runs on {' and '.join(self.devices)}, not on {platform.device}")
        return self.probe if isinstance(self.probe, str) else self.probe(platform)


@dataclass(frozen=True, slots=True)
class Op(Generic[F]):
    """An op and its implementations, the fastest first and `reference` last."""

    name: str
    implementations: tuple[Implementation[F], ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(i.name for i in self.implementations)

    def use(self, name: str) -> F:
        """What runs the implementation called `name`. Raises KernelError that lists those there are."""
        return self.get(name).run

    def get(self, name: str) -> Implementation[F]:
        """The implementation called `name`. Raises KernelError that lists those there are."""
        for implementation in self.implementations:
            if implementation.name == name:
                return implementation
        raise KernelError(f"{self.name} has no implementation {name!r}: "
                          f"use one of {', '.join(self.names)}")
