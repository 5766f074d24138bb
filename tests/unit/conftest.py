"""Fixtures of several unit tests."""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from pair_ends import LinkEnd


@pytest.fixture
def ends() -> Iterator[Callable[..., LinkEnd]]:
    """Makes ends, and closes them."""
    made: list[LinkEnd] = []

    def make(*args, **settings) -> LinkEnd:
        made.append(LinkEnd(*args, **settings))
        return made[-1]

    yield make
    for end in made:
        end.link.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("penstock-pair")]
