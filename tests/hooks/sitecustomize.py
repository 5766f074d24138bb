"""Refuses to unpickle, in the test process and (through PYTHONPATH) in every Python it starts.

Unpickling runs code of whoever wrote the bytes, so nothing in the product may do it.
"""
from __future__ import annotations

import sys

FOUND: list[str] = []


def _refuse(event: str, args: tuple[object, ...]) -> None:
    if event == "pickle.find_class":
        name = ".".join(map(str, args))
        FOUND.append(name)
        raise RuntimeError(f"unpickling {name}: no pickle in penstock, in any form")


sys.addaudithook(_refuse)
