"""The version of this package, installed or run from its source."""
from __future__ import annotations

from importlib import metadata


def version() -> str:
    """As installed; run from a source tree it says so."""
    try:
        return metadata.version("penstock")
    except metadata.PackageNotFoundError:
        return "0+source"
