"""Numbers for roots of the prefix tree: pages are shared inside one, never across."""
from __future__ import annotations

import hashlib

from penstock.engine.sessions import NAME_BITS, key_of


def namespace(secret: bytes, tenant: bytes, salt: str | None) -> int:
    """Return the namespace of this tenant and salt; 0 when there is neither.

    The tenant comes from the API key; a client's `cache_salt` only narrows it. A number is 63 bits of a keyed
    digest: two equal ones cannot be looked for without the secret, and among a million salts the chance
    that there are any is below 1 in 10 million. With one secret they are the same in every process.
    """
    if not tenant and salt is None:
        return 0
    text = b"" if salt is None else b"salt" + salt.encode()
    return _number(secret, tenant, text)


def session_number(secret: bytes, tenant: bytes, name: str) -> int:
    """Return the number of this tenant's session with this name: no other tenant can name it. `key_of` is the tenant's
    part of it."""
    of_name = _number(secret, tenant, b"session" + name.encode()) & (1 << NAME_BITS) - 1
    return key_of(_number(secret, tenant, b"sessions")) << NAME_BITS | of_name or 1


def _number(secret: bytes, tenant: bytes, text: bytes) -> int:
    name = len(tenant).to_bytes(8, "little") + tenant + text
    return int.from_bytes(hashlib.blake2b(name, key=secret, digest_size=8).digest()) >> 1 or 1
