"""Both ends of a pair on one machine: the prefill engine as a second child of the API process.

Owns where they meet, a socket and a secret that are in no folder, and the prefill engine's process: one that
dies is started again. The decode engine is an ordinary engine of the server.
"""
from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable
from dataclasses import replace

from penstock.config.base.errors import ConfigError
from penstock.config.settings.tree import Config, PairConfig, PairMode
from penstock.serve.client.client import EngineClient, EngineDied
from penstock.serve.wire import Ready

RESTART_S = (0.2, 5.0)              # before it is started again: at first, at most
JOIN_S = 10.0                       # for the ends to find each other, before the server says that it is ready


class PairHere:
    """`--prefill 1 --decode 1`. Everything on one asyncio loop."""

    def __init__(self, config: Config, log: Callable[[str], None]) -> None:
        """log: takes a line at a time."""
        self._log = log
        # The engines get the secret by descriptor, so that nothing is left behind however all of them end.
        key = os.memfd_create("penstock-pair-key")
        os.fchmod(key, 0o600)
        os.write(key, secrets.token_hex(32).encode())
        self.fds: tuple[int, ...] = (key,)
        address = f"unix:@penstock-pair-{secrets.token_hex(16)}"
        self.decode = _end(config, "decode", address, key)
        self._config = _end(config, "prefill", address, key)
        self._died = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self.engine: EngineClient | None = None     # the present one, once it has started
        self.num_restarts = 0

    async def start(self) -> Ready:
        """Start the prefill engine, and keep one running from then on. Raises ConfigError or EngineDied."""
        ready = await self._start()
        self._keeping = asyncio.create_task(self._keep())
        return ready

    async def joined(self, decode: EngineClient) -> None:
        """Until `decode` has found it, or that takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(JOIN_S):
                while decode.peer_missing:
                    await asyncio.sleep(0.01)

    async def _start(self) -> Ready:
        engine = EngineClient(self._config, log=lambda line: self._log(f"prefill: {line}"),
                              on_death=lambda _: self._died.set(), fds=self.fds)
        ready = await engine.start()
        self.engine = engine
        return ready

    async def _keep(self) -> None:
        wait = RESTART_S[0]
        while True:
            await self._died.wait()
            self._died.clear()
            assert self.engine is not None
            if self.engine.died is None:
                continue
            why = str(self.engine.died).splitlines()[0]
            self._log(f"the prefill engine is gone ({why}): it is started again")
            while True:
                await asyncio.sleep(wait)
                wait = min(2 * wait, RESTART_S[1])
                self._died.clear()              # also set by one that died before it had started
                try:
                    await self._start()
                    break
                except (EngineDied, ConfigError) as e:
                    self._log(f"the prefill engine does not start: {e}")
            self.num_restarts += 1
            wait = RESTART_S[0]

    async def close(self) -> None:
        """End the prefill engine. Idempotent."""
        if self._keeping is not None:
            self._keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeping
        if self.engine is not None:
            await self.engine.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = ()


def _end(config: Config, mode: PairMode, address: str, key: int) -> Config:
    old = config.pair
    pair = PairConfig(
        prefill=1, decode=1,                    # it is one of two on this machine: it sizes its pools so
        disaggregation_mode=mode, pair_key_file=f"/dev/fd/{key}", pair_timeout_s=old.pair_timeout_s,
        pair_silence_s=old.pair_silence_s, pair_peer=address if mode == "decode" else None,
        pair_listen=address if mode == "prefill" else None,
        pair_fallback=old.pair_fallback if mode == "decode" else "compute")
    return replace(config, pair=pair)
