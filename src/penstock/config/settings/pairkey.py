"""Secrets from files, and the cluster's: from a file, or from the environment."""
from __future__ import annotations

import os
import stat

from penstock.config.base.child import SECRET_VARIABLES
from penstock.config.base.errors import ConfigError
from penstock.config.settings.tree import ClusterConfig

VARIABLE, PAIR, NODES = SECRET_VARIABLES[:3]        # the last two for one release more
BYTES_MIN = 16


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


def pair_key(config: ClusterConfig) -> bytes:
    """The secret of a prefill and a decode instance. Raises ConfigError: there is none, it cannot be read,
    others can read it, or it is too short."""
    return _key(config, PAIR, "prefill and decode instances")


def node_key(config: ClusterConfig) -> bytes:
    """The secret of all nodes. Raises ConfigError, see `pair_key`."""
    return _key(config, NODES, "all nodes")


def _key(config: ClusterConfig, old: str, users: str) -> bytes:
    flag, path = "--cluster-key-file", config.cluster_key_file
    if path is None:
        variable = old if old in os.environ and VARIABLE not in os.environ else VARIABLE
        key, where = os.environ.get(variable, "").encode(), f"${variable}"
        if not key:
            raise ConfigError(f"no {flag} and no ${variable}: {users} need the same secret, for example from "
                              "openssl rand -hex 32")
    else:
        where = f"{flag} {path}"
        key = read_secret(flag, path).strip()
    if len(key) < BYTES_MIN:
        raise ConfigError(f"{where} has {len(key)} characters: a secret of {BYTES_MIN} or more is needed")
    return key
