"""Numbers for tenants' parts of the prefix tree."""
from __future__ import annotations

import hashlib
import secrets


class Namespaces:
    """Numbers for roots of the prefix tree: pages are shared inside one, never across.

    The tenant comes from the API key; a client's `cache_salt` only narrows it. A number is 63 bits of a keyed
    digest: nobody without the secret can look for two that are the same, and among a million salts the chance
    that there are any is below 1 in 10 million. With one secret they are the same in every process.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        """secret: 32 bytes; None: drawn, and of this process."""
        self._secret = secret or secrets.token_bytes(32)

    def number(self, tenant: bytes, salt: str | None) -> int:
        """The namespace of this tenant and salt; 0 when there is neither."""
        if not tenant and salt is None:
            return 0
        text = b"" if salt is None else b"salt" + salt.encode()
        name = len(tenant).to_bytes(8, "little") + tenant + text
        return int.from_bytes(hashlib.blake2b(name, key=self._secret, digest_size=8).digest()) >> 1 or 1
