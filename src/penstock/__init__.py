"""penstock serves language models whose KV cache lives in a hierarchy of tiers.

`from penstock import LLM, SamplingParams`. Names are imported when they are first used: importing
the package costs nothing, and nothing of it imports torch into the caller's process.
"""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.config.base.errors import ConfigError, RequestError
    from penstock.config.request.grammar import Grammar
    from penstock.config.request.params import SamplingParams
    from penstock.engine.client.client import EngineDied
    from penstock.llm.llm import LLM, AsyncLLM
    from penstock.llm.outputs import Session

__all__ = ["LLM", "AsyncLLM", "ConfigError", "EngineDied", "Grammar", "RequestError", "SamplingParams",
           "Session"]

_HOME = {"LLM": "llm.llm", "AsyncLLM": "llm.llm",
         "Session": "llm.outputs",
         "Grammar": "config.request.grammar", "SamplingParams": "config.request.params",
         "ConfigError": "config.base.errors",
         "RequestError": "config.base.errors", "EngineDied": "engine.client.client"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
