"""Grammars compiled to see whether they can be, in a process of its own, over the socket it was started with.

A schema of a client may cost seconds or gigabytes to compile: here only the next grammar waits for it.
"""
from __future__ import annotations

import socket
import time

from penstock.config.base.errors import cut
from penstock.config.request.grammar import Grammar
from penstock.exec.sampling.grammar import BadGrammar, Compiler, Vocabulary
from penstock.text.frames import receive, send, serve

MEMORY_BYTES_MAX = 4 << 30
ERROR_CHARS_MAX = 400


def answers(link: socket.socket) -> None:
    """Answer {"tokenizer", "eos_ids"} with {}, then each {"kind", "text", "before"} with {"seconds"} or
    {"error"}."""
    hello = receive(link)
    try:
        compiler = Compiler(Vocabulary(hello["tokenizer"], tuple(hello["eos_ids"])))
    except (ImportError, ValueError) as e:
        send(link, {"error": str(e)[:ERROR_CHARS_MAX]})
        return
    send(link, {})
    while True:
        asked, began = receive(link), time.process_time()
        try:
            compiler.compile(Grammar(**asked))
            send(link, {"seconds": time.process_time() - began})
        except BadGrammar as e:
            # A line at a time, for the reason comes behind the text that it is about.
            said = "\n".join(cut(line) for line in str(e).splitlines())
            send(link, {"error": said[:ERROR_CHARS_MAX]})


if __name__ == "__main__":
    serve(answers, MEMORY_BYTES_MAX)
