"""Numbers for tenants' parts of the prefix tree."""
from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict

NAMESPACES_MAX = 1 << 16


class Namespaces:
    """Numbers for roots of the prefix tree: pages are shared inside one, never across.

    The tenant comes from the API key; a client's `cache_salt` only narrows it. Numbers are dense and
    never used twice, so two salts cannot collide. One that was not seen for long gets a new number,
    which costs a cache miss.
    """

    def __init__(self, size_max: int = NAMESPACES_MAX) -> None:
        self._secret = secrets.token_bytes(32)
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._next = 1
        self._size_max = size_max

    def number(self, tenant: bytes, salt: str | None) -> int:
        """The namespace of this tenant and salt; 0 when there is neither."""
        if not tenant and salt is None:
            return 0
        text = b"" if salt is None else b"salt" + salt.encode()
        name = len(tenant).to_bytes(8, "little") + tenant + text
        key = hashlib.blake2b(name, key=self._secret, digest_size=32).digest()
        known = self._numbers.get(key)
        if known is None:
            known = self._numbers[key] = self._next
            self._next += 1
            if len(self._numbers) > self._size_max:
                self._numbers.popitem(last=False)
        else:
            self._numbers.move_to_end(key)
        return known
