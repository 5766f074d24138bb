"""The tokenizer's own process: texts in, token ids out, over the socket it was started with.

The library holds the interpreter's lock while it encodes, seconds for megabytes, and keeps the memory.
Here both cost nobody but the next long text. Knows no request and no model.
"""
from __future__ import annotations

import socket
from typing import Any

import tokenizers

from penstock.text.frames import receive, send, serve

MEMORY_BYTES_MAX = 8 << 30


def answer(raw: tokenizers.Tokenizer, question: dict[str, Any]) -> dict[str, Any]:
    """{"ids"}: one list for each of "texts"; {"count"} of the first that has over "most" ids; {"error"}."""
    found: list[list[int]] = []
    for text in question["texts"]:
        try:
            encoded = raw.encode_batch_fast([text], add_special_tokens=question["special"])[0]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as e:           # a Rust panic is no Exception
            return {"error": f"{type(e).__name__}: {e}"[:1000]}
        if len(encoded) > question["most"]:
            return {"count": len(encoded)}
        found.append(encoded.ids)
    return {"ids": found}


def answers(link: socket.socket) -> None:
    """Answer {"tokenizer": its JSON} with {}, then each question with `answer`."""
    raw = tokenizers.Tokenizer.from_str(receive(link)["tokenizer"])
    send(link, {})
    while True:
        send(link, answer(raw, receive(link)))


if __name__ == "__main__":
    serve(answers, MEMORY_BYTES_MAX)
