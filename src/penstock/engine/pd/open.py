"""From a config to the open end of a pair: what is said of this engine, where its pages are, the link.

Owns what must be the same at both ends, in words. Knows no request.
"""
from __future__ import annotations

import os

from penstock.config.settings.pairkey import pair_key
from penstock.config.settings.tree import Config
from penstock.core.plan import PeerId
from penstock.engine.pd.remote import Peer
from penstock.engine.pd.router import Peers
from penstock.exec.start.build import Built
from penstock.transfer.facts import Facts, Info, group_facts
from penstock.transfer.link import PairLink
from penstock.transfer.remote.opener import opener
from penstock.transfer.streams import LinkSettings, read_certificate

SHARED = ("model", "dtype", "page_size", "hbm_bytes", "dram_bytes", "max_model_len", "max_num_seqs",
        "step_tokens", "sparse_top_k", "pp", "tp", "threads", "weight_bytes", "start_seconds")


def links_of(config: Config) -> list[LinkSettings]:
    """How each engine of the other end is reached, or how they reach this one; none for an engine without
    another end. Asks nothing of the network.

    Raises ConfigError: the key, the address or the certificate, or a transport that is not installed.
    """
    pair, cluster = config.pair, config.cluster
    if pair.disaggregation_mode is None:
        return []
    opener(pair.disaggregation_transfer_backend)
    listens = pair.disaggregation_mode == "prefill"
    key, certificate = pair_key(cluster), cluster.cluster_tls_cert or ""
    # Instances that one command has started on this machine need none.
    tls = not pair.prefill_replicas and (cluster.cluster_tls or (listens and bool(certificate)))
    links = [LinkSettings(
        role=pair.disaggregation_mode, address=address, listens=listens, key=key,
        tls=tls, tls_cert=certificate if tls else "", plaintext=cluster.cluster_insecure,
        silence_s=cluster.instance_silence_s)
        for address in ([pair.disaggregation_listen or ""] * pair.num_peers if listens else
                        pair.disaggregation_connect or [""] * pair.num_peers)]
    for settings in links:
        settings.check()
        if settings.tls and listens:
            read_certificate(settings.tls_cert)
    return links


def open_peers(config: Config, built: Built) -> Peers | None:
    """The links to the engines of the other end, which are being looked for; None for an engine without.

    Raises ConfigError: as `links_of`, or the address cannot be listened on.
    """
    links: list[PairLink] = []
    backend = config.pair.disaggregation_transfer_backend
    for settings in reversed(links_of(config)):         # the first of those that listen has all others beside
        beside = links if settings.listens else []
        links = [PairLink(settings, facts_of(settings.role, built, backend), built.pages, built.wakes.wake,
                          beside=beside, open_carrier=opener(backend)), *links]
    if not links:
        return None
    listens = config.pair.disaggregation_mode == "prefill"
    for link in links[:1] if listens else links:
        if link.address:
            link.start()
    return Peers(*(Peer(link, config.pair.disaggregation_mode or "", link.address, id=PeerId(n),
                        refuses=config.pair.disaggregation_fallback == "refuse") for n, link in enumerate(links)),
                 routed=not listens and not config.pair.disaggregation_connect,
                 allowed=config.pair.disaggregation_allow)


def facts_of(role: str, built: Built, backend: str = "stream") -> Facts:
    """What is said of this engine before anything else."""
    info: Info = {"pid": os.getpid(), **{name: built.info[name] for name in SHARED if name in built.info}}
    return Facts(role=role, must=built.identity | {"transfer backend": backend},
                 groups=[group_facts(group.name, layout)
                         for group, layout in zip(built.caches.groups, built.caches.layouts, strict=True)],
                 stages=[list(layers) for layers in built.stages], info=info)
