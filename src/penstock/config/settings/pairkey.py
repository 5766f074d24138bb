"""The secret of the two ends of a pair: of a file, or of the environment."""
from __future__ import annotations

import os

from penstock.config.base.errors import ConfigError
from penstock.config.settings.tree import PairConfig

VARIABLE = "PENSTOCK_PAIR_KEY"
BYTES_MIN = 16


def pair_key(config: PairConfig) -> bytes:
    """Raises ConfigError: there is none, it cannot be read, or it is too short."""
    if config.pair_key_file is None:
        key, where = os.environ.get(VARIABLE, "").encode(), f"${VARIABLE}"
        if not key:
            raise ConfigError(f"no --pair-key-file and no ${VARIABLE}: both ends of a pair need the same "
                              "secret, e.g. of openssl rand -hex 32")
    else:
        where = f"--pair-key-file {config.pair_key_file}"
        try:
            with open(config.pair_key_file, "rb") as file:
                key = file.read(1 << 16).strip()
        except OSError as e:
            raise ConfigError(f"{where}: {e.strerror}: give a readable file") from None
    if len(key) < BYTES_MIN:
        raise ConfigError(f"{where} has {len(key)} characters: a secret of {BYTES_MIN} or more is needed")
    return key
