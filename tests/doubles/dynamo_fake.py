"""What `penstock.dynamo.backend` imports of Dynamo, where that is not installed: the same names, no behaviour."""
from __future__ import annotations

import enum
import importlib
import sys
import types
from dataclasses import dataclass, field
from typing import Any


class Mode(enum.Enum):
    AGGREGATED, PREFILL, DECODE = "agg", "prefill", "decode"


class Error(Exception):
    pass


class Record:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


@dataclass(frozen=True)
class ZmqSource:
    endpoint: str
    topic: str = ""
    dp_rank: int = 0


@dataclass
class Context:
    """Of one request, as Dynamo's Worker gives it."""

    number: str
    stopped: bool = field(default=False)

    def id(self) -> str:
        return self.number

    def is_stopped(self) -> bool:
        return self.stopped


def _unchanged(request: Any) -> Any:
    return request


MODULES: dict[str, dict[str, Any]] = {
    "dynamo": {}, "dynamo.common": {}, "dynamo.common.utils": {}, "dynamo.llm": {},
    "dynamo.common.backend": {"EngineConfig": Record, "LLMEngine": object, "LlmRegistration": Record, "Worker": Record,
                              "WorkerConfig": Record},
    "dynamo.common.backend.health_check": {"build_health_check_payload": lambda first: {"token_ids": [first]}},
    "dynamo.common.backend.publisher": {"ComponentSnapshot": Record, "ZmqSource": ZmqSource},
    "dynamo.common.constants": {"DisaggregationMode": Mode},
    "dynamo.common.utils.token_ids": {"normalize_request_token_ids": _unchanged},
    "dynamo.llm.exceptions": {name: type(name, (Error,), {}) for name in (
        "Cancelled", "EngineShutdown", "InvalidArgument", "Unknown", "WorkerUnavailable")},
}


def backend() -> Any:
    """Return our module over Dynamo's own types, or over these."""
    try:
        importlib.import_module("dynamo.common.backend")
    except ModuleNotFoundError:
        for name, values in MODULES.items():
            module = types.ModuleType(name)
            module.__dict__.update(values, __path__=[])
            sys.modules[name] = module
    return importlib.import_module("penstock.dynamo.backend")
