"""Messages and settings of the core as plain JSON values, and back. Knows no file format."""
from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any, get_args

from penstock.core.pair.messages import Message
from penstock.core.plan import Arrived, Event, Listed, Lookup, Received, StepPlan, Unstore, Used
from penstock.core.settings import CacheGroup, CoreConfig

KINDS = {kind.__name__: kind for kind in get_args(Event)}
MESSAGES = {kind.__name__: kind for kind in get_args(Message)}


def plain(value: Any) -> Any:
    """Enums by value, messages as lists of their fields, sets sorted."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, bytes):
        return value.hex()
    if is_dataclass(value):
        return [plain(getattr(value, f.name)) for f in fields(value)]
    return [plain(v) for v in value] if isinstance(value, tuple | list) else value


def plain_event(event: Any) -> list[Any]:
    """Return the fields of an Event or an Output: its kind, then its fields; a message within it is written alike.
    Of keys, which depend on a secret, only how many there are."""
    if isinstance(event, Lookup | Unstore | Used):
        event = replace(event, keys=(b"",) * len(event.keys))
    values = (getattr(event, f.name) for f in fields(event))
    return [type(event).__name__, *(plain_event(v) if is_dataclass(v) else plain(v) for v in values)]


def event_of(item: list[Any]) -> Event:
    """Raises KeyError or TypeError if `plain_event` did not write it."""
    kind: Any = KINDS[item[0]]
    if kind is Received:
        name, *parts = item[1]
        message: Message = MESSAGES[name](*map(tuples, parts))
        return Received(message, item[2])
    values = [tuples(value) for value in item[1:]]
    if kind is Arrived:
        at = [f.name for f in fields(Arrived)].index("stop")
        values[at] = frozenset(values[at])
    if kind is Listed:
        values[2] = bytes.fromhex(values[2])
    event: Event = kind(*values)
    return event


def plain_plan(plan: StepPlan) -> dict[str, Any]:
    """By name; empty columns are left out, and keys of stored pages."""
    if any([move.keys for move in plan.moves]):
        plan = replace(plan, moves=tuple([move._replace(keys=()) for move in plan.moves]))
    return {f.name: plain(v) for f in fields(plan) if (v := getattr(plan, f.name)) != ()}


def plain_config(cfg: CoreConfig) -> dict[str, Any]:
    """What differs from the defaults, and what has none."""
    given = {f.name: getattr(cfg, f.name) for f in fields(cfg)}
    given["store_root"] = cfg.store_root and b"keys"               # whether pages have any is all that shows
    cut = {f.name: f.default for f in fields(cfg)}
    return {name: [{f.name: getattr(g, f.name) for f in fields(g)} for g in value]
            if name == "groups" else plain(value) for name, value in given.items() if value != cut[name]}


def config_of(plain: dict[str, Any]) -> CoreConfig:
    if "groups" in plain:
        plain = {**plain, "groups": tuple(CacheGroup(**g) for g in plain["groups"])}
    if "store_root" in plain:
        plain = {**plain, "store_root": bytes.fromhex(plain["store_root"])}
    return CoreConfig(**plain)


def tuples(value: Any) -> Any:
    return tuple(map(tuples, value)) if isinstance(value, list) else value
