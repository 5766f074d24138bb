"""Numbers for roots of the prefix tree: pages are shared inside one, never across."""
from __future__ import annotations

import hashlib

from penstock.config.base.errors import RequestError
from penstock.core.plan import NAME_BITS, key_of

SESSION_CHARS_MAX = 256
RETAIN_S_MAX = 86_400


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


def check_retention(retain_s: int | None) -> None:
    """Raises RequestError."""
    if retain_s is not None and not 0 <= retain_s <= RETAIN_S_MAX:
        raise RequestError(f"session_retain_s is {retain_s}: 0 to {RETAIN_S_MAX} seconds", "session_retain_s")


def check_session(name: str | None, retain_s: int | None, retained_pages: int) -> None:
    """retained_pages: that sessions of this engine may retain. Raises RequestError."""
    if name is not None and not 0 < len(name) <= SESSION_CHARS_MAX:
        raise RequestError(f"session_id has {len(name)} characters: 1 to {SESSION_CHARS_MAX}", "session_id")
    try:
        (name or "").encode()
    except UnicodeEncodeError:
        raise RequestError("session_id is not UTF-8: send the UTF-8 bytes of the name", "session_id") from None
    check_retention(retain_s)
    if retain_s is None:
        return
    if name is None:
        raise RequestError("session_retain_s is for a session: also give session_id, or leave it out",
                           "session_retain_s")
    if retain_s and not retained_pages:
        raise RequestError("session_retain_s: this server retains no sessions: start it with --retained-share, or "
                           "leave it out", "session_retain_s")


def session_number(secret: bytes, tenant: bytes, name: str) -> int:
    """Return the number of this tenant's session with this name: no other tenant can name it. `key_of` is the tenant's
    part of it."""
    of_name = _number(secret, tenant, b"session" + name.encode()) & (1 << NAME_BITS) - 1
    return key_of(_number(secret, tenant, b"sessions")) << NAME_BITS | of_name or 1


def _number(secret: bytes, tenant: bytes, text: bytes) -> int:
    name = len(tenant).to_bytes(8, "little") + tenant + text
    return int.from_bytes(hashlib.blake2b(name, key=secret, digest_size=8).digest()) >> 1 or 1
