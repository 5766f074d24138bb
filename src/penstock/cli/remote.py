"""A conversation with a running server, by its HTTP API and the standard library alone.

Owns one request at a time. What is typed and printed is `commands`.
"""
from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.config.base.errors import ConfigError, RequestError
from penstock.config.request.params import SamplingParams
from penstock.llm.outputs import Delta, Message

LIMIT_S = 600.0


class Remote:
    """What `commands.Conversation` needs of the library, of a server."""

    def __init__(self, base_url: str, bearer: str | None) -> None:
        """Raises ConfigError: that is no URL, or no server answers there."""
        parts = urllib.parse.urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"--base-url {base_url}: give one such as http://127.0.0.1:8000")
        self._base = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json", "user-agent": "penstock chat",
                         **({"authorization": f"Bearer {bearer}"} if bearer else {})}
        try:
            with self._open("/v1/models", None) as answer:
                self.model = str(json.load(answer)["data"][0]["id"])
        except (RequestError, KeyError, IndexError, TypeError, ValueError) as e:
            raise ConfigError(f"{base_url} does not answer /v1/models: {e}") from None

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams) -> Iterator[Delta]:
        """The assistant's next message as it comes. Closing it ends the request. Raises RequestError."""
        body: dict[str, Any] = {
            "model": self.model, "messages": list(messages), "stream": True,
            "temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k,
            "stop": list(params.stop),
            **({} if params.max_tokens is None else {"max_tokens": params.max_tokens})}
        with self._open("/v1/chat/completions", body) as answer:
            for line in self._lines(answer):
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    return
                event = json.loads(line[6:])
                if "error" in event:
                    raise RequestError(str(event["error"].get("message")))
                for choice in event["choices"]:
                    delta = choice["delta"]
                    text = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
                    yield Delta(text, [], choice["finish_reason"])
        raise RequestError("the server ended in the middle of its answer")

    def _lines(self, answer: Any) -> Iterator[bytes]:
        try:
            yield from answer
        except (OSError, http.client.HTTPException) as e:
            raise RequestError(f"the connection to {self._base} broke: {e}") from None

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        """Raises RequestError with what the server says."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, self._headers)
        try:
            return urllib.request.urlopen(request, timeout=LIMIT_S)
        except urllib.error.HTTPError as e:
            with e:
                raise RequestError(_told(e.read(1 << 16)) or f"HTTP {e.code}") from None
        except (OSError, http.client.HTTPException) as e:
            raise RequestError(f"{self._base}: {e}") from None


def _told(body: bytes) -> str:
    """The message of an error in OpenAI's shape."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace")[:300].strip()
