"""`penstock eval`: how often a model answers right, or how likely a text is to it. A MODEL, or a server."""
from __future__ import annotations

import argparse
import asyncio
import functools
import math
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.bench.report import check_output, table, write_json
from penstock.config.base.errors import ConfigError, RequestError
from penstock.config.settings.tree import Config
from penstock.engine.client.client import EngineDied
from penstock.eval import tasks
from penstock.eval.ask import Asker, Library, Server, all_of
from penstock.eval.tasks import Interview, Question, Size
from penstock.llm.llm import AsyncLLM

TASKS = ("recall", "tracking", "sum", "copying", "needles", "variables", "common", "text", "gsm8k")
OWN_WORDS = ("sum", "copying")              # tasks that only the recall model understands
ENGLISH = {"variables": tasks.variables, "common": tasks.common}
DEFAULTS = {"contexts": "1024", "samples": 4, "questions": 8, "prefix": 0.5, "eval_seed": 0}
# Others have no prefix.
UNUSED = {"text": ("samples", "eval_seed"), "gsm8k": ("contexts", "prefix"), "common": ("questions", "prefix")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("eval")
    group.add_argument("--task", choices=TASKS, help="kind of questions; text and gsm8k need --file")
    group.add_argument("--text", metavar="FILE", help="the same as --task text --file FILE")
    group.add_argument("--needles", action="store_true", help="the same as --task needles")
    group.add_argument("--file", help="a text (text, or the haystack of needles) or GSM8K's JSON lines")
    group.add_argument("--base-url", help="ask this server instead of a MODEL, e.g. http://127.0.0.1:8000")
    group.add_argument("--bearer", help="API key that is sent to the server")
    group.add_argument("--contexts", help="tokens of a context, several with commas (1024)")
    group.add_argument("--samples", type=int, help="contexts of each length (4)")
    group.add_argument("--questions", type=int, help="questions about each context (8); text: number of "
                       "windows; gsm8k: number of problems, times --samples")
    group.add_argument("--forced", action="store_true",
                       help="recall, tracking, sum: ask while decoding, all of a context in one request")
    group.add_argument("--prefix", type=float,
                       help="text: share of a window that is the prompt (0.5); the rest is forced")
    group.add_argument("--budgets", help="ask with each of these sparse_top_k, e.g. 0,512: 0 reads all KV; "
                       "others need --sparse-top-k (default: what the server gives)")
    group.add_argument("--concurrency", type=int, default=4, help="requests open at once")
    group.add_argument("--eval-seed", dest="eval_seed", type=int, help="seed of the questions (0)")
    group.add_argument("--output-json", help="file for every single answer")
    group.add_argument("--quiet", action="store_true", help="no progress bar; a file never gets one")


def run(config: Config | None, args: argparse.Namespace) -> int:
    """The exit code: 0, or 70 for a dead engine. Raises ConfigError, also where a request is refused."""
    _settle(config, args)
    try:
        return asyncio.run(_run(config, args))
    except RequestError as e:
        raise ConfigError(f"the model refused a request: {e}") from None
    except EngineDied as e:
        print(f"penstock: {e}", file=sys.stderr)
        return 70


def _settle(config: Config | None, args: argparse.Namespace) -> None:
    """Raises ConfigError for flags that do not go together."""
    if (config is None) == (args.base_url is None):
        raise ConfigError("eval takes a MODEL or --base-url of a running server, one of them")
    for given, task in ((args.text, "text"), (args.needles, "needles")):
        if given:
            if args.task not in (None, task):
                raise ConfigError(f"--task {args.task} and --{task} are two tasks: take one")
            args.task = task
    if args.text and args.file:
        raise ConfigError("--text names the file: leave --file out")
    args.file = args.text or args.file
    if args.task is None:
        raise ConfigError(f"eval needs --task, one of {', '.join(TASKS)}")
    if args.task in ("text", "gsm8k") and args.file is None:
        raise ConfigError(f"--task {args.task} reads a file that you name: --file FILE")
    if args.file is not None and args.task not in ("text", "gsm8k", "needles"):
        raise ConfigError(f"--file: --task {args.task} makes its own questions")
    if args.forced and args.task not in ("recall", "tracking", "sum"):
        raise ConfigError(f"--forced: --task {args.task} cannot be asked while decoding")
    if config is None and (args.forced or args.task == "text"):
        raise ConfigError("outputs can be given in the library only: --forced and --task text need a MODEL")
    if args.bearer and config is not None:
        raise ConfigError("--bearer is for a server, with --base-url")
    for name in UNUSED.get(args.task, ("prefix",)):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')}: --task {args.task} has no use for it")
    for name, default in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    for name in ("samples", "questions", "concurrency"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} is {getattr(args, name)}: at least 1")
    if not 0 < args.prefix < 1:
        raise ConfigError(f"--prefix is {args.prefix}: above 0 and below 1")
    if args.forced and args.budgets:
        raise ConfigError("--budgets: --forced is asked with the budget of --sparse-top-k only")
    args.contexts = _numbers("--contexts", args.contexts)
    args.budgets = (None,) if args.budgets is None else _numbers("--budgets", args.budgets)
    if min(args.contexts) < 128:
        raise ConfigError(f"--contexts {args.contexts}: at least 128 tokens each")
    check_output("--output-json", args.output_json)


def _numbers(flag: str, given: str) -> tuple[int, ...]:
    try:
        return tuple(int(n) for n in given.split(","))
    except ValueError:
        raise ConfigError(f"{flag} {given}: numbers of tokens, with commas") from None


def _reads(budget: int | None) -> str:
    """What a budget is called in a table; nothing for the server's own."""
    return "" if budget is None else ", reads all" if budget == 0 else f", reads {budget}"


async def _run(config: Config | None, args: argparse.Namespace) -> int:
    if config is None:
        async with Server(args.base_url, args.bearer) as server:
            return await _ask(server, args)
    async with AsyncLLM(config=config) as llm:
        asker = Library(llm)
        if args.task != "gsm8k" and max(args.contexts) > llm.max_model_len:
            raise ConfigError(f"--contexts {max(args.contexts)}: this engine's context is "
                              f"{llm.max_model_len} tokens")
        if args.task == "gsm8k" and not llm.has_chat_template:
            print("penstock: without a chat template: problems are texts to continue", file=sys.stderr)
        if args.task == "text":
            return await _text(asker, args)
        if args.forced:
            await _need_words(asker, "--forced")
            return await _interviews(asker, args)
        return await _ask(asker, args)


# ---------------------------------------------------------------- questions with answers
async def _in_words(asker: Asker) -> bool:
    """Whether the model's tokens are the recall model's words."""
    return await asker.tokens("k1 v1 f1 recall |") == 5


async def _need_words(asker: Asker, what: str) -> None:
    if not await _in_words(asker):
        raise ConfigError(f"{what} is for models with the recall model's words, and this one has others")


async def _size(asker: Asker, args: argparse.Namespace) -> Size:
    per_char = await asker.tokens("The quiet rabbit points to the early tower. " * 32) / 1408
    return Size(contexts=args.contexts, samples=args.samples, questions=args.questions, seed=args.eval_seed,
                tokens_of=lambda text: max(1, round(per_char * len(text))))


async def _questions(asker: Asker, args: argparse.Namespace) -> list[Question]:
    if args.task == "gsm8k":
        return tasks.gsm8k(args.file, args.samples * args.questions, args.eval_seed)
    size = await _size(asker, args)
    if args.task == "needles":
        return tasks.needles(size, _read(args.file) if args.file else None)
    if args.task in ENGLISH:
        return ENGLISH[args.task](size)
    if args.task in OWN_WORDS:
        await _need_words(asker, f"--task {args.task}")
    if await _in_words(asker):
        return tasks.in_words(args.task, size)
    return tasks.in_english(args.task, size)


async def _ask(asker: Asker, args: argparse.Namespace) -> int:
    asked = await _questions(asker, args)
    questions = [replace(q, budget=budget, group=q.group + _reads(budget))
                 for budget in args.budgets for q in asked]
    texts = await all_of(asker.answer, questions, concurrency=args.concurrency, unit="question",
                         quiet=args.quiet)
    if args.task == "gsm8k":
        right = [float(tasks.number_in(text) == q.answer) for q, text in zip(questions, texts, strict=True)]
    else:
        right = [q.score(text) for q, text in zip(questions, texts, strict=True)]
    groups: dict[str, list[float]] = defaultdict(list)
    for question, ok in zip(questions, right, strict=True):
        groups[question.group].append(ok)
    answers = [{"group": q.group, "asked": q.prompt[-80:], "answer": q.answer, "given": text, "right": ok}
               for q, text, ok in zip(questions, texts, right, strict=True)]
    return _report(args, groups, answers)


async def _interviews(asker: Library, args: argparse.Namespace) -> int:
    made = tasks.interviews(args.task, await _size(asker, args))

    async def hold(interview: Interview) -> list[bool]:
        context, dialogue = (asker.llm.encode(x) for x in (interview.context, interview.dialogue))
        given = await asker.forced(context, dialogue)
        return [all(given[i].rank == 1 for i in places) for places in interview.answers]

    held = await all_of(hold, made, concurrency=args.concurrency, unit="context", quiet=args.quiet)
    groups: dict[str, list[float]] = defaultdict(list)
    for interview, right in zip(made, held, strict=True):
        groups[interview.group] += right
    answers = [{"group": i.group, "right": right} for i, right in zip(made, held, strict=True)]
    return _report(args, groups, answers)


def interval(right: float, asked: int) -> tuple[float, float]:
    """95 % confidence interval of a share; a wide one if answers can be right in part. Source: Wilson, 1927."""
    z = 1.959964
    share, spread = right / asked, z * z / asked
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / asked + spread / (4 * asked)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def _report(args: argparse.Namespace, groups: dict[str, list[float]], answers: list[dict[str, Any]]) -> int:
    rows, found = [], []
    for group, right in groups.items():
        low, high = interval(sum(right), len(right))
        rows.append((group, f"{sum(right):.4g} of {len(right)}", f"{100 * sum(right) / len(right):.1f} %",
                     f"{100 * low:.1f} to {100 * high:.1f} %"))
        found.append({"group": group, "right": sum(right), "asked": len(right), "interval95": [low, high]})
    kind = f"{args.task}, forced" if args.forced else args.task
    print(table((kind, "right", "share", "95 % interval"), rows))
    if args.output_json:
        write_json(args.output_json, {"task": args.task, "forced": args.forced, "groups": found,
                                      "answers": answers})
    return 0


# ---------------------------------------------------------------- text
def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise ConfigError(f"--file {path}: cannot be read as text: {e}") from None


async def _losses(asker: Library, first: int, budget: int | None, window: list[int]) -> list[float]:
    return [-given.logprob for given in await asker.forced(window[:first], window[first:], budget)]


async def _text(asker: Library, args: argparse.Namespace) -> int:
    """Perplexity of windows of a text: a share of each is the prompt, the rest is read token by token."""
    ids = asker.llm.encode(_read(args.file))
    rows, found = [], []
    for context in args.contexts:
        starts = range(0, len(ids) - context + 1, context)
        if not starts:
            raise ConfigError(f"--file {args.file}: {len(ids)} tokens, and a window has {context}")
        windows = [ids[at:at + context] for at in starts[:args.questions]]
        first = max(1, int(args.prefix * context))
        for budget in args.budgets:
            losses = await all_of(functools.partial(_losses, asker, first, budget), windows,
                                  concurrency=args.concurrency, unit="window", quiet=args.quiet)
            low, mean, high = loss_interval([loss for window in losses for loss in window])
            rows.append((f"{context}{_reads(budget)}", len(losses), sum(map(len, losses)),
                         f"{math.exp(mean):.3f}", f"{math.exp(low):.3f} to {math.exp(high):.3f}"))
            found.append({"context": context, "budget": budget, "tokens": sum(map(len, losses)),
                          "loss": mean, "interval95": [low, high], "losses": losses})
    print(table(("tokens", "windows", "read", "perplexity", "95 % interval"), rows))
    if args.output_json:
        write_json(args.output_json, {"task": "text", "file": args.file, "contexts": found})
    return 0


def loss_interval(losses: list[float], block: int = 64) -> tuple[float, float, float]:
    """(low, mean, high) of a mean loss: neighbouring tokens depend on each other, so blocks are compared."""
    mean = math.fsum(losses) / len(losses)
    means = [math.fsum(part) / len(part) for at in range(0, len(losses), block)
             if (part := losses[at:at + block])]
    if len(means) < 2:
        return mean, mean, mean
    spread = math.sqrt(math.fsum((m - mean) ** 2 for m in means) / (len(means) - 1) / len(means))
    return mean - 1.959964 * spread, mean, mean + 1.959964 * spread


