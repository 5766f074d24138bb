"""From a config to the open end of a pair: what is said of this engine, where its pages are, the link.

Owns what must be the same at both ends, in words. Knows no request.
"""
from __future__ import annotations

import os

from penstock.config.settings.pairkey import pair_key
from penstock.config.settings.tree import Config
from penstock.exec.start.build import Built
from penstock.serve.engine.peer import Peer
from penstock.transfer.facts import Facts, Info, group_facts
from penstock.transfer.link import PairLink
from penstock.transfer.pages import PoolPages
from penstock.transfer.streams import LinkSettings, read_certificate

TOLD = ("model", "dtype", "page_size", "hbm_bytes", "dram_bytes", "max_model_len", "max_num_seqs",
        "step_tokens", "sparse_top_k", "pp", "tp", "threads", "weight_bytes", "start_seconds")


def link_settings(config: Config) -> LinkSettings | None:
    """How the other engine is reached; None for an engine without one. Asks nothing of the network.

    Raises ConfigError: the key, the address or the certificate.
    """
    pair = config.pair
    if pair.disaggregation_mode is None:
        return None
    listens = pair.disaggregation_mode == "prefill"
    address = pair.pair_listen if listens else pair.pair_peer
    assert address is not None, "refused without"
    settings = LinkSettings(
        role=pair.disaggregation_mode, address=address, listens=listens, key=pair_key(pair),
        tls=pair.pair_tls or pair.pair_tls_cert is not None, tls_cert=pair.pair_tls_cert or "",
        plaintext=pair.pair_plaintext, silence_s=pair.pair_silence_s)
    settings.check()
    if settings.tls and listens:
        read_certificate(settings.tls_cert)
    return settings


def open_peer(config: Config, built: Built) -> Peer | None:
    """The link to the other engine, which is being looked for; None for an engine without one.

    Raises ConfigError: as `link_settings`, or the address cannot be listened on.
    """
    settings = link_settings(config)
    if settings is None:
        return None
    link = PairLink(settings, facts_of(settings.role, built), PoolPages(built.pools), built.wakes.wake)
    link.start()
    return Peer(link, settings.role, link.address, refuses=config.pair.pair_fallback == "refuse")


def facts_of(role: str, built: Built) -> Facts:
    """What is said of this engine before anything else."""
    first_lanes = built.pools[::int(built.info.get("tp") or 1)]
    stages = [[next((pool.layout.num_layers for pool in pools if pool.group == g), 0)
               for pools in first_lanes] for g in range(len(built.caches.groups))]
    info: Info = {"pid": os.getpid(), **{name: built.info[name] for name in TOLD if name in built.info}}
    return Facts(role=role, must=built.identity,
                 groups=[group_facts(group.name, layout)
                         for group, layout in zip(built.caches.groups, built.caches.layouts, strict=True)],
                 stages=stages, info=info)
