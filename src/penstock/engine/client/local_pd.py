"""Both ends of a pair on one machine: prefill engines as further children of the API process.

Owns where they meet, a socket and a secret that are in no folder, and the prefill engines' processes.
Decode engines are ordinary engines of the server.
"""
from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from penstock.config.settings.pairkey import node_key
from penstock.config.settings.tree import Config, PairConfig
from penstock.engine.client.replicas import Engines, environment
from penstock.engine.client.supervised import Kept, Traced

JOIN_S = 10.0                       # for the ends to find each other, before the server says that it is ready


class PairHere:
    """`--prefill-replicas N --decode-replicas M`. Everything on one asyncio loop."""

    def __init__(self, config: Config, log: Callable[[str], None], traced: Traced | None = None) -> None:
        """log: takes a line at a time. traced: see `Kept`."""
        # The engines get the secret by descriptor, so that nothing is left behind however all of them end.
        key = os.memfd_create("penstock-pair-key")
        os.fchmod(key, 0o600)
        os.write(key, node_key(config.cluster) if config.nodes.num > 1 else secrets.token_hex(32).encode())
        self.fds: tuple[int, ...] = (key,)
        addresses = tuple(f"unix:@penstock-pair-{secrets.token_hex(16)}" for _ in range(config.pair.prefill_replicas))
        self.decode = _end(config, key, disaggregation_mode="decode", disaggregation_connect=addresses,
                           disaggregation_fallback=config.pair.disaggregation_fallback)
        self.prefill = []
        for n, address in enumerate(addresses):
            end = _end(config, key, disaggregation_mode="prefill", disaggregation_listen=address)
            # A router cannot send a prompt to one of these: what they have cached is of no use to it.
            end = replace(end, kv=replace(end.kv, kv_events_config=None),
                          nodes=config.nodes.of_engine(config.pair.decode_replicas + n))
            name = f"prefill {n}" if len(addresses) > 1 else "prefill"
            self.prefill.append(Kept(end, name, log, fds=self.fds, traced=traced,
                                     env=environment(config, config.pair.decode_replicas + n)))

    async def joined(self, decode: Engines) -> None:
        """Until `decode` has found them, or that takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(JOIN_S):
                while decode.peer_missing:
                    await asyncio.sleep(0.01)

    async def close(self, store_s: float = 0.0) -> None:
        """End the prefill engines, see EngineClient.close. Idempotent."""
        await asyncio.gather(*(kept.close(store_s) for kept in self.prefill))
        for fd in self.fds:
            os.close(fd)
        self.fds = ()


def _end(config: Config, key: int, **own: Any) -> Config:
    """Return the config of one instance, which sizes its pools as one of several engines on this machine."""
    old = config.pair
    pair = PairConfig(prefill_replicas=old.prefill_replicas, decode_replicas=old.decode_replicas,
                      disaggregation_transfer_backend=old.disaggregation_transfer_backend,
                      disaggregation_timeout_s=old.disaggregation_timeout_s, **own)
    # A router sees one server, which is no end of a pair.
    return replace(config, pair=pair, cluster=replace(config.cluster, cluster_key_file=f"/dev/fd/{key}"),
                   server=replace(config.server, router_dialect="off"),
                   device=replace(config.device, dp=old.decode_replicas))
