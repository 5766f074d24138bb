"""`penstock generate` and `penstock chat`: the library in a terminal or a pipe.

Owns what is printed and how a Ctrl-C is taken. Answers go to stdout, everything else to stderr.
"""
from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, aclosing, closing, contextmanager, nullcontext, suppress
from typing import Any, TextIO

from penstock.cli.remote import Remote
from penstock.config.base.errors import ConfigError, RequestError
from penstock.config.base.paths import cache_dir
from penstock.config.request.params import SamplingParams
from penstock.config.settings.tree import Config
from penstock.engine.client.client import EngineDied

HELP = """/reset  forget the conversation     /system TEXT  start again with this system message
/help   this text                   Ctrl-C  stop an answer     /bye or Ctrl-D  leave"""
LEAVE = ("/bye", "/exit", "/quit")
HISTORY = "chat_history"                # in penstock's cache folder: what was typed, for the arrow keys
HISTORY_MAX = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `penstock generate` or `penstock chat`, as `parser.prog` says."""
    group = parser.add_argument_group("request")
    if parser.prog.endswith("generate"):
        what = group.add_mutually_exclusive_group()
        what.add_argument("--prompt", metavar="TEXT", help="the prompt (default: read from stdin)")
        what.add_argument("--input", metavar="FILE", help=(
            'one JSON object a line with "prompt", "prompt_token_ids" or "messages"; - is stdin'))
        group.add_argument("--output", metavar="FILE",
                           help="one JSON object a line, in the order of --input (default: stdout)")
    else:
        group.add_argument("--base-url", metavar="URL",
                           help="talk to this server instead of a MODEL, e.g. http://127.0.0.1:8000")
        group.add_argument("--bearer", metavar="KEY", help="API key of that server")
        group.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    group.add_argument("--max-tokens", type=int, metavar="N",
                       help="maximum number of tokens of an answer (default: up to the context length)")
    group.add_argument("--temperature", type=float, default=None, metavar="X",
                       help="0 is greedy (default: 0 for generate, 0.7 for chat)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="X",
                       help="nucleus sampling: share of probability; 1 is off")
    group.add_argument("--top-k", type=int, default=0, metavar="N", help="sample from the N likeliest tokens; 0 is off")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT",
                       help="stop string, which ends the answer and is not shown; may be repeated")


def run(config: Config | None, args: argparse.Namespace) -> int:
    """The exit code: 0, 1 for a refused request, 70 for a dead engine. Raises ConfigError."""
    try:
        if args.command == "chat":
            return chat(config, args)
        assert config is not None, "generate needs a MODEL"
        return asyncio.run(generate(config, args))
    except RequestError as e:
        print(f"penstock: error: {e}", file=sys.stderr)
        return 1
    except EngineDied as e:
        print(f"penstock: {e}", file=sys.stderr)
        return 70


def params_of(args: argparse.Namespace, temperature: float) -> SamplingParams:
    """Raises ConfigError for a value out of range."""
    if args.temperature is not None:
        temperature = args.temperature
    try:
        return SamplingParams(max_tokens=args.max_tokens, temperature=temperature,
                              top_p=args.top_p, top_k=args.top_k, stop=tuple(args.stop)).checked()
    except RequestError as e:
        raise ConfigError(f"--{str(e).replace('_', '-', 1)}") from None


# ---------------------------------------------------------------- generate
async def generate(config: Config, args: argparse.Namespace) -> int:
    from penstock.llm.llm import AsyncLLM

    params = params_of(args, temperature=0.0)
    if args.input is not None:
        requests = read_requests(args.input)
    elif args.output is not None:
        raise ConfigError("--output needs --input: one prompt streams to stdout")
    else:
        # Not before the prompt is whole: an engine that waits for a typist only holds memory.
        prompt = sys.stdin.read().removesuffix("\n") if args.prompt is None else args.prompt
        if not prompt:
            raise RequestError("the prompt is empty: give --prompt TEXT, or text on stdin", "prompt")
    async with AsyncLLM(config=config) as llm:
        if args.input is None:
            async with aclosing(llm.stream(prompt, params)) as deltas:
                async for delta in deltas:
                    print(delta.text, end="", flush=True)
            print()
            return 0
        with opened(args.output) as out:
            failed, progress = 0, ProgressLine(len(requests), sys.stderr, shares=out.isatty())
            async with progress:
                async for line in answers(llm, requests, params, progress.add):
                    failed += "error" in line
                    print(json.dumps(line, ensure_ascii=False), file=out, flush=True)
    if failed:
        print(f"penstock: {failed} of {len(requests)} requests were refused", file=sys.stderr)
    return 1 if failed else 0


class ProgressLine:
    """Report requests done and tokens a second on stderr while several requests run.

    A terminal gets one line that is written again, none where the answers are on it too; a file or a pipe
    gets a line each 10 s.
    """

    def __init__(self, total: int, out: TextIO, *, shares: bool = False,
                 interval_s: float | None = None) -> None:
        """shares: the answers go to a terminal; interval_s: seconds between two lines."""
        self._total, self._out, self._live = total, out, out.isatty()
        self._hidden = total < 2 or (self._live and shares)
        self._interval_s = interval_s or (0.5 if self._live else 10.0)
        self._done = self._tokens = 0
        self._began = time.monotonic()
        self._lines: asyncio.Task[None] | None = None

    def add(self, tokens: int) -> None:
        """A request has ended, with so many output tokens."""
        self._done += 1
        self._tokens += tokens

    async def __aenter__(self) -> None:
        self._began = time.monotonic()
        if not self._hidden:
            self._lines = asyncio.create_task(self._write())

    async def __aexit__(self, *_: object) -> None:
        if self._lines is None:
            return
        self._lines.cancel()
        if self._live:
            self._line()
            print(file=self._out, flush=True)

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            self._line()

    def _line(self) -> None:
        rate = self._tokens / max(time.monotonic() - self._began, 1e-9)
        text = f"penstock: {self._done} of {self._total} requests done, {rate:.1f} tokens/s"
        print(f"\r{text}\x1b[K" if self._live else text, end="" if self._live else "\n", file=self._out,
              flush=True)


async def answers(llm: Any, requests: list[dict[str, Any]], params: SamplingParams,
                  ended: Callable[[int], None] = lambda tokens: None) -> AsyncIterator[dict[str, Any]]:
    """Yield one result a request, in order, while later ones run; `ended` gets each one's output tokens."""
    async def one(request: dict[str, Any]) -> dict[str, Any]:
        kept = {k: v for k, v in request.items() if k not in PROMPT_FIELDS}
        asked = {k: v for k, v in request.items() if k in PROMPT_FIELDS}
        try:
            async with gate:
                if "messages" in asked:
                    [result] = await llm.chat(asked["messages"], params)
                else:
                    [result] = await llm.generate(asked, params)
        except RequestError as e:
            ended(0)
            return {**kept, "error": str(e)}
        output = result.outputs[0]
        ended(len(output.token_ids))
        return {**kept, "text": output.text, "token_ids": output.token_ids,
                "finish_reason": output.finish_reason,
                "num_prompt_tokens": len(result.prompt_token_ids),
                "num_cached_tokens": result.num_cached_tokens}

    gate = asyncio.Semaphore(4 * llm.config.schedule.max_num_seqs)
    tasks = [asyncio.create_task(one(r)) for r in requests]
    try:
        for task in tasks:
            yield await task
    finally:
        for task in tasks:
            task.cancel()


PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")


def read_requests(path: str) -> list[dict[str, Any]]:
    """Raises ConfigError that names the file and the line."""
    try:
        if path == "-":
            lines = sys.stdin.readlines()
        else:
            with open(path, encoding="utf-8") as f:
                lines = f.readlines()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--input {path}: {e}") from None
    requests = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise ConfigError(f"--input {path}, line {number}: not JSON: {e}") from None
        if not isinstance(value, dict) or sum(f in value for f in PROMPT_FIELDS) != 1:
            raise ConfigError(f"--input {path}, line {number}: an object with exactly one of "
                              f"{', '.join(PROMPT_FIELDS)} is needed")
        requests.append(value)
    return requests


def opened(path: str | None) -> AbstractContextManager[TextIO]:
    """The output file, or stdout, which stays open. Raises ConfigError."""
    if path in (None, "-"):
        return nullcontext(sys.stdout)
    try:
        return open(str(path), "w", encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"--output {path}: {e.strerror}") from None


# ---------------------------------------------------------------- chat
def chat(config: Config | None, args: argparse.Namespace) -> int:
    """A conversation: line by line from a terminal or a pipe. Raises ConfigError."""
    if (config is None) == (args.base_url is None):
        raise ConfigError("chat takes a MODEL or --base-url of a running server, one of them")
    if args.bearer and args.base_url is None:
        raise ConfigError("--bearer is for a server, with --base-url")
    params = params_of(args, temperature=0.7)
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    with _asked(config, args, terminal) as llm:
        if terminal:
            print(HELP, file=sys.stderr)
        Conversation(llm, params, args.system).run(typed(terminal))
    return 0


@contextmanager
def _asked(config: Config | None, args: argparse.Namespace, terminal: bool) -> Iterator[Any]:
    """A server, or an engine of this process."""
    if config is None:
        remote = Remote(args.base_url, args.bearer)
        if terminal:
            print(f"{remote.model} at {args.base_url}", file=sys.stderr)
        yield remote
        return
    from penstock.llm.llm import LLM

    if terminal:
        print(f"loading {config.model.model} ...", file=sys.stderr)
    with LLM(config=config) as llm:
        yield llm


class Conversation:
    """History and commands of a chat."""

    def __init__(self, llm: Any, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def run(self, lines: Iterable[str]) -> None:
        for line in lines:
            command, _, rest = line.strip().partition(" ")
            if command in LEAVE:
                return
            if command == "/reset":
                self.reset()
            elif command == "/system":
                self._system = rest or None
                self.reset()
            elif command == "/help" or (command.startswith("/") and command[1:].isalpha()):
                print(HELP, file=sys.stderr)
            elif line.strip():
                self.ask(line.strip())

    def ask(self, text: str) -> None:
        """Stream the answer. A Ctrl-C keeps what was said so far; a refusal keeps nothing."""
        self.messages.append({"role": "user", "content": text})
        said = ""
        try:
            with closing(self._llm.stream_chat(self.messages, self._params)) as deltas:
                for delta in deltas:
                    said += delta.text
                    print(delta.text, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="", file=sys.stderr)
        except RequestError as e:
            self.messages.pop()
            print(f"penstock: {e} (/reset starts again)", file=sys.stderr)
            return
        print(flush=True)
        self.messages.append({"role": "assistant", "content": said})


def typed(terminal: bool) -> Iterator[str]:
    """Lines of stdin; in a terminal with a prompt, and a Ctrl-C only clears the line."""
    if not terminal:
        yield from sys.stdin
        return
    import readline  # gives input() its line editing, and a history

    kept = cache_dir() / HISTORY
    with suppress(OSError):
        readline.read_history_file(kept)
    readline.set_history_length(HISTORY_MAX)
    try:
        while True:
            try:
                yield input("> ")
            except KeyboardInterrupt:
                print()
            except EOFError:
                print()
                return
    finally:
        # The user's alone, also while it is written.
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.touch(0o600)
            readline.write_history_file(kept)
