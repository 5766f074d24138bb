"""Which tokens may come next under a request's grammar, by llguidance: masks, one row a request.

Owns the tokenizer as that library knows it, compiled grammars, and how far each request has matched.
Knows no logits and imports no torch: the process that checks grammars runs this too.

    W words of 32 tokens
"""
from __future__ import annotations

import importlib.metadata
import json
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.config.request.grammar import TOO_COMPLEX, WHITE_SPACE, Grammar
from penstock.config.request.schemas import ascii_classes, prepared

if TYPE_CHECKING:
    import llguidance

COMPILED_MAX = 64
WALKS, WALK = 4, 8          # beginnings of answers that are tried when a grammar is compiled, tokens of each
NO_TOKENIZER = "this model has no tokenizer"
SWITCHED_OFF = "--grammar-backend none"
NOT_INSTALLED = "the package llguidance is not installed"


class BadGrammar(ValueError):
    """A grammar that cannot be compiled, and why, which may quote it."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as text (`tokenizers.Tokenizer.to_str()`), and the ids that end an answer."""

    tokenizer: str
    eos_ids: tuple[int, ...]


class Compiler:
    """Grammars over one vocabulary. Making it takes .25 s for 49k tokens, 1.1 s for 152k, mostly under the
    interpreter's lock. Thread-safe. Raises ImportError; ValueError for a tokenizer that is not supported."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import llguidance

        self.eos_ids = frozenset(vocabulary.eos_ids)
        self._tokens = llguidance.LLTokenizer(vocabulary.tokenizer, eos_token=list(vocabulary.eos_ids))
        self.words = -(-self._tokens.vocab_size // 32)
        # What a mask may take: some milliseconds.
        self._limits = llguidance.LLParserLimits(step_max_items=5000, max_items_in_row=500,
                                                 step_lexer_fuel=20_000)

    def compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        """At the beginning of an answer. Raises BadGrammar."""
        import llguidance

        # log_level: the library would print tokens.
        found = llguidance.LLMatcher(self._tokens, source_of(grammar), log_level=0, limits=self._limits)
        if found.is_error():
            raise BadGrammar(found.get_error())
        for seed in range(WALKS):
            self._walk(found.deep_copy(), random.Random(seed))
        return found

    def _walk(self, at: llguidance.LLMatcher, some: random.Random) -> None:
        """Some tokens into an answer: what is too complex shows there. Raises BadGrammar."""
        for _ in range(WALK):
            words = at.compute_bitmask()
            if at.is_error():
                raise BadGrammar(at.get_error())
            admit = [(n, word) for n, word in enumerate(memoryview(words).cast("I")) if word]
            if not admit:
                return
            n, word = some.choice(admit)
            token = 32 * n + some.choice([bit for bit in range(32) if word >> bit & 1])
            if token in self.eos_ids:
                return
            at.consume_token(token)
            if at.is_error():
                raise BadGrammar(at.get_error())


def source_of(grammar: Grammar) -> str:
    """In llguidance's own form. Raises BadGrammar."""
    try:
        found = _plain(grammar)
        if grammar.before:
            # Lark stays as it is, the others are in the library's JSON.
            lark = grammar.kind in ("choice", "grammar", "lark")
            answer = {"lark_grammar": found} if lark else json.loads(found)["grammars"][0]
            found = json.dumps({"grammars": [{"lark_grammar": grammar.before}, {**answer, "name": "answer"}]})
        return found
    # Its converter of GBNF is a parser in Python that fails in any way at what is no grammar.
    except Exception as e:
        raise BadGrammar(f"{e}" or type(e).__name__) from None


def _plain(grammar: Grammar) -> str:
    import llguidance

    if grammar.kind == "json_schema":
        schema = json.dumps(prepared(json.loads(grammar.text)))
        return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides={
            "lenient": False, "whitespace_pattern": WHITE_SPACE})
    if grammar.kind == "choice":
        choices = json.loads(grammar.text)
        if not isinstance(choices, list) or not choices or not all(type(c) is str for c in choices):
            raise ValueError("a list of strings is needed, of at least one")
    text = ascii_classes(grammar.text) if grammar.kind == "regex" else grammar.text
    return llguidance.grammar_from(grammar.kind, text)


