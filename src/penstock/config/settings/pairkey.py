"""Secrets out of files, and those of the ends of a pair and of nodes: of a file, or of the environment."""
from __future__ import annotations

import os
import stat

from penstock.config.base.errors import ConfigError
from penstock.config.settings.tree import NodesConfig, PairConfig

VARIABLE, NODES_VARIABLE = "PENSTOCK_PAIR_KEY", "PENSTOCK_NODE_KEY"
BYTES_MIN = 16
# What processes that need no secret are not handed on.
SECRET_VARIABLES = (VARIABLE, NODES_VARIABLE, "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


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
    return _key("--pair-key-file", config.pair_key_file, VARIABLE, "both ends of a pair")


def node_key(config: NodesConfig) -> bytes:
    """As `pair_key`."""
    return _key("--node-key-file", config.node_key_file, NODES_VARIABLE, "all nodes")


def _key(flag: str, path: str | None, variable: str, who: str) -> bytes:
    if path is None:
        key, where = os.environ.get(variable, "").encode(), f"${variable}"
        if not key:
            raise ConfigError(f"no {flag} and no ${variable}: {who} need the same "
                              "secret, e.g. of openssl rand -hex 32")
    else:
        where = f"{flag} {path}"
        key = read_secret(flag, path).strip()
    if len(key) < BYTES_MIN:
        raise ConfigError(f"{where} has {len(key)} characters: a secret of {BYTES_MIN} or more is needed")
    return key
