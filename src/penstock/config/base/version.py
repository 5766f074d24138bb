"""The version of this package, installed or run from its source."""
from __future__ import annotations

from importlib import metadata

DISTRIBUTION = "penstock-llm"       # as pyproject.toml names it: `penstock` on the public index is not ours


def version() -> str:
    """As installed; run from a source tree it says so."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0+source"
