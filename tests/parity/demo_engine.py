"""The demo model in an engine without processes, as a test wants it: chunks, pauses, late copies.

Weights are loaded once; every `Demo.engine` is a whole `build_engine` otherwise. The loop is the
product's, the core too, but for a policy that pauses requests on purpose. As a program, writes
`demo_long.json`.
"""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from demo_reference import DATA, Reference, long_text
from pair_engines import End

from penstock.config.base.machine import probe
from penstock.config.settings.cli import from_options
from penstock.config.settings.resolve import resolve
from penstock.core.core import Core
from penstock.core.plan import Advance, Event, Paused, Retired
from penstock.core.settings import CoreConfig
from penstock.exec.load.sizing import kv_layout
from penstock.exec.start import build
from penstock.memory.lateness import Lateness
from penstock.model.weights.locate import ModelFiles, locate
from penstock.text.model_text import open_text

GREEDY = {"ignore_eos": True}
MEASURED = {"ignore_eos": True, "logprobs": 0}
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
    tokens: list[int]
    logprobs: list[float]           # if asked for
    cached: dict[str, int]          # prompt tokens found, by tier

    def judged(self, reference: Reference) -> None:
        reference.judge(self.prompt, tuple(self.tokens), self.logprobs)


class Engine(End):
    """Prompts run in the order of `ask`, as many as fit."""

    def __init__(self, built: build.Built, pause_every: int) -> None:
        self.begin(built, Pausing(built.core_config, pause_every))

    def ask(self, prompts: Sequence[Tokens], *, params: Mapping[str, object] = GREEDY) -> list[Answer]:
        """NUM_NEW tokens each, all at once; the answers in the order of the prompts."""
        rids = [self.submit(prompt, NUM_NEW, **params) for prompt in prompts]
        while self.open:
            self.turn()
        assert {self.ended[rid].finish for rid in rids} == {"length"}
        assert {len(self.got[rid]) for rid in rids} == {NUM_NEW}
        return [Answer(prompt, self.got[rid], [found.logprob for found in self.logprobs[rid]],
                       self.cached[rid].cached_by_tier) for prompt, rid in zip(prompts, rids, strict=True)]

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
        whole = {"threads": 1, "kv_cache_memory_bytes": "200M", "dtype": "float32", **options}
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

        def load(*args: object, **given: object) -> build.Loaded:
            if packed_as not in self._loaded:
                self._loaded = {packed_as: real(*args, **given)}
            loaded = self._loaded[packed_as]
            return replace(loaded, layout=kv_layout(config, loaded.whole, loaded.dtype))

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
