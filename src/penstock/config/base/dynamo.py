"""What NVIDIA Dynamo's programs have in common by the environment: defaults of flags."""
from __future__ import annotations

import os


def dynamo_default(flag: str, otherwise: str | None) -> str | None:
    """Return the default of a flag that all of Dynamo's workers have, e.g. $DYN_REQUEST_PLANE of --request-plane."""
    return os.environ.get(f"DYN_{flag.removeprefix('dyn-').upper().replace('-', '_')}") or otherwise
