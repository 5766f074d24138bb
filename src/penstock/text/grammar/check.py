"""Whether a request's grammar can be compiled: asked of a process aside, before the engine hears of it.

Owns the limits on compiling, and the answers for grammars that passed. Knows no HTTP.
"""
from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict

import msgspec

from penstock.config.base.errors import ConfigError, RequestError, cut
from penstock.config.request.grammar import Grammar
from penstock.text.helper import Aside, HelperDied
from penstock.text.tokenizer import Tokenizer
from penstock.text.turns import Turns

WAIT_S_MAX = 2.0            # until the process is killed; a busy machine needs more of it than
CPU_S_MAX = 0.5             # what the engine may spend to compile the same
CHECKS_MAX = 64             # grammars that are checked or wait for it
PASSED_MAX = 1024


class GrammarCheck:
    """Checks grammars for one tokenizer. `check` on one event loop; `begin` and `close` anywhere. The first check
    starts its process, if `begin` has not."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._aside = Aside(
            "penstock.text.grammar.process",
            {"tokenizer": tokenizer.raw.to_str(), "eos_ids": list(tokenizer.eos_ids)},
            wrong="this server has no structured output", advice="leave the grammar out")
        self._turns = Turns("check-grammar", CHECKS_MAX)
        self._passed: OrderedDict[Grammar, None] = OrderedDict()

    def begin(self) -> None:
        """Start the process now, .2 s to 1.5 s. One that cannot start is the first check's to report."""
        with contextlib.suppress(ConfigError):
            self._aside.check()

    async def check(self, grammar: Grammar, tenant: bytes = b"") -> None:
        """Raises RequestError with the place in the grammar; TooManyTexts; HelperDied."""
        if grammar not in self._passed:
            await self._turns.run(tenant, functools.partial(self._ask, grammar))
            self._passed[grammar] = None
            if len(self._passed) > PASSED_MAX:
                self._passed.popitem(last=False)
        self._passed.move_to_end(grammar)

    def _ask(self, grammar: Grammar) -> None:
        try:
            answer = self._aside.ask(msgspec.structs.asdict(grammar), WAIT_S_MAX)
        except HelperDied:
            raise
        except ConfigError as e:
            raise RequestError(str(e), "grammar") from None
        except (TimeoutError, EOFError):
            raise _too_complex() from None
        if "error" in answer:
            raise RequestError(f"the {_NAMES[grammar.kind]} cannot be used: {cut(answer['error'], 400)}",
                               "grammar")
        if answer["seconds"] > CPU_S_MAX:
            raise _too_complex()

    def close(self) -> None:
        """End the process. Idempotent."""
        self._aside.close()
        self._turns.close()


_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "grammar": "grammar",
          "choice": "list of choices", "lark": "grammar"}


def _too_complex() -> RequestError:
    return RequestError(f"the grammar takes over {CPU_S_MAX:g} s to compile: make it simpler", "grammar")
