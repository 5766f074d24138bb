"""An engine process that is started again when it dies, as one of several behind an address.

Owns the order of its lives; who asks it meanwhile hears EngineDied.
"""
from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from penstock.config.base.errors import ConfigError
from penstock.config.settings.tree import Config
from penstock.engine.client.client import EngineClient, EngineDied
from penstock.engine.wire import EngineReady, Timeline

RESTART_S = (0.2, 5.0)              # before it is started again: at first, at most

Traced: TypeAlias = Callable[[str, Sequence[Timeline]], None]


class Kept:
    """Everything on one asyncio loop."""

    def __init__(self, config: Config, name: str, log: Callable[[str], None], *, fds: Sequence[int] = (),
                 rids: Iterator[int] | None = None, env: dict[str, str] | None = None,
                 on_death: Callable[[EngineDied], None] | None = None, traced: Traced | None = None) -> None:
        """name: what its lines in the log begin with, "" for nothing. fds, rids, env: as of EngineClient.
        on_death: called instead of a restart. traced: takes its name and timelines of traced requests."""
        self._config, self._name, self._log = config, name, log
        self._fds, self._rids, self._env, self._on_death = fds, rids, env, on_death
        self._traced = None if traced is None else functools.partial(traced, name)
        self._died = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self.last: EngineClient | None = None       # the present one, once it has started, else the last
        self.num_restarts = 0

    @property
    def engine(self) -> EngineClient:
        """The present process, or the last. An assertion if none has ever started."""
        assert self.last is not None, "start() has not returned"
        return self.last

    @property
    def missing(self) -> str:
        """Why it is not there, "" if it is."""
        if self.last is None:
            return "it has not started"
        return "" if self.last.died is None else _first(self.last.died)

    async def start(self) -> EngineReady:
        """Start it, and keep one running from then on. Raises ConfigError or EngineDied."""
        try:
            ready = await self._start()
        except EngineDied as e:
            if self._name:
                e.args = (f"{self._name}: {e}",)
            raise
        if self._on_death is None:
            self._keeping = asyncio.create_task(self._keep())
        return ready

    async def _start(self) -> EngineReady:
        engine = EngineClient(self._config, log=self._line, fds=self._fds, rids=self._rids, env=self._env,
                              traced=self._traced,
                              on_death=self._on_death or (lambda _: self._died.set()))
        ready = await engine.start()
        self.last = engine
        return ready

    def _line(self, line: str) -> None:
        self._log(f"{self._name}: {line}" if self._name else line)

    async def _keep(self) -> None:
        wait = RESTART_S[0]
        while True:
            await self._died.wait()
            self._died.clear()
            if self.engine.died is None:
                continue
            self._line(f"{_first(self.engine.died)}: it is started again")
            while True:
                await asyncio.sleep(wait)
                wait = min(2 * wait, RESTART_S[1])
                self._died.clear()              # also set by one that died before it had started
                try:
                    await self._start()
                    break
                except (EngineDied, ConfigError) as e:
                    self._line(f"it does not start: {e}")
            self.num_restarts += 1
            wait = RESTART_S[0]

    async def close(self, store_s: float = 0.0) -> None:
        """End it, see EngineClient.close. Idempotent."""
        if self._keeping is not None:
            self._keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeping
        if self.last is not None:
            await self.last.close(store_s)


def _first(error: EngineDied) -> str:
    """Its other lines are the process's last ones, which were logged as they came."""
    return str(error).splitlines()[0]
