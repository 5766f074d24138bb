"""Both ends of a pair on one machine: the prefill engine as a second child of the API process.

Owns where they meet, a socket and a secret that are in no folder, and the prefill engine's process. The
decode engine is an ordinary engine of the server.
"""
from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable
from dataclasses import replace

from penstock.config.settings.tree import Config, PairConfig, PairMode
from penstock.serve.client.engines import Engines
from penstock.serve.client.kept import Kept

JOIN_S = 10.0                       # for the ends to find each other, before the server says that it is ready


class PairHere:
    """`--prefill 1 --decode 1`. Everything on one asyncio loop."""

    def __init__(self, config: Config, log: Callable[[str], None]) -> None:
        """log: takes a line at a time."""
        # The engines get the secret by descriptor, so that nothing is left behind however all of them end.
        key = os.memfd_create("penstock-pair-key")
        os.fchmod(key, 0o600)
        os.write(key, secrets.token_hex(32).encode())
        self.fds: tuple[int, ...] = (key,)
        address = f"unix:@penstock-pair-{secrets.token_hex(16)}"
        self.decode = _end(config, "decode", address, key)
        self.prefill = Kept(_end(config, "prefill", address, key), "prefill", log, fds=self.fds)

    async def joined(self, decode: Engines) -> None:
        """Until `decode` has found it, or that takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(JOIN_S):
                while decode.peer_missing:
                    await asyncio.sleep(0.01)

    async def close(self) -> None:
        """End the prefill engine. Idempotent."""
        await self.prefill.close()
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
