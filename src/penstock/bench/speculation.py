"""`penstock bench --speculative`: tokens per second of one stream with drafts and without them, in turns, and
how many of the drafts were right.

Real texts, of which each asks for another share of what the prompt has: drafts live on that.
"""
from __future__ import annotations

import time
from argparse import Namespace

from penstock.bench.report import Spread, optional, table, write_json
from penstock.config.base.errors import ConfigError, RequestError
from penstock.config.request.params import SamplingParams
from penstock.config.settings.tree import Config
from penstock.llm.llm import AsyncLLM
from penstock.llm.outputs import RequestOutput

PASSAGE = (
    "A penstock is a sluice or gate that controls a flow of water, or an enclosed pipe that "
    "delivers water to hydro turbines and sewerage systems. The term is inherited from the "
    "earlier technology of mill ponds and watermills. Penstocks for hydroelectric installations "
    "are normally equipped with a gate system and a surge tank. Flow is regulated by turbine "
    "operation, and is nil when turbines are not in service. Maintenance of these water ways is "
    "usually done by hand.")
TASKS = {
    "repeat": f"Repeat this text word for word, and nothing else:\n\n{PASSAGE}",
    "new code": "Write a Python class Stack with push, pop, peek and size, each with a docstring.",
    "chat": "Why do people keep diaries? Answer in a few sentences.",
}
DRAFTED, WITHOUT = "drafts", "no drafts"


async def measure(config: Config, args: Namespace) -> int:
    """Each task `args.runs` times with and without drafts, greedily, up to `args.output_len` tokens.

    Raises ConfigError without a --speculative-method or a tokenizer, and beside another bench of its own.
    """
    if config.schedule.speculative_method is None:
        raise ConfigError("--speculative measures what drafts bring: add --speculative-method "
                          "ngram, mtp or eagle3")
    if (args.against, args.plot, args.plot_hot) != (None, None, None):
        raise ConfigError("--speculative is a bench of its own: leave --against, --plot and --plot-hot out")
    found = {task: {DRAFTED: list[float](), WITHOUT: list[float]()} for task in TASKS}
    counts = {task: [0, 0, 0] for task in TASKS}       # drafted, accepted, said
    bar = optional("tqdm").tqdm(total=args.runs * len(TASKS), unit="run", disable=args.quiet or None)
    async with AsyncLLM(config=config) as llm:
        try:
            llm.encode(PASSAGE)
        except RequestError as why:
            raise ConfigError(f"--speculative asks in words: {why}") from None
        for n in range(args.runs + 1):                 # the first warms up, and caches the prompts for all
            for task, ask in TASKS.items():
                for arm, most in ((DRAFTED, None), (WITHOUT, 0)):
                    answer, speed = await _once(llm, ask, args.output_len, most)
                    if n:
                        found[task][arm].append(speed)
                    if n and arm == DRAFTED:
                        for i, more in enumerate((answer.draft_tokens, answer.accepted_draft_tokens,
                                                  len(answer.outputs[0].token_ids))):
                            counts[task][i] += more
                if n:
                    bar.update()
    bar.close()
    about = (f"{config.model.model}, {config.model.dtype}, {config.schedule.speculative_method}, at most "
             f"{config.schedule.speculative_tokens} a step, {args.runs} runs of {args.output_len} tokens")
    print(f"\n{about}\ntokens/s: median (minimum .. maximum); ratio pair by pair\n")
    print(table(("work", *found["chat"], "ratio", "drafted", "accepted", "said"), [
        (task, *map(Spread.of, arms.values()),
         Spread.of([a / b for a, b in zip(*arms.values(), strict=True)]), *counts[task])
        for task, arms in found.items()]))
    if args.output_json:
        write_json(args.output_json, {"about": about, "results": found, "drafted, accepted, said": counts})
    return 0


async def _once(llm: AsyncLLM, ask: str, new: int, most: int | None) -> tuple[RequestOutput, float]:
    """The answer, and its tokens per second."""
    params = SamplingParams(max_tokens=new, temperature=0.0, speculative_tokens=most)
    start = time.perf_counter()
    [answer] = (await llm.chat([{"role": "user", "content": ask}], params) if llm.has_chat_template else
                await llm.generate(ask, params))
    return answer, len(answer.outputs[0].token_ids) / (time.perf_counter() - start)
