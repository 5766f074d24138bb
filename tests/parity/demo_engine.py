"""The demo model in an engine without processes, as a test wants it: chunks, pauses, late copies.

Weights are loaded once; every `Demo.engine` is a whole `build_engine` otherwise. The loop is the
product's, the core too, but for a policy that pauses requests on purpose. As a program, writes
`demo_long.json`.
"""
from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from demo_reference import DATA, Reference, long_text

from penstock.config.base.machine import probe
from penstock.config.request.params import SamplingParams
from penstock.config.settings.cli import from_options
from penstock.config.settings.resolve import resolve
from penstock.core.core import Core
from penstock.core.plan import Advance, Event, Paused, Retired
from penstock.core.settings import CoreConfig
from penstock.exec.start import build
from penstock.memory.lateness import Lateness
from penstock.model.weights.locate import ModelFiles, locate
from penstock.serve.engine.loop import EngineLoop
from penstock.serve.text.model_text import open_text
from penstock.serve.wire import Submit

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
MEASURED = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=0)
NUM_NEW = 32        # output tokens of every request
LONG = {1: 6_000, 2: 6_000, 4: 2_000}       # tokens of a long prompt, by its seed
Tokens = tuple[int, ...]


class Pausing(Core):
    """The core under a policy: at every `every`-th step the next running request must pause."""

    def __init__(self, cfg: CoreConfig, every: int) -> None:
        super().__init__(cfg)
        self._every, self._steps = every, 0

    def advance(self, events: Sequence[Event]) -> Advance:
        if any(isinstance(e, Retired) for e in events):
            self._steps += 1
            running = [r.rid for r in self.running]
            if self._every and self._steps % self._every == 0 and running:
                turn = self._steps // self._every
                events = [*events, Paused(running[turn % len(running)])]
        return super().advance(events)


@dataclass(slots=True)
class Answer:
    """What a request was told."""

    prompt: Tokens
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)        # if asked for
    cached: dict[str, int] = field(default_factory=dict)       # prompt tokens found, by tier

    def judged(self, reference: Reference) -> None:
        reference.judge(self.prompt, tuple(self.tokens), self.logprobs)


class Engine:
    """A loop, and what its requests said. Prompts run in the order of `ask`, as many as fit."""

    def __init__(self, built: build.Built, pause_every: int) -> None:
        self.core = Pausing(built.core_config, pause_every)
        self.loop = EngineLoop(self.core, built.executor,
                               vocab_size=built.vocab_size, max_model_len=built.max_model_len,
                               check=True)
        self._last = 0

    def ask(self, prompts: Sequence[Tokens], *, params: SamplingParams = GREEDY) -> list[Answer]:
        """NUM_NEW tokens each, all at once; the answers in the order of the prompts."""
        answers: dict[int, Answer] = {}
        for prompt in prompts:
            self._last += 1
            answers[self._last] = Answer(prompt)
            self.loop.handle(Submit(rid=self._last, prompt=list(prompt), params=params, stop_ids=[],
                                    max_new=NUM_NEW))
        left = len(answers)
        while left:
            for chunk in self.loop.turn(block=True):
                assert chunk.finish in (None, "length"), chunk.reason
                answer = answers[chunk.rid]
                assert chunk.index == len(answer.tokens) or not chunk.tokens
                answer.tokens += chunk.tokens
                answer.logprobs += [found.logprob for found in chunk.logprobs or ()]
                answer.cached = chunk.cached_by_tier or answer.cached
                left -= chunk.finish is not None
        assert {len(answer.tokens) for answer in answers.values()} == {NUM_NEW}
        return list(answers.values())

    @property
    def pauses(self) -> int:
        return int(self.core.stats()["pauses"])


class Demo:
    """The files, the text side and the weights of the demo model; `close` when done."""

    def __init__(self) -> None:
        self.files: ModelFiles = locate("demo")
        self.text = open_text(self._config({}), self.files)
        self._loaded: dict[tuple[str, ...], build.Loaded] = {}     # the last one

    @staticmethod
    def _config(options: dict[str, object]) -> build.Config:
        whole = {"threads": 1, "hbm_bytes": "200M", "dtype": "float32", **options}
        return resolve(from_options("demo", whole), probe())

    def prompt(self, messages: Sequence[dict[str, str]]) -> Tokens:
        return tuple(self.text.encode(self.text.chat(messages), special=False))

    def long_prompt(self, seed: int) -> Tokens:
        """A chat of exactly LONG[seed] tokens: the middle of a text is cut out."""
        whole = self.prompt([{"role": "user", "content": long_text(2500, seed)}])
        assert len(whole) > LONG[seed]
        return whole[:LONG[seed] - 20] + whole[-20:]

    def engine(self, *, lateness: Lateness | None = None, pause_every: int = 0,
               **options: object) -> Engine:
        """`options` are flags, `pause_every` steps a request is told to pause (0: never)."""
        config = self._config(options)
        packed_as = (config.model.dtype, *sorted(config.device.backends))
        real = build.load

        def load(*args: object) -> build.Loaded:
            if packed_as not in self._loaded:
                self._loaded = {packed_as: real(*args)}
            return self._loaded[packed_as]

        build.load = load
        try:
            built = build.build_engine(config, lambda line: None, lateness=lateness)
        finally:
            build.load = real
        # A slot that is read before it is written shows.
        [rank] = built.executor._ranks
        for pool in rank._hbm:
            pool.fill(float("nan"))
        return Engine(built, pause_every)

    def close(self) -> None:
        self.text.close()


def main() -> None:
    """Write what transformers says to the long prompts: tokens, and their logprobs."""
    demo = Demo()
    reference = Reference.load(demo.files)
    said = {seed: reference.greedy(demo.long_prompt(seed), NUM_NEW) for seed in LONG}
    lines = ",\n".join(
        f' "{seed}": {{"tokens": {list(tokens)},\n  "logprobs": '
        f"{json.dumps([round(p, 5) for p in logprobs])}}}" for seed, (tokens, logprobs) in said.items())
    (DATA / "demo_long.json").write_text(f"{{\n{lines}\n}}\n")
    print(reference.report())
    demo.close()


if __name__ == "__main__":
    main()
