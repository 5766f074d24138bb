"""What every client's script here shares: named calls, each of which raises when its answer is wrong.

    python SCRIPT.py URL      one JSON object a line: {"call", "why"}; why is "" where it worked
"""
from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

URL = sys.argv[1].rstrip("/") if len(sys.argv) > 1 else ""
V1 = URL + "/v1"
KEY = "none"
MODEL = "demo"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
PERSON = {"type": "object",
          "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}
WEATHER = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
           "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather of a city now.",
                                         "parameters": WEATHER}}
_CALLS: list[Callable[[], Any]] = []


def call(work: Callable[[], Any]) -> Callable[[], Any]:
    """Registers one call; its name is the function's."""
    _CALLS.append(work)
    return work


def main() -> None:
    for work in _CALLS:
        try:
            work()
            why = ""
        except Exception as e:
            why = f"{type(e).__name__}: {e}".splitlines()[0][:300] or type(e).__name__
            traceback.print_exc()
        print(json.dumps({"call": work.__name__, "why": why}), flush=True)
