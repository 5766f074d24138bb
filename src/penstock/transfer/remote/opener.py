"""Which transport a --disaggregation-transfer-backend is, and whether it is installed."""
from __future__ import annotations

import importlib.util

from penstock.config.base.errors import ConfigError, install_hint
from penstock.config.base.storage_url import bound_mooncake
from penstock.transfer.remote.carrier import Open


def opener(backend: str) -> Open | None:
    """How carriers of a --disaggregation-transfer-backend are made; None: pages are in the stream. Raises
    ConfigError: it is not installed."""
    if backend == "stream":
        return None
    if importlib.util.find_spec(backend) is None:
        raise ConfigError(f"--disaggregation-transfer-backend {backend} is not installed: "
                          f"{install_hint(backend)}, or leave the flag out")
    try:
        if backend == "nixl":
            from penstock.transfer.remote.nixl import Nixl
            return Nixl
        bound_mooncake()
        from penstock.transfer.remote.mooncake import Mooncake
        return Mooncake
    except (ImportError, OSError) as e:         # a library of the system that it needs
        raise ConfigError(f"--disaggregation-transfer-backend {backend} cannot be loaded: {e}") from None
