"""Bytes as somebody who means harm, or a bad cable, would change them."""
from __future__ import annotations

import random


def mutate(rng: random.Random, data: bytes, most: int) -> bytes:
    """One change to `most`: bytes replaced, put in, left out or repeated, heads of large msgpack values."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, most)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(5):
            case 0:
                changed[at:at + 1] = rng.randbytes(1)
            case 1:
                changed[at:at] = rng.randbytes(rng.randint(1, 4))
            case 2:
                del changed[at:at + rng.randint(1, 4)]
            case 3:                             # headers of big arrays, maps, strings, ints
                changed[at:at + 1] = rng.choice((b"\xdd", b"\xdf", b"\xdb", b"\xcf", b"\xd9")) + (
                    rng.randbytes(4))
            case 4:
                changed[at:at] = changed[:rng.randint(0, len(changed))]
    return bytes(changed)