class Grammars:
    """The grammars of one rank: compiled in a thread of their own, the last ones kept. The vocabulary comes
    first: at `begin`, or when somebody has a grammar."""

    def __init__(self, vocabulary: Callable[[], Vocabulary | None],
                 wake: Callable[[], None] | None = None) -> None:
        """vocabulary: called in that thread; None: the model has no tokenizer. It may raise BadGrammar.
        wake: called there when a grammar has been compiled, or cannot be."""
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-grammar")
        self._vocabulary = vocabulary
        self._compiler: Future[Compiler] | None = None
        self._compiled: OrderedDict[Grammar, Future[llguidance.LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self) -> Future[Compiler]:
        """Take up the vocabulary, in the thread, unless that was done. Returns at once, but other threads
        stand still meanwhile: for when they have nothing to do."""
        with self._lock:
            if self._compiler is None:
                self._compiler = self._thread.submit(_compiler, self._vocabulary)
            return self._compiler

    def matcher(self, grammar: Grammar) -> Matcher:
        """Of a new request. Returns at once: what is wrong shows when it is asked for a mask."""
        return Matcher(self.begin(), self._of(grammar))

    def compiled(self, grammar: Grammar) -> bool:
        """Whether no matcher of it has to wait. Returns at once, and has it compiled."""
        return self._of(grammar).done()

    def told(self, grammar: Grammar, done: Callable[[], object]) -> None:
        """Have it compiled; `done` is called, here or in the thread, when no matcher of it has to wait."""
        self._of(grammar).add_done_callback(lambda _: done())

    def _of(self, grammar: Grammar) -> Future[llguidance.LLMatcher]:
        compiler = self.begin()
        with self._lock:
            found = self._compiled.get(grammar)
            if found is None:
                found = self._compiled[grammar] = self._thread.submit(
                    lambda: compiler.result().compile(grammar))
                # Never one that somebody waits for: it would be begun anew at each look.
                ended = [g for g, one in self._compiled.items() if one.done()]
                for old in ended[:max(0, len(self._compiled) - COMPILED_MAX)]:
                    del self._compiled[old]
                found.add_done_callback(self._done)
            self._compiled.move_to_end(grammar)
        return found

    def _done(self, _: Future[llguidance.LLMatcher]) -> None:
        if self._wake is not None:
            self._wake()


def switched_off() -> Vocabulary | None:
    """As `vocabulary`, where there shall be no grammars."""
    raise BadGrammar(SWITCHED_OFF)


def whose(backend: str) -> str:
    """Whose grammars a server has, or "none: " and why there are none. Does not look at the model."""
    if backend == "none":
        return f"none: {SWITCHED_OFF}"
    try:
        return f"llguidance {importlib.metadata.version('llguidance')}"
    except importlib.metadata.PackageNotFoundError:
        return f"none: {NOT_INSTALLED}"


def proved(vocabulary: Callable[[], Vocabulary | None]) -> str:
    """Why there can be no grammars over it, or "". Takes as long as `Compiler`."""
    try:
        _compiler(vocabulary)
    except BadGrammar as why:
        return str(why)
    return ""


def _compiler(vocabulary: Callable[[], Vocabulary | None]) -> Compiler:
    found = vocabulary()
    if found is None:
        raise BadGrammar(NO_TOKENIZER)
    try:
        return Compiler(found)
    except ImportError:
        raise BadGrammar(NOT_INSTALLED) from None
    except ValueError as e:
        raise BadGrammar(f"its tokenizer is not one that llguidance knows: {e}") from None


class Matcher:
    """How far one request has matched. Asked for a mask, it first learns the output tokens that it lacks:
    what happened to them meanwhile, or which engine sampled them, does not matter."""

    def __init__(self, compiler: Future[Compiler], compiled: Future[llguidance.LLMatcher]) -> None:
        self._compiler, self._compiled = compiler, compiled
        self._at: llguidance.LLMatcher | None = None
        self._count = 0                     # output tokens that it has learnt; an end is not learnt

    def rewind(self, count: int) -> None:
        """Output tokens from `count` on are forgotten."""
        if count < self._count:
            if self._at is None or not self._at.rollback(self._count - count):
                self._at, count = None, 0
            self._count = count

    def words(self) -> int:
        """W of its masks, at least 1."""
        return 1 if self._compiler.exception() is not None else self._compiler.result().words

    def fill(self, outputs: Sequence[int], address: int) -> str:
        """Write which tokens may follow `outputs`, as W words of int32 at `address`. Returns "", or why the
        request cannot go on, in words that quote nothing. Waits for the grammar to be compiled."""
        if self._compiled.exception() is not None:
            return "its grammar cannot be compiled here"
        if why := self._learn(outputs):
            return why
        assert self._at is not None
        self._at.unsafe_compute_mask_ptr(address, 4 * self._compiler.result().words)
        return self._failed(TOO_COMPLEX) if self._at.is_error() else ""

    def forced(self, outputs: Sequence[int], most: int) -> list[int]:
        """What follows `outputs` whatever the model says, as the tokenizer cuts it, at most so many: none
        where there is a choice, the answer has ended, or the grammar is not compiled yet."""
        if not self._compiled.done() or self._compiled.exception() is not None or self._learn(outputs):
            return []
        assert self._at is not None
        found: list[int] = self._at.compute_ff_tokens() if self._count == len(outputs) else []
        return found[:most]

    def _learn(self, outputs: Sequence[int]) -> str:
        """Of those that it lacks; as `fill`. The grammar is compiled."""
        if self._at is None:
            self._at, self._count = self._compiled.result().deep_copy(), 0
        eos_ids = self._compiler.result().eos_ids
        for token in outputs[self._count:]:
            if token in eos_ids:            # the answer has ended: what is sampled ahead of that is dropped
                break
            if not self._at.consume_token(token):
                if "satisfy" not in self._at.get_error():       # one code for both
                    return self._failed(TOO_COMPLEX)
                return self._failed(f"output token {self._count} is not one that its grammar admits")
            self._count += 1
        return ""

    def _failed(self, why: str) -> str:
        self._at, self._count = None, 0     # the library's stays in error for ever
        return why
