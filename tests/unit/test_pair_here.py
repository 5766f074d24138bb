"""Both ends on one machine, and the keeper of an engine: one at a time, whatever dies when."""
from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest

from penstock.config.settings.cli import from_options
from penstock.config.settings.pairkey import pair_key
from penstock.config.settings.tree import Config
from penstock.engine.client import local_pd as pair_here
from penstock.engine.client import supervised as kept
from penstock.engine.client.client import EngineDied
from penstock.transfer.streams import LinkSettings, dial, listen

STILL_S = 0.2                           # much longer than it takes to start another one of these


class Fake:
    """An EngineClient whose process is a word: `starts` says of each in turn whether it gets up."""

    starts: list[bool]
    made: list[Fake]

    def __init__(self, config: Config, *, log: object, on_death: Callable[[EngineDied], None],
                 fds: tuple[int, ...], rids: object, env: object, traced: bool) -> None:
        self.died: EngineDied | None = None
        self._on_death = on_death
        self.made.append(self)

    async def start(self) -> None:
        await asyncio.sleep(0)
        if not self.starts.pop(0):
            self.die()
            assert self.died is not None
            raise self.died

    def die(self) -> None:
        self.died = EngineDied(-9)
        self._on_death(self.died)

    async def close(self, store_s: float = 0.0) -> None:
        pass


def test_each_end_knows_that_it_shares_the_machine() -> None:
    pair = pair_here.PairHere(from_options("demo", {"prefill": 1, "decode": 1}), print)
    assert pair.decode.num_engines == pair.prefill[0]._config.num_engines == 2
    asyncio.run(pair.close())


def test_where_they_meet_and_their_secret_are_in_no_folder() -> None:
    pair = pair_here.PairHere(from_options("demo", {"prefill": 1, "decode": 1}), print)
    both = pair.decode, pair.prefill[0]._config
    ends = [end.pair for end in both]
    one, two = (pair_key(end.cluster) for end in both)
    assert one == two and len(one) == 64
    at = [LinkSettings(role="decode", address=address, listens=False, key=one)
          for address in (ends[0].disaggregation_connect[0], ends[1].disaggregation_listen)]
    with listen(at[1]), dial(at[0]) as dialled:
        assert str(dialled.getpeername(), "ascii").startswith("\0penstock-pair-")
    asyncio.run(pair.close())
    assert pair.fds == () and not os.path.exists(both[0].cluster.cluster_key_file)


def test_a_replacement_that_dies_while_it_loads_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    Fake.starts, Fake.made = [True, False, False, *[True] * 50], []
    monkeypatch.setattr(kept, "EngineClient", Fake)
    monkeypatch.setattr(kept, "RESTART_S", (0.001, 0.001))
    said: list[str] = []

    async def run() -> None:
        one = kept.Kept(from_options("demo", {}), "prefill", said.append)
        await one.start()
        Fake.made[0].die()
        assert one.missing == "the engine process was killed by signal 9"
        await asyncio.sleep(STILL_S)
        assert len(Fake.made) == 4 and one.engine is Fake.made[3] and one.num_restarts == 1, said
        assert not one.missing and all(line.startswith("prefill: ") for line in said)
        Fake.made[3].die()                      # and it still looks after the new one
        await asyncio.sleep(STILL_S)
        assert len(Fake.made) == 5 and one.num_restarts == 2
        await one.close()

    asyncio.run(run())
