"""Secrets out of files, and the one of the two ends of a pair: of a file, or of the environment."""
from __future__ import annotations

import os
import stat

from penstock.config.base.errors import ConfigError
from penstock.config.settings.tree import PairConfig

VARIABLE = "PENSTOCK_PAIR_KEY"
BYTES_MIN = 16
# What processes that need no secret are not handed on.
SECRET_VARIABLES = (VARIABLE, "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def read_secret(flag: str, path: str) -> bytes:
    """At most the first 64 KiB of a file. Raises ConfigError: it cannot be read, or every user of
    the machine can read it."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & stat.S_IROTH:     # a group is how containers are given secrets of another owner
                raise ConfigError(f"{flag} {path}: every user of this machine can read it "
                                  f"(mode {stat.S_IMODE(mode):03o}): chmod o= {path}")
            return file.read(1 << 16)
    except OSError as e:
        raise ConfigError(f"{flag} {path}: {e.strerror}: give a readable file") from None


def pair_key(config: PairConfig) -> bytes:
    """Raises ConfigError: there is none, it cannot be read, others can read it, or it is too short."""
    if config.pair_key_file is None:
        key, where = os.environ.get(VARIABLE, "").encode(), f"${VARIABLE}"
        if not key:
            raise ConfigError(f"no --pair-key-file and no ${VARIABLE}: both ends of a pair need the same "
                              "secret, e.g. of openssl rand -hex 32")
    else:
        where = f"--pair-key-file {config.pair_key_file}"
        key = read_secret("--pair-key-file", config.pair_key_file).strip()
    if len(key) < BYTES_MIN:
        raise ConfigError(f"{where} has {len(key)} characters: a secret of {BYTES_MIN} or more is needed")
    return key
