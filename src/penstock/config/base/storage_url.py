"""What --kv-storage names: a folder, a bucket, a server."""
from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from penstock.config.base.errors import ConfigError, install_hint

FORMS = ("file:///DIR, s3://BUCKET/PREFIX, valkey://HOST:PORT, valkey:///SOCKET, or redis: as valkey:, "
         "mooncake://MASTER:PORT")
MODULES = {"s3": "obstore", "valkey": "redis", "mooncake": "mooncake"}      # of the extras of these names


@dataclass(frozen=True, slots=True)
class StorageUrl:
    """kind: what speaks to it. host: server or bucket; None: `path` is a folder or socket of this machine."""

    kind: Literal["file", "s3", "valkey", "mooncake"]
    host: str | None
    path: str
    port: int | None = None
    database: int = 0
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    @property
    def folder(self) -> Path | None:
        return Path(self.path) if self.kind == "file" else None

    @property
    def shown(self) -> str:
        """The URL without its secrets."""
        scheme = f"{self.kind}://" + ("" if self.host is None else
                                      f"[{self.host}]" if ":" in self.host else self.host)
        return scheme + (f":{self.port}" if self.port else "") + self.path


def masked(url: str) -> str:
    """For people: without a password or a query, even where it is no URL of ours."""
    if url.lower().startswith("file:"):
        return url
    return re.sub(r"(?s)[?#].*", "?...", re.sub(r"(?s)^(\w*:/*)?.*@", r"\1...@", url))


def parse_storage(url: str) -> StorageUrl | None:
    """None: it names nothing that pages can be stored in. A path is absolute, without `..`."""
    try:
        parts = urlsplit(url)
        host, port, path = parts.hostname, parts.port, unquote(parts.path)
    except ValueError:
        return None
    local = path.startswith("/") and path.strip("/") and ".." not in Path(path).parts
    if parts.query or parts.fragment or "\0" in path or (port == 0):
        return None
    match parts.scheme:
        case "file" if local and parts.netloc in ("", "localhost"):
            return StorageUrl("file", None, path)
        case "s3" if host and parts.netloc == host and ".." not in Path(path).parts:
            return StorageUrl("s3", host, path)
        case "mooncake" if host and not path.strip("/") and "@" not in parts.netloc:
            return StorageUrl("mooncake", host, "", port)
        case "redis" | "valkey":
            user = unquote(parts.username or "") or None
            # As the clients of both have it: what is on a command line, every user of the machine reads.
            password = (unquote(parts.password or "") or os.environ.get("VALKEYCLI_AUTH")
                        or os.environ.get("REDISCLI_AUTH") or None)
            if host is None:
                return StorageUrl("valkey", None, path, user=user, password=password) if local else None
            number = path.strip("/")
            if not number or (number.isascii() and number.isdecimal() and len(number) < 6):
                return StorageUrl("valkey", host, f"/{int(number)}" if number else "", port,
                                  int(number or 0), user, password)
    return None


def check_installed(url: StorageUrl) -> None:
    """Raises ConfigError that names the extra which speaks to it, if that is missing."""
    module = MODULES.get(url.kind)
    if module and importlib.util.find_spec(module) is None:
        raise ConfigError(f"{url.shown}: {module} is not installed: {install_hint(url.kind)}")


def bound_mooncake() -> None:
    """What Mooncake's client waits for at most: it reads that from the environment when it is loaded, and
    its own bound is half a minute."""
    for name, value in (("MC_RPC_TIMEOUT_MS", "2000"), ("MC_RPC_CONNECT_TIMEOUT_MS", "1000"),
                        ("MC_TCP_STATUS_TIMEOUT_SEC", "5"), ("MC_TCP_PROGRESS_TIMEOUT_SEC", "5"),
                        ("MC_LOG_LEVEL", "ERROR")):
        os.environ.setdefault(name, value)
