"""The forms in which a chat template may take calls: arguments as an object or as JSON text, one call a message."""
from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator
from typing import Any

# Of a template that takes arguments in another form: it joins an object to text, or asks text for its items.
WRONG_TYPE = re.compile("chat template: (TypeError|UndefinedError: '(str|dict)( object)?' )")


def arguments_of(text: str) -> Any:
    """Return the object that `text` is as JSON, else `text` itself: a model's call may be cut off."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def argument_forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield `messages` as they are, then with all arguments as text, then with all as objects.

    A text that is no object becomes, in the last form, the value of the object's only key, "arguments":
    templates that walk over items show it then.
    """
    yield messages
    given = [c["function"]["arguments"] for m in messages for c in m.get("tool_calls", ())]
    if any(not isinstance(a, str) for a in given):
        yield _with(messages, lambda a: a if isinstance(a, str) else json.dumps(a, ensure_ascii=False))
    if any(isinstance(a, str) for a in given):
        yield _with(messages, lambda a: {"arguments": a} if isinstance(a, str) else a)


def one_call_each(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `messages` where each call is a message, and its result the next: gpt-oss's template shows the first call
    of a message alone, and names every result by the last call."""
    found: list[dict[str, Any]] = []
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            found.append(message)
            continue
        results = []
        while rest and rest[0]["role"] == "tool":
            results.append(rest.popleft())
        for call in calls:
            found.append({**message, "tool_calls": [call]})
            message = {"role": "assistant", "content": ""}
            own = next((i for i, r in enumerate(results) if r.get("tool_call_id") == call["id"]), None)
            if own is not None:
                found.append(results.pop(own))
        found += results
    return found


def _with(messages: list[dict[str, Any]], form: Any) -> list[dict[str, Any]]:
    return [{**m, "tool_calls": [
        {**c, "function": {**c["function"], "arguments": form(c["function"]["arguments"])}}
        for c in m["tool_calls"]]} if "tool_calls" in m else m for m in messages]
